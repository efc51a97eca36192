"""The machine's rules, each as a whole list of effects."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.daemons.optimizer.events import (
    AmendAsked,
    AttemptAsked,
    BeginAsked,
    BeginPass,
    BlockWords,
    Broken,
    CancelPulls,
    CommitAsked,
    DeviceUpdated,
    DrainAsked,
    Effect,
    EndPass,
    Event,
    Exit,
    FlipCommitted,
    GradientsReady,
    MemoryFacts,
    OwnedBlock,
    PassDone,
    Pull,
    Pulled,
    RunPass,
    SendAmended,
    SendBlockStatus,
    SendDrained,
    SendFailed,
    SendReady,
    SendSettled,
    SetEpoch,
    SetSlot,
    SetState,
    SettleAsked,
    SkipAsked,
    StopAsked,
    UndoWords,
    UpdatePolicy,
    WriteRecord,
)
from penstock.daemons.optimizer.passes import (
    Advance,
    CastWeights,
    FinishHold,
    FinishSettle,
    GradientStatus,
    Hold,
    Preview,
    Settle,
    pass_tag,
)
from penstock.daemons.optimizer.state import OptimizerState, Phase
from penstock.protocol.errors import ExitCode
from penstock.protocol.step import OptimizerStep, PassStatus
from penstock.shm.control import INVALID_VERSION, CommitRecord, Decision, PassIntent

OK = PassStatus(finite=True, sum_squares=2.0)
DONE = PassDone(status=OK, seconds=0.25)
QUIET = PassDone(status=None, seconds=0.25)
IDLE_UNDO = UndoWords(armed=False, tag=0, completed=0)
ONE_BLOCK = (OwnedBlock(index=0, contributions=1),)
TWO_BLOCKS = (OwnedBlock(index=0, contributions=1), OwnedBlock(index=3, contributions=1))


def record(version: int, attempt: int, coefficient: float = 1.0, **more: object) -> CommitRecord:
    """A commit with loss scale 4 and learning rate 0.5."""
    fields: dict[str, object] = {
        "version": version,
        "attempt": attempt,
        "decision": Decision.COMMIT,
        "coefficient": coefficient,
        "inverse_loss_scale": 0.25,
        "learning_rate": 0.5,
        "bias_step": version,
        "incarnation": 1,
    }
    return CommitRecord(**{**fields, **more})  # type: ignore[arg-type]


def update(version: int, coefficient: float = 0.25) -> OptimizerStep:
    """What :func:`record` promises."""
    return OptimizerStep(
        version=version, coefficient=coefficient, learning_rate=0.5, bias_step=version
    )


def facts(
    committed: int,
    blocks: dict[int, tuple[int, int, int]],
    *,
    interrupted: PassIntent | None = None,
    undo: UndoWords = IDLE_UNDO,
    found: CommitRecord | None = None,
) -> MemoryFacts:
    """``blocks``: state version, version in slot 0, version in slot 1."""
    return MemoryFacts(
        incarnation=1,
        committed=committed,
        record=found or record(committed, 10 * committed),
        next_record=None,
        interrupted=interrupted,
        undo=undo,
        blocks={b: BlockWords(state_version=s, slots=(x, y)) for b, (s, x, y) in blocks.items()},
    )


def begin(found: MemoryFacts, commit: CommitRecord | None = None, epoch: int = 1) -> BeginAsked:
    """A Begin with the commit that memory has, or with ``commit``."""
    commit = commit or record(found.committed, 10 * found.committed)
    return BeginAsked(epoch=epoch, record=commit, facts=found)


def attempt(number: int, base: int, *, hold: bool = False, epoch: int = 1) -> AttemptAsked:
    """An attempt with the loss scale and learning rate of :func:`record`."""
    return AttemptAsked(
        epoch=epoch,
        attempt=number,
        base_version=base,
        loss_scale=4.0,
        learning_rate=0.5,
        hold=hold,
    )


def ready(number: int, block: int = 0, contribution: int = 0, epoch: int = 1) -> GradientsReady:
    """A contribution of an attempt."""
    return GradientsReady(epoch=epoch, attempt=number, block=block, contribution=contribution)


def status(number: int, block: int = 0) -> SendBlockStatus:
    """What is sent when DONE follows."""
    return SendBlockStatus(epoch=1, attempt=number, block=block, status=OK, seconds=0.25)


def invalid(block: int, slot: int) -> SetSlot:
    """The word before the first write into a slot."""
    return SetSlot(block=block, slot=slot, version=INVALID_VERSION)


def live(
    state: int = 4,
    committed: int = 5,
    blocks: tuple[OwnedBlock, ...] = ONE_BLOCK,
    *,
    together: bool = False,
) -> OptimizerState:
    """A machine in epoch 1 at ``committed`` (odd: its weights are in slot 1)."""
    machine = OptimizerState(blocks, together=together)
    words = {b.index: (state, committed - 1, committed) for b in blocks}
    assert machine.handle(begin(facts(committed, words))) == [SetEpoch(epoch=1), SendReady(epoch=1)]
    machine.validate()
    return machine


def reported(*, hold: bool = False) -> OptimizerState:
    """A machine at 5 that has reported the only block of attempt 51."""
    machine = live(state=5)
    machine.handle(attempt(51, 5, hold=hold))
    machine.handle(ready(51))
    assert machine.handle(DONE)[-1] == status(51)
    return machine


def test_pending_state_is_advanced() -> None:
    machine = live()
    assert machine.handle(attempt(51, 5)) == []
    work = Advance(block=0, pending=update(5), update=update(6))
    assert machine.handle(ready(51)) == [
        invalid(0, 0),
        BeginPass(block=0, state_version=5),
        RunPass(work=work),
    ]
    assert machine.handle(DONE) == [
        SetState(block=0, version=5),
        EndPass(),
        SetSlot(block=0, slot=0, version=6),
        status(51),
    ]


def test_settled_state_is_previewed() -> None:
    machine = live(state=5)
    machine.handle(attempt(51, 5))
    assert machine.handle(ready(51)) == [
        invalid(0, 0),
        RunPass(work=Preview(block=0, update=update(6))),
    ]
    assert machine.handle(DONE) == [SetSlot(block=0, slot=0, version=6), status(51)]


def test_one_pass_at_a_time_in_order_of_arrival() -> None:
    machine = live(state=5, blocks=TWO_BLOCKS)
    machine.handle(attempt(51, 5))
    assert len(machine.handle(ready(51, block=3))) == 2
    assert machine.handle(ready(51, block=0)) == []
    assert machine.queue_length == 1
    assert machine.handle(DONE) == [
        SetSlot(block=3, slot=0, version=6),
        status(51, block=3),
        invalid(0, 0),
        RunPass(work=Preview(block=0, update=update(6))),
    ]


def test_a_synchronous_optimizer_waits_for_the_last_gradient_of_all_blocks() -> None:
    machine = live(state=5, blocks=TWO_BLOCKS, together=True)
    machine.handle(attempt(51, 5))
    assert machine.handle(ready(51, block=3)) == []
    assert machine.handle(ready(51, block=0)) == [
        invalid(3, 0),
        RunPass(work=Preview(block=3, update=update(6))),
    ]
    assert machine.queue_length == 1


def test_a_block_waits_for_all_contributions_and_counts_each_once() -> None:
    machine = live(state=5, blocks=(OwnedBlock(index=0, contributions=2),))
    machine.handle(attempt(51, 5))
    assert machine.handle(ready(51, contribution=1)) == []
    assert machine.handle(ready(51, contribution=1)) == []
    assert machine.awaited() == (ready(51, contribution=0),)
    assert machine.handle(ready(51, contribution=0))[-1] == RunPass(
        work=Preview(block=0, update=update(6))
    )
    assert machine.awaited() == ()


@pytest.mark.parametrize(
    "message",
    [
        ready(51, epoch=0),
        ready(50),
        ready(51, block=1),
        ready(51, contribution=1),
        ready(51, block=2),
    ],
    ids=["old epoch", "old attempt", "not owned", "no such contribution", "frozen"],
)
def test_gradients_that_do_not_count(message: GradientsReady) -> None:
    machine = live(state=5, blocks=(*ONE_BLOCK, OwnedBlock(index=2, contributions=0)))
    machine.handle(attempt(51, 5))
    assert machine.handle(message) == []


def test_gradients_may_come_before_their_attempt() -> None:
    machine = live(state=5)
    assert machine.handle(ready(51)) == []
    assert machine.handle(attempt(51, 5)) == [
        invalid(0, 0),
        RunPass(work=Preview(block=0, update=update(6))),
    ]


def test_a_hold_settles_at_once_and_only_looks_at_the_gradients() -> None:
    machine = live()
    assert machine.handle(attempt(51, 5, hold=True)) == [
        BeginPass(block=0, state_version=5),
        RunPass(work=Settle(block=0, update=update(5))),
    ]
    assert machine.handle(ready(51)) == []
    assert machine.handle(QUIET) == [
        SetState(block=0, version=5),
        EndPass(),
        RunPass(work=GradientStatus(block=0, version=6)),
    ]
    assert machine.handle(DONE) == [status(51)]


def test_a_held_commit_flips_then_takes_the_step_in_forward_order() -> None:
    machine = live(state=5, blocks=TWO_BLOCKS)
    machine.handle(attempt(51, 5, hold=True))
    for block in (3, 0):
        machine.handle(ready(51, block=block))
    assert machine.handle(DONE)[0] == status(51, block=3)
    assert machine.handle(DONE) == [status(51, block=0)]
    commit = record(6, 51, coefficient=0.5)
    assert machine.handle(CommitAsked(epoch=1, record=commit)) == [
        WriteRecord(record=commit),
        FlipCommitted(version=6),
        invalid(0, 0),
        BeginPass(block=0, state_version=6),
        RunPass(work=Hold(block=0, update=update(6, 0.125))),
    ]
    machine.validate()
    assert machine.handle(attempt(52, 6)) == []
    assert machine.handle(DONE) == [
        SetState(block=0, version=6),
        EndPass(),
        SetSlot(block=0, slot=0, version=6),
        invalid(3, 0),
        BeginPass(block=3, state_version=6),
        RunPass(work=Hold(block=3, update=update(6, 0.125))),
    ]
    assert machine.handle(DONE) == [
        SetState(block=3, version=6),
        EndPass(),
        SetSlot(block=3, slot=0, version=6),
    ]


def test_a_commit_writes_the_record_then_flips_once() -> None:
    machine = reported()
    commit = CommitAsked(epoch=1, record=record(6, 51))
    assert machine.handle(commit) == [WriteRecord(record=record(6, 51)), FlipCommitted(version=6)]
    assert machine.handle(commit) == []
    assert machine.committed == 6


def test_weights_of_another_step_than_the_committed_one_never_become_readable() -> None:
    machine = reported()
    commit = record(6, 51, learning_rate=0.75)
    promised = dataclasses.replace(update(6), learning_rate=0.75)
    assert machine.handle(CommitAsked(epoch=1, record=commit)) == [
        invalid(0, 0),
        WriteRecord(record=commit),
        FlipCommitted(version=6),
        invalid(0, 0),
        BeginPass(block=0, state_version=6),
        RunPass(work=Hold(block=0, update=promised)),
    ]


def test_an_amend_previews_again_and_the_commit_only_flips() -> None:
    machine = reported()
    commit = record(6, 51, coefficient=0.5, decision=Decision.AMEND)
    assert machine.handle(AmendAsked(epoch=1, attempt=51, record=commit)) == [
        invalid(0, 0),
        RunPass(work=Preview(block=0, update=update(6, 0.125))),
    ]
    assert machine.handle(DONE) == [
        SetSlot(block=0, slot=0, version=6),
        SendAmended(epoch=1, attempt=51),
    ]
    assert machine.handle(CommitAsked(epoch=1, record=commit)) == [
        WriteRecord(record=commit),
        FlipCommitted(version=6),
    ]


def test_a_skip_forgets_the_preview_and_keeps_the_version() -> None:
    machine = reported()
    assert machine.handle(SkipAsked(epoch=1, attempt=51)) == [invalid(0, 0)]
    assert machine.committed == 5
    assert machine.handle(SkipAsked(epoch=1, attempt=51)) == []
    machine.handle(attempt(52, 5))
    assert machine.handle(ready(52))[-1] == RunPass(work=Preview(block=0, update=update(6)))


def test_a_skip_amid_an_advance_keeps_the_settle_and_drops_the_weights() -> None:
    machine = live()
    machine.handle(attempt(51, 5))
    machine.handle(ready(51))
    assert machine.handle(SkipAsked(epoch=1, attempt=51)) == []
    assert machine.handle(DONE) == [SetState(block=0, version=5), EndPass()]


def test_settle_brings_every_block_up_once() -> None:
    machine = live(blocks=TWO_BLOCKS)
    assert machine.handle(SettleAsked(epoch=1, version=5)) == [
        BeginPass(block=0, state_version=5),
        RunPass(work=Settle(block=0, update=update(5))),
    ]
    assert machine.handle(SettleAsked(epoch=1, version=5)) == []
    assert machine.handle(QUIET) == [
        SetState(block=0, version=5),
        EndPass(),
        BeginPass(block=3, state_version=5),
        RunPass(work=Settle(block=3, update=update(5))),
    ]
    assert machine.handle(QUIET) == [
        SetState(block=3, version=5),
        EndPass(),
        SendSettled(epoch=1, version=5),
    ]
    assert machine.handle(SettleAsked(epoch=1, version=5)) == [SendSettled(epoch=1, version=5)]


def test_drain_lets_the_running_pass_finish_and_drops_the_rest() -> None:
    machine = live(blocks=TWO_BLOCKS)
    machine.handle(attempt(51, 5))
    machine.handle(ready(51, block=0))
    machine.handle(ready(51, block=3))
    assert machine.handle(DrainAsked(epoch=2)) == []
    assert machine.handle(ready(51, block=3)) == []
    # The weights belong to an attempt that is no more; the state is one commit further for good.
    assert machine.handle(DONE) == [SetState(block=0, version=5), EndPass(), SendDrained(epoch=2)]


def test_drain_when_idle_is_answered_at_once_old_ones_never() -> None:
    machine = live()
    assert machine.handle(DrainAsked(epoch=3)) == [SendDrained(epoch=3)]
    assert machine.handle(DrainAsked(epoch=2)) == []
    assert machine.handle(begin(facts(5, {0: (5, 4, 5)}), epoch=2)) == []
    assert machine.handle(attempt(51, 5)) == []


def test_a_fresh_process_drains_before_its_first_begin() -> None:
    machine = OptimizerState(ONE_BLOCK)
    assert machine.handle(DrainAsked(epoch=1)) == [SendDrained(epoch=1)]


def test_begin_applies_an_outstanding_commit() -> None:
    machine = OptimizerState(ONE_BLOCK)
    commit = record(6, 51)
    assert machine.handle(begin(facts(5, {0: (5, 6, 5)}), commit)) == [
        WriteRecord(record=commit),
        FlipCommitted(version=6),
        SetEpoch(epoch=1),
        SendReady(epoch=1),
    ]


def test_begin_completes_a_held_commit() -> None:
    machine = OptimizerState(ONE_BLOCK)
    commit = record(6, 51, coefficient=0.5)
    assert machine.handle(begin(facts(5, {0: (5, 4, 5)}), commit)) == [
        WriteRecord(record=commit),
        FlipCommitted(version=6),
        invalid(0, 0),
        BeginPass(block=0, state_version=6),
        RunPass(work=Hold(block=0, update=update(6, 0.125))),
    ]
    assert machine.phase is Phase.RECOVERING
    assert machine.handle(DONE) == [
        SetState(block=0, version=6),
        EndPass(),
        SetSlot(block=0, slot=0, version=6),
        SetEpoch(epoch=1),
        SendReady(epoch=1),
    ]


def test_begin_casts_the_weights_of_a_settled_block() -> None:
    machine = OptimizerState(ONE_BLOCK)
    assert machine.handle(begin(facts(5, {0: (5, 4, INVALID_VERSION)}))) == [
        invalid(0, 1),
        RunPass(work=CastWeights(block=0, version=5)),
    ]


def test_begin_forgets_only_newer_previews() -> None:
    machine = OptimizerState(TWO_BLOCKS)
    assert machine.handle(begin(facts(5, {0: (5, 6, 5), 3: (4, 4, 5)}))) == [
        invalid(0, 0),
        SetEpoch(epoch=1),
        SendReady(epoch=1),
    ]


def test_begin_writes_a_record_that_was_cut_short() -> None:
    machine = OptimizerState(ONE_BLOCK)
    found = dataclasses.replace(facts(5, {0: (4, 4, 5)}), record=None)
    assert machine.handle(begin(found)) == [
        WriteRecord(record=record(5, 50)),
        SetEpoch(epoch=1),
        SendReady(epoch=1),
    ]


TAG = pass_tag(0, 5)


def test_begin_drops_the_intent_of_a_pass_that_never_started() -> None:
    machine = OptimizerState(ONE_BLOCK)
    intent = PassIntent(block=0, state_version=5)
    found = facts(5, {0: (4, INVALID_VERSION, 5)}, interrupted=intent)
    assert machine.handle(begin(found)) == [EndPass(), SetEpoch(epoch=1), SendReady(epoch=1)]


@pytest.mark.parametrize(("state", "words"), [(4, [SetState(block=0, version=5)]), (5, [])])
def test_begin_writes_the_words_that_a_complete_pass_lacks(state: int, words: list[Effect]) -> None:
    machine = OptimizerState(ONE_BLOCK)
    intent = PassIntent(block=0, state_version=5)
    undo = UndoWords(armed=False, tag=TAG, completed=TAG)
    found = facts(5, {0: (state, INVALID_VERSION, 5)}, interrupted=intent, undo=undo)
    assert machine.handle(begin(found)) == [
        *words,
        EndPass(),
        SetEpoch(epoch=1),
        SendReady(epoch=1),
    ]


def test_begin_finishes_an_interrupted_pass_as_settle_only() -> None:
    machine = OptimizerState(ONE_BLOCK)
    intent = PassIntent(block=0, state_version=5)
    undo = UndoWords(armed=True, tag=TAG, completed=7)
    found = facts(5, {0: (4, INVALID_VERSION, 5)}, interrupted=intent, undo=undo)
    assert machine.handle(begin(found)) == [
        RunPass(work=FinishSettle(block=0, update=update(5))),
    ]
    assert machine.handle(QUIET) == [
        SetState(block=0, version=5),
        EndPass(),
        SetEpoch(epoch=1),
        SendReady(epoch=1),
    ]


def test_begin_finishes_an_interrupted_hold_as_a_hold() -> None:
    """Told by the slot: upper halves of a split master exist nowhere else."""
    machine = OptimizerState(ONE_BLOCK)
    intent = PassIntent(block=0, state_version=5)
    undo = UndoWords(armed=True, tag=TAG, completed=7)
    found = facts(5, {0: (4, 4, INVALID_VERSION)}, interrupted=intent, undo=undo)
    assert machine.handle(begin(found)) == [
        invalid(0, 1),
        RunPass(work=FinishHold(block=0, update=update(5))),
    ]
    assert machine.handle(QUIET) == [
        SetState(block=0, version=5),
        EndPass(),
        SetSlot(block=0, slot=1, version=5),
        SetEpoch(epoch=1),
        SendReady(epoch=1),
    ]


INTENT = PassIntent(block=0, state_version=5)
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
        (facts(5, {0: (5, 4, 5)}, interrupted=INTENT), record(6, 60), "a pass led block 0"),
        (
            facts(5, {0: (4, 4, 5)}, interrupted=PassIntent(block=1, state_version=5)),
            record(5, 50),
            "a pass led block 1",
        ),
    ],
)
def test_begin_refuses_what_cannot_be(found: MemoryFacts, commit: CommitRecord, error: str) -> None:
    machine = OptimizerState(ONE_BLOCK)
    failed, leave = machine.handle(begin(found, commit))
    assert isinstance(failed, SendFailed) and error in failed.error
    assert leave == Exit(code=ExitCode.BAD_CONFIG)
    assert machine.handle(DrainAsked(epoch=9)) == []


def test_frozen_blocks_follow_the_commits_without_a_pass() -> None:
    blocks = (OwnedBlock(index=0, contributions=0),)
    machine = OptimizerState(blocks)
    machine.handle(begin(facts(5, {0: (5, 4, 5)})))
    assert machine.handle(attempt(51, 5)) == []
    assert machine.handle(CommitAsked(epoch=1, record=record(6, 51))) == [
        WriteRecord(record=record(6, 51)),
        FlipCommitted(version=6),
        SetState(block=0, version=6),
        SetSlot(block=0, slot=0, version=6),
    ]
    assert machine.handle(SettleAsked(epoch=1, version=6)) == [SendSettled(epoch=1, version=6)]


REMOTE = (OwnedBlock(index=0, contributions=2, remote=frozenset([1])),)


def pull(version: int, number: int, since: int) -> Pull:
    """A pull of the remote contribution."""
    return Pull(
        epoch=1, since_epoch=since, attempt=number, version=version, block=0, contribution=1
    )


def arrived(version: int, number: int) -> Pulled:
    """The answer to :func:`pull`."""
    return Pulled(epoch=1, attempt=number, version=version, block=0, contribution=1)


def test_a_remote_contribution_is_pulled_from_the_start_of_the_attempt() -> None:
    machine = OptimizerState(REMOTE)
    assert machine.handle(begin(facts(5, {0: (5, 4, 5)}))) == [
        CancelPulls(),
        SetEpoch(epoch=1),
        SendReady(epoch=1),
    ]
    assert machine.handle(attempt(51, 5)) == [pull(6, 51, since=1)]
    assert machine.handle(ready(51)) == []
    assert machine.handle(ready(51, contribution=1)) == []
    assert machine.handle(arrived(6, 51))[-1] == RunPass(work=Preview(block=0, update=update(6)))


def test_pulls_follow_the_backward() -> None:
    """Pulls run one by one: the blocks whose gradients are there first come first."""
    blocks = [OwnedBlock(index=b, contributions=2, remote=frozenset([1])) for b in range(3)]
    machine = OptimizerState(blocks)
    machine.handle(begin(facts(5, {b: (5, 4, 5) for b in range(3)})))
    pulls = [effect for effect in machine.handle(attempt(51, 5)) if isinstance(effect, Pull)]
    assert [(effect.block, effect.contribution) for effect in pulls] == [(2, 1), (1, 1), (0, 1)]


def test_begin_pulls_pending_remote_gradients_again_of_whatever_epoch() -> None:
    machine = OptimizerState(REMOTE)
    undo = UndoWords(armed=True, tag=TAG, completed=0)
    found = facts(
        5,
        {0: (4, INVALID_VERSION, 5)},
        interrupted=PassIntent(block=0, state_version=5),
        undo=undo,
    )
    assert machine.handle(begin(found)) == [CancelPulls(), pull(5, 50, since=0)]
    assert machine.handle(arrived(5, 50)) == [RunPass(work=FinishSettle(block=0, update=update(5)))]
    assert machine.handle(QUIET)[-1] == SendReady(epoch=1)


def test_pulled_gradients_survive_a_change_of_epoch() -> None:
    machine = OptimizerState(REMOTE)
    machine.handle(begin(facts(5, {0: (5, 4, 5)})))
    machine.handle(attempt(51, 5))
    machine.handle(arrived(6, 51))
    machine.handle(ready(51))
    machine.handle(DONE)
    machine.handle(CommitAsked(epoch=1, record=record(6, 51)))
    machine.handle(DrainAsked(epoch=2))
    found = facts(6, {0: (5, 6, 5)}, found=record(6, 51))
    assert machine.handle(begin(found, record(6, 51), epoch=2)) == [
        CancelPulls(),
        SetEpoch(epoch=2),
        SendReady(epoch=2),
    ]


def test_stop_waits_for_the_running_pass() -> None:
    machine = live()
    machine.handle(attempt(51, 5))
    machine.handle(ready(51))
    assert machine.handle(StopAsked()) == []
    assert machine.handle(DrainAsked(epoch=2)) == []
    assert machine.handle(DONE) == [
        SetState(block=0, version=5),
        EndPass(),
        Exit(code=ExitCode.DONE),
    ]
    assert live().handle(StopAsked()) == [Exit(code=ExitCode.DONE)]


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (attempt(52, 5), "attempt 52 begins, but 51 is undecided"),
        (CommitAsked(epoch=1, record=record(6, 52)), "attempt 52 is decided"),
        (CommitAsked(epoch=1, record=record(7, 51)), "leads to version 6"),
        (CommitAsked(epoch=1, record=record(6, 51)), "before the pass of blocks [0]"),
        (AmendAsked(epoch=1, attempt=51, record=record(6, 51)), "before the pass of blocks [0]"),
        (SettleAsked(epoch=1, version=6), "settled at version 6, but 5 is"),
        (begin(facts(5, {0: (5, 4, 5)}), epoch=2), "before the old one has drained"),
    ],
)
def test_contradictions_end_the_run(event: Event, error: str) -> None:
    machine = live(state=5)
    machine.handle(attempt(51, 5))
    machine.handle(ready(51))
    failed, leave = machine.handle(event)
    assert isinstance(failed, SendFailed) and error in failed.error
    of_memory = isinstance(event, BeginAsked)
    assert leave == Exit(code=ExitCode.BAD_CONFIG if of_memory else ExitCode.LOST_MEMBERS)


def test_an_attempt_must_be_based_on_the_committed_version() -> None:
    failed, _ = live().handle(attempt(51, 4))
    assert isinstance(failed, SendFailed) and "based on version 4, but 5" in failed.error


def test_a_pass_that_cannot_run_ends_the_run() -> None:
    machine = live()
    assert machine.handle(Broken(error="no such array")) == [
        SendFailed(error="no such array", exit_code=ExitCode.LOST_MEMBERS),
        Exit(code=ExitCode.LOST_MEMBERS),
    ]


def test_speculation_and_record_agree_bit_for_bit() -> None:
    for scale in (1.0, 3.0, 65536.0, 0.1):
        commit = record(6, 51, inverse_loss_scale=1.0 / scale)
        expected = OptimizerStep.speculative(version=6, loss_scale=scale, learning_rate=0.5)
        assert OptimizerStep.of(commit) == expected


DEVICE_BLOCK = OwnedBlock(index=0, contributions=1, policy=UpdatePolicy.DEVICE)
EARLY_BLOCK = OwnedBlock(index=3, contributions=1, policy=UpdatePolicy.SETTLE_EARLY)


def updated(number: int, block: int = 0, epoch: int = 1) -> DeviceUpdated:
    """A worker's preview, with what DONE says."""
    return DeviceUpdated(epoch=epoch, attempt=number, block=block, status=OK, seconds=0.25)


