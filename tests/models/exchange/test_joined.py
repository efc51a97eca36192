"""Checkpoints with the optimizer in a DCP folder of its own: FSDP's in a Trainer folder, written by
accelerate, and NeMo Automodel's, written by torch in Automodel's layout.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import StateDictType

from penstock.host.errors import ConfigError, StateError
from penstock.models.exchange.readers import open_checkpoint
from penstock.models.surgery.skeleton import build_skeleton
from tests.models.exchange.fsdp2 import DECAY, automodel_folder, trainer_folder
from tests.models.exchange.test_dcp import STEPS, check_equal, shard, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore::FutureWarning")


def split(folder: Path) -> None:
    """Divides the rows of one rank's file among two ranks."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
    assert places == {n: {"saved_offsets": [0] * tensor.ndim} for n, tensor in tensors.items()}
    path.unlink()
    for rank in range(2):
        parts = {name: tensor.chunk(2)[rank].clone() for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            places[name]["saved_offsets"][0] = rank * (len(tensor) - len(parts[name]))
        metadata = {"DCP_SHARDING_INFO": json.dumps(places), "format": "pt"}
        save_file(
            parts, folder / path.name.replace("shard-00001", f"shard-0000{rank + 1}"), metadata
        )


@pytest.mark.parametrize("sharded", [False, True])
def test_shards_of_fsdp_in_a_folder_of_the_trainer_are_read(sharded: bool, tmp_path: Path) -> None:
    model, optimizer = trained()
    kind = StateDictType.SHARDED_STATE_DICT
    folder = trainer_folder(tmp_path / "ck", model, optimizer, STEPS, kind)
    if sharded:
        shard(folder / "pytorch_model_fsdp_0")
        shard(folder / "optimizer_0")
    state = open_checkpoint(folder)
    check_equal(state, model, optimizer)
    assert (state.kind, state.step, state.problems) == ("trainer", STEPS, ())
    decays = {name: group.weight_decay for group in state.groups for name in group.names}
    assert decays == {n: DECAY * (p.ndim > 1) for n, p in model.named_parameters()}
    files = {tensor.role: tensor.file.partition("/")[0] for tensor in state.tensors}
    assert files == {
        "weight": "pytorch_model_fsdp_0",
        **dict.fromkeys(("exp_avg", "exp_avg_sq"), "optimizer_0"),
    }
    assert all((folder / each).is_file() for t in state.tensors for each in t.file.split(", "))


def test_the_state_that_fsdp_gathers_is_read(tmp_path: Path) -> None:
    """The Trainer saves whole weights as safetensors, too."""
    model, optimizer = trained()
    kind = StateDictType.FULL_STATE_DICT
    folder = trainer_folder(tmp_path / "ck", model, optimizer, STEPS, kind)
    model.save_pretrained(folder)
    state = open_checkpoint(folder)
    skeleton = build_skeleton(model.config)
    fitted = state.fitted(skeleton, {name for name, _ in model.named_parameters()})
    check_equal(fitted, model, optimizer)
    assert (fitted.step, fitted.state_problems) == (STEPS, ())


def test_a_folder_without_the_optimizer_s_shards_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    kind = StateDictType.SHARDED_STATE_DICT
    folder = trainer_folder(tmp_path / "ck", model, optimizer, STEPS, kind)
    (folder / "optimizer_0" / ".metadata").unlink()
    with pytest.raises(ConfigError, match=r"FSDP saved the state in shards.*FULL_STATE_DICT"):
        open_checkpoint(folder)


def test_weights_of_ranks_come_before_narrower_consolidated_ones(tmp_path: Path) -> None:
    model, optimizer = trained()
    folder = automodel_folder(tmp_path / "epoch_0_step_3", model, optimizer)
    copy.deepcopy(model).bfloat16().save_pretrained(folder / "model" / "consolidated")
    check_equal(open_checkpoint(folder), model, optimizer)


@pytest.mark.parametrize("form", ["dcp", "consolidated", "rank", "ranks"])
def test_a_checkpoint_of_automodel_is_read(form: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    folder = automodel_folder(tmp_path / "epoch_0_step_3", model, optimizer)
    if form == "ranks":
        split(folder / "model")
    elif form == "consolidated":
        shutil.rmtree(folder / "model")
        model.save_pretrained(folder / "model" / "consolidated")
    elif form == "dcp":
        shutil.rmtree(folder / "model")
        dcp.save(model.state_dict(), checkpoint_id=folder / "model", no_dist=True)
    state = open_checkpoint(folder)
    check_equal(state, model, optimizer)
    assert (state.kind, state.step, state.problems) == ("automodel", STEPS, ())
    files = {file for tensor in state.tensors for file in tensor.file.split(", ")}
    assert all((folder / file).is_file() for file in files)
    assert len([file for file in files if "/shard-" in file]) == {"rank": 1, "ranks": 2}.get(
        form, 0
    )
    assert {n for group in state.groups for n in group.names} == {
        name for name, _ in model.named_parameters()
    }
    assert any("sched.num_steps" in note for note in state.notes)


def test_damaged_parts_of_ranks_and_adapters_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    folder = automodel_folder(tmp_path / "epoch_0_step_3", model, optimizer)
    split(folder / "model")
    first, second = sorted((folder / "model").glob("shard-*.safetensors"))
    content = second.read_bytes()
    second.write_bytes(content[:-8])
    with pytest.raises(StateError, match=rf"{second.name}: is damaged.*copy the checkpoint again"):
        open_checkpoint(folder)
    second.unlink()
    os.mkfifo(second)
    with pytest.raises(StateError, match=rf"{second.name}: is a FIFO"):
        open_checkpoint(folder)
    second.unlink()
    second.write_bytes(content)
    first.unlink()
    with pytest.raises(StateError, match=r"chunks of .* are missing.*files of all ranks"):
        open_checkpoint(folder)
    (folder / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model: is an adapter.*and --weights-only"):
        open_checkpoint(folder)


def test_a_missing_shard_of_automodel_s_optimizer_is_named(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    folder = automodel_folder(tmp_path / "epoch_0_step_3", model, optimizer)
    shard(folder / "optim")
    (folder / "optim" / "__1_9.distcp").unlink()
    with pytest.raises(StateError, match=r"optim/__1_9.distcp: is missing.*files of all ranks"):
        open_checkpoint(folder)
