"""Files that name and cut tensors in another way than modules do: read, checked, written back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError, StateError
from penstock.models.checkpoints.checkpoint import Checkpoint
from penstock.models.checkpoints.conversion import Weights
from penstock.models.checkpoints.export import export_hf
from penstock.models.checkpoints.initial import initial_blocks
from penstock.models.prepare import prepare
from penstock.models.surgery.hf import read_hf_config
from penstock.models.surgery.skeleton import build_skeleton
from penstock.models.surgery.table import build_table
from penstock.shm.table import BlockTable, DType

RENAMED = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w1.weight",
    "qwen3_moe": "model.layers.1.mlp.experts.3.gate_proj.weight",
    "qwen3_next": "model.layers.1.mlp.experts.3.gate_proj.weight",
    "olmoe": "model.layers.1.mlp.experts.3.gate_proj.weight",
    "phimoe": "model.layers.1.block_sparse_moe.experts.3.w1.weight",
    "gpt_neox": "embed_out.weight",
}
"""Types whose published files differ from the modules, and a name that only the files have."""


def from_folder(path: Path, **sections: Any) -> Config:
    return parse_config(
        {
            "model": {"path": str(path)},
            "data": {"path": "@stdlib", "sequence_length": 16, "tokenizer": "byte"},
            **sections,
        }
    )


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory by their names in the files."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def read_all(config: Config) -> tuple[Any, BlockTable, dict[int, dict[str, torch.Tensor]]]:
    assert config.model.path is not None
    hf_config = read_hf_config(config.model.path)
    table = build_table(config, hf_config)
    blocks = dict(initial_blocks(config, hf_config, table, range(len(table.blocks))))
    return hf_config, table, blocks


@pytest.fixture(name="saved")
def _saved(tmp_path: Path, make_config: Any, make_hf_config: Any) -> Callable[..., Any]:
    """Save a random model as transformers does: the model, and its directory."""

    def save(model_type: str, shard_size: str = "1GB", **changes: Any) -> tuple[Any, Path]:
        torch.manual_seed(3)
        hf_config = make_hf_config(make_config(model_type, vocab_size=300, **changes))
        model = AutoModelForCausalLM.from_config(hf_config)
        model.save_pretrained(tmp_path / "model", max_shard_size=shard_size)
        return model, tmp_path / "model"

    return save


@pytest.mark.parametrize("shard_size", ["1GB", "10KB"])
@pytest.mark.parametrize("model_type", RENAMED)
def test_published_names_in_and_out(
    model_type: str, shard_size: str, saved: Any, tmp_path: Path
) -> None:
    """The model has what transformers loads; the export has what transformers saves."""
    model, folder = saved(model_type, shard_size)
    published = tensors_of(folder)
    parameters = dict(model.named_parameters())
    assert RENAMED[model_type] in published and RENAMED[model_type] not in parameters
    hf_config, table, blocks = read_all(from_folder(folder))
    read = {name: value for block in blocks.values() for name, value in block.items()}
    assert read.keys() == parameters.keys()
    assert all(torch.equal(read[name], parameters[name]) for name in read)

    def arrays(block: int) -> dict[str, Any]:
        return {name: value.numpy() for name, value in blocks[block].items()}

    out = tmp_path / "out"
    export_hf(hf_config, table, arrays, out, dtype=DType.FP32, carried={}, shard_bytes=20_000)
    exported = tensors_of(out)
    assert {k: v.shape for k, v in exported.items()} == {k: v.shape for k, v in published.items()}
    assert all(torch.equal(exported[name], published[name]) for name in published)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == published.keys()


def test_module_names_are_read_too(saved: Any) -> None:
    """Files that some earlier tool saved as the modules name them."""
    model, folder = saved("qwen3_moe")
    save_file(
        {name: value.detach().contiguous() for name, value in model.named_parameters()},
        folder / "model.safetensors",
    )
    _, _, blocks = read_all(from_folder(folder))
    fused = blocks[1]["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(fused, model.model.layers[0].mlp.experts.gate_up_proj)


def test_a_block_is_read_without_the_others(saved: Any, monkeypatch: Any) -> None:
    """Of the whole model only headers are read; of a block each tensor once."""
    _, folder = saved("mixtral", "10KB")
    skeleton = build_skeleton(read_hf_config(folder))
    table = build_table(from_folder(folder), read_hf_config(folder))
    seen: list[str] = []
    read = Checkpoint.read

    def watched(self: Checkpoint, name: str, dtype: DType) -> torch.Tensor:
        seen.append(name)
        return read(self, name, dtype)

    monkeypatch.setattr(Checkpoint, "read", watched)
    weights = Weights(skeleton, Checkpoint(folder, [p.name for p in folder.glob("*.safetensors")]))
    weights.check(table)
    assert seen == []
    weights.read(table.blocks[2], DType.FP32)
    assert sorted(seen) == sorted(n for n in tensors_of(folder) if ".layers.1." in n)


_EXPERT = "model.layers.1.mlp.experts.2"


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ({"model.norm.weight": None}, r"the files have no tensor model.norm.weight \(head\)"),
        (
            {f"{_EXPERT}.down_proj.weight": None},
            r"experts.down_proj has shape \(3, 32, 16\) .* asks for \(4, 32, 16\)",
        ),
        (
            {f"{_EXPERT}.up_proj.weight": None},
            r"cannot be converted to .*1.mlp.experts.gate_up_proj",
        ),
        (
            {f"{_EXPERT}.up_proj.weight": torch.zeros(9, 32)},
            r"layers.1.mlp.experts.0.gate_proj.weight, .* cannot be converted to",
        ),
        (
            {f"{_EXPERT}.up_proj.weight": torch.zeros(16, 32, dtype=torch.int8)},
            r"2.up_proj.weight is I8; quantized weights cannot be trained",
        ),
        (
            {"model.layers.0.self_attn.q_proj.weight": torch.zeros(8, 32)},
            r"q_proj.weight has shape \(8, 32\) in the files, .* asks for \(32, 32\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_made(
    damage: dict[str, torch.Tensor | None], complaint: str, saved: Any, tmp_path: Path
) -> None:
    _, folder = saved("qwen3_moe")
    tensors = {**tensors_of(folder), **damage}
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for table_only in (True, False):
        with pytest.raises(StateError, match=complaint) as caught:
            prepare(from_folder(folder), run_dir, table_only=table_only)
        assert "\n" not in str(caught.value)
    assert list(run_dir.iterdir()) == []


def test_a_plan_needs_no_weights_and_a_run_does(saved: Any, tmp_path: Path) -> None:
    _, folder = saved("qwen3_moe")
    (folder / "model.safetensors").unlink()
    prepare(from_folder(folder), tmp_path, table_only=True)
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=r"model.path = .*: has no model.safetensors"):
        prepare(from_folder(folder), tmp_path / "run")


def test_keys_that_only_modules_know(make_config: Any, make_hf_config: Any) -> None:
    """``head_dim`` stands in every published qwen3_moe configuration, and not in its class."""
    config = make_config("qwen3_moe", head_dim=16)
    table = build_table(config, make_hf_config(config))
    shapes = {t.name: t.shape for t in table.blocks[1].tensors}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (4 * 16, 32)
    with pytest.raises(ConfigError, match=r"model.hf.head_dims: unknown key"):
        make_hf_config(make_config("qwen3_moe", head_dims=16))
    with pytest.raises(ConfigError, match=r"model.hf.head_dim: unknown key"):
        make_hf_config(make_config("gpt2", head_dim=16))


def test_losses_that_span_all_layers_are_refused(
    saved: Any, make_config: Any, make_hf_config: Any, tmp_path: Path
) -> None:
    complaint = (
        r"^model: output_router_logits = true of 'mixtral' adds a loss .* set output_\w+ to false$"
    )
    with pytest.raises(ConfigError, match=complaint):
        make_hf_config(make_config("mixtral", output_router_logits=True))
    _, folder = saved("mixtral")
    fields = {**json.loads((folder / "config.json").read_text()), "output_router_logits": True}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=complaint):
        prepare(from_folder(folder), tmp_path)


@pytest.mark.parametrize(
    ("model_type", "published"),
    [
        ("qwen3_moe", {"max_window_layers": 48, "use_sliding_window": False, "head_dim": 16}),
        ("qwen3_next", {"partial_rotary_factor": 0.25, "use_sliding_window": False}),
        ("gpt_neox", {"rotary_pct": 0.25, "rotary_emb_base": 10000}),
        ("gpt2", {"n_ctx": 1024, "task_specific_params": {"text-generation": {}}}),
        ("opt", {"activation_dropout": 0.0, "prefix": "</s>"}),
    ],
)
def test_keys_of_published_configurations(
    make_config: Any, make_hf_config: Any, model_type: str, published: dict[str, Any]
) -> None:
    """They act as in transformers, or have no effect there either."""
    config = make_hf_config(make_config(model_type, **published))
    if "rotary_pct" in published:
        assert config.rope_parameters["partial_rotary_factor"] == 0.25


def test_a_key_without_effect_is_refused_where_it_is_switched_on(
    make_config: Any, make_hf_config: Any
) -> None:
    config = make_config("opt", activation_dropout=0.1)
    with pytest.raises(ConfigError, match=r"model.hf.activation_dropout: unknown key"):
        make_hf_config(config)
