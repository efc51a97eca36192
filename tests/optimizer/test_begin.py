"""What Begin makes of what it finds in memory, each as a whole list of effects."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.daemons.kit.events import DrainAsked, Exit, SendDrained, SendFailed, SendReady
from penstock.daemons.optimizer.machine.events import (
    BeginSweep,
    Effect,
    EndSweep,
    FlipCommitted,
    MemoryFacts,
    RunSweep,
    SetEpoch,
    SetSlot,
    SetState,
    UndoWords,
    WriteRecord,
)
from penstock.daemons.optimizer.machine.machine import OptimizerMachine, OptimizerPhase
from penstock.daemons.optimizer.machine.sweeps import (
    CastWeights,
    FinishHold,
    FinishSettle,
    Hold,
    sweep_tag,
)
from penstock.host.errors import ExitCode
from penstock.shm.control import INVALID_VERSION, CommitRecord, Decision, SweepIntent
from tests.optimizer.machine import (
    DONE,
    ONE_BLOCK,
    QUIET,
    TWO_BLOCKS,
    begin,
    facts,
    invalid,
    record,
    update,
)


def test_a_fresh_process_drains_before_its_first_begin() -> None:
    machine = OptimizerMachine(ONE_BLOCK)
    assert machine.handle(DrainAsked(epoch=1)) == [SendDrained(epoch=1)]


def test_begin_applies_an_outstanding_commit() -> None:
    machine = OptimizerMachine(ONE_BLOCK)
    commit = record(6, 51)
    assert machine.handle(begin(facts(5, {0: (5, 6, 5)}), commit)) == [
        WriteRecord(record=commit),
        FlipCommitted(version=6),
        SetEpoch(epoch=1),
        SendReady(epoch=1),
    ]


def test_begin_completes_a_held_commit() -> None:
    machine = OptimizerMachine(ONE_BLOCK)
    commit = record(6, 51, coefficient=0.5)
    assert machine.handle(begin(facts(5, {0: (5, 4, 5)}), commit)) == [
        WriteRecord(record=commit),
        FlipCommitted(version=6),
        invalid(0, 0),
        BeginSweep(block=0, state_version=6),
        RunSweep(work=Hold(block=0, update=update(6, 0.125))),
    ]
    assert machine.phase is OptimizerPhase.RECOVERING
    assert machine.handle(DONE) == [
        SetState(block=0, version=6),
        EndSweep(),
        SetSlot(block=0, slot=0, version=6),
        SetEpoch(epoch=1),
        SendReady(epoch=1),
    ]


def test_begin_casts_the_weights_of_a_settled_block() -> None:
    machine = OptimizerMachine(ONE_BLOCK)
    assert machine.handle(begin(facts(5, {0: (5, 4, INVALID_VERSION)}))) == [
        invalid(0, 1),
        RunSweep(work=CastWeights(block=0, version=5)),
    ]


def test_begin_forgets_only_newer_previews() -> None:
    machine = OptimizerMachine(TWO_BLOCKS)
    assert machine.handle(begin(facts(5, {0: (5, 6, 5), 3: (4, 4, 5)}))) == [
        invalid(0, 0),
        SetEpoch(epoch=1),
        SendReady(epoch=1),
    ]


def test_begin_writes_a_record_that_was_cut_short() -> None:
    machine = OptimizerMachine(ONE_BLOCK)
    found = dataclasses.replace(facts(5, {0: (4, 4, 5)}), record=None)
    assert machine.handle(begin(found)) == [
        WriteRecord(record=record(5, 50)),
        SetEpoch(epoch=1),
        SendReady(epoch=1),
    ]


TAG = sweep_tag(0, 5)


def test_begin_drops_the_intent_of_a_sweep_that_never_started() -> None:
    machine = OptimizerMachine(ONE_BLOCK)
    intent = SweepIntent(block=0, state_version=5)
    found = facts(5, {0: (4, INVALID_VERSION, 5)}, interrupted=intent)
    assert machine.handle(begin(found)) == [EndSweep(), SetEpoch(epoch=1), SendReady(epoch=1)]


@pytest.mark.parametrize(("state", "words"), [(4, [SetState(block=0, version=5)]), (5, [])])
def test_begin_writes_the_words_that_a_complete_sweep_lacks(
    state: int, words: list[Effect]
) -> None:
    machine = OptimizerMachine(ONE_BLOCK)
    intent = SweepIntent(block=0, state_version=5)
    undo = UndoWords(armed=False, tag=TAG, completed=TAG)
    found = facts(5, {0: (state, INVALID_VERSION, 5)}, interrupted=intent, undo=undo)
    assert machine.handle(begin(found)) == [
        *words,
        EndSweep(),
        SetEpoch(epoch=1),
        SendReady(epoch=1),
    ]


def test_begin_finishes_an_interrupted_sweep_as_settle_only() -> None:
    machine = OptimizerMachine(ONE_BLOCK)
    intent = SweepIntent(block=0, state_version=5)
    undo = UndoWords(armed=True, tag=TAG, completed=7)
    found = facts(5, {0: (4, INVALID_VERSION, 5)}, interrupted=intent, undo=undo)
    assert machine.handle(begin(found)) == [
        RunSweep(work=FinishSettle(block=0, update=update(5))),
    ]
    assert machine.handle(QUIET) == [
        SetState(block=0, version=5),
        EndSweep(),
        SetEpoch(epoch=1),
        SendReady(epoch=1),
    ]


def test_begin_finishes_an_interrupted_hold_as_a_hold() -> None:
    """Told by the slot: upper halves of a split master exist nowhere else."""
    machine = OptimizerMachine(ONE_BLOCK)
    intent = SweepIntent(block=0, state_version=5)
    undo = UndoWords(armed=True, tag=TAG, completed=7)
    found = facts(5, {0: (4, 4, INVALID_VERSION)}, interrupted=intent, undo=undo)
    assert machine.handle(begin(found)) == [
        invalid(0, 1),
        RunSweep(work=FinishHold(block=0, update=update(5))),
    ]
    assert machine.handle(QUIET) == [
        SetState(block=0, version=5),
        EndSweep(),
        SetSlot(block=0, slot=1, version=5),
        SetEpoch(epoch=1),
        SendReady(epoch=1),
    ]


INTENT = SweepIntent(block=0, state_version=5)
ARMED = UndoWords(armed=True, tag=TAG, completed=0)


@pytest.mark.parametrize(
    ("found", "commit", "error"),
    [
        (facts(5, {0: (5, 4, 5)}), record(7, 60), "memory is at version 5, the scheduler at 7"),
        (facts(5, {0: (5, 4, 5)}), record(4, 40), "memory is at version 5, the scheduler at 4"),
        (facts(5, {0: (5, 4, 5)}), record(5, 50, incarnation=2), "holds incarnation 1"),
        (facts(5, {0: (3, 4, 5)}), record(5, 50), "block 0: state version 3"),
        (facts(5, {0: (4, 4, 5)}), record(6, 60), "block 0: state version 4"),
        (facts(5, {0: (6, 4, 5)}), record(6, 60), "block 0: state version 6"),
        (facts(5, {0: (4, 4, 5)}), record(5, 50, decision=Decision.RESTORE), "no gradients"),
        (facts(5, {0: (4, 4, 5)}, undo=ARMED), record(5, 50), "undo area is armed"),
        (facts(5, {0: (5, 4, 5)}, interrupted=INTENT), record(6, 60), "a sweep led block 0"),
        (
            facts(5, {0: (4, 4, 5)}, interrupted=SweepIntent(block=1, state_version=5)),
            record(5, 50),
            "a sweep led block 1",
        ),
    ],
)
def test_begin_refuses_what_cannot_be(found: MemoryFacts, commit: CommitRecord, error: str) -> None:
    machine = OptimizerMachine(ONE_BLOCK)
    failed, leave = machine.handle(begin(found, commit))
    assert isinstance(failed, SendFailed) and error in failed.error
    assert leave == Exit(code=ExitCode.BAD_CONFIG, reason=failed.error)
    assert machine.handle(DrainAsked(epoch=9)) == []
