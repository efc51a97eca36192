"""Steps in place that arithmetic takes back: the machine's rules, and its random lives.

Random lives end with the numbers of their commits, not with their bytes: what a step rounded away
is lost when it is taken back.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import _native
from penstock.daemons.kit.events import SendFailed, SendReady
from penstock.daemons.memory.pinning import let_go_of_all
from penstock.daemons.optimizer.machine.arithmetic import ArithmeticSteps
from penstock.daemons.optimizer.machine.contributions import OwnedBlocks, Pulls
from penstock.daemons.optimizer.machine.epoch import Epoch
from penstock.daemons.optimizer.machine.events import (
    AmendAsked,
    BeginSweep,
    CancelPulls,
    CommitAsked,
    Effect,
    EndSweep,
    FlipCommitted,
    MemoryFacts,
    OwnedBlock,
    Pull,
    Pulled,
    RunSweep,
    SendAmended,
    SendBlockStatus,
    SendSettled,
    SetEpoch,
    SetSlot,
    SetState,
    SettleAsked,
    SkipAsked,
    SweepDone,
    UndoWords,
    UpdatePolicy,
    WriteRecord,
)
from penstock.daemons.optimizer.machine.exact import ExactSteps
from penstock.daemons.optimizer.machine.machine import OptimizerMachine
from penstock.daemons.optimizer.machine.sweeps import (
    FinishHold,
    FinishInvert,
    GradientStatus,
    Hold,
    Invert,
    sweep_tag,
)
from penstock.protocol.plan.step import SweepStatus
from penstock.shm.control import CommitRecord, Decision, SweepIntent
from penstock.shm.layout import Ownership, Storage
from penstock.shm.memory import NodeMemory
from penstock.shm.table import DType
from tests.optimizer.conftest import Reference, Toolbox
from tests.optimizer.machine import (
    DONE,
    OK,
    QUIET,
    attempt,
    begin,
    facts,
    invalid,
    ready,
    record,
    update,
)
from tests.optimizer.test_interleavings import World
from tests.optimizer.test_process import Rig

CASES = 30
IN_PLACE = UpdatePolicy.IN_PLACE
ONE_BLOCK = (OwnedBlock(index=0, contributions=1, policy=IN_PLACE),)
TWO_BLOCKS = tuple(OwnedBlock(index=b, contributions=1, policy=IN_PLACE) for b in (0, 3))
OVERFLOW = SweepDone(status=SweepStatus(finite=False, sum_squares=float("inf")), seconds=0.25)
READY = [SetEpoch(epoch=1), SendReady(epoch=1)]
ANNOUNCED = WriteRecord(record=record(6, 11))
LOOK = RunSweep(work=GradientStatus(block=0, version=6))
SKIP = SkipAsked(epoch=1, attempt=11)


def live(blocks: tuple[OwnedBlock, ...] = ONE_BLOCK) -> OptimizerMachine:
    """A machine in epoch 1 at version 5, whose attempt 11 has begun."""
    machine = OptimizerMachine(blocks)
    words = {b.index: (5, 4, 5) for b in blocks}
    assert machine.handle(begin(facts(5, words))) == READY
    assert machine.handle(attempt(11, 5)) == [ANNOUNCED]
    return machine


def reported(block: int = 0, seconds: float = 0.5, status: SweepStatus = OK) -> SendBlockStatus:
    """The status of the gradients, with the seconds of look and step."""
    return SendBlockStatus(epoch=1, attempt=11, block=block, status=status, seconds=seconds)


def stepping(block: int = 0, coefficient: float = 0.25) -> list[Effect]:
    """A step of a block from 5 to 6."""
    hold = Hold(block=block, update=update(6, coefficient))
    return [invalid(block, 0), BeginSweep(block=block, state_version=6), RunSweep(work=hold)]


def stepped(block: int = 0) -> list[Effect]:
    """The words behind it."""
    version = SetState(block=block, version=6)
    return [version, EndSweep(), SetSlot(block=block, slot=0, version=6)]


def inverting(block: int = 0) -> list[Effect]:
    """Its inverse."""
    invert = Invert(block=block, update=update(6))
    return [BeginSweep(block=block, state_version=5), RunSweep(work=invert)]


def inverted(block: int = 0) -> list[Effect]:
    """The words behind that."""
    return [SetState(block=block, version=5), EndSweep()]


def ahead() -> OptimizerMachine:
    """A machine whose only block has taken attempt 11's step."""
    machine = live()
    assert machine.handle(ready(11)) == [LOOK]
    assert machine.handle(DONE) == stepping()
    assert machine.handle(QUIET) == [*stepped(), reported()]
    machine.validate()
    return machine


