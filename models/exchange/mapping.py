"""Assignment of a checkpoint's tensors to those of a run, before a byte is written."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.config.schema import Config
from penstock.models.checkpoints.conversion import all_names, folded
from penstock.models.checkpoints.files import few
from penstock.models.exchange.foreign import (
    MASTER,
    WEIGHT,
    ForeignState,
    ForeignTensor,
)
from penstock.models.surgery.skeleton import Skeleton
from penstock.protocol.plan.groups import tensor_steps
from penstock.shm.table import BlockTable, TensorSpec

FROZEN = "frozen"
"""Array of tensors that the run does not train. Other arrays are ``master`` and those of the
optimizer's state."""
_NAMES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Options of an import. ``weights_only``: moments and steps stay behind. ``samples_seen``
    replaces the checkpoint's count.
    """

    weights_only: bool = False
    samples_seen: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """An array of a tensor of the run. ``source`` None: zeros."""

    block: int
    spec: TensorSpec
    array: str
    source: ForeignTensor | None

    @property
    def key(self) -> str:
        """The name in the file of the saved state."""
        return self.spec.name if self.array == MASTER else f"{self.array}.{self.spec.name}"

    def to_fields(self) -> dict[str, Any]:
        """Returns the JSON object of the report."""
        source = None if self.source is None else self.source.to_fields()
        return {
            "name": self.spec.name,
            "array": self.array,
            "shape": list(self.spec.shape),
            "block": self.block,
            "from": source,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRate:
    """A learning rate of the checkpoint, which the client compares with the configuration's curve.
    ``field``: name of the rate in the checkpoint. ``is_peak``: the rate after warmup, else that of
    the next step. ``factor``: of ``optimizer.groups``. ``tensors``: names, shortened.
    """

    field: str
    value: float
    is_peak: bool
    factor: float
    tensors: str

    def to_fields(self) -> dict[str, Any]:
        """Returns the JSON object of the report."""
        return {
            "field": self.field,
            "checkpoint": self.value,
            "is_peak": self.is_peak,
            "factor": self.factor,
            "tensors": self.tensors,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """The assignments of an import. ``problems`` refuse it; ``notes`` are for the user."""

    kind: str
    step: int
    samples_seen: int
    assignments: tuple[Assignment, ...]
    unused: tuple[ForeignTensor, ...]
    rates: tuple[ForeignRate, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def to_fields(self) -> dict[str, Any]:
        """Returns the report as a JSON object."""
        return {
            "kind": self.kind,
            "step": self.step,
            "samples_seen": self.samples_seen,
            "tensors": [each.to_fields() for each in self.assignments],
            "unused": [tensor.to_fields() for tensor in self.unused],
            "rates": [rate.to_fields() for rate in self.rates],
            "problems": list(self.problems),
            "notes": list(self.notes),
        }


@dataclass(slots=True, kw_only=True)
class _Findings:
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_import(
    state: ForeignState,
    config: Config,
    table: BlockTable,
    skeleton: Skeleton,
    options: ImportOptions,
) -> ImportPlan:
    """Assigns the tensors of a checkpoint to those of a run. Reads only tensors that the model
    ties, to compare them.

    Raises:
        StateError: a file with a tied tensor is damaged.
    """
    findings = _Findings(problems=list(state.problems), notes=list(state.notes))
    if not options.weights_only:
        findings.problems += state.state_problems
    by_key: dict[tuple[str, str], ForeignTensor] = {}
    for tensor in state.tensors:
        by_key.setdefault((tensor.name, tensor.role), tensor)
    names_of = _names_of(table, skeleton)
    arrays = () if options.weights_only else table.state_arrays
    assignments, used = [], set[tuple[str, str]]()
    for block in table.blocks:
        for spec in block.tensors:
            for each in _assigned(block.index, spec, arrays, names_of[spec.name], by_key):
                assignments.append(each)
                if each.source is not None:
                    used.add((each.source.name, each.source.role))
    zeros = () if not options.weights_only else table.state_arrays
    lacking = [each for each in assignments if each.source is None]
    _say_lacking(lacking, by_key, state, findings)
    assignments += [
        Assignment(block=block.index, spec=spec, array=array, source=None)
        for block in table.blocks
        for spec in block.tensors
        if spec.trainable
        for array in zeros
    ]
    order = (MASTER, *table.state_arrays, FROZEN)  # as in the files of a save
    assignments.sort(key=lambda each: (each.block, order.index(each.array)))
    _check_shapes(assignments, findings)
    _check_ties(names_of, by_key, findings)
    unused = [tensor for key, tensor in by_key.items() if key not in used]
    _say_unused(unused, used, table, skeleton, options, findings)
    step, samples_seen = _position(state, config, table, names_of, options, findings)
    rates: tuple[ForeignRate, ...] = ()
    if not options.weights_only:
        _compare_settings(state, step, config, table, names_of, findings)
        rates = tuple(_rates(state, config, table, names_of))
    return ImportPlan(
        kind=state.kind,
        step=step,
        samples_seen=samples_seen,
        assignments=tuple(assignments),
        unused=tuple(unused),
        rates=rates,
        problems=tuple(findings.problems),
        notes=tuple(findings.notes),
    )


def _names_of(table: BlockTable, skeleton: Skeleton) -> dict[str, list[str]]:
    """Returns all names of each tensor of the run; a tied one has several."""
    aliases = all_names(skeleton)
    names = (spec.name for block in table.blocks for spec in block.tensors)
    return {name: aliases.get(name, [name]) for name in names}


def _assigned(
    block: int,
    spec: TensorSpec,
    arrays: Sequence[str],
    names: Sequence[str],
    by_key: Mapping[tuple[str, str], ForeignTensor],
) -> Iterator[Assignment]:
    def source(*roles: str) -> ForeignTensor | None:
        keys = ((name, role) for role in roles for name in names)
        return next((by_key[key] for key in keys if key in by_key), None)

    array = MASTER if spec.trainable else FROZEN
    yield Assignment(block=block, spec=spec, array=array, source=source(MASTER, WEIGHT))
    for array in arrays if spec.trainable else ():
        yield Assignment(block=block, spec=spec, array=array, source=source(array))


def _say_lacking(
    lacking: Sequence[Assignment],
    by_key: Mapping[tuple[str, str], ForeignTensor],
    state: ForeignState,
    findings: _Findings,
) -> None:
    roles = {role for _, role in by_key}
    names: dict[str, list[str]] = {}
    for each in lacking:
        names.setdefault(each.array, []).append(each.spec.name)
    for array, tensors in names.items():
        if array in (MASTER, FROZEN):
            present = sorted({name for name, role in by_key if role in (MASTER, WEIGHT)})
            findings.problems.append(
                f"{state.path}: has no weights of {_listed(tensors)}; it has weights of"
                f" {_listed(present)}"
            )
        elif array in roles:
            findings.problems.append(
                f"{state.path}: has no {array} of {_listed(tensors)}, which the configuration"
                " trains; exclude the tensors by train.freeze, or give --weights-only"
            )
        else:
            moments = sorted(roles - {MASTER, WEIGHT})
            findings.problems.append(
                f"{state.path}: has no {array} of any tensor, and optimizer.name keeps it; the"
                f" checkpoint has {', '.join(moments) or 'no state of an optimizer'}; set"
                " optimizer.name to its optimizer, or give --weights-only"
            )


def _check_shapes(assignments: Sequence[Assignment], findings: _Findings) -> None:
    for each in assignments:
        source = each.source
        if source is None:
            continue
        if source.shape is None:
            fits = source.num_elements == each.spec.num_elements
        else:
            fits = source.shape == each.spec.shape
        if not fits:
            size = source.num_elements if source.shape is None else list(source.shape)
            findings.problems.append(
                f"{source.file}: {source.role} of {source.name} has shape {size}, the"
                f" configuration's model has {list(each.spec.shape)}"
            )


def _check_ties(
    names_of: Mapping[str, Sequence[str]],
    by_key: Mapping[tuple[str, str], ForeignTensor],
    findings: _Findings,
) -> None:
    """Refuses two different tensors of the checkpoint for one of the model."""
    for names in names_of.values():
        for role in {role for name, role in by_key if name in names[1:]}:
            first, *others = (by_key[name, role] for name in names if (name, role) in by_key)
            for other in others:
                if not torch.equal(first.load().reshape(-1), other.load().reshape(-1)):
                    findings.problems.append(
                        f"{role} of {first.name} and of {other.name} differ in the checkpoint, and"
                        " the configuration's model ties the two; set tie_word_embeddings to false"
                    )


def _say_unused(
    unused: Sequence[ForeignTensor],
    used: Collection[tuple[str, str]],
    table: BlockTable,
    skeleton: Skeleton,
    options: ImportOptions,
    findings: _Findings,
) -> None:
    """Refuses parameters that the run has no place for. Notes other tensors."""
    parameters = {name for name, _ in used}
    aliases = {n: names for names in all_names(skeleton).values() for n in names}
    frozen = {s.name for block in table.blocks for s in block.tensors if not s.trainable}
    buffers = {name for name, _ in skeleton.model.named_buffers()}
    foreign, moments = [], []
    for tensor in unused:
        known = set(aliases.get(tensor.name, [tensor.name]))
        if tensor.role in (MASTER, WEIGHT):
            if not known & parameters and tensor.name not in buffers:
                foreign.append(tensor.name)
        elif not options.weights_only and known & frozen:
            moments.append(tensor.name)
        elif not options.weights_only and not known & parameters:
            foreign.append(tensor.name)
    if foreign:
        findings.problems.append(
            f"the configuration's model has no place for {_listed(foreign)} of the checkpoint;"
            " give the configuration of the model that was trained"
        )
    if moments:
        findings.notes.append(
            f"the optimizer's state of {_listed(moments)} is left out: the configuration does not"
            " train them"
        )


def _position(
    state: ForeignState,
    config: Config,
    table: BlockTable,
    names_of: Mapping[str, Sequence[str]],
    options: ImportOptions,
    findings: _Findings,
) -> tuple[int, int]:
    """Returns the step of the run, and the samples that it has consumed."""
    batch = config.train.global_batch
    if options.weights_only:
        return 0, options.samples_seen or 0
    step = state.step
    trained = [s.name for block in table.blocks for s in block.tensors if s.trainable]
    counts = {state.steps[n] for name in trained for n in names_of[name] if n in state.steps}
    if len(counts) > 1:
        findings.problems.append(
            f"{state.path}: the optimizer's steps of the tensors differ:"
            f" {', '.join(str(count) for count in sorted(counts))}; Penstock counts the steps of"
            " all tensors together; give --weights-only"
        )
    elif counts:
        step = counts.pop()
    samples_seen = state.samples_seen if options.samples_seen is None else options.samples_seen
    if step is None and samples_seen is not None:
        step, rest = divmod(samples_seen, batch)
        if rest:
            findings.problems.append(
                f"--samples-seen {samples_seen}: is no multiple of train.global_batch ({batch}),"
                " and the checkpoint does not name its step"
            )
    if step is None:
        findings.problems.append(
            f"{state.path}: does not name its step; give --samples-seen, or --weights-only"
        )
        return 0, 0
    if samples_seen is None:
        samples_seen = step * batch
        findings.notes.append(
            f"samples seen: {step} steps of train.global_batch {batch}; --samples-seen gives"
            " another number"
        )
    return step, samples_seen


def _compare_settings(
    state: ForeignState,
    step: int,
    config: Config,
    table: BlockTable,
    names_of: Mapping[str, Sequence[str]],
    findings: _Findings,
) -> None:
    """Notes settings of the optimizer that differ; those of the configuration hold."""
    optimizer, groups, schedule = config.optimizer, state.groups, state.schedule
    if schedule is not None and schedule.steps not in (None, step):
        findings.notes.append(
            f"{schedule.file}: last_epoch is {schedule.steps}, the optimizer has {step} steps;"
            f" optimizer.schedule goes on from step {step}"
        )
    for name, here in (("betas", optimizer.betas), ("eps", optimizer.eps)):
        foreign = {getattr(group, name) for group in groups} - {None}
        if foreign - {here}:
            findings.notes.append(
                f"optimizer.{name} is {here}, the checkpoint has"
                f" {', '.join(str(value) for value in sorted(foreign))}"
            )
    decays = {name: group.weight_decay for group in groups for name in group.names}
    differing: dict[tuple[float, float], list[str]] = {}
    for block in table.blocks:
        for spec, here, _ in tensor_steps(optimizer, table, block.index):
            known = (decays[n] for n in names_of[spec.name] if n in decays)
            foreign_decay = next(known, None)
            if foreign_decay is not None and foreign_decay != here:
                differing.setdefault((here, foreign_decay), []).append(spec.name)
    for (here, foreign_decay), names in differing.items():
        findings.notes.append(
            f"weight decay of {_listed(names)} is {here:g} in the configuration,"
            f" {foreign_decay:g} in the checkpoint"
        )


def _rates(
    state: ForeignState, config: Config, table: BlockTable, names_of: Mapping[str, Sequence[str]]
) -> Iterator[ForeignRate]:
    """Yields the learning rates of the checkpoint, each with the trained tensors that have it."""
    factors = {
        alias: factor
        for block in table.blocks
        for spec, _, factor in tensor_steps(config.optimizer, table, block.index)
        for alias in names_of[spec.name]
    }
    names: dict[tuple[str, float, bool, float], list[str]] = {}
    for number, group in enumerate(state.groups):
        trained = {name: factors[name] for name in group.names if name in factors}
        if group.names and not trained:
            continue
        values = [("lr of param_groups", group.lr, False)]
        if (schedule := state.schedule) is not None:
            rate, bases = schedule.rates[number], schedule.base_rates[number : number + 1]
            values = values if group.lr != rate else []
            values.append((f"_last_lr of {schedule.file}", rate, False))
            values += [(f"base_lrs of {schedule.file}", base, True) for base in bases]
        for field_name, value, is_peak in values:
            if value is None or not math.isfinite(value):
                continue
            for name, factor in trained.items() or (("", 1.0),):
                names.setdefault((field_name, value, is_peak, factor), []).append(name)
    for (field_name, value, is_peak, factor), tensors in names.items():
        yield ForeignRate(
            field=field_name,
            value=value,
            is_peak=is_peak,
            factor=factor,
            tensors=_listed([name for name in tensors if name]),
        )


def _listed(names: Sequence[str]) -> str:
    count = f"{len(names)} tensors " if len(names) > _NAMES else ""
    return f"{count}{few(folded(names), _NAMES)}" or "nothing"
