"""Folders of models, adapters and saved states as lists of tensors."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from penstock.host.errors import ConfigError, StateError
from penstock.models.exchange.foreign import ForeignState
from penstock.models.exchange.readers import open_checkpoint
from penstock.models.surgery.skeleton import build_skeleton
from penstock.protocol.run.checksums import with_checksum

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

LLAMA = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MIXTRAL = {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2}


def saved_model(folder: Path, model_type: str = "llama", **fields: object):
    """Saves a model with random weights; returns the model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**LLAMA, **fields})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model


def weights_of(state: ForeignState) -> dict[str, torch.Tensor]:
    assert {tensor.role for tensor in state.tensors} == {"weight"}
    return {tensor.name: tensor.load() for tensor in state.tensors}


@pytest.mark.parametrize(
    ("model_type", "fields"), [("llama", LLAMA), ("mixtral", MIXTRAL), ("llama", {"shards": True})]
)
def test_a_model_folder_has_the_model_s_names_and_numbers(
    model_type: str, fields: dict[str, object], tmp_path: Path
) -> None:
    fields = dict(fields)
    shards = bool(fields.pop("shards", False))
    model = saved_model(tmp_path, model_type, **fields)
    if shards:
        (tmp_path / "model.safetensors").unlink()
        model.save_pretrained(tmp_path, max_shard_size="8KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
    state = open_checkpoint(tmp_path)
    assert (state.kind, state.step, state.problems) == ("hf", None, ())
    expected = dict(model.named_parameters())
    weights = weights_of(state)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    for tensor in state.tensors:
        assert tensor.shape == expected[tensor.name].shape
        assert tensor.num_bytes == 4 * tensor.num_elements
        assert (tmp_path / tensor.file).is_file()


def test_a_tied_weight_has_one_name_and_an_untied_one_has_two(tmp_path: Path) -> None:
    saved_model(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in weights_of(open_checkpoint(tmp_path))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"] + 1
    save_file({**tensors, "lm_head.weight": head}, path)
    state = open_checkpoint(tmp_path)
    assert torch.equal(weights_of(state)["lm_head.weight"], head)
    assert state.notes == ("tied tensors differ in the files, so they are not tied",)


def test_a_tensor_without_a_place_keeps_its_name(tmp_path: Path) -> None:
    saved_model(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "mtp.weight": torch.ones(3)}, path)
    assert torch.equal(weights_of(open_checkpoint(tmp_path))["mtp.weight"], torch.ones(3))


def test_a_folder_without_config_has_the_names_of_the_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    state = open_checkpoint(tmp_path)
    assert [tensor.to_fields() for tensor in state.tensors] == [
        {
            "name": "a",
            "role": "weight",
            "dtype": "bfloat16",
            "shape": [2],
            "bytes": 4,
            "file": "model.safetensors",
        }
    ]
    assert "has no config.json" in state.notes[0]


def test_another_class_of_model_is_a_problem(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **LLAMA, num_labels=2, pad_token_id=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    (problem,) = open_checkpoint(tmp_path).problems
    assert "LlamaForSequenceClassification, and Penstock trains LlamaForCausalLM" in problem


def test_an_unknown_type_is_a_problem_and_runs_nothing(tmp_path: Path) -> None:
    saved_model(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    fields = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    state = open_checkpoint(tmp_path)
    assert "transformers knows no such type" in state.problems[0]
    assert "lm_head.weight" in weights_of(state)


def test_quantized_weights_are_a_problem(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    assert "quantized or integers (I8)" in open_checkpoint(tmp_path).problems[0]


def test_a_missing_shard_and_a_truncated_file_are_named(tmp_path: Path) -> None:
    model = saved_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(StateError, match=shard.name):
        open_checkpoint(tmp_path)
    shard.unlink()
    with pytest.raises(StateError, match=shard.name):
        open_checkpoint(tmp_path)


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder, other = tmp_path / "model", tmp_path / "other.safetensors"
    saved_model(folder)
    (folder / "model.safetensors").rename(other)
    save_file({"unused": torch.ones(1)}, folder / "unused.safetensors")
    for name in ("../other.safetensors", str(other)):
        index = {"weight_map": {"model.norm.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(StateError, match="lies outside of the folder"):
            open_checkpoint(folder)


def test_an_adapter_has_the_names_of_a_run(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    from penstock.config.adapter import AdapterConfig

    base = saved_model(tmp_path / "base")
    hf_config = base.config
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]))
    torch.nn.init.normal_(
        model.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight
    )
    model.save_pretrained(tmp_path / "adapter")
    state = open_checkpoint(tmp_path / "adapter")
    assert state.kind == "peft"
    mine = AdapterConfig(r=2, alpha=4, targets=["q_proj"], dropout=0.0)
    skeleton = build_skeleton(hf_config, mine)
    names = {n for n, _ in skeleton.model.named_parameters() if ".lora_" in n}
    weights = weights_of(state)
    assert weights.keys() == names
    expected = {n.replace(".default", ""): p for n, p in model.base_model.model.named_parameters()}
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())
    assert state.fitted(skeleton, names).problems == ()
    other = build_skeleton(hf_config, mine.model_copy(update={"alpha": 8.0}))
    (problem,) = state.fitted(other, names).problems
    assert "differs from the configuration's in model.layers.0.self_attn.q_proj" in problem
    (problem,) = state.fitted(build_skeleton(hf_config), names).problems
    assert "has no section adapter" in problem


def saved_state(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Writes a saved state as INTERNALS.md describes it; returns its tensors by file and key."""
    folder, base = run / "state" / f"step-{step:08d}", run / "state" / "base"
    folder.mkdir(parents=True)
    base.mkdir(exist_ok=True)
    keys = ("w", "exp_avg.w", "exp_avg_sq.w")
    tensors = {key: torch.full((2, 3), float(step + i)) for i, key in enumerate(keys)}
    frozen = {"frozen.a.b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, folder / "block-0000.safetensors")
    digests = [hashlib.sha256(save(each)).hexdigest() for each in (tensors, frozen)]
    name = f"block-0000-{digests[1][:16]}.safetensors"
    save_file(frozen, base / name)
    fields = {
        "format": 2,
        "version": step,
        "files": {"block-0000.safetensors": {"sha256": digests[0]}},
        "base": {name: {"sha256": digests[1]}},
        "scheduler": {"data_position": 8 * step},
    }
    (folder / "manifest.json").write_text(json.dumps(with_checksum(fields)))
    return tensors | frozen


def test_a_run_has_the_tensors_of_its_newest_state(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="no saved state"):
        open_checkpoint(tmp_path)
    saved_state(tmp_path, 9)
    expected = saved_state(tmp_path, 10)
    state = open_checkpoint(tmp_path)
    assert (state.kind, state.step, state.samples_seen) == ("penstock", 10, 80)
    tensors = {(t.role, t.name): t.load() for t in state.tensors}
    for role, name, key in [
        ("master", "w", "w"),
        ("exp_avg", "w", "exp_avg.w"),
        ("exp_avg_sq", "w", "exp_avg_sq.w"),
        ("weight", "a.b", "frozen.a.b"),
    ]:
        assert torch.equal(tensors.pop((role, name)), expected[key])
    assert not tensors
    assert all((state.path / tensor.file).is_file() for tensor in state.tensors)
    assert open_checkpoint(tmp_path / "state" / "step-00000009").step == 9


@pytest.mark.parametrize("folder", ["base", "step-00000003"])
def test_a_changed_byte_of_a_saved_state_is_refused(folder: str, tmp_path: Path) -> None:
    saved_state(tmp_path, 3)
    (path,) = (tmp_path / "state" / folder).glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    state = open_checkpoint(tmp_path / "state" / "step-00000003")
    with pytest.raises(StateError, match=f"{path.name}: is damaged: its checksum differs"):
        [tensor.load() for tensor in state.tensors]


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    saved_state(tmp_path, 3)
    path = tmp_path / "state" / "step-00000003" / "manifest.json"
    path.write_text(path.read_text().replace('"version": 3', '"version": 4'))
    with pytest.raises(StateError, match="checksum"):
        open_checkpoint(path.parent)


def test_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint"):
        open_checkpoint(tmp_path)
