"""DeepSpeed's checkpoints: those that DeepSpeed made (tests/data/deepspeed), and damaged ones."""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig

from penstock.config.adapter import AdapterConfig
from penstock.host.errors import ConfigError, StateError
from penstock.models.exchange.deepspeed.common import plain_name
from penstock.models.exchange.foreign import ForeignState
from penstock.models.exchange.readers import open_checkpoint
from penstock.models.surgery.skeleton import build_skeleton
from tests.system.conftest import TINY_LLAMA

DATA = Path(__file__).parents[2] / "data" / "deepspeed"
ROLES = {"fp32": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
RANK = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def unpacked(kind: str, folder: Path) -> Path:
    """Returns a checkpoint of DeepSpeed: the folder with ``latest``."""
    with tarfile.open(DATA / f"{kind}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / kind


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


TIED = "lm_head.weight"


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3", "tied1", "parts3", "empty1"])
def test_tensors_are_those_that_deepspeed_converts(kind: str, tmp_path: Path) -> None:
    state = open_checkpoint(unpacked(kind, tmp_path))
    position = (None, 0) if kind == "empty1" else (3, 6)
    assert (state.kind, state.step, state.samples_seen) == ("deepspeed-zero", *position)
    notes = [f"ZeRO stage {kind[-1]} on 2 ranks"]
    stored = json.loads((DATA / "digests.json").read_text())[kind]
    if kind == "tied1":
        notes.append(f"{TIED} is tied to model.embed_tokens.weight")
        assert stored.pop(f"{TIED}/fp32") == stored["model.embed_tokens.weight/fp32"]
    assert state.notes == tuple(notes)
    read = {(tensor.name, tensor.role): tensor for tensor in state.tensors}
    frozen = {"zero2": {"model.norm.weight"}, "zero3": {"model.embed_tokens.weight"}}
    for key, expected in stored.items():
        name, _, file = key.rpartition("/")
        role = "weight" if name in frozen.get(kind, ()) else ROLES[file]
        tensor = read[name, role]
        assert digest(tensor.load().float()) == expected, key
    others = {name for name, role in read if role == "weight"}
    assert others == frozen.get(kind, set())
    assert {(name, role) for name, role in read if name not in others} == {
        (key.rpartition("/")[0], ROLES[key.rpartition("/")[2]])
        for key in stored
        if key.rpartition("/")[0] not in others
    }
    for name in others:
        weight = read[name, "weight"]
        assert weight.load().shape == weight.shape
        assert weight.load().abs().sum() > 0


def test_groups_have_names_and_settings(tmp_path: Path) -> None:
    decayed, plain = open_checkpoint(unpacked("zero1", tmp_path)).groups
    assert (decayed.lr, decayed.betas, decayed.eps) == (0.01, (0.9, 0.95), 1e-8)
    assert (decayed.weight_decay, plain.weight_decay) == (0.1, 0.0)
    assert "lm_head.weight" in decayed.names
    assert set(plain.names) == {
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
    }
    (group,) = open_checkpoint(unpacked("zero2", tmp_path)).groups
    assert len(group.names) == 11 and group.weight_decay == 0.1
    # Stage 3 has several rows a group.
    assert open_checkpoint(unpacked("parts3", tmp_path)).groups == (decayed, plain)


def test_frozen_parameters_of_a_converted_stage_3_are_in_the_files_of_ranks(tmp_path: Path) -> None:
    whole, folder = open_checkpoint(unpacked("zero3", tmp_path)), tmp_path / "zero3-universal"
    unpacked(folder.name, tmp_path)
    converted = open_checkpoint(folder)
    (frozen,) = (tensor for tensor in converted.tensors if tensor.role == "weight")
    (expected,) = (tensor for tensor in whole.tensors if tensor.role == "weight")
    assert (frozen.name, frozen.shape) == (expected.name, expected.shape)
    assert torch.equal(frozen.load(), expected.load())
    assert {(t.name, t.role) for t in converted.tensors} == {
        (t.name, t.role) for t in whole.tensors
    }
    part = folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(StateError, match=f"{part.name}.*copy the checkpoint again"):
        open_checkpoint(folder)
    part.unlink()
    with pytest.raises(StateError, match=f"{part.name}.*copy the checkpoint again"):
        open_checkpoint(folder)


def test_parameters_that_a_conversion_mixes_are_refused(tmp_path: Path) -> None:
    """DeepSpeed's converter of round_robin_gradients writes other numbers than the model's."""
    root = unpacked("robin2", tmp_path)
    states = torch.load(root / "global_step3" / "mp_rank_00_model_states.pt", weights_only=False)
    masters = [t for t in open_checkpoint(root).tensors if t.role == "master"]
    assert len(masters) == 12
    for tensor in masters:
        assert torch.equal(tensor.load(), states["module"][tensor.name])
    unpacked("robin2-universal", tmp_path)
    (problem,) = open_checkpoint(tmp_path / "robin2-universal").problems
    assert "are not the weights in mp_rank_00_model_states.pt" in problem
    assert problem.endswith("import the directory that was converted")


@pytest.mark.parametrize("kind", ["zero1", "zero3"])
def test_missing_and_other_ranks_are_named(kind: str, tmp_path: Path) -> None:
    root = unpacked(kind, tmp_path) / "global_step3"
    first, second = root / RANK.format(0), root / RANK.format(1)
    shutil.copy(first, root / RANK.format(2))
    with pytest.raises(StateError, match="remove the files of older checkpoints"):
        open_checkpoint(root)
    (root / RANK.format(2)).unlink()
    content = second.read_bytes()
    second.write_bytes(content[: len(content) // 2])
    with pytest.raises(StateError, match=r"zero_pp_rank_1_.*copy the checkpoint again"):
        open_checkpoint(root)
    second.unlink()
    with pytest.raises(StateError, match=r"zero_pp_rank_1_.*is missing; .* of 2 ranks, and 1"):
        open_checkpoint(root)
    second.write_bytes(content)
    second.rename(root / "zero_pp_rank_1_mp_rank_01_optim_states.pt")
    with pytest.raises(
        ConfigError, match="convert the checkpoint with DeepSpeed's ds_to_universal"
    ):
        open_checkpoint(root)


@pytest.mark.parametrize("fault", ["", "exp_avg", "paddings"])
def test_lengths_that_would_shift_parameters_are_refused(fault: str, tmp_path: Path) -> None:
    sizes = {"a": torch.Size([2]), "b": torch.Size([3])}
    for rank in range(2):
        flat = torch.arange(3.0) + 3 * rank
        state = {"step": torch.tensor(1.0), "exp_avg": flat, "exp_avg_sq": flat}
        fields = {
            "zero_stage": 1,
            "partition_count": 2,
            "single_partition_of_fp32_groups": [flat],
            "base_optimizer_state": {"state": {0: state}, "param_groups": [{"params": [0]}]},
        }
        if fault == "exp_avg":
            state[fault] = torch.ones(6)
        elif fault:
            fields["param_alignment_paddings"] = [[-1, 0]]
        torch.save({"optimizer_state_dict": fields}, tmp_path / RANK.format(rank))
    shapes = {"module": {}, "param_shapes": [sizes]}
    torch.save(shapes, tmp_path / "mp_rank_00_model_states.pt")
    if not fault:
        tensors = {(t.name, t.role): t.load().tolist() for t in open_checkpoint(tmp_path).tensors}
        assert tensors["a", "master"] == [0, 1] and tensors["b", "exp_avg"] == [2, 3, 4]
        return
    with pytest.raises(StateError, match=f"{fault}.*copy the checkpoint again"):
        open_checkpoint(tmp_path)


def test_gaps_between_parameters_are_left_out(tmp_path: Path) -> None:
    """DeepSpeed aligns each parameter of a group, and names the gap behind it. The state's step
    counts before the step of the settings.
    """
    groups = [{"params": [0], "step": 7}]
    for rank in range(2):
        fields = {
            "zero_stage": 1,
            "partition_count": 2,
            "single_partition_of_fp32_groups": [torch.arange(3.0) + 3 * rank],
            "base_optimizer_state": {"state": {0: {"step": 1}}, "param_groups": groups},
            "param_alignment_paddings": [[1, 0]],
        }
        torch.save({"optimizer_state_dict": fields}, tmp_path / RANK.format(rank))
    shapes = {"module": {}, "param_shapes": [{"a": torch.Size([2]), "b": torch.Size([3])}]}
    torch.save(shapes, tmp_path / "mp_rank_00_model_states.pt")
    state = open_checkpoint(tmp_path)
    tensors = {tensor.name: tensor.load().tolist() for tensor in state.tensors}
    assert tensors == {"a": [0, 1], "b": [3, 4, 5]} and state.step == 1


def test_odd_parameters_of_stage_3_are_cut_behind_their_middle(tmp_path: Path) -> None:
    """Each rank has a part of each parameter. The last rank's part has padding."""
    parts = ([0.0, 1.0, 2.0, 10.0, 11.0], [3.0, 4.0, -1.0, 12.0, -1.0])
    shapes = {"a": torch.Size([5]), "b": torch.Size([3])}
    for rank, values in enumerate(parts):
        fields = {
            "zero_stage": 3,
            "partition_count": 2,
            "fp32_flat_groups": [torch.tensor(values)],
            "optimizer_state_dict": {"state": {0: {"step": 1}}, "param_groups": [{"params": [0]}]},
        }
        torch.save({"optimizer_state_dict": fields}, tmp_path / RANK.format(rank))
        model = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        torch.save({"module": {}, "param_shapes": [shapes]}, tmp_path / model)
    tensors = {tensor.name: tensor.load().tolist() for tensor in open_checkpoint(tmp_path).tensors}
    assert tensors == {"a": [0, 1, 2, 3, 4], "b": [10, 11, 12]}


def test_missing_model_states_and_tags_are_named(tmp_path: Path) -> None:
    root = unpacked("zero1", tmp_path)
    (root / "global_step3" / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(StateError, match=r"mp_rank_00_model_states\.pt"):
        open_checkpoint(root)
    for tag in ("../zero1/global_step3", "global_step9", ""):
        (root / "latest").write_text(tag)
        with pytest.raises(StateError, match="latest: names"):
            open_checkpoint(root)


def universal(root: Path, **files: Any) -> Path:
    """Writes the files of a parameter of a universal checkpoint."""
    folder = root / "zero" / "module.lm_head.weight"
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        torch.save(value, folder / f"{name}.pt")
    return root


def opened(root: Path, **files: Any) -> ForeignState:
    return open_checkpoint(universal(root, **files))


def test_universal_checkpoints_need_only_their_parameters(tmp_path: Path) -> None:
    numbers = torch.arange(6.0).reshape(2, 3)
    saved = {"param": numbers, "cat_dim": 0}
    state = opened(tmp_path / "a", fp32=saved, exp_avg=saved, exp_avg_sq=saved, step=7)
    assert (state.step, state.steps, state.groups) == (7, {"lm_head.weight": 7}, ())
    assert {tensor.role for tensor in state.tensors} == {"master", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(tensor.load(), numbers) for tensor in state.tensors)
    assert opened(tmp_path / "a", step=torch.tensor(8.0)).step == 8
    bare = opened(tmp_path / "b", fp32=numbers.reshape(-1))
    assert (bare.step, bare.tensors[0].shape, bare.tensors[0].num_elements) == (None, None, 6)
    (tmp_path / "latest_universal").write_text("a")
    assert open_checkpoint(tmp_path).step == 8


def test_names_of_adapters_are_those_of_peft_s_files() -> None:
    prefix, layer = "base_model.model.model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"
    names = {
        f"{prefix}.lora_A.default.weight": f"{layer}.lora_A.weight",
        f"{prefix}.base_layer.weight": f"{layer}.weight",
        f"module.{prefix}.modules_to_save.default.weight": f"{layer}.weight",
        f"{prefix}.original_module.weight": f"{layer}.weight",
        "base_model.model.embed.lora_embedding_A.default": "embed.lora_embedding_A",
        "model.default.weight": "model.default.weight",
    }
    assert {name: plain_name(name) for name in names} == names


def test_an_adapter_is_compared_with_the_settings_of_peft(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3" / "global_step3"
    part = folder / "zero" / "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"
    part.mkdir(parents=True)
    torch.save({"param": torch.ones(2, 3), "cat_dim": 0}, part / "fp32.pt")
    (note,) = open_checkpoint(folder).notes
    assert note.endswith("alpha and modules are those of the configuration")
    (folder.parent / "adapter_model.safetensors").touch()
    LoraConfig(r=2, lora_alpha=4, target_modules=["up_proj"]).save_pretrained(folder.parent)
    state = open_checkpoint(folder)
    assert not state.notes
    hf_config = LlamaConfig(**TINY_LLAMA)
    for alpha, count in ((4.0, 0), (8.0, 1)):
        adapter = AdapterConfig(r=2, alpha=alpha, targets=("up_proj",))
        problems = state.fitted(build_skeleton(hf_config, adapter), ()).problems
        assert len(problems) == count
        assert all("differs from the configuration's" in problem for problem in problems)


def test_universal_checkpoints_with_faults_are_refused(tmp_path: Path) -> None:
    numbers = {"param": torch.ones(2), "cat_dim": 0}
    (problem,) = opened(tmp_path / "a", exp_avg=numbers).problems
    assert "module.lm_head.weight: has no fp32.pt" in problem
    with pytest.raises(StateError, match=r"step\.pt: step is 1\.5, which is no count"):
        opened(tmp_path / "b", fp32=numbers, step=1.5)
    with pytest.raises(StateError, match=r"fp32\.pt: param is of type str"):
        opened(tmp_path / "c", fp32={"param": "a"})
    with pytest.raises(ConfigError, match="experts, which transformers names"):
        opened(tmp_path / "d", fp32={**numbers, "is_expert_param": True})
    path = opened(tmp_path / "f", fp32=numbers, exp_avg=numbers).path
    damaged = path / "zero" / "module.lm_head.weight" / "exp_avg.pt"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(StateError, match=r"exp_avg\.pt: .*copy the checkpoint again"):
        open_checkpoint(path)
    (tmp_path / "e" / "zero").mkdir(parents=True)
    with pytest.raises(StateError, match="has no folder with fp32"):
        open_checkpoint(tmp_path / "e")