def test_a_block_steps_ahead_and_the_commit_only_flips() -> None:
    machine = ahead()
    commit = record(6, 11)
    assert machine.handle(CommitAsked(epoch=1, record=commit)) == [
        WriteRecord(record=commit),
        FlipCommitted(version=6),
    ]
    machine.validate()
    assert machine.handle(SettleAsked(epoch=1, version=6)) == [SendSettled(epoch=1, version=6)]


def test_gradients_that_no_arithmetic_brings_back_are_not_stepped_with() -> None:
    machine = live()
    machine.handle(ready(11))
    assert machine.handle(OVERFLOW) == [reported(seconds=0.25, status=OVERFLOW.status or OK)]
    assert machine.handle(SKIP) == []
    assert machine.handle(SettleAsked(epoch=1, version=5)) == [SendSettled(epoch=1, version=5)]


def test_a_skip_takes_the_step_back_before_it_is_settled() -> None:
    machine = ahead()
    assert machine.handle(SKIP) == [invalid(0, 0), *inverting()]
    assert machine.handle(SettleAsked(epoch=1, version=5)) == []
    assert machine.handle(QUIET) == [*inverted(), SendSettled(epoch=1, version=5)]
    machine.validate()
    [announced] = machine.handle(attempt(12, 5))
    assert announced == WriteRecord(record=record(6, 12))


def test_an_attempt_before_the_step_is_taken_back_ends_the_run() -> None:
    machine = ahead()
    machine.handle(SKIP)
    [failed, _] = machine.handle(attempt(12, 5))
    assert isinstance(failed, SendFailed) and "blocks [0]" in failed.error


def test_an_amend_takes_all_blocks_back_before_the_first_steps_again() -> None:
    machine = live(TWO_BLOCKS)
    for block in (0, 3):
        machine.handle(ready(11, block))
        machine.handle(DONE)
        assert machine.handle(QUIET) == [*stepped(block), reported(block)]
    amended = record(6, 11, 0.5, decision=Decision.AMEND)
    assert machine.handle(AmendAsked(epoch=1, attempt=11, record=amended)) == [
        invalid(0, 0),
        *inverting(0),
    ]
    assert machine.handle(QUIET) == [*inverted(0), invalid(3, 0), *inverting(3)]
    assert machine.handle(QUIET) == [
        *inverted(3),
        WriteRecord(record=amended),
        *stepping(0, 0.125),
    ]
    assert machine.handle(QUIET) == [*stepped(0), *stepping(3, 0.125)]
    assert machine.handle(QUIET) == [*stepped(3), SendAmended(epoch=1, attempt=11)]
    assert machine.handle(CommitAsked(epoch=1, record=amended)) == [
        WriteRecord(record=amended),
        FlipCommitted(version=6),
    ]
    machine.validate()


def test_a_commit_of_another_step_than_the_one_taken_ends_the_run() -> None:
    [failed, _] = ahead().handle(CommitAsked(epoch=1, record=record(6, 11, 0.5)))
    assert isinstance(failed, SendFailed) and "another step" in failed.error


def test_a_commit_that_is_heard_again_changes_nothing_ahead_of_it() -> None:
    assert ahead().handle(CommitAsked(epoch=1, record=record(5, 50))) == []


