"""Measuring a very small model: plausible numbers, exact bytes, a file that the planner reads."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
import torch

from penstock.config.schema import Config, load_config, parse_config
from penstock.host.errors import ExitCode
from penstock.models.profiling import profile
from penstock.models.profiling.blocks import Stopwatch
from penstock.models.profiling.machine import measure_copies, measure_messages
from penstock.planner.cost.profile import block_costs, cluster_of
from penstock.protocol.plan.profile import Profile, from_json, load_profile, to_json
from penstock.protocol.run.hardware.sweep_rates import measure_optimizer
from penstock.shm.table import DType
from tests.compiler import QUIET, fresh_compiler

__all__ = ["fresh_compiler"]
pytestmark = QUIET

HIDDEN, INNER, HEADS, LENGTH = 32, 48, 4, 16

_CONFIG = f"""
model:
  dtype: fp32
  hf: {{model_type: llama, hidden_size: {HIDDEN}, intermediate_size: {INNER},
       num_hidden_layers: 3, num_attention_heads: {HEADS}, num_key_value_heads: {HEADS},
       max_position_embeddings: 32}}
data: {{path: "@stdlib", tokenizer: byte, sequence_length: {LENGTH}}}
"""


@pytest.fixture(name="config", scope="module")
def _config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("profile") / "config.yaml"
    path.write_text(_CONFIG, encoding="utf-8")
    return load_config(path)


@pytest.fixture(name="measured", scope="module")
def _measured(config: Config) -> tuple[Profile, list[str]]:
    messages: list[str] = []
    return profile.measure(config, messages.append, budget_s=0.0), messages


def test_every_kind_of_block_is_measured(measured: tuple[Profile, list[str]]) -> None:
    found, messages = measured
    assert list(found.kinds) == ["embedding", "LlamaDecoderLayer", "head"]
    assert messages == [
        "blocks of kind embedding, 1 at a time, micro-batch 1",
        "blocks of kind embedding, 1 at a time, micro-batch 2",
        "blocks of kind LlamaDecoderLayer, 1 at a time, micro-batch 1",
        "blocks of kind LlamaDecoderLayer, 2 at a time, micro-batch 1",
        "blocks of kind LlamaDecoderLayer, 1 at a time, micro-batch 2",
        "blocks of kind LlamaDecoderLayer, 2 at a time, micro-batch 2",
        "blocks of kind head, 1 at a time, micro-batch 1",
        "blocks of kind head, 1 at a time, micro-batch 2",
        "copies between host and device",
        "messages between workers",
        "optimizer passes",
    ]


def test_the_profile_says_that_layers_are_not_compiled(
    measured: tuple[Profile, list[str]],
) -> None:
    assert measured[0].device.endswith(", layers not compiled")


@pytest.mark.slow
def test_compiled_layers_are_measured_where_a_run_has_them(
    config: Config, measured: tuple[Profile, list[str]]
) -> None:
    """A compiled graph saves less, and BACKWARD_INPUT leaves the same rows and gradients."""
    model = config.model.model_copy(update={"compile": True})
    found = profile.measure(config.model_copy(update={"model": model}), budget_s=0.0)
    assert found.device.endswith(", layers compiled")
    layer, plain = (each.kinds["LlamaDecoderLayer"] for each in (found, measured[0]))
    for name in ("forward_s", "recompute_s", "backward_input_s", "backward_weight_s"):
        assert getattr(layer, name).at(LENGTH) >= 0.0
    assert 0.0 < layer.activation_bytes.at(LENGTH) < plain.activation_bytes.at(LENGTH)
    assert layer.deferred_bytes.at(LENGTH) == plain.deferred_bytes.at(LENGTH)
    assert layer.operators and layer.output_bytes == plain.output_bytes
    assert from_json(to_json(found)) == found


def test_bytes_are_exact(measured: tuple[Profile, list[str]]) -> None:
    """In fp32: the hidden states, one id a token, and what each operator makes."""
    found, _ = measured
    layer = found.kinds["LlamaDecoderLayer"]
    assert layer.output_bytes.at(LENGTH) == 4 * HIDDEN * LENGTH
    embedding = found.kinds["embedding"]
    assert embedding.activation_bytes.at(LENGTH) == 4.0  # token ids outlive the micro-batch
    assert embedding.deferred_bytes.at(LENGTH) == (4 * HIDDEN + 8) * LENGTH
    kept = {op.name: op.activation_bytes.at(LENGTH) for op in layer.operators}
    inner = 4 * INNER * LENGTH
    assert {name: kept[name] for name in ("gate", "up", "silu", "mul", "down")} == {
        "gate": inner,
        "up": inner,
        "silu": inner,
        "mul": inner,
        "down": 0.0,
    }
    assert kept["qkv"] == 3 * 4 * HIDDEN * LENGTH  # values, and queries and keys as rotated
    assert kept["norm"] >= 2 * 4 * HIDDEN * LENGTH
    assert sum(kept.values()) < layer.activation_bytes.at(LENGTH)


def test_seconds_are_plausible(measured: tuple[Profile, list[str]]) -> None:
    found, _ = measured
    costs = block_costs(found.table, found, tokens=found.tokens)
    embedding, layer, *_, head = costs.blocks
    assert len(costs.blocks) == 5
    assert 0.0 < layer.forward_s < 0.1 and 0.0 < layer.backward_input_s < 0.1
    assert embedding.backward_input_s == 0.0 and head.forward_s > 0.0
    assert 0.0 < sum(op.forward_s for op in layer.operators) < 0.1
    assert layer.parameters == found.table.blocks[1].trainable_elements


def test_machine(measured: tuple[Profile, list[str]]) -> None:
    found, _ = measured
    machine = found.machine
    assert (machine.fetch_bandwidth, machine.offload_bandwidth) == (inf, inf)
    assert cluster_of(found, devices_per_node=2).optimizer_rate == machine.advance_rate
    rates = (machine.advance_rate, machine.preview_rate, machine.settle_rate)
    assert all(1e6 < rate < 1e12 for rate in rates)
    assert machine.device_update_rate == machine.preview_rate / 2, "a worker's share of the cores"
    assert 0.0 < machine.latency_s < 0.1 and 1e6 < machine.peer_bandwidth < 1e12


def test_the_file_reads_back(measured: tuple[Profile, list[str]]) -> None:
    assert from_json(to_json(measured[0])) == measured[0]


def test_sixteen_bits_move_on_a_cpu(config: Config) -> None:
    narrow = parse_config(
        {
            **config.model_dump(mode="json", include={"model", "data"}, exclude_none=True),
            "model": {"hf": config.model.hf, "dtype": "bf16"},
            "optimizer": {"grad_dtype": "bf16"},
        }
    )
    assert narrow.model.dtype is DType.BF16
    copies = measure_copies(narrow, torch.device("cpu"), num_bytes=1 << 16)
    assert 0.0 < copies.fetch < inf and 0.0 < copies.offload < inf
    assert measure_optimizer(narrow, num_elements=1 << 10).advance > 0.0


def test_messages() -> None:
    found = measure_messages(num_bytes=1 << 16)
    assert found.latency_s > 0.0 and found.bandwidth > 0.0


def test_a_median_leaves_out_the_first_run() -> None:
    runs: list[int] = []

    def prepare() -> int:
        runs.append(len(runs))
        return runs[-1]

    watch = Stopwatch(device=torch.device("cpu"), budget_s=0.0)
    assert watch.median_after(prepare, lambda prepared: prepared) >= 0.0
    assert runs == [0, 1, 2, 3]


def test_the_command_writes_a_profile(
    measured: tuple[Profile, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fake(config: Config, progress: Callable[[str], None]) -> Profile:
        assert config.train.micro_batch == 2
        progress("everything")
        return measured[0]

    monkeypatch.setattr(profile, "measure", fake)
    path, out = tmp_path / "config.yaml", tmp_path / "p.json"
    path.write_text(_CONFIG, encoding="utf-8")
    assert profile.main([str(path), "--out", str(out), "--set", "train.micro_batch=2"]) == 0
    assert load_profile(out) == measured[0]
    assert capsys.readouterr().out == "measuring everything\n"


def test_a_gpu_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    path, out = tmp_path / "config.yaml", tmp_path / "p.json"
    path.write_text(_CONFIG, encoding="utf-8")
    code = profile.main([str(path), "--out", str(out), "--set", "cluster.device=cuda"])
    assert code == ExitCode.BAD_CONFIG
    assert "there is no GPU here to measure" in capsys.readouterr().err
    assert not out.exists()
