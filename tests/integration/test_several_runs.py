"""Two runs at the same time on one machine, the second one another user's: as each would be alone.

Root starts the second one as ``nobody``; where Python is in a folder that is root's alone, with the
capability to read it, and no other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny.yaml"
DEADLINE_S = 240.0
OTHER = (
    *("setpriv", "--reuid=nobody", "--clear-groups", "--inh-caps=-all,+dac_read_search"),
    *("--ambient-caps=-all,+dac_read_search", "--bounding-set=-all,+dac_read_search"),
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may use; pytest's are their owner's alone."""
    path = Path(tempfile.mkdtemp(prefix="penstock-several-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def penstock(*words: str) -> list[str]:
    return [sys.executable, "-m", "penstock.client.main", *words]


def train(run_dir: Path, *prefix: str) -> subprocess.Popen[str]:
    """A short training with as many threads wherever it runs."""
    settings = ("train.steps=6", "cluster.threads_per_worker=1", "optimizer.threads=2")
    words = [word for setting in settings for word in ("--set", setting)]
    return subprocess.Popen(
        [*prefix, *penstock("train", str(EXAMPLE), *words, "--run-dir", str(run_dir))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd="/",
        env=os.environ | {"HOME": str(run_dir.parent)},
    )


def state(run_dir: Path) -> dict[str, str]:
    """The checksums of the blocks of the last saved state."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (run_dir / "state/step-00000006").glob("block-*")
    }


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_two_users_runs_at_once_end_with_the_bytes_of_one_alone(folder: Path) -> None:
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv (util-linux) to start a run of another user")
    with train(folder / "mine") as mine, train(folder / "theirs", *OTHER) as theirs:
        seen = _both_running(folder, (mine, theirs))
        print("two runs at once, of root and of nobody:", *seen.values(), sep="\n")
        finish(mine)
        finish(theirs)
    assert seen[str(folder / "theirs")]["user"] == "nobody"
    pinned = [run["cpus"] for run in seen.values() if str(folder) in str(run["directory"])]
    assert len([cpus for cpus in pinned if cpus]) <= 1, "not both on the same cores"
    with train(folder / "alone") as alone:
        finish(alone)
    expected = state(folder / "alone")
    assert len(expected) == 10
    assert state(folder / "mine") == state(folder / "theirs") == expected


def _both_running(
    folder: Path, processes: tuple[subprocess.Popen[str], ...]
) -> dict[str, dict[str, object]]:
    """Returns what ``penstock list`` says once it shows the memory of both runs."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        output = subprocess.run(
            penstock("list", "--json"), check=True, capture_output=True, text=True
        ).stdout
        found = {run["directory"]: run for run in json.loads(output)}
        ours = [run for where, run in found.items() if where.startswith(str(folder))]
        if len(ours) == 2 and all(run["memory_bytes"] for run in ours):
            return found
    raise AssertionError("the two runs were never there at the same time")