def test_an_attempt_that_holds_steps_after_its_commit() -> None:
    machine = OptimizerMachine(ONE_BLOCK)
    machine.handle(begin(facts(5, {0: (5, 4, 5)})))
    assert machine.handle(attempt(11, 5, hold=True)) == []
    assert machine.handle(ready(11)) == [LOOK]
    assert machine.handle(DONE) == [reported(seconds=0.25)]
    commit = record(6, 11, 0.5)
    assert machine.handle(CommitAsked(epoch=1, record=commit)) == [
        WriteRecord(record=commit),
        FlipCommitted(version=6),
        *stepping(0, 0.125),
    ]


def found(
    state: int,
    *,
    announced: CommitRecord | None = ANNOUNCED.record,
    to: int | None = None,
    armed: bool = False,
    completed: bool = False,
) -> MemoryFacts:
    """Memory at version 5 with a block at ``state``; ``to``: where its interrupted sweep led."""
    tag = 0 if to is None else sweep_tag(0, to)
    undo = UndoWords(armed=armed, tag=tag, completed=tag if completed else 0)
    intent = None if to is None else SweepIntent(block=0, state_version=to)
    words = facts(5, {0: (state, 6 if state == 6 else 4, 5)}, interrupted=intent, undo=undo)
    return replace(words, next_record=announced)


@pytest.mark.parametrize(
    ("memory", "effects"),
    [
        pytest.param(found(6), [invalid(0, 0), *inverting()], id="broken attempt"),
        pytest.param(found(5, to=6), [EndSweep(), *READY], id="not stepped yet"),
        pytest.param(
            found(5, to=6, completed=True),
            [SetState(block=0, version=6), EndSweep(), *inverting()],
            id="stepped, the word missing",
        ),
        pytest.param(
            found(5, to=6, armed=True),
            [invalid(0, 0), RunSweep(work=FinishHold(block=0, update=update(6)))],
            id="amid the step",
        ),
        pytest.param(
            found(6, to=5, armed=True),
            [invalid(0, 0), RunSweep(work=FinishInvert(block=0, update=update(6)))],
            id="amid the inverse",
        ),
        pytest.param(
            found(6, to=5, completed=True),
            [SetState(block=0, version=5), EndSweep(), invalid(0, 0), *READY],
            id="inverted, the word missing",
        ),
    ],
)
def test_begin_takes_back_what_was_not_committed(
    memory: MemoryFacts, effects: list[Effect]
) -> None:
    assert OptimizerMachine(ONE_BLOCK).handle(begin(memory)) == effects


def test_begin_finishes_a_step_to_take_it_back_and_an_inverse() -> None:
    machine = OptimizerMachine(ONE_BLOCK)
    machine.handle(begin(found(5, to=6, armed=True)))
    assert machine.handle(QUIET) == [*stepped(), invalid(0, 0), *inverting()]
    assert machine.handle(QUIET) == [*inverted(), *READY]
    machine = OptimizerMachine(ONE_BLOCK)
    machine.handle(begin(found(6, to=5, armed=True)))
    assert machine.handle(QUIET) == [*inverted(), *READY]


@pytest.mark.parametrize("announced", [ANNOUNCED.record, None], ids=["written", "cut short"])
def test_begin_keeps_the_step_that_was_journaled(announced: CommitRecord | None) -> None:
    commit = record(6, 11)
    machine = OptimizerMachine(ONE_BLOCK)
    assert machine.handle(begin(found(6, announced=announced), commit)) == [
        WriteRecord(record=commit),
        FlipCommitted(version=6),
        *READY,
    ]