def test_a_block_that_settles_early_does_so_when_the_next_attempt_begins() -> None:
    machine = live(blocks=(EARLY_BLOCK, *ONE_BLOCK))
    assert machine.handle(attempt(51, 5)) == [
        BeginPass(block=3, state_version=5),
        RunPass(work=Settle(block=3, update=update(5))),
    ]
    assert machine.handle(ready(51, block=3)) == [], "its next gradients wait for the settle"
    assert machine.handle(QUIET) == [
        SetState(block=3, version=5),
        EndPass(),
        invalid(3, 0),
        RunPass(work=Preview(block=3, update=update(6))),
    ]


def test_a_block_of_a_device_is_settled_and_vacated_and_then_left_to_the_worker() -> None:
    machine = live(blocks=(DEVICE_BLOCK,))
    assert machine.handle(attempt(51, 5)) == [
        invalid(0, 0),
        BeginPass(block=0, state_version=5),
        RunPass(work=Settle(block=0, update=update(5))),
    ]
    assert machine.handle(ready(51)) == []
    assert machine.handle(QUIET) == [SetState(block=0, version=5), EndPass()]
    assert machine.handle(updated(51)) == [SetSlot(block=0, slot=0, version=6), status(51)]
    assert machine.handle(updated(51)) == [], "said twice"
    machine.validate()
    commit = CommitAsked(epoch=1, record=record(6, 51))
    assert machine.handle(commit) == [WriteRecord(record=record(6, 51)), FlipCommitted(version=6)]


