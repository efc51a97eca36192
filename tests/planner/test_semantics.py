"""The table of instructions against the validator, which has rules of its own.

The validator runs plans of every kind, and around each instruction its world is looked at: what
came, what went, and without what the instruction is refused. What is left (lanes, sides, the order
of sends) is written down here. Then each field of each row is changed, and that is always noticed.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any, get_args

import pytest

from penstock.planner.schedule.layout import ComputeInstruction
from penstock.planner.schedule.schedule import lower
from penstock.planner.schedule.tensors import Receive, Send
from penstock.planner.validate.machine import AbstractMachine
from penstock.planner.validate.world import DeviceState, PlanRules, RuleBroken, World
from penstock.protocol.plan import semantics
from penstock.protocol.plan.instructions import (
    INSTRUCTIONS,
    Instruction,
    Opcode,
    Phase,
)
from penstock.protocol.plan.layout import StageLayout
from penstock.protocol.plan.resources import Kind, PlanFacts, StateKind, TensorKind
from penstock.protocol.plan.semantics import (
    SEMANTICS,
    InstructionRow,
    Lane,
    Made,
    Read,
    WeightUse,
    makes,
    reads,
    side_of,
    takes,
)
from penstock.workers import handlers
from penstock.workers.platforms.emulated import handlers as emulated_handlers
from tests.planner import test_validate_mutants as schedules

CASES = (
    ("1f1b", "none", schedules.swap(peer=True)),
    ("1f1b", "selective", schedules.swap(peer=False)),
    ("1f1b", "selective", schedules.after_gradient),
    ("chimera", "none", schedules.update),
    ("chimera", "full", schedules.reduce),
    ("mobius", "full", schedules.skip),
    ("spipe", "full", schedules.after_gradient),
    ("spipe", "full", schedules.split),
    ("1f1b", "full", schedules.some_keep_all),
)

LANES_AND_SIDES: Mapping[str, tuple[str | None, str | None]] = MappingProxyType(
    {
        "F": ("compute", "forward"),
        "R": ("compute", "backward"),
        "B": ("compute", "backward"),
        "BI": ("compute", "backward"),
        "BW": ("compute", "backward"),
        "SA": ("link", "forward"),
        "RA": (None, "forward"),
        "SG": ("link", "backward"),
        "RG": (None, "backward"),
        "SC": ("link", "backward"),
        "RC": (None, "backward"),
        "FW": ("fetch", None),
        "RW": (None, None),
        "OG": ("offload", "backward"),
        "SO": ("swap", "forward"),
        "SI": ("swap", "forward"),
        "U": ("update", None),
        "RD": ("reduce", "backward"),
    }
)

Things = frozenset[tuple[Any, ...]]
"""What a device of the validator's world has: (kind, stage, micro-batch or phase)."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the validator's world says of an instruction that ran."""

    instruction: Instruction
    needed: Things
    came: Things
    gone: Things


def _things(world: World, device: DeviceState) -> Things:
    """Sums are there when all are in; a swapped share is something until it is back."""
    tensors = map(world.events.tensor_of, device.held | device.posted.keys())
    found: set[tuple[Any, ...]] = {(t.kind, t.stage, t.micro_batch) for t in tensors if t}
    for (stage, m), graph in device.graphs.items():
        found.add(("partial graph" if graph.incomplete else "graph", stage, m))
        if graph.swapped is not None:
            found.add(("swapped", stage, m))
    found |= {("deferred", *place) for place in device.deferred}
    found |= {("weights", *buffer) for buffer in device.buffers}
    for stage in world.layout.backward_stages_on(device.index):
        if not world.remaining[stage] and stage not in world.offloaded:
            found.add(("sums", stage, -1))
    return frozenset(found)


def _copy(world: World) -> World:
    shared = (world.layout, world.programs, world.rules, world.reduction, world.events)
    return copy.deepcopy(world, {id(value): value for value in shared})


def _is_refused_without(
    world: World, number: int, thing: tuple[Any, ...], rule: Any, instruction: Instruction
) -> bool:
    """Whether an instruction waits, or breaks a rule, where its device lacks something."""
    world, (kind, stage, m) = _copy(world), thing
    device = world.devices[number]
    if kind in tuple(TensorKind):
        event = world.events.tensor(kind, stage, m)
        device.held.discard(event)
        device.posted.pop(event, None)
    elif kind in ("graph", "partial graph"):
        del device.graphs[stage, m]
    elif kind == "swapped":
        device.graphs[stage, m].swapped = None
    elif kind == "deferred":
        device.deferred.remove((stage, m))
    elif kind == "weights":
        del device.buffers[stage, m]
    else:
        first = world.layout.microbatches_of_route[world.backward.routes[stage]][0]
        world.backward.weighted[stage * len(world.route_of) + first] = 0
        world.remaining[stage] = 1
    try:
        return rule(world, device, instruction) is not None
    except RuleBroken:
        return True


def _watched(rule: Any, seen: list[Seen]) -> Any:
    """A rule, and a look at the world before and after what runs by it; two micro-batches do."""

    def run(world: World, device: DeviceState, instruction: Instruction) -> Any:
        if getattr(instruction, "micro_batch", 0) >= 2:
            return rule(world, device, instruction)
        former, before, left = _copy(world), _things(world, device), list(world.remaining)
        awaited = rule(world, device, instruction)
        if awaited is not None:
            return awaited
        after = _things(world, device)
        gone = before - after
        summed = {("sums", b, -1) for b, count in enumerate(left) if count > world.remaining[b]}
        seen.append(
            Seen(
                instruction=instruction,
                needed=frozenset(
                    thing
                    for thing in before
                    if thing in gone
                    or _is_refused_without(former, device.index, thing, rule, instruction)
                ),
                came=after - before | summed,
                gone=gone,
            )
        )
        return None

    return run


@cache
def observations() -> tuple[tuple[PlanFacts, tuple[Seen, ...]], ...]:
    """What the validator sees of all cases, and of their evaluation programs."""
    found = []
    for scheme, mode, transform in CASES:
        plan = lower(transform(schedules.schedule_of_scheme(scheme, mode)))
        layout = StageLayout.of(plan)
        for evaluation, programs in ((False, plan.programs), (True, plan.evaluation)):
            machine = AbstractMachine(layout, programs, PlanRules.of(plan, evaluation=evaluation))
            seen: list[Seen] = []
            machine._table = {cls: _watched(rule, seen) for cls, rule in machine._table.items()}
            machine.run()
            found.append((PlanFacts.of(layout, programs), tuple(dict.fromkeys(seen))))
    return tuple(found)


def contradictions(opcode: Opcode) -> list[str]:
    """How an opcode's row is not what the validator, or this file, says."""
    row = semantics.SEMANTICS[opcode]
    if (row.lane, row.side) != LANES_AND_SIDES[opcode]:
        return ["lane or side"]
    found: list[str] = []
    for facts, several in observations():
        for seen in several:
            if seen.instruction.opcode is opcode:
                found += _contradicted(facts, seen)
    return found