@pytest.mark.parametrize(
    ("memory", "commit"),
    [
        pytest.param(found(6, announced=None), record(5, 50), id="no record of the step"),
        pytest.param(found(6), record(6, 11, 0.5), id="another step was journaled"),
        pytest.param(found(7), record(5, 50), id="two steps ahead"),
        pytest.param(found(5, to=7), record(5, 50), id="a sweep two steps ahead"),
    ],
)
def test_begin_refuses_what_cannot_be(memory: MemoryFacts, commit: CommitRecord) -> None:
    [failed, _] = OptimizerMachine(ONE_BLOCK).handle(begin(memory, commit))
    assert isinstance(failed, SendFailed), failed


@pytest.mark.parametrize(
    ("way", "state", "undecided", "wrong"),
    [
        pytest.param(ExactSteps, 4, False, "", id="exact: one step behind"),
        pytest.param(ExactSteps, 6, True, "state 6", id="exact: never ahead"),
        pytest.param(ArithmeticSteps, 4, False, "state 4", id="in place: not behind"),
        pytest.param(ArithmeticSteps, 6, True, "", id="in place: ahead while undecided"),
        pytest.param(ArithmeticSteps, 6, False, "announced 0", id="in place: no step announced"),
        pytest.param(ArithmeticSteps, 7, True, "state 7", id="in place: two steps ahead"),
    ],
)
def test_each_way_has_an_invariant_of_its_own(
    way: type[ExactSteps | ArithmeticSteps], state: int, undecided: bool, wrong: str
) -> None:
    effects: list[Effect] = []
    blocks = OwnedBlocks(ONE_BLOCK)
    memory = facts(5, {0: (5, 4, 5)})
    steps = way(Epoch(begin(memory), blocks, Pulls(blocks, effects), effects))
    if undecided:
        steps.handle(attempt(11, 5))
    steps.validate()
    steps.epoch.words.set_state(0, state)
    if wrong:
        with pytest.raises(ValueError, match=wrong):
            steps.validate()
    else:
        steps.validate()


def test_begin_pulls_the_gradients_of_the_step_that_it_takes_back() -> None:
    blocks = (OwnedBlock(index=0, contributions=1, remote=frozenset({0}), policy=IN_PLACE),)
    machine = OptimizerMachine(blocks)
    pull = Pull(epoch=1, since_epoch=0, attempt=11, version=6, block=0, contribution=0)
    assert machine.handle(begin(found(6))) == [CancelPulls(), invalid(0, 0), pull]
    arrived = Pulled(epoch=1, attempt=11, version=6, block=0, contribution=0)
    assert machine.handle(arrived) == inverting()


# ---- random lives ----


class Close(Reference):
    """Compares numbers: a few elements may be off where rounding was magnified."""

    def assert_weights(self, memory: NodeMemory, block: int, version: int) -> None:
        if block in self.arrays:
            wide = [
                _wide(array, memory.spec.table.weight_dtype)
                for array in (memory.weights(block, version % 2), self.arrays[block]["weights"])
            ]
            assert_close(*wide, 0.02, f"weights of block {block} at version {version}")

    def assert_state(self, memory: NodeMemory, block: int) -> None:
        for name in ("master", "exp_avg", "exp_avg_sq"):
            if block in self.arrays:
                expected = self.arrays[block][name]
                assert_close(memory.state(block, name), expected, 1e-3, f"{name} of block {block}")


def _wide(array: Any, dtype: DType) -> Any:
    if dtype is DType.BF16:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.view(np.float16 if dtype is DType.FP16 else np.float32).astype(np.float32)


def assert_close(ours: Any, expected: Any, tolerance: float, what: str) -> None:
    """All finite, and nearly all elements close. A step lost or taken twice moves every one."""
    assert np.isfinite(ours).all(), what
    off = np.abs(ours - expected) > tolerance * (np.abs(expected) + 0.01)
    assert off.mean() < 0.05, f"{what}: {off.mean():.1%} are off"


class CloseToolbox(Toolbox):
    reference = Close


class InPlaceWorld(World):
    """All blocks step in place; the scheduler waits until a skipped step is taken back."""

    loss_scales = (1.0,)  # no others are allowed
    exact = False  # but for states that are read as they were when they were pinned

    def decide(self, decision: Decision, *more: Any) -> None:
        super().decide(decision, *more)
        if decision is Decision.SKIP:
            self.sent.clear()  # an earlier skip at this version may have been settled
            self.settle()