def test_a_worker_may_speak_of_an_attempt_before_the_scheduler_does() -> None:
    machine = live(state=5, blocks=(DEVICE_BLOCK,))
    assert machine.handle(ready(51)) == machine.handle(updated(51)) == []
    assert machine.handle(attempt(51, 5)) == [
        invalid(0, 0),
        SetSlot(block=0, slot=0, version=6),
        status(51),
    ]


def test_clipping_previews_blocks_of_devices_again_and_a_skip_forgets_them() -> None:
    machine = live(state=5, blocks=(DEVICE_BLOCK,))
    machine.handle(attempt(51, 5))
    machine.handle(updated(51))
    commit = record(6, 51, coefficient=0.5, decision=Decision.AMEND)
    assert machine.handle(AmendAsked(epoch=1, attempt=51, record=commit)) == [
        invalid(0, 0),
        RunPass(work=Preview(block=0, update=update(6, 0.125))),
    ]
    assert machine.handle(DONE) == [
        SetSlot(block=0, slot=0, version=6),
        SendAmended(epoch=1, attempt=51),
    ]
    machine = live(state=5, blocks=(DEVICE_BLOCK,))
    machine.handle(attempt(51, 5))
    machine.handle(updated(51))
    assert machine.handle(SkipAsked(epoch=1, attempt=51)) == [invalid(0, 0)]
    assert machine.handle(attempt(52, 5)) == [], "settled, and its slot holds nothing"
    assert machine.handle(updated(51)) == [], "of the attempt that was skipped"
    assert machine.handle(updated(52))[-1] == status(52)


