"""Machines that lack what every run needs: one sentence, exit code 2 or 3, nothing left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

CONFIG = """
model: {hf: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2,
             num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 32}}
data: {path: text.txt, sequence_length: 16}
train: {steps: 2, global_batch: 2}
cluster: {workers: 1, threads_per_worker: 1}
"""

MACHINES = {
    "read-only /dev/shm": (
        "unshare --mount sh -c 'mount -o remount,bind,ro /dev/shm && exec \"$@\"' sh",
        "/dev/shm: is mounted read-only",
        2,
    ),
    "no loopback": ("unshare --net", "bring up the loopback interface", 2),
    "another /proc": ("unshare --pid --fork", "the processes of another PID namespace", 2),
    "little address space": ("prlimit --as=1200000000", "of address space (ulimit -v)", 3),
    "read-only run directory": (
        "unshare --mount sh -c 'mount -t tmpfs -o ro tmpfs runs && exec \"$@\"' sh",
        "cannot write it: Read-only file system",
        2,
    ),
}

OWN_MEMORY = (
    'unshare --mount sh -c \'mount -t tmpfs tmpfs /dev/shm && "$@"; code=$?;'
    " ls -A /dev/shm >&2; exit $code' sh"
)
"""A /dev/shm of its own, whose files stand on stderr behind what the command says there."""


@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_that_lacks_something_is_refused(tmp_path: Path, machine: str) -> None:
    around, words, code = MACHINES[machine]
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "runs").mkdir()
    done = subprocess.run(
        f"{OWN_MEMORY} {around} {sys.executable} -m penstock.client.main train c.yaml"
        " --run-dir runs/r",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stderr
    assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr
