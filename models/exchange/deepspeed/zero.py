"""Directories of DeepSpeed's ZeRO stages 1, 2 and 3: a part of flat tensors for each rank.

Stages 1 and 2 cut the flat tensor of a group into equal parts, one a rank; a parameter may lie in
several parts. Stage 3 cuts each parameter, and the last rank's part ends with padding. The files
``*_model_states.pt`` have names and shapes in the order of the flat tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.host.errors import ConfigError, StateError
from penstock.models.exchange.deepspeed.common import (
    MOMENTS,
    ModelStates,
    compared_with_adapter,
    foreign,
    groups_of,
    narrowed,
    plain_name,
    read_model_states,
    row,
    step_of,
    tagged,
)
from penstock.models.exchange.foreign import MASTER, WEIGHT, ForeignState, ForeignTensor
from penstock.models.exchange.pickles import PickledTensor, expect, expect_list, load_torch

LATEST = "latest"
"""File with the name of the newest checkpoint's folder."""

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_TAIL = "_optim_states.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """The optimizer's state of a rank. ``flats``: rows of each group, by role."""

    path: Path
    stage: int
    world_size: int
    flats: tuple[Mapping[str, PickledTensor], ...]
    paddings: tuple[tuple[int, ...], ...] | None
    steps: tuple[int | None, ...]
    groups: Any


class ZeroReader:
    """Reads directories of ZeRO."""

    def recognises(self, path: Path) -> bool:
        """Returns whether a folder has files of ranks, or names such a folder."""
        if any(path.glob(f"*{_TAIL}")):
            return True
        return (path / LATEST).is_file() and any(path.glob(f"*/*{_TAIL}"))

    def open(self, path: Path) -> ForeignState:
        """Lists the tensors from headers.

        Raises:
            ConfigError: the checkpoint has tensor or pipeline parallel ranks.
            StateError: the file of a rank is missing, or a file is damaged; names the file.
        """
        root = path if any(path.glob(f"*{_TAIL}")) else tagged(path, LATEST)
        ranks = _ranks(root)
        states = _model_states(root, ranks)
        first, model = ranks[0], states[0]
        if len(first.flats) != len(model.shapes):
            raise StateError(
                f"{first.path}: has {len(first.flats)} groups, and {model.path.name} has shapes of"
                f" {len(model.shapes)}; copy the files of one checkpoint"
            )
        assemble = _partitioned if first.stage == 3 else _flat
        tensors = list(assemble(ranks, model, root))
        tensors += frozen_tensors(states, root) if first.stage == 3 else model.weights(root)
        counts = {step for step in first.steps if step is not None}
        steps = {
            plain_name(name): step
            for shapes, step in zip(model.shapes, first.steps, strict=True)
            if step is not None
            for name in shapes
        }
        state = ForeignState(
            kind="deepspeed-zero",
            path=root,
            tensors=tuple(tensors),
            step=counts.pop() if len(counts) == 1 else None,
            steps=steps,
            samples_seen=model.global_samples,
            groups=groups_of(first.groups, _names_of_groups(first, model), first.path),
            notes=(f"ZeRO stage {first.stage} on {first.world_size} ranks", *_notes(model)),
        )
        return compared_with_adapter(state)


def _names_of_groups(rank: _Rank, model: ModelStates) -> list[tuple[str, ...]]:
    """Returns the parameters of each group of settings. Stage 3 cuts a group into several rows;
    the group's ``params`` are numbers of rows.
    """
    names = [tuple(map(plain_name, each)) for each in model.shapes]
    rows = [
        group.get("params") if isinstance(group, dict) else None
        for group in expect_list(rank.groups, rank.path, "param_groups")
    ]
    numbers = [number for each in rows if isinstance(each, list) for number in each]
    if numbers != list(range(len(names))):
        return names
    return [tuple(name for number in each or () for name in names[number]) for each in rows]


def _notes(model: ModelStates) -> Iterator[str]:
    for name, source in model.shared.items():
        yield f"{name} is tied to {source}"
    if model.skipped_steps:
        yield (
            f"DeepSpeed skipped {model.skipped_steps} of its {model.global_steps} steps; the"
            " optimizer does not count them"
        )


def _ranks(root: Path) -> tuple[_Rank, ...]:
    """Reads the optimizer's state of all ranks.

    Raises:
        ConfigError: there are several ranks of tensor or pipeline parallelism.
        StateError: a rank's file is missing or damaged.
    """
    paths: dict[int, Path] = {}
    for path in sorted(root.glob(f"*{_TAIL}")):
        match = _OPTIMIZER.fullmatch(path.name)
        if match is None or int(match[2]) or int(match[1]) in paths:
            raise ConfigError(
                f"{path}: is of a form that is not read (tensor, pipeline or expert parallel);"
                " convert the checkpoint with DeepSpeed's ds_to_universal, and import that"
            )
        paths[int(match[1])] = path
    first = _rank(paths[min(paths)])
    missing = [number for number in range(first.world_size) if number not in paths]
    if missing:
        name = re.sub(r"pp_rank_\d+", f"pp_rank_{missing[0]}", first.path.name)
        raise StateError(
            f"{root / name}: is missing; the checkpoint is of {first.world_size} ranks, and"
            f" {len(paths)} files are here; copy the files of all ranks"
        )
    if len(paths) > first.world_size:
        raise StateError(
            f"{paths[max(paths)]}: is of another checkpoint: {first.path.name} is of"
            f" {first.world_size} ranks; remove the files of older checkpoints"
        )
    ranks = tuple(_rank(paths[number]) for number in range(first.world_size))
    for each in ranks:
        same = (each.stage, each.world_size, len(each.flats))
        if same != (first.stage, first.world_size, len(first.flats)) or each.steps != first.steps:
            raise StateError(
                f"{each.path}: differs from {first.path.name} in stage, ranks, groups or steps;"
                " copy the files of one checkpoint"
            )
    return ranks


