"""Types of model of one's own: ResNet, whose blocks hand on features of several shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.papers.two_bp.pictures import SEQUENCE_LENGTH, write_digits
from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError
from penstock.models.data.objectives import own_objective
from penstock.models.prepare import prepare
from penstock.models.profiling.blocks import BlockBench
from penstock.models.runtime import ModelRuntime
from penstock.models.surgery.hf import load_run_config
from penstock.protocol.run.rundir import RunDirectory


def configured(root: Path, imports: str = "bench.papers.two_bp.resnet") -> Config:
    """A ResNet of four bottlenecks on digits."""
    write_digits(root / "digits.bin")
    hf = {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1], "embedding_size": 8}
    return parse_config(
        {
            "run": {"dir": str(root)},
            "model": {
                "imports": [imports],
                "hf": {"model_type": "resnet-blocks", "vocab_size": 17, **hf},
            },
            "data": {
                "tokens": str(root / "digits.bin"),
                "sequence_length": SEQUENCE_LENGTH,
                "objective": "bench.papers.two_bp.pictures:digits",
            },
        }
    )


def test_blocks_are_measured_with_what_comes_before_them(tmp_path: Path) -> None:
    config = configured(tmp_path)
    (tmp_path / "resolved.yaml").write_text(config.to_yaml())
    prepare(config, tmp_path)
    table = RunDirectory(tmp_path).table
    assert table.num_parameters == sum(t.num_elements for b in table.blocks for t in b.tensors)
    fp32 = torch.float32
    runtime = ModelRuntime(
        load_run_config(tmp_path), table, device="cpu", compute_dtype=fp32, seed=0
    )
    bench = BlockBench(
        runtime,
        device=torch.device("cpu"),
        compute_dtype=fp32,
        sequence_length=SEQUENCE_LENGTH,
        budget_s=0.0,
        objective=own_objective(config),
    )
    shapes = [bench.measure(range(b, b + 1), 2).memory.output_bytes for b in range(1, 5)]
    assert shapes == [2 * 4 * c * s * s for c, s in ((16, 8), (32, 4), (64, 2), (128, 1))]
    assert bench.measure(range(5, 6), 2).forward_s > 0.0, "the head"


def test_imports_that_fail_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.imports: 'no.such.module': No module named"):
        prepare(configured(tmp_path, "no.such.module"), tmp_path)