def _contradicted(facts: PlanFacts, seen: Seen) -> Iterator[str]:
    instruction = seen.instruction
    needed, came, gone = set(reads(instruction, facts)), list(makes(instruction, facts)), set()
    gone |= set(takes(instruction, facts))
    weights = {thing for thing in seen.needed | seen.came if thing[0] == "weights"}
    use = semantics.row_of(instruction).weights
    if use is not None and weights:
        ((_, stage, phase),) = weights
        allowed = [side_of(instruction)]
        if facts.layout.is_coupled(stage):
            allowed.append(Phase.FORWARD)
        if stage != instruction.stage or phase not in allowed:  # type: ignore[attr-defined]
            yield "weights of another stage"
    if use is not _weight_use(seen):
        yield "weights"
    if needed != seen.needed - weights:
        yield "reads"
    if set(came) != seen.came - weights or len(set(came)) < len(came):
        yield "makes"
    if gone != seen.gone - weights:
        yield "takes"
    sent = [made for made in came if made.kind in tuple(TensorKind)]
    if sent != sorted(sent, key=lambda made: (made.kind != "activation", -made.stage)):
        yield "the order of sends"


def _weight_use(seen: Seen) -> WeightUse | None:
    for things, use in (
        (seen.came, WeightUse.FETCHES),
        (seen.gone, WeightUse.RELEASES),
        (seen.needed, WeightUse.READS),
    ):
        if any(thing[0] == "weights" for thing in things):
            return use
    return None


@pytest.mark.parametrize("opcode", Opcode)
def test_rows_say_what_the_validator_sees(opcode: Opcode) -> None:
    assert contradictions(opcode) == []


def test_the_cases_have_every_instruction() -> None:
    seen = {type(s.instruction) for _, several in observations() for s in several}
    assert seen == set(INSTRUCTIONS)