def _rank(path: Path) -> _Rank:
    content = expect(load_torch(path), dict, path, "the content")
    fields = expect(content.get("optimizer_state_dict"), dict, path, "optimizer_state_dict")
    stage = fields.get("zero_stage")
    stage = 1 if stage is None else _stage(stage, path)
    count = fields.get("partition_count")
    counts = count if isinstance(count, list | tuple) else [count]
    sizes = {expect(each, int, path, "partition_count") for each in counts}
    if len(sizes) != 1 or not 0 < max(sizes) < 2**20:
        raise ConfigError(
            f"{path}: groups are of different numbers of ranks (expert parallel); convert the"
            " checkpoint with DeepSpeed's ds_to_universal, and import that"
        )
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    masters = expect_list(fields.get(key), path, key)
    base_key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    base = fields.get(base_key)
    groups: Any = []
    if isinstance(base, dict):
        states = expect(base.get("state"), dict, path, f"{base_key}.state")
        groups = base.get("param_groups") or []
    else:  # of elastic checkpoints: the states of groups, without padding
        listed = expect_list(base, path, base_key)
        states = {str(number): state for number, state in enumerate(listed)}
    flats, steps = [], []
    for number, master in enumerate(masters):
        state = expect(states.get(str(number), {}), dict, path, f"{base_key}.state[{number}]")
        rows = {MASTER: row(master, path, f"{key}[{number}]")}
        for name in MOMENTS:
            if name in state:
                rows[name] = row(state[name], path, f"{name} of group {number}")
                if rows[name].num_elements > rows[MASTER].num_elements:
                    raise StateError(
                        f"{path}: {name} of group {number} has {rows[name].num_elements} numbers,"
                        f" its parameters have {rows[MASTER].num_elements}; copy the checkpoint"
                        " again"
                    )
        flats.append(rows)
        steps.append(_group_step(state, groups, number, fields, path))
    return _Rank(
        path=path,
        stage=stage,
        world_size=sizes.pop(),
        flats=tuple(flats),
        paddings=_paddings(fields.get("param_alignment_paddings"), path),
        steps=tuple(steps),
        groups=groups,
    )


def _stage(value: Any, path: Path) -> int:
    """Returns the stage, which may be a member of DeepSpeed's enumeration."""
    args = getattr(value, "args", None)
    stage = expect(args[0] if args else value, int, path, "zero_stage")
    if stage not in (1, 2, 3):
        raise ConfigError(f"{path}: is of ZeRO stage {stage}; stages 1, 2 and 3 are read")
    return stage


def _group_step(
    state: Mapping[Any, Any], groups: Any, number: int, fields: Mapping[Any, Any], path: Path
) -> int | None:
    """Returns the steps of a group: in its state, in its settings, or of an elastic checkpoint."""
    group = groups[number] if isinstance(groups, list) and number < len(groups) else {}
    sources = (state.get("step"), group.get("step") if isinstance(group, dict) else None)
    for value in (*sources, fields.get("base_optimizer_state_step")):
        if value is not None:
            return step_of(value, path, f"the step of group {number}")
    return None


def _paddings(value: Any, path: Path) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    name = "param_alignment_paddings"
    paddings = tuple(
        tuple(expect(n, int, path, name) for n in expect_list(group, path, name))
        for group in expect_list(value, path, name)
    )
    if any(padding < 0 for group in paddings for padding in group):
        raise StateError(f"{path}: {name} has a negative number; copy the checkpoint again")
    return paddings


def _model_states(root: Path, ranks: Sequence[_Rank]) -> tuple[ModelStates, ...]:
    """Reads the names and shapes: one file for stages 1 and 2, one a rank for stage 3."""
    if ranks[0].stage == 3:
        return rank_states(root, len(ranks))
    states = (read_model_states(root / "mp_rank_00_model_states.pt"),)
    _check_states(states, len(ranks))
    return states


def rank_states(root: Path, count: int) -> tuple[ModelStates, ...]:
    """Reads the model's files of ``count`` ranks of stage 3.

    Raises:
        StateError: a file is missing or damaged, or of another checkpoint; names the file.
    """
    names = {int(m[1]): p for p in root.iterdir() if (m := _MODEL.fullmatch(p.name))}
    default = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
    paths = (names.get(n, root / default.format(n)) for n in range(count))
    states = tuple(map(read_model_states, paths))
    _check_states(states, count)
    return states


