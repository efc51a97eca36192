"""Assignment of a checkpoint's tensors to those of a run, before a byte is written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.config.schema import Config
from penstock.models.adapters.settings import is_adapter_tensor
from penstock.models.checkpoints.conversion import all_names
from penstock.models.exchange.foreign import (
    MASTER,
    WEIGHT,
    ForeignState,
    ForeignTensor,
    other_rule,
)
from penstock.models.exchange.settings import (
    ForeignRate,
    compare_models,
    compare_settings,
    listed,
    rates_of,
)
from penstock.models.surgery.skeleton import Skeleton
from penstock.shm.table import BlockTable, TensorSpec

FROZEN = "frozen"
"""Array of tensors that the run does not train. Other arrays are ``master`` and those of the
optimizer's state."""
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Types of numbers that need no scale: eight bits do."""
_MOST = (1 << 53) - 1
"""Most steps or samples of a saved state: JSON readers round larger numbers."""


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
        if rule := other_rule([group.others for group in state.groups]):
            findings.problems.append(f"{state.path}: {rule}; give --weights-only")
    by_key = _by_key(state, options, findings)
    names_of = _names_of(table, skeleton)
    only_weights = options.weights_only or bool(state.state_problems)  # arrays may have no names
    assignments = [
        each
        for block in table.blocks
        for spec in block.tensors
        for each in _assigned(block.index, spec, table.state_arrays, names_of[spec.name], by_key)
    ]
    if options.weights_only:
        assignments = [
            each if each.array in (MASTER, FROZEN) else replace(each, source=None)
            for each in assignments
        ]
    used = {(each.source.name, each.source.role) for each in assignments if each.source is not None}
    lacking = [each for each in assignments if each.source is None]
    if only_weights:
        lacking = [each for each in lacking if each.array in (MASTER, FROZEN)]
    _say_lacking(lacking, by_key, state, findings)
    order = (MASTER, *table.state_arrays, FROZEN)  # as in the files of a save
    assignments.sort(key=lambda each: (each.block, order.index(each.array)))
    _check_shapes(assignments, findings)
    _check_ties(names_of, by_key, findings)
    unused = [tensor for key, tensor in by_key.items() if key not in used]
    _say_unused(unused, used, table, skeleton, only_weights, findings)
    step, samples_seen = _position(state, config, table, names_of, options, findings)
    findings.notes += compare_models(state, skeleton.model.config.to_dict())
    rates: tuple[ForeignRate, ...] = ()
    if not options.weights_only:
        findings.notes += compare_settings(state, step, config, table, names_of)
        rates = tuple(rates_of(state, config, table, names_of))
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


def _by_key(
    state: ForeignState, options: ImportOptions, findings: _Findings
) -> dict[tuple[str, str], ForeignTensor]:
    """Returns the tensors by name and role. Refuses a needed one that the checkpoint has twice."""
    by_key: dict[tuple[str, str], ForeignTensor] = {}
    for tensor in state.tensors:
        first = by_key.setdefault((tensor.name, tensor.role), tensor)
        is_needed = tensor.role in (MASTER, WEIGHT) or not options.weights_only
        if first is not tensor and is_needed:
            files = " and in ".join(dict.fromkeys((first.file, tensor.file)))
            findings.problems.append(
                f"{state.path}: has {tensor.role} of {tensor.name} twice, in {files}; remove one of"
                " the two"
            )
    return by_key


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
            if any(map(is_adapter_tensor, tensors)):
                remedy = "remove the section adapter; or train a new adapter with model.path"
            elif array == FROZEN:
                remedy = "save it again with its frozen weights"
            else:
                remedy = "give the configuration of the model that was trained"
            findings.problems.append(
                f"{state.path}: has no weights of {listed(tensors)}; it has weights of"
                f" {listed(present)}; {remedy}"
            )
        elif array in roles:
            findings.problems.append(
                f"{state.path}: has no {array} of {listed(tensors)}, which the configuration"
                " trains; exclude the tensors by train.freeze, or give --weights-only"
            )
        elif moments := sorted(roles - {MASTER, WEIGHT}):
            findings.problems.append(
                f"{state.path}: has no {array} of any tensor, and optimizer.name keeps it; the"
                f" checkpoint has {', '.join(moments)}; set optimizer.name to its optimizer, or"
                " give --weights-only"
            )
    if not roles - {MASTER, WEIGHT} and names.keys() - {MASTER, FROZEN}:
        findings.problems.append(f"{state.path}: has no state of an optimizer; give --weights-only")


def _check_shapes(assignments: Sequence[Assignment], findings: _Findings) -> None:
    integers: dict[tuple[str, str, str], list[str]] = {}
    for each in assignments:
        source = each.source
        if source is None:
            continue
        if source.dtype not in _FLOATS:
            integers.setdefault((source.file, source.role, source.dtype), []).append(source.name)
        if source.shape is None:
            fits = source.num_elements == each.spec.num_elements
        else:
            fits = source.shape == each.spec.shape
        if not fits:
            size = source.num_elements if source.shape is None else list(source.shape)
            findings.problems.append(
                f"{source.file}: {source.role} of {source.name} has shape {size}, the"
                f" configuration's model has {list(each.spec.shape)}; give the configuration of the"
                " model that was trained"
            )
    for (file, role, dtype), names in integers.items():
        findings.problems.append(
            f"{file}: {role} of {listed(names)} is of type {dtype}; give fp32, fp16 or bf16"
        )


def _check_ties(
    names_of: Mapping[str, Sequence[str]],
    by_key: Mapping[tuple[str, str], ForeignTensor],
    findings: _Findings,
) -> None:
    """Refuses two different tensors of the checkpoint for one of the model."""
    for names in (each for each in names_of.values() if len(each) > 1):
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
    only_weights: bool,
    findings: _Findings,
) -> None:
    """Refuses parameters that the run has no place for. Notes other tensors. ``only_weights``: not
    of the optimizer's arrays.
    """
    parameters = {name for name, _ in used}
    aliases = {n: names for names in all_names(skeleton).values() for n in names}
    frozen = {s.name for block in table.blocks for s in block.tensors if not s.trainable}
    buffers = {name for name, _ in skeleton.model.named_buffers()}
    foreign, moments, others = [], [], set()
    for tensor in unused:
        known = set(aliases.get(tensor.name, [tensor.name]))
        if tensor.role in (MASTER, WEIGHT):
            if not known & parameters and tensor.name not in buffers:
                foreign.append(tensor.name)
        elif only_weights:
            continue
        elif known & frozen:
            moments.append(tensor.name)
        elif not known & parameters:
            foreign.append(tensor.name)
        elif tensor.role not in table.state_arrays:
            others.add(tensor.role)
    if foreign:
        findings.problems.append(
            f"the configuration's model has no place for {listed([*dict.fromkeys(foreign)])} of"
            " the checkpoint; give the configuration of the model that was trained"
        )
    if others and not findings.problems:
        findings.problems.append(
            f"the checkpoint's optimizer keeps {', '.join(sorted(others))}, the configuration's"
            f" {', '.join(table.state_arrays) or 'nothing'}; set optimizer.name to the checkpoint's"
            " optimizer, or give --weights-only"
        )
    if moments:
        findings.notes.append(
            f"the optimizer's state of {listed([*dict.fromkeys(moments)])} is left out: the"
            " configuration does not train them"
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
        return 0, 0
    if counts:
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
        if any(tensor.role not in (MASTER, WEIGHT) for tensor in state.tensors):
            findings.problems.append(
                f"{state.path}: does not name its step; give --samples-seen, or --weights-only"
            )
        return 0, 0  # without moments the import is refused
    if samples_seen is None:
        samples_seen = step * batch
        findings.notes.append(
            f"samples seen: {step} steps of train.global_batch {batch}; --samples-seen gives"
            " another number"
        )
    elif options.samples_seen is None:
        findings.notes += [state.samples_note] if state.samples_note else []
        if samples_seen != step * batch:
            findings.notes.append(
                f"train.global_batch is {batch}, the checkpoint has {samples_seen} samples in"
                f" {step} steps"
            )
    _check_counts(step, samples_seen, config, state, findings)
    return step, samples_seen


def _check_counts(
    step: int, samples_seen: int, config: Config, state: ForeignState, findings: _Findings
) -> None:
    for name, count, remedy in (
        ("the step", step, "copy the checkpoint again"),
        ("samples seen", samples_seen, "give --samples-seen"),
    ):
        if not 0 <= count <= _MOST:
            findings.problems.append(
                f"{state.path}: {name}: {count} is no count from 0 to {_MOST}; {remedy}"
            )
    if 0 < config.train.steps <= step <= _MOST:
        findings.notes.append(
            f"train.steps is {config.train.steps}, the checkpoint has {step} steps: nothing is left"
            " to train; a larger train.steps goes on"
        )
