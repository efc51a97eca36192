"""What the validator says about plans that break one rule each.

That it rejects whatever would fail: test_validate_mutants.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.planner.cost.profile import GPU_GUESS, table_costs
from penstock.planner.planning.configured import build_plan
from penstock.planner.validate.check import PlanError, validate
from penstock.protocol.plan.instructions import Instruction, Program, parse_instruction
from penstock.protocol.plan.plan import Plan
from penstock.shm.table import BlockTable

Tables = Callable[..., BlockTable]
Configs = Callable[..., Config]


def edited(plan: Plan, device: int, edit: Callable[[list[Instruction]], object]) -> Plan:
    """The plan with one device's program changed in place by ``edit``."""
    program = list(plan.programs[device])
    edit(program)
    programs = list(plan.programs)
    programs[device] = tuple(program)
    return dataclasses.replace(plan, programs=tuple(programs))


@pytest.fixture(name="small")
def _small(make_table: Tables, make_config: Configs) -> Plan:
    """Two devices, two micro-batches, SPipe with 2 and 4 stages; see golden/spipe.txt."""
    config = make_config("spipe", workers=2, micro_batches=2, forward_stages=2, backward_stages=4)
    return build_plan(config, make_table(8))


def _index(program: Program | list[Instruction], text: str) -> int:
    return program.index(parse_instruction(text))


@pytest.mark.parametrize(
    ("device", "dropped", "place", "reason"),
    [
        (0, "F 0 1 keep=input", (0, "SA 0 1 peer=1"), "does not exist on this device"),
        (0, "SA 0 1 peer=1", (1, "F 1 1 keep=input"), "deadlock: device 1"),
        (1, "RA 0 1 peer=0", (1, "F 1 1 keep=input"), "no receive of it was posted before"),
        (1, "SC 3 1 peer=0", (0, "R 3 1"), "which never sends it"),
        (0, "R 3 1", (0, "B 3 1"), "no activations: neither RECOMPUTE nor"),
        (0, "B 3 1", (0, "SG 3 1 peer=1"), "does not exist on this device"),
        (1, "B 0 1", (1, "OG 0"), "BACKWARD of micro-batch 1 is missing"),
        (0, "FW 1 phase=backward", (0, "R 1 0"), "weights of backward stage 1 are not here"),
        (0, "RW 0 phase=forward", (0, "FW 1 phase=backward"), "no free buffer"),
        (1, "OG 0", (1, None), "gradients of backward stage 0 were never offloaded"),
        (1, "RW 0 phase=backward", (1, None), "weights of backward stage 0 are not released"),
    ],
)
def test_a_missing_instruction_is_found_where_it_is_missed(
    small: Plan, device: int, dropped: str, place: tuple[int, str | None], reason: str
) -> None:
    broken = edited(small, device, lambda p: p.remove(parse_instruction(dropped)))
    with pytest.raises(PlanError) as caught:
        validate(broken)
    program = broken.programs[place[0]]
    position = len(program) if place[1] is None else _index(program, place[1])
    assert (caught.value.device, caught.value.position) == (place[0], position)
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("device", "added", "before", "reason"),
    [
        (0, "F 0 0 keep=input", "F 0 1 keep=input", "this work was done before"),
        (0, "F 0 0 keep=none", "F 0 0 keep=input", "keep=none belongs into evaluation"),
        (0, "F 0 0 keep=all", "F 0 0 keep=input", "keep=all needs a backward stage of the same"),
        (0, "F 0 7 keep=input", "F 0 0 keep=input", "there are 2 micro-batches"),
        (0, "F 9 0 keep=input", "F 0 0 keep=input", "there are 2 forward stages"),
        (0, "F 1 0 keep=input", "F 0 1 keep=input", "forward stage 1 is on device 1"),
        (0, "SA 0 0 peer=1", "R 3 0", "was sent before"),
        (0, "SA 0 0 peer=0", "SA 0 0 peer=1", "wrong peer: the activation"),
        (1, "SA 1 0 peer=0", "RW 1 phase=forward", "there is no activation of stage 1"),
        (1, "SC 0 0 peer=0", "RW 1 phase=forward", "there is no checkpoint of stage 0"),
        (1, "RA 0 0 peer=0", "F 1 1 keep=input", "was posted before"),
        (1, "RW 1 phase=forward", "F 1 1 keep=input", "weights of forward stage 1 are not here"),
        (1, "RW 1 phase=forward", "FW 0 phase=backward", "never fetched, or released before"),
        (0, "RW 3 phase=backward", "B 3 0", "still wait for their BACKWARD"),
        (0, "FW 0 phase=forward", "F 0 0 keep=input", "these weights are already here"),
        (0, "FW 2 phase=backward", "F 0 0 keep=input", "backward stage 2 is on device 1"),
        (0, "FW 9 phase=backward", "F 0 0 keep=input", "there are 4 backward stages"),
        (0, "OG 3", "B 3 1", "the gradients are not final: BACKWARD of micro-batch 1"),
        (0, "OG 3", "R 1 0", "these gradients were offloaded before"),
        (0, "OG 2", "R 1 0", "this device has no such backward stage"),
        (0, "RD 3", "R 1 0", "no REDUCE_GRADIENTS of these ran before it"),
        (0, "SO 3 0 fraction=0.5", "R 1 0", "no activations: no FORWARD with keep=all"),
    ],
)
def test_a_surplus_instruction_is_found(
    small: Plan, device: int, added: str, before: str, reason: str
) -> None:
    broken = edited(small, device, lambda p: p.insert(_index(p, before), parse_instruction(added)))
    with pytest.raises(PlanError) as caught:
        validate(broken)
    assert reason in caught.value.reason