def _check_states(states: Sequence[ModelStates], count: int) -> None:
    for each in states:
        if each.dp_world_size not in (None, count):
            raise StateError(
                f"{each.path}: is of {each.dp_world_size} ranks, the optimizer's files of {count};"
                " copy the files of one checkpoint"
            )
        if each.shapes != states[0].shapes:
            raise StateError(f"{each.path}: its parameters differ from {states[0].path.name}'s")


def _flat(ranks: Sequence[_Rank], model: ModelStates, root: Path) -> Iterator[ForeignTensor]:
    """Yields parameters of stages 1 and 2."""
    for number, shapes in enumerate(model.shapes):
        paddings = ranks[0].paddings
        gaps = paddings[number] if paddings is not None and number < len(paddings) else ()
        if gaps and len(gaps) != len(shapes):
            raise StateError(
                f"{ranks[0].path}: has {len(gaps)} paddings for {len(shapes)} parameters; copy the"
                " files of one checkpoint"
            )
        for role in (MASTER, *MOMENTS):
            rows = [rank.flats[number][role] for rank in ranks if role in rank.flats[number]]
            if not rows:
                continue
            if len(rows) != len(ranks):
                raise StateError(f"{ranks[0].path}: {role} is missing in the files of some ranks")
            # The last ranks' rows may lack the padding: all others have the same length.
            size, start = rows[0].num_elements, 0
            for index, (name, shape) in enumerate(shapes.items()):
                count = math.prod(shape)
                pieces = _pieces(rows, size, start, count)
                yield _joined(name, role, pieces, shape, root, rows[-1].path)
                start += count + (gaps[index] if gaps else 0)


def _pieces(
    rows: Sequence[PickledTensor], size: int, start: int, count: int
) -> list[PickledTensor]:
    """Returns elements of a row that is cut into ranks' parts of ``size`` elements."""
    pieces, end = [], start + count
    for rank, part in enumerate(rows):
        first = max(start, rank * size)
        last = min(end, rank * size + part.num_elements)
        if first < last:
            pieces.append(narrowed(part, first - rank * size, last - first))
    return pieces


def _partitioned(ranks: Sequence[_Rank], model: ModelStates, root: Path) -> Iterator[ForeignTensor]:
    """Yields parameters of stage 3."""
    for number, shapes in enumerate(model.shapes):
        for role in (MASTER, *MOMENTS):
            rows = [rank.flats[number][role] for rank in ranks if role in rank.flats[number]]
            if not rows:
                continue
            if len(rows) != len(ranks):
                raise StateError(f"{ranks[0].path}: {role} is missing in the files of some ranks")
            start = 0
            for name, shape in shapes.items():
                count = math.prod(shape)
                part = math.ceil(count / len(ranks))
                pieces = []
                for rank, each in enumerate(rows):
                    length = max(0, min(part, count - rank * part))
                    if length and start + length <= each.num_elements:
                        pieces.append(narrowed(each, start, length))
                yield _joined(name, role, pieces, shape, root, rows[-1].path)
                start += part


def frozen_tensors(states: Sequence[ModelStates], root: Path) -> Iterator[ForeignTensor]:
    """Yields frozen parameters of stage 3, which lie in parts in the model's files of all ranks.

    Raises:
        StateError: a part is missing; names the file.
    """
    for name, shape in states[0].frozen_shapes.items():
        count = math.prod(shape)
        pieces: list[PickledTensor] = []
        left = count
        for each in states:
            if name not in each.frozen:
                raise StateError(f"{each.path}: has no part of the frozen {name}; copy it again")
            part = row(each.frozen[name], each.path, name)
            pieces.append(narrowed(part, 0, min(part.num_elements, left)))
            left -= pieces[-1].num_elements
        yield _joined(name, WEIGHT, pieces, shape, root, states[-1].path)


def _joined(
    name: str,
    role: str,
    pieces: Sequence[PickledTensor],
    shape: tuple[int, ...],
    root: Path,
    last: Path,
) -> ForeignTensor:
    """Returns a parameter that lies in pieces.

    Raises:
        StateError: the pieces are shorter than the parameter.
    """
    count, present = math.prod(shape), sum(piece.num_elements for piece in pieces)
    if present != count or not pieces:
        raise StateError(
            f"{last}: {role} of {name} has {present} of {count} numbers in the files of all ranks;"
            " copy the files of one checkpoint"
        )
    first = foreign(name, role, pieces[0], root)
    return ForeignTensor(
        name=first.name,
        role=role,
        dtype=first.dtype,
        shape=shape,
        num_elements=count,
        num_bytes=sum(piece.num_bytes for piece in pieces),
        file=first.file,
        load=partial(_load, tuple(pieces), shape),
    )


def _load(pieces: Sequence[PickledTensor], shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the numbers: over the mapped file if they lie in one piece, else a copy."""
    tensors = [piece.load() for piece in pieces]
    return (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).reshape(shape)