@pytest.fixture(scope="module")
def pool() -> Iterator[_native.Pool]:
    with _native.Pool([0]) as pool:
        yield pool


@pytest.mark.parametrize(
    ("dtype", "remote"),
    [
        pytest.param(DType.FP32, False, id="fp32-local"),
        pytest.param(DType.BF16, True, id="bf16-remote"),
    ],
)
def test_any_life_ends_with_the_numbers_of_its_commits(
    dtype: DType, remote: bool, new_memory: Any, tools: Any, pool: _native.Pool
) -> None:
    blocks = [
        tools.make_block(0, [400, 160], contributions=2),
        tools.make_block(1, []),
        tools.make_block(2, [4096, 30]),
    ]
    table = tools.make_table(blocks, dtype, dtype)
    there = 1 if remote else 0
    ownership = Ownership(owner=(0, 0, 0), computed_on=((0, there), (0,), (0,)))
    memory = new_memory(table, ownership, 0, Storage(single_gradients=(0, 1, 2)))
    assert memory.spec.layout.gradient_copies == ((2, 1, 1) if remote else (1, 1, 1))
    kills, first = 0, random.randrange(10**6)
    print(f"seeds from {first}")
    for seed in range(first, first + CASES):
        world = InPlaceWorld(random.Random(seed), memory, pool, CloseToolbox(), (IN_PLACE,))
        try:
            world.life()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            let_go_of_all(memory)
            world.kernels.close()
        kills += world.kills
    assert kills > CASES, "the kills must hit"


# ---- the process ----


def under_way(rig: Rig, *, inverse: bool) -> bool:
    """Whether a sweep over state is under way, or one that takes a step back."""
    intent = rig.nodes[0].memory.control.interrupted_sweep
    return intent is not None and (not inverse or intent.state_version <= rig.version)


def interrupt(rig: Rig, fate: random.Random) -> list[str]:
    """SIGKILL amid a step, then amid what takes it back, until one is missed; which were hit."""
    [node] = rig.nodes
    hits: list[str] = []
    for kill in range(3):
        if kill:
            rig.begin(wait=False)  # what the kill left is taken back
        deadline = time.monotonic() + 0.5
        while not under_way(rig, inverse=kill > 0) and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(fate.random() * 0.004)
        rig.kill(node)
        armed = _native.undo_state(node.memory.control.undo_area).armed
        intent = node.memory.control.interrupted_sweep
        rig.start(node)
        if not armed:
            break
        assert intent is not None
        hits.append("step" if intent.state_version > rig.version else "inverse")
    return hits


@pytest.mark.slow
def test_sigkill_amid_steps_and_inverses_loses_no_step(tmp_path: Path, tools: Any) -> None:
    blocks = [tools.make_block(0, [6_000_000, 64]), tools.make_block(1, [1_500_000])]
    table = tools.make_table(blocks, DType.BF16, DType.BF16)
    rig = Rig(tmp_path / "run", table, [0, 0], CloseToolbox(), rollback="arithmetic")
    seed = random.randrange(1000)
    fate = random.Random(seed)
    print(f"seed {seed}")
    try:
        rig.start(rig.nodes[0])
        rig.begin()
        hits: list[str] = []
        for attempt in range(24):
            rig.begin_attempt()
            if attempt % 2 == 0:
                hits += interrupt(rig, fate)
                rig.begin()
                continue
            rig.statuses()
            if fate.random() < 0.5:
                rig.amend(0.25)
                rig.journal(coefficient=0.25)
            else:
                rig.journal(coefficient=1.0)
            rig.commit()
            rig.settle_and_compare()
    finally:
        rig.close()
    assert {"step", "inverse"} <= set(hits), f"seed {seed}: kills amid {hits}"
