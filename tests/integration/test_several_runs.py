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
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.host.errors import ExitCode
from tests.system.conftest import newest_step

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny.yaml"
DEADLINE_S = 600.0
ENDLESS = 10**6
SETTINGS = (
    *("optimizer.schedule=constant", "optimizer.min_lr=0.0"),  # for any number of steps
    *("cluster.threads_per_worker=1", "optimizer.threads=2"),
)
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


@contextmanager
def train(run_dir: Path, steps: int, *prefix: str) -> Iterator[subprocess.Popen[str]]:
    """A training with as many threads wherever it runs; it is over at the end of the block."""
    settings = (f"train.steps={steps}", *SETTINGS)
    words = [word for setting in settings for word in ("--set", setting)]
    process = subprocess.Popen(
        [*prefix, *penstock("train", str(EXAMPLE), *words, "--run-dir", str(run_dir))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd="/",
        env=os.environ | {"HOME": str(run_dir.parent)},
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def state(run_dir: Path, steps: int) -> dict[str, str]:
    """The checksums of the blocks of the state that was saved after so many steps."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (run_dir / f"state/step-{steps:08}").glob("block-*")
    }


def finish(process: subprocess.Popen[str], code: int = 0) -> None:
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, output


def stop(process: subprocess.Popen[str], run_dir: Path) -> int:
    """Stops a run after its first step; returns the step that it has saved."""
    deadline_s = time.monotonic() + DEADLINE_S
    while newest_step(run_dir) < 1:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline_s, f"{run_dir.name} has no step"
        time.sleep(0.1)
    process.terminate()  # root is refused another user's token, so penstock stop is not for both
    finish(process, ExitCode.INTERRUPTED)
    return newest_step(run_dir)


@pytest.mark.integration
def test_two_users_runs_at_once_end_with_the_bytes_of_one_alone(folder: Path) -> None:
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv (util-linux) to start a run of another user")
    mine_dir, theirs_dir = folder / "mine", folder / "theirs"
    # Without an end, so that neither is over before both are seen.
    with train(mine_dir, ENDLESS) as mine, train(theirs_dir, ENDLESS, *OTHER) as theirs:
        seen = _both_running(folder, (mine, theirs))
        print("two runs at once, of root and of nobody:", *seen.values(), sep="\n")
        steps = 2 + max(stop(mine, mine_dir), stop(theirs, theirs_dir))
    with train(mine_dir, steps) as mine, train(theirs_dir, steps, *OTHER) as theirs:
        finish(mine)
        finish(theirs)
    assert seen[str(theirs_dir)]["user"] == "nobody"
    pinned = [run["cpus"] for run in seen.values() if str(folder) in str(run["directory"])]
    assert len([cpus for cpus in pinned if cpus]) <= 1, "not both on the same cores"
    with train(folder / "alone", steps) as alone:
        finish(alone)
    expected = state(folder / "alone", steps)
    assert len(expected) == 10
    assert state(mine_dir, steps) == state(theirs_dir, steps) == expected


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