def test_in_an_attempt_that_holds_the_cpu_looks_at_the_gradients_of_all_blocks() -> None:
    machine = live(state=5, blocks=(DEVICE_BLOCK,))
    assert machine.handle(attempt(51, 5, hold=True)) == []
    assert machine.handle(updated(51)) == [], "no worker was asked"
    assert machine.handle(ready(51)) == [RunPass(work=GradientStatus(block=0, version=6))]
    assert machine.handle(DONE) == [status(51)]


@pytest.mark.parametrize(
    "message",
    [updated(51, epoch=0), updated(50), updated(51, block=3), updated(51, block=7)],
    ids=["old epoch", "old attempt", "of the CPU", "not owned"],
)
def test_updates_that_do_not_count(message: DeviceUpdated) -> None:
    machine = live(state=5, blocks=(DEVICE_BLOCK, EARLY_BLOCK))
    machine.handle(attempt(51, 5))
    assert machine.handle(message) == []


def test_an_update_from_state_that_is_not_settled_ends_the_run() -> None:
    """Its weights are those of another step; the service does not let such a message through."""
    machine = live(blocks=(DEVICE_BLOCK,))
    machine.handle(attempt(51, 5))
    failed, exited = machine.handle(updated(51))
    assert isinstance(failed, SendFailed) and "block 0 in attempt 51" in failed.error
    assert exited == Exit(code=ExitCode.LOST_MEMBERS)


def test_a_settle_that_is_asked_for_counts_those_that_are_under_way_already() -> None:
    machine = live(blocks=(DEVICE_BLOCK,))
    machine.handle(attempt(51, 5))
    machine.handle(SkipAsked(epoch=1, attempt=51))
    assert machine.handle(SettleAsked(epoch=1, version=5)) == []
    assert machine.handle(QUIET) == [
        SetState(block=0, version=5),
        EndPass(),
        SendSettled(epoch=1, version=5),
    ]