def _nowhere(instruction: Any, facts: PlanFacts) -> Sequence[int]:
    return ()


def _beside(instruction: Any, facts: PlanFacts) -> Sequence[int]:
    return (instruction.stage + 1,)


def _changed(opcode: Opcode) -> Iterator[tuple[str, InstructionRow]]:
    """A row with one thing in one field changed, in every way that is not a matter of taste."""
    row = SEMANTICS[opcode]
    for lane in (None, *Lane):
        yield "lane", dataclasses.replace(row, lane=lane)
    for side in (None, *Phase):
        yield "side", dataclasses.replace(row, side=side)
    for use in (None, *WeightUse):
        yield "weights", dataclasses.replace(row, weights=use)
    for several in _changed_tuples(row.reads, _changed_reads):
        yield "reads", dataclasses.replace(row, reads=several)
    for several in _changed_tuples(row.makes, _changed_made):
        yield "makes", dataclasses.replace(row, makes=several)


def _changed_tuples(values: tuple[Any, ...], change: Any) -> Iterator[tuple[Any, ...]]:
    for index, value in enumerate(values):
        before, after = values[:index], values[index + 1 :]
        yield before + after
        for changed in change(value):
            yield (*before, changed, *after)


def _changed_reads(read: Read) -> Iterator[Read]:
    yield from (read._replace(step=step) for step in (-1, 0, 1))
    yield read._replace(stays=not read.stays)
    yield from (read._replace(kind=kind) for kind in _others(read.kind))
    if read.when is not None:
        yield read._replace(when=None)
    yield read._replace(when=lambda instruction, facts: False)


def _changed_made(made: Made) -> Iterator[Made]:
    yield made._replace(stages=_nowhere)
    yield made._replace(stages=_beside)
    yield from (made._replace(kind=kind) for kind in _others(made.kind))


def _others(kind: Kind) -> Iterator[Kind]:
    yield from (other for other in (*TensorKind, *StateKind) if other is not kind)


@pytest.mark.parametrize("opcode", Opcode)
def test_every_change_of_a_row_is_noticed(opcode: Opcode, monkeypatch: pytest.MonkeyPatch) -> None:
    row = SEMANTICS[opcode]
    changes = [(field, changed) for field, changed in _changed(opcode) if changed != row]
    unnoticed = []
    for field, changed in changes:
        monkeypatch.setattr(semantics, "SEMANTICS", {**SEMANTICS, opcode: changed})
        if not contradictions(opcode):
            unnoticed.append((field, changed))
    assert not unnoticed
    assert {field for field, _ in changes} >= {"lane", "side", "weights"}


def test_tensors_come_from_where_the_table_says() -> None:
    """Who makes a tensor is known without looking for the instruction."""
    made = [
        (facts.maker(resource), (side_of(seen.instruction), seen.instruction.stage))  # type: ignore[attr-defined]
        for facts, several in observations()
        for seen in several
        if seen.instruction.opcode not in map(_opcode, semantics.RECEIVES.values())
        for resource in makes(seen.instruction, facts)
        if resource.kind in (*TensorKind, StateKind.DEFERRED)
    ]
    assert made and [said for said, _ in made] == [maker for _, maker in made]


def _opcode(cls: type[Instruction]) -> Opcode:
    return cls.opcode


def test_unions_for_type_checkers_are_those_of_the_table() -> None:
    assert get_args(ComputeInstruction) == semantics.COMPUTES
    assert get_args(Send) == tuple(semantics.SENDS.values())
    assert get_args(Receive) == tuple(semantics.RECEIVES.values())


@pytest.mark.parametrize("module", [semantics, handlers])
@pytest.mark.parametrize("opcode", Opcode)
def test_an_opcode_without_row_or_handler_fails_at_import(
    module: ModuleType, opcode: Opcode
) -> None:
    """The module's source without the opcode's entry, as it would be executed at its import."""
    source = ast.parse(inspect.getsource(module))
    for node in ast.walk(source):
        if isinstance(node, ast.Dict):
            for key in list(node.keys):
                if key is not None and ast.unparse(key) == f"Opcode.{opcode.name}":
                    index = node.keys.index(key)
                    del node.keys[index], node.values[index]
    with pytest.raises(NotImplementedError, match=f"no (row|handler) for {opcode.name}$"):
        exec(compile(source, module.__name__, "exec"), {"__name__": module.__name__})


def test_emulated_devices_handle_what_the_others_do() -> None:
    assert set(emulated_handlers.EMULATED_HANDLERS) == set(Opcode)