def test_nothing_may_follow_the_end(small: Plan) -> None:
    extra = [parse_instruction("FW 3 phase=backward"), parse_instruction("RW 3 phase=backward")]
    broken = edited(small, 0, lambda p: p.extend(extra))
    with pytest.raises(PlanError, match="fetched and never used"):
        validate(broken)


def test_circular_waits_name_every_device(small: Plan) -> None:
    """Device 0 waits for a checkpoint before the activation that it would come from is sent."""

    def edit(program: list[Instruction]) -> None:
        send = program.pop(_index(program, "SA 0 0 peer=1"))
        program.insert(_index(program, "B 3 0"), send)

    with pytest.raises(PlanError) as caught:
        validate(edited(small, 0, edit))
    assert caught.value.reason == (
        "deadlock: device 0 (R 3 0) waits for the checkpoint of stage 3, micro-batch 0 from 1,"
        " which waits itself; device 1 (F 1 0 keep=input) waits for the activation of stage 0,"
        " micro-batch 0 from 0, which waits itself"
    )


def test_receives_must_be_in_the_order_of_the_sends(small: Plan) -> None:
    def edit(program: list[Instruction]) -> None:
        first, second = _index(program, "RC 3 0 peer=1"), _index(program, "RC 3 1 peer=1")
        program.insert(first, program.pop(second))

    with pytest.raises(PlanError) as caught:
        validate(edited(small, 0, edit))
    assert "not in the order of its sends" in caught.value.reason
    assert caught.value.position == _index(small.programs[0], "RC 3 0 peer=1")


def test_evaluation_is_validated_too(small: Plan) -> None:
    with pytest.raises(PlanError, match=r"evaluation: device 0.*only keep=none does"):
        validate(dataclasses.replace(small, evaluation=small.programs[:1] + small.evaluation[1:]))


def test_the_message_shows_the_whole_grid_with_the_step_marked(
    make_table: Tables, make_config: Configs
) -> None:
    plan = build_plan(make_config("gpipe", workers=2, micro_batches=1), make_table(2))
    broken = edited(plan, 1, lambda p: p.remove(parse_instruction("RA 0 0 peer=0")))
    with pytest.raises(PlanError) as caught:
        validate(broken)
    assert str(caught.value) == (
        "plan: device 1, instruction 1 (F 1 0 keep=all): needs the activation of stage 0,"
        " micro-batch 0, but no receive of it was posted before\n"
        "      device 0            device 1\n"
        "   0  FW 0 phase=forward  FW 1 phase=forward\n"
        "   1  RG 1 0 peer=1       >>F 1 0 keep=all<<\n"
        "   2  F 0 0 keep=all      B 1 0\n"
        "   3  SA 0 0 peer=1       SG 1 0 peer=0\n"
        "   4  B 0 0               OG 1\n"
        "   5  OG 0                RW 1 phase=forward\n"
        "   6  RW 0 phase=forward\n"
    )


def test_a_plan_for_another_model_is_refused(small: Plan, make_table: Tables) -> None:
    with pytest.raises(ConfigError, match="covers 8 blocks, the model has 9"):
        validate(small, make_table(9))


def test_device_memory_over_the_limit(small: Plan, make_table: Tables) -> None:
    """Buffers of two blocks; a graph (4096), three checkpoints and a gradient (512 each)."""
    costs = table_costs(make_table(8), GPU_GUESS, tokens=8, own_memory=True)
    validate(small, costs=costs, memory_limit=10**6)
    with pytest.raises(PlanError) as caught:
        validate(small, costs=costs, memory_limit=30000)
    message, _, grid = str(caught.value).partition("\n")
    assert message == (
        "memory.device_limit = 29.3 KiB: device 0 needs 30.0 KiB (16.0 KiB weights, 8.0 KiB"
        " gradients, 6.0 KiB activations); use more stages, smaller micro-batches or"
        " schedule.recompute: full"
    )
    assert ">>" in grid
