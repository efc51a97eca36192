"""The validator against a reference executor that computes: plans broken at random.

Every scheme, transformed in every way that programs know; and what the passes make of schedules.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.host.errors import ConfigError
from penstock.planner.cost.cluster import Cluster
from penstock.planner.passes import PASSES, PassContext
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.layout import Order, OrderedInstruction
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.schedule.timing import unit_costs
from penstock.planner.schemes import SCHEMES
from penstock.planner.validate.check import PlanError, validate
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Keep,
    Recompute,
    RecomputeAfter,
    SwapIn,
    SwapOut,
    Update,
)
from penstock.protocol.plan.plan import Plan

Execute = Callable[[Plan], None]

_MUTANTS = 40


def schedule_of_scheme(scheme: str, mode: Any, *, forward_stages: int | None = None) -> Schedule:
    """Two devices, four micro-batches, eight blocks: what every scheme can do."""
    drop = ("attention",) if mode == "selective" else ()
    request = ScheduleRequest(
        scheme=scheme,
        num_devices=2,
        num_microbatches=4,
        forward_stages=forward_stages,
        recompute=mode,
        drop=drop,
    )
    return build_schedule(request, [1.0] * 8)


def edit_orders(
    schedule: Schedule, edit: Callable[[OrderedInstruction], Sequence[OrderedInstruction]]
) -> Schedule:
    """Every instruction replaced by others."""
    orders = tuple(
        tuple(new for instruction in order for new in edit(instruction))
        for order in schedule.orders
    )
    return dataclasses.replace(schedule, orders=orders)


def split(schedule: Schedule) -> Schedule:
    """BACKWARD in halves; weight gradients in pairs at the end of their device."""
    orders: list[Order] = []
    for order in schedule.orders:
        found: dict[int, list[int]] = {}
        halves: list[OrderedInstruction] = []
        for i in order:
            if isinstance(i, Backward):
                found.setdefault(i.stage, []).append(i.micro_batch)
                i = BackwardInput(stage=i.stage, micro_batch=i.micro_batch)
            halves.append(i)
        halves += [
            BackwardWeight(stage=stage, micro_batches=tuple(batches[k : k + 2]))
            for stage, batches in found.items()
            for k in range(0, len(batches), 2)
        ]
        orders.append(tuple(halves))
    return dataclasses.replace(schedule, orders=tuple(orders))


def swap(peer: bool) -> Callable[[Schedule], Schedule]:
    """What a forward keeps goes away at once and comes back at the last moment."""

    def edit(instruction: OrderedInstruction, away: dict[tuple[int, int], int | None]) -> Any:
        match instruction:
            case Forward(stage=s, micro_batch=m, keep=Keep.ALL | Keep.SELECTIVE):
                yield instruction
                if m % 2:
                    yield SwapOut(stage=s, micro_batch=m, fraction=0.5, peer=away[s, m])
            case Recompute(stage=s, micro_batch=m) | Backward(stage=s, micro_batch=m):
                if m % 2 and (s, m) in away:
                    yield SwapIn(stage=s, micro_batch=m, fraction=0.5, peer=away.pop((s, m)))
                yield instruction
            case _:
                yield instruction

    def run(schedule: Schedule) -> Schedule:
        away = {
            (i.stage, i.micro_batch): 1 - device if peer else None
            for device, order in enumerate(schedule.orders)
            for i in order
            if isinstance(i, Forward)
        }
        return edit_orders(schedule, lambda i: tuple(edit(i, away)))

    return run


def update(schedule: Schedule) -> Schedule:
    """All blocks are updated on device 0."""
    updates = tuple(Update(block=block) for block in range(schedule.layout.num_blocks))
    return dataclasses.replace(
        schedule, orders=(schedule.orders[0] + updates, *schedule.orders[1:])
    )


def reduce(schedule: Schedule) -> Schedule:
    """Data parallelism."""
    return dataclasses.replace(schedule, reduces_gradients=True)


def skip(schedule: Schedule) -> Schedule:
    """Without the last forward stage of each route."""
    layout = schedule.layout

    def edit(i: OrderedInstruction) -> Sequence[OrderedInstruction]:
        return () if isinstance(i, Forward) and layout.is_last_forward(i.stage) else (i,)

    return edit_orders(schedule, edit)


def after_gradient(schedule: Schedule) -> Schedule:
    """Recomputation inside the backward."""

    def edit(i: OrderedInstruction) -> Sequence[OrderedInstruction]:
        if isinstance(i, Recompute):
            return (dataclasses.replace(i, after=RecomputeAfter.GRADIENT),)
        return (i,)

    return edit_orders(schedule, edit)


def some_keep_all(schedule: Schedule) -> Schedule:
    """Odd micro-batches are not recomputed."""

    def edit(i: OrderedInstruction) -> Sequence[OrderedInstruction]:
        if isinstance(i, Forward) and i.micro_batch % 2:
            return (dataclasses.replace(i, keep=Keep.ALL),)
        return () if isinstance(i, Recompute) and i.micro_batch % 2 else (i,)

    return edit_orders(schedule, edit)


SCHEME_CASES = [(name, mode) for name, scheme in SCHEMES.items() for mode in scheme.recompute_modes]

TRANSFORMED_CASES = [
    ("gpipe", "none", split),
    ("chimera", "none", split),
    ("mobius", "full", split),
    ("spipe", "full", split),
    ("1f1b", "none", swap(peer=False)),
    ("1f1b", "selective", swap(peer=True)),
    ("chimera", "none", update),
    ("1f1b", "none", reduce),
    ("chimera", "full", reduce),
    ("gpipe", "full", skip),
    ("mobius", "full", skip),
    ("chimera", "full", skip),
    ("spipe", "full", after_gradient),
    ("1f1b", "selective", after_gradient),
    ("1f1b", "full", some_keep_all),
]


@pytest.mark.parametrize(("scheme", "mode"), SCHEME_CASES)
def test_broken_schemes_are_rejected(
    scheme: str, mode: str, execute: Execute, execution_failed: type[Exception]
) -> None:
    _check(lower(schedule_of_scheme(scheme, mode)), execute, execution_failed)


@pytest.mark.parametrize(
    ("scheme", "mode", "transform"),
    TRANSFORMED_CASES,
    ids=[
        f"{name}-{mode}-{edit.__qualname__.partition('.')[0]}"
        for name, mode, edit in TRANSFORMED_CASES
    ],
)
def test_broken_transformations_are_rejected(
    scheme: str,
    mode: str,
    transform: Callable[[Schedule], Schedule],
    execute: Execute,
    execution_failed: type[Exception],
) -> None:
    _check(lower(transform(schedule_of_scheme(scheme, mode))), execute, execution_failed)


@pytest.mark.parametrize("name", list(PASSES))
def test_broken_results_of_sweeps_are_rejected(
    name: str, execute: Execute, execution_failed: type[Exception]
) -> None:
    """Of the first scheme that the pass can work on."""
    for scheme, mode in (("1f1b", "none"), ("1f1b", "full"), ("spipe", "full")):
        schedule = schedule_of_scheme(scheme, mode)
        context = PassContext(
            costs=unit_costs(schedule.layout), cluster=Cluster(devices_per_node=2)
        )
        try:
            changed = PASSES[name].run(schedule, context)
        except ConfigError:
            continue
        if changed is not schedule:
            _check(lower(changed), execute, execution_failed)
            return


def _check(plan: Plan, execute: Execute, execution_failed: type[Exception]) -> None:
    """The plan is accepted and computes; mutants that fail are rejected, with the step named."""
    validate(plan)
    execute(plan)
    rng = random.Random(len(plan.programs[0]))
    failed = rejected = 0
    for _ in range(_MUTANTS):
        mutant = _mutate(plan, rng)
        for _ in range(rng.randrange(2)):
            mutant = _mutate(mutant, rng)
        accepted = _accepts(mutant)
        rejected += not accepted
        try:
            execute(mutant)
        except execution_failed as error:
            failed += 1
            assert not accepted, f"{error}:\n{mutant.to_json()}"
    assert rejected >= failed > _MUTANTS // 4


def _accepts(plan: Plan) -> bool:
    try:
        validate(plan)
    except PlanError as error:
        assert 0 <= error.position <= len(plan.programs[error.device])
        assert error.reason
        return False
    except ConfigError:
        return False
    return True


def _mutate(plan: Plan, rng: random.Random) -> Plan:
    programs = [list(program) for program in plan.programs]
    program = rng.choice([p for p in programs if p])
    position = rng.randrange(len(program))
    match rng.choice(["drop", "swap", "duplicate", "move", "device", "retarget"]):
        case "drop":
            del program[position]
        case "swap":
            other = min(position + rng.choice([1, 1, 2, 5]), len(program) - 1)
            program[position], program[other] = program[other], program[position]
        case "duplicate":
            program.insert(rng.randrange(len(program) + 1), program[position])
        case "move":
            program.insert(rng.randrange(len(program)), program.pop(position))
        case "device":
            instruction = program.pop(position)
            target = rng.choice(programs)
            target.insert(rng.randrange(len(target) + 1), instruction)
        case "retarget":
            program[position] = _retarget(program[position], rng)
    return dataclasses.replace(plan, programs=tuple(map(tuple, programs)))


def _retarget(instruction: Instruction, rng: random.Random) -> Instruction:
    fields = [f.name for f in dataclasses.fields(instruction) if f.name != "drop"]
    name = rng.choice(fields)
    value = getattr(instruction, name)
    return dataclasses.replace(instruction, **{name: _changed(value, rng)})


def _changed(value: Any, rng: random.Random) -> Any:
    match value:
        case None:
            return rng.randrange(2)
        case int():
            return max(value + rng.choice([-1, 1]), 0)
        case float():
            return value / 2
        case tuple():
            return (*value[:-1], _changed(value[-1], rng))
        case _:
            return rng.choice(list(type(value)))


@pytest.mark.parametrize(
    ("scheme", "change"),
    [
        ("mobius", {"weight_buffers": 1}),
        ("mobius", {"rebinds_weights": False}),
        ("chimera", {"routes": (0, 0, 1, 1)}),
        ("chimera", {"routes": ()}),
    ],
)
def test_broken_terms_of_a_plan_are_rejected(
    scheme: str, change: dict[str, Any], execute: Execute, execution_failed: type[Exception]
) -> None:
    stages = 6 if scheme == "mobius" else None
    plan = lower(schedule_of_scheme(scheme, "none", forward_stages=stages))
    validate(plan)
    execute(plan)
    broken = dataclasses.replace(plan, **change)
    with pytest.raises(execution_failed):
        execute(broken)
    with pytest.raises(ConfigError):
        validate(broken)
