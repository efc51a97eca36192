"""The batch script for Slurm: what it asks for, and what it does about ends of its steps. Slurm's
commands are stand-ins here; tests/integration/test_slurm.py has the real ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from penstock.client.main import app

CONFIG = {
    "run": {"name": "tiny"},
    "model": {"path": "m"},
    "data": {"path": "x"},
    "optimizer": {"threads": 3},
    "cluster": {"workers": 2, "threads_per_worker": 4},
}
STAND_INS = {
    "srun": 'echo srun >> calls; read -r code < codes; sed -i 1d codes; exit "$code"',
    "scontrol": 'echo "scontrol $*" >> calls',
    "sleep": "exit 0",
    "squeue": "cat ends",
}


def deploy(folder: Path, *options: str, config: object = CONFIG) -> tuple[int, str]:
    """Exit code and output of ``penstock deploy slurm`` in a folder."""
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    words = ["deploy", "slurm", "--config", str(folder / "tiny.yaml"), *options]
    words += ["--out", str(folder / "tiny.sbatch")]
    result = CliRunner().invoke(app, words)
    return result.exit_code, result.output


def test_what_the_script_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = deploy(tmp_path, "--nodes", "2", "--time", "12:00:00")
    assert (code, output.split()[-1]) == (0, str(tmp_path / "tiny.sbatch"))
    text = (tmp_path / "tiny.sbatch").read_text()
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]
    assert directives == [
        "--job-name=tiny",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=11",
        "--exclusive",
        "--mem=0",
        "--time=12:00:00",
        "--signal=TERM@120",
        "--requeue",
        f"--chdir={tmp_path}",
        f"--output={tmp_path}/tiny-%j.txt",
        "--open-mode=append",
    ]
    assert f"penstock={Path(sys.executable).with_name('penstock')}\n" in text
    assert deploy(tmp_path, "--nodes", "2", "--time", "1")[0] == 2, "it overwrites nothing"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nodes", "3", "--time", "1"), "--nodes 3: cluster.nodes has 2 nodes; give --nodes 2"),
        (("--nodes", "2", "--time", "soon"), "--time soon: expected minutes"),
        (("--nodes", "2", "--time", "1", "--memory", "all"), "--memory all: expected a size"),
    ],
)
def test_what_it_refuses(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    cluster = {"nodes": [{"name": "x"}, {"name": "y"}]}
    code, output = deploy(tmp_path, *options, config={**CONFIG, "cluster": cluster})
    assert code == 2 and words in output
    assert not (tmp_path / "tiny.sbatch").exists()


def make_commands(folder: Path, commands: dict[str, str]) -> None:
    for name, body in commands.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)


@pytest.mark.parametrize(
    ("codes", "left_s", "expected", "calls"),
    [
        ("4 0", None, 0, ["srun"] * 2),
        ("0", 9999, 0, ["srun"]),
        ("2", 9999, 2, ["srun"]),
        ("5", 9999, 5, ["srun"]),
        ("143", 9999, 143, ["srun"]),
        ("4 137 0", 9999, 0, ["srun"] * 3),
        ("4 4 4 4 4 0", 9999, 4, ["srun"] * 5),
        ("5", 100, 5, ["srun", "scontrol requeue 7"]),
        ("130", 100, 130, ["srun", "scontrol requeue 7"]),
        ("3", 100, 3, ["srun"]),
    ],
)
def test_what_it_does_when_a_step_ends(
    tmp_path: Path, codes: str, left_s: int | None, expected: int, calls: list[str]
) -> None:
    assert deploy(tmp_path, "--nodes", "2", "--time", "9")[0] == 0
    make_commands(tmp_path, STAND_INS)
    (tmp_path / "codes").write_text(codes.replace(" ", "\n") + "\n")
    ends_s = time.localtime(time.time() + (left_s or 0))
    ends = "NONE" if left_s is None else time.strftime("%Y-%m-%dT%H:%M:%S", ends_s)
    (tmp_path / "ends").write_text(f"{ends}\n")
    job = {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "8"}
    environment = {**os.environ, **job, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(tmp_path / "tiny.sbatch")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=600, check=False)
    assert done.returncode == expected
    assert (tmp_path / "calls").read_text().splitlines() == calls


@pytest.mark.parametrize(
    ("codes", "expected", "calls"),
    [
        ("0", 0, ["node"]),
        ("130", 130, ["node"]),
        ("137 5", 5, ["node"] * 2),
        ("2", 2, ["node", "scancel --signal=TERM 7.1"]),
    ],
)
def test_what_it_does_when_a_node_ends(
    tmp_path: Path, codes: str, expected: int, calls: list[str]
) -> None:
    assert deploy(tmp_path, "--nodes", "2", "--time", "9")[0] == 0
    words = '[ "$*" = "node --config C --grace-seconds 60" ] && echo node >> calls'
    stand_in = f'{words}; read -r code < codes; sed -i 1d codes; exit "$code"'
    make_commands(tmp_path, {"penstock": stand_in, "scancel": 'echo "scancel $*" >> calls'})
    (tmp_path / "codes").write_text(codes.replace(" ", "\n") + "\n")
    [node] = re.findall(r"^node='\n(.*?)^'$", (tmp_path / "tiny.sbatch").read_text(), re.M | re.S)
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURMD_NODENAME": "n1"}
    environment = {**os.environ, **job, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", "-c", node, "penstock", "C", "60"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=600, check=False)
    assert done.returncode == expected
    assert (tmp_path / "calls").read_text().splitlines() == calls
