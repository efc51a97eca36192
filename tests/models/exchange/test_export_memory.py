"""Exports of states that are larger than the memory they may take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.models.exchange.readers import open_checkpoint
from penstock.protocol.run.rundir import RunDirectory
from tests.models.exchange.memory import LARGE, LIMIT, LIMITED
from tests.models.exchange.test_dcp_export import STEP, numbers, run_of, state_of

EXPORT = f"""
import sys
from pathlib import Path
import torch
from penstock.models.checkpoints import export
from penstock.models.checkpoints.constants import read_constants
from penstock.models.checkpoints.exports.tensors import saved_blocks
from penstock.models.surgery.hf import load_run_config
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import DType

def work(form, run, state, out):
    if form != "hf":
        words = [str(run), str(state), str(out), "--format", form, "--step", "{STEP}", "--verify"]
        return export.main(words)
    table = RunDirectory(run).table
    shard = {LIMIT} // 4  # a whole shard is in memory
    export.export_hf(
        load_run_config(run), table, saved_blocks(state, table), out, dtype=DType.FP32,
        carried={{}}, constants=read_constants(run), shard_bytes=shard, verifies=True,
    )
    return 0

torch.set_num_threads(1)
form, tiny, large, out = sys.argv[1], *map(Path, sys.argv[2:])
assert work(form, tiny, tiny / "saved", out / "tiny") == 0  # imports all that an export needs
{LIMITED}
sys.exit(work(form, large, large / "saved", out / "large"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dcp", "universal", "hf"])
def test_an_export_takes_the_memory_of_a_part_of_the_state(form: str, tmp_path: Path) -> None:
    """A state over 8 times the limit is written and compared, with the same numbers."""
    tiny, large = run_of(tmp_path / "tiny"), run_of(tmp_path / "large", hf=LARGE)
    state_of(tiny, "saved")
    state = state_of(large, "saved")
    assert sum(file.stat().st_size for file in state.iterdir()) > 8 * LIMIT
    out = tmp_path / "out"
    out.mkdir()
    words = [sys.executable, "-c", EXPORT, form, tiny, large, out]
    root = Path(__file__).parents[3]
    assert subprocess.run(list(map(str, words)), cwd=root, timeout=500).returncode == 0
    expected = numbers(large, state)
    tensors = open_checkpoint(out / "large").tensors
    assert len(tensors) >= len(RunDirectory(large).table.blocks[1].tensors) * 16
    for tensor in tensors:
        key = tensor.name if tensor.role in ("weight", "master") else f"{tensor.role}.{tensor.name}"
        assert expected[key].equal(tensor.load().reshape(expected[key].shape)), key
