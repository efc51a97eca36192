"""Folders of torch.distributed.checkpoint, in and out. torch writes and reads the references."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from penstock.host.errors import ConfigError, StateError
from penstock.models.exchange.dcp.metadata import Chunk, Slice, check_chunks
from penstock.models.exchange.foreign import ForeignState
from penstock.models.exchange.readers import open_checkpoint
from tests.hostile import side_by_side
from tests.models.exchange.fsdp2 import BETAS, DECAY, EPS, LLAMA, RATE, model_of, optimizer_of

HEAD = "lm_head.weight"
STEPS = 3


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def trained(steps: int = STEPS, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """Returns a model and its optimizer after some steps."""
    model = model_of({**LLAMA, "num_hidden_layers": 1, **fields}, dtype)
    return model, stepped(model, steps)


def stepped(model: nn.Module, steps: int) -> torch.optim.Optimizer:
    """Returns the optimizer of a model after some steps."""
    optimizer = optimizer_of(model)
    for step in range(steps):
        for number, parameter in enumerate(optimizer_parameters(optimizer)):
            generator = torch.Generator().manual_seed(100 * step + number)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Returns the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    flat: bool = True,
    sections: tuple[str, str] = ("model", "optimizer"),
    **others: Any,
) -> Path:
    """Saves as FSDP2's users do, by one process."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    values = {sections[0]: weights, sections[1]: state, **others}
    dcp.save(values, checkpoint_id=folder, no_dist=True)
    return folder


def metadata(folder: Path) -> Metadata:
    """Returns torch's own view of ``.metadata``."""
    value: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return value


def change(folder: Path, changed: Metadata) -> None:
    """Writes ``.metadata`` again."""
    (folder / ".metadata").write_bytes(pickle.dumps(changed))


def shard(folder: Path, ranks: int = 3) -> None:
    """Divides each tensor's rows among files of several ranks, as FSDP2 does."""
    known = metadata(folder)
    values: dict[str, Any] = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in known.state_dict_metadata.items()
        if hasattr(value, "size")
    }
    dcp.load(values, checkpoint_id=folder, no_dist=True)
    for rank in range(ranks):
        with (folder / f"__{rank}_9.distcp").open("wb") as file:
            for key, value in values.items():
                if not value.shape:
                    continue
                described, parts = known.state_dict_metadata[key], value.chunk(ranks)
                if rank == 0:
                    described.chunks.clear()
                if rank >= len(parts):
                    continue
                first = sum(len(part) for part in parts[:rank])
                offsets = torch.Size([first, *[0] * (value.ndim - 1)])
                described.chunks.append(
                    ChunkStorageMetadata(offsets=offsets, sizes=parts[rank].shape)
                )
                start = file.tell()
                content = io.BytesIO()
                torch.save(parts[rank].clone(), content)
                file.write(content.getvalue())
                known.storage_data[MetadataIndex(key, offsets)] = _StorageInfo(
                    Path(file.name).name, start, file.tell() - start
                )
    change(folder, known)


