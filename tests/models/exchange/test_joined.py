"""Checkpoints with the optimizer in a DCP folder of its own: FSDP's in a Trainer folder, written by
accelerate, and NeMo Automodel's, written by torch in Automodel's layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import StateDictType

from penstock.host.errors import ConfigError, StateError
from penstock.models.exchange.readers import open_checkpoint
from penstock.models.surgery.skeleton import build_skeleton
from tests.models.exchange.fsdp2 import DECAY, trainer_folder
from tests.models.exchange.test_dcp import STEPS, check_equal, shard, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore::FutureWarning")


def automodel_folder(folder: Path, model: Any, optimizer: Any) -> Path:
    """Saves the optimizer and the scheduler of the rate as Automodel does."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    values = {"optim": state, "sched": {"num_steps": STEPS, "max_lr": 1.0}}
    dcp.save(values, checkpoint_id=folder / "optim", no_dist=True)
    (folder / "config.yaml").write_text("step_scheduler: {}\n")
    return folder


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


@pytest.mark.parametrize("consolidated", [False, True])
def test_a_checkpoint_of_automodel_is_read(consolidated: bool, tmp_path: Path) -> None:
    model, optimizer = trained()
    folder = automodel_folder(tmp_path / "epoch_0_step_3", model, optimizer)
    if consolidated:
        model.save_pretrained(folder / "model" / "consolidated")
    else:
        dcp.save(model.state_dict(), checkpoint_id=folder / "model", no_dist=True)
    state = open_checkpoint(folder)
    check_equal(state, model, optimizer)
    assert (state.kind, state.step, state.problems) == ("automodel", STEPS, ())
    assert all((folder / tensor.file).is_file() for tensor in state.tensors)
    assert {n for group in state.groups for n in group.names} == {
        name for name, _ in model.named_parameters()
    }
    assert any("sched.num_steps" in note for note in state.notes)


def test_weights_of_automodel_by_rank_and_adapters_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    folder = automodel_folder(tmp_path / "epoch_0_step_3", model, optimizer)
    writer = HuggingFaceStorageWriter(path=str(folder / "model"), save_distributed=True)
    dcp.save(model.state_dict(), storage_writer=writer, no_dist=True)
    assert list((folder / "model").glob("shard-*.safetensors"))
    with pytest.raises(ConfigError, match=r"model: has each rank's part.*save_consolidated true"):
        open_checkpoint(folder)
    (folder / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model: is an adapter.*and --weights-only"):
        open_checkpoint(folder)


def test_a_missing_shard_of_automodel_s_optimizer_is_named(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    folder = automodel_folder(tmp_path / "epoch_0_step_3", model, optimizer)
    dcp.save(model.state_dict(), checkpoint_id=folder / "model", no_dist=True)
    shard(folder / "optim")
    (folder / "optim" / "__1_9.distcp").unlink()
    with pytest.raises(StateError, match=r"optim/__1_9.distcp: is missing.*files of all ranks"):
        open_checkpoint(folder)