def check_equal(state: ForeignState, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compares weights and moments with those of torch."""
    actual = {(tensor.name, tensor.role): tensor for tensor in state.tensors}
    expected = {(name, "weight"): value for name, value in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, arrays in optimizer.state.items():
        for array in ("exp_avg", "exp_avg_sq"):
            expected[names[id(parameter)], array] = arrays[array]
    assert actual.keys() == expected.keys()
    for key, tensor in actual.items():
        value = tensor.load()
        assert torch.equal(value, expected[key]), key
        assert tensor.shape == expected[key].shape and tensor.num_elements == value.numel()
        assert tensor.dtype == str(value.dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("flat", "sharded", "sections"),
    [
        (True, False, ("model", "optimizer")),
        (True, True, ("model", "optimizer")),
        (False, True, ("model", "optim")),
    ],
    ids=["flat", "sharded", "nested"],
)
def test_a_folder_of_fsdp2_has_weights_moments_steps_and_groups(
    flat: bool, sharded: bool, sections: tuple[str, str], tmp_path: Path
) -> None:
    model, optimizer = trained()
    folder = save(tmp_path / "ck", model, optimizer, flat=flat, sections=sections)
    if sharded:
        shard(folder)
    state = open_checkpoint(folder)
    check_equal(state, model, optimizer)
    assert (state.kind, state.step, state.problems) == ("dcp", STEPS, ())
    assert set(state.steps.values()) == {STEPS} and HEAD in state.steps
    decays = {name: group.weight_decay for group in state.groups for name in group.names}
    assert decays == {n: DECAY * (p.ndim > 1) for n, p in model.named_parameters()}
    assert {(group.lr, group.betas, group.eps) for group in state.groups} == {(RATE, BETAS, EPS)}
    json.dumps(state.to_fields())
    if sharded:
        (head,) = [t for t in state.tensors if (t.name, t.role) == (HEAD, "exp_avg")]
        assert head.file == "__0_9.distcp, __1_9.distcp, __2_9.distcp"


def test_names_lose_the_parts_of_wrappers(tmp_path: Path) -> None:
    values = {
        "module._orig_mod.a.weight": torch.ones(2),
        "module.b._checkpoint_wrapped_module.weight": torch.ones(3),
    }
    optimizer = {"state.module._orig_mod.a.weight.exp_avg": torch.zeros(2)}
    contents = {"model": values, "optimizer": optimizer, "train_state": {"step": 4}}
    dcp.save(contents, checkpoint_id=tmp_path / "ck", no_dist=True)
    state = open_checkpoint(tmp_path / "ck")
    assert [(t.name, t.role) for t in state.tensors] == [
        ("a.weight", "weight"),
        ("b.weight", "weight"),
        ("a.weight", "exp_avg"),
    ]
    assert state.step == 4


def test_weights_at_the_top_and_other_contents(tmp_path: Path) -> None:
    model, _ = trained(0)
    others = {"global_step": torch.tensor(7), "loader": {"seen": torch.ones(2), "a": "b"}}
    dcp.save({**model.state_dict(), **others}, checkpoint_id=tmp_path / "ck", no_dist=True)
    state = open_checkpoint(tmp_path / "ck")
    assert {tensor.name for tensor in state.tensors} == set(model.state_dict())
    assert state.step == 7
    (note,) = state.notes
    assert "loader.seen" in note and "loader.a" in note


def test_odd_checkpoints_are_read(tmp_path: Path) -> None:
    tied = trained(tie_word_embeddings=True)
    check_equal(open_checkpoint(save(tmp_path / "tied", *tied)), *tied)
    bf16 = trained(dtype=torch.bfloat16)
    check_equal(open_checkpoint(save(tmp_path / "bf16", *bf16)), *bf16)
    model = model_of({**LLAMA, "num_hidden_layers": 1})
    model.lm_head.weight.requires_grad = False
    optimizer = stepped(model, 2)
    state = open_checkpoint(save(tmp_path / "frozen", model, optimizer))
    check_equal(state, model, optimizer)
    assert HEAD not in state.steps and not any(HEAD in group.names for group in state.groups)


def test_a_checkpoint_before_the_first_step(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    dcp.save(
        {"model": model.state_dict(), "optimizer": {"state": {}, "param_groups": []}},
        checkpoint_id=tmp_path / "ck",
        no_dist=True,
    )
    state = open_checkpoint(tmp_path / "ck")
    assert state.step is None and {tensor.role for tensor in state.tensors} == {"weight"}
    assert not optimizer.state


def _without_a_file(folder: Path) -> None:
    (folder / "__1_9.distcp").unlink()


def _truncated(folder: Path) -> None:
    path = folder / "__2_9.distcp"
    path.write_bytes(path.read_bytes()[:-10])


def _without_a_chunk(folder: Path) -> None:
    known = metadata(folder)
    known.state_dict_metadata[f"model.{HEAD}"].chunks.pop()
    change(folder, known)


def _with_overlapping_chunks(folder: Path) -> None:
    known = metadata(folder)
    chunks = known.state_dict_metadata[f"model.{HEAD}"].chunks
    chunks.append(chunks[0])
    change(folder, known)


def _without_a_place(folder: Path) -> None:
    known = metadata(folder)
    del known.storage_data[MetadataIndex(f"model.{HEAD}", torch.Size([0, 0]))]
    change(folder, known)


def _outside(folder: Path) -> None:
    known = metadata(folder)
    index = MetadataIndex(f"model.{HEAD}", torch.Size([0, 0]))
    known.storage_data[index].relative_path = "../secret"
    change(folder, known)


def _compressed(folder: Path) -> None:
    known = metadata(folder)
    index = MetadataIndex(f"model.{HEAD}", torch.Size([0, 0]))
    known.storage_data[index].transform_descriptors = ["stream.zstd"]
    change(folder, known)


def _by_another_planner(folder: Path) -> None:
    known = metadata(folder)
    known.planner_data = None
    change(folder, known)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_without_a_file, r"__1_9.distcp: is missing.*copy the files of all ranks"),
        (_truncated, r"__2_9.distcp: is truncated"),
        (_without_a_chunk, r"metadata: chunks of model.lm_head.weight are missing"),
        (_with_overlapping_chunks, r"metadata: chunks of model.lm_head.weight overlap"),
        (_without_a_place, r"metadata: has no place of the chunk \[0, 0\] of model.lm_head"),
        (_outside, r"metadata: names the file '../secret' outside"),
        (_compressed, r"metadata: chunks are compressed"),
        (_by_another_planner, r"metadata: has no planner_data"),
        (
            lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04"),
            r"metadata: its pickle is damaged",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_folder_is_refused(damage: Any, words: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "ck", *trained(1))
    shard(folder)
    open_checkpoint(folder)
    damage(folder)
    with pytest.raises((StateError, ConfigError), match=words):
        open_checkpoint(folder)


def test_a_changed_number_is_refused_when_it_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "ck", *trained(1))
    place = metadata(folder).storage_data[MetadataIndex(f"model.{HEAD}", torch.Size([0, 0]))]
    path = folder / place.relative_path
    content = bytearray(path.read_bytes())
    content[place.offset + place.length // 2] ^= 1
    path.write_bytes(content)
    state = open_checkpoint(folder)
    (head,) = [t for t in state.tensors if (t.name, t.role) == (HEAD, "weight")]
    with pytest.raises(StateError, match=rf"{path.name}.*checksum"):
        head.load()


def test_numbers_in_place_of_names_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    values = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(values, checkpoint_id=tmp_path / "ck", no_dist=True)
    with pytest.raises(ConfigError, match=r"numbers in place of names.*get_optimizer_state_dict"):
        open_checkpoint(tmp_path / "ck")


class Hostile:
    """An object that makes a file when its pickle is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_of_a_folder_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    model, optimizer = trained(1)
    folder = save(tmp_path / "ck", model, optimizer, train_state={"step": Hostile(mark)})
    known = metadata(folder)
    known.storage_meta = Hostile(mark)  # type: ignore[assignment]
    change(folder, known)
    state = open_checkpoint(folder)
    check_equal(state, model, optimizer)
    assert not mark.exists() and any("train_state.step" in note for note in state.notes)
    optimizer.param_groups[0]["lr"] = Hostile(mark)
    folder = save(tmp_path / "rate", model, optimizer)
    assert None in {group.lr for group in open_checkpoint(folder).groups}
    assert not mark.exists()


def test_a_weight_in_two_dictionaries_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    other = {name: value + 1 for name, value in model.state_dict().items()}
    folder = save(tmp_path / "ck", model, optimizer, state_dict=other)
    with pytest.raises(ConfigError, match=r"state_dict\.\S+ are both the weight of"):
        open_checkpoint(folder)


def test_settings_that_are_no_finite_numbers_are_unknown(tmp_path: Path) -> None:
    """JSON has no NaN, and prints no integer of thousands of digits."""
    model, optimizer = trained(1)
    nan, huge = float("nan"), 10**5000
    optimizer.param_groups[0].update(lr=nan, betas=[0.9], eps="a", odd=nan, huge=huge, kept=1)
    state = open_checkpoint(save(tmp_path / "ck", model, optimizer))
    (group,) = (group for group in state.groups if "kept" in group.others)
    assert (group.lr, group.betas, group.eps) == (None, None, None)
    assert not {"odd", "huge"} & set(group.others)
    assert json.dumps(state.to_fields(), allow_nan=False)


def test_shards_without_metadata_name_the_missing_file(tmp_path: Path) -> None:
    folder = save(tmp_path / "ck", *trained(1))
    (folder / ".metadata").unlink()
    with pytest.raises(StateError, match=r"\.metadata: cannot be read .*No such file"):
        open_checkpoint(folder)


def test_chunks_side_by_side_are_compared_in_linear_time(tmp_path: Path) -> None:
    """All begin in the same row: pairs of 50,000 chunks would take an hour."""
    side_by_side(tmp_path / "whole", 50_000)
    (tensor,) = open_checkpoint(tmp_path / "whole").tensors
    assert (tensor.name, tensor.shape) == ("w", (1, 50_000))
    side_by_side(tmp_path / "overlapping", 50_000, last=49_998)
    with pytest.raises(StateError, match=r"metadata: chunks of w overlap"):
        open_checkpoint(tmp_path / "overlapping")


@pytest.mark.parametrize("seed", range(3))
def test_overlapping_chunks_are_found_in_any_number_of_axes(seed: int, tmp_path: Path) -> None:
    """Grids of random cuts, with a chunk moved to another place."""
    chosen = random.Random(seed)
    place = Slice(file="a", offset=0, length=1)
    for _ in range(200):
        axes = [sorted({0, 7, *(chosen.randrange(8) for _ in range(2))}) for _ in range(seed + 1)]
        spans = [list(itertools.pairwise(cuts)) for cuts in axes]
        chunks = [
            Chunk(
                offsets=tuple(start for start, _ in box),
                sizes=tuple(end - start for start, end in box),
                place=place,
            )
            for box in itertools.product(*spans)
        ]
        chosen.shuffle(chunks)
        check_chunks(tmp_path, "w", [7] * (seed + 1), chunks)
        moved = replace(chunks[0], offsets=tuple(chosen.randrange(8 - n) for n in chunks[0].sizes))
        if moved != chunks[0]:
            with pytest.raises(StateError, match="chunks of w overlap"):
                check_chunks(tmp_path, "w", [7] * (seed + 1), [moved, *chunks[1:]])
