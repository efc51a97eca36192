"""The machine's rules, each as a whole list of effects; those of Begin are in test_begin.py."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.daemons.kit.events import (
    DrainAsked,
    EffectFailed,
    Exit,
    SendDrained,
    SendFailed,
    SendReady,
    StopAsked,
)
from penstock.daemons.optimizer.machine.events import (
    AmendAsked,
    BeginSweep,
    CancelPulls,
    CommitAsked,
    DeviceUpdated,
    EndSweep,
    Event,
    FlipCommitted,
    GradientsReady,
    OwnedBlock,
    Pull,
    Pulled,
    RecoveryAsked,
    RunSweep,
    SendAmended,
    SendHeard,
    SendSettled,
    SetEpoch,
    SetSlot,
    SetState,
    SettleAsked,
    SkipAsked,
    UndoWords,
    UpdatePolicy,
    WriteRecord,
)
from penstock.daemons.optimizer.machine.machine import OptimizerMachine
from penstock.daemons.optimizer.machine.sweeps import (
    Advance,
    FinishSettle,
    GradientStatus,
    Hold,
    Preview,
    Settle,
    sweep_tag,
)
from penstock.host.errors import ExitCode
from penstock.protocol.plan.step import OptimizerStep
from penstock.shm.control import INVALID_VERSION, Decision, SweepIntent
from tests.optimizer.machine import (
    DONE,
    OK,
    ONE_BLOCK,
    QUIET,
    TWO_BLOCKS,
    attempt,
    begin,
    facts,
    invalid,
    live,
    ready,
    record,
    reported,
    status,
    update,
)


def test_pending_state_is_advanced() -> None:
    machine = live()
    assert machine.handle(attempt(51, 5)) == []
    work = Advance(block=0, pending=update(5), update=update(6))
    assert machine.handle(ready(51)) == [
        invalid(0, 0),
        BeginSweep(block=0, state_version=5),
        RunSweep(work=work),
    ]
    assert machine.handle(DONE) == [
        SetState(block=0, version=5),
        EndSweep(),
        SetSlot(block=0, slot=0, version=6),
        status(51),
    ]


def test_settled_state_is_previewed() -> None:
    machine = live(state=5)
    machine.handle(attempt(51, 5))
    assert machine.handle(ready(51)) == [
        invalid(0, 0),
        RunSweep(work=Preview(block=0, update=update(6))),
    ]
    assert machine.handle(DONE) == [SetSlot(block=0, slot=0, version=6), status(51)]


def test_one_sweep_at_a_time_in_order_of_arrival() -> None:
    machine = live(state=5, blocks=TWO_BLOCKS)
    machine.handle(attempt(51, 5))
    assert len(machine.handle(ready(51, block=3))) == 2
    assert machine.handle(ready(51, block=0)) == []
    assert machine.queue_length == 1
    assert machine.handle(DONE) == [
        SetSlot(block=3, slot=0, version=6),
        status(51, block=3),
        invalid(0, 0),
        RunSweep(work=Preview(block=0, update=update(6))),
    ]


def test_a_synchronous_optimizer_waits_for_the_last_gradient_of_all_blocks() -> None:
    machine = live(state=5, blocks=TWO_BLOCKS, together=True)
    machine.handle(attempt(51, 5))
    assert machine.handle(ready(51, block=3)) == []
    assert machine.handle(ready(51, block=0)) == [
        invalid(3, 0),
        RunSweep(work=Preview(block=3, update=update(6))),
    ]
    assert machine.queue_length == 1


def test_a_block_waits_for_all_contributions_and_counts_each_once() -> None:
    machine = live(state=5, blocks=(OwnedBlock(index=0, contributions=2),))
    machine.handle(attempt(51, 5))
    assert machine.handle(ready(51, contribution=1)) == []
    assert machine.handle(ready(51, contribution=1)) == []
    assert machine.awaited() == (ready(51, contribution=0),)
    assert machine.handle(ready(51, contribution=0))[-1] == RunSweep(
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
        RunSweep(work=Preview(block=0, update=update(6))),
    ]


def test_a_hold_settles_at_once_and_only_looks_at_the_gradients() -> None:
    machine = live()
    assert machine.handle(attempt(51, 5, hold=True)) == [
        BeginSweep(block=0, state_version=5),
        RunSweep(work=Settle(block=0, update=update(5))),
    ]
    assert machine.handle(ready(51)) == []
    assert machine.handle(QUIET) == [
        SetState(block=0, version=5),
        EndSweep(),
        RunSweep(work=GradientStatus(block=0, version=6)),
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
        BeginSweep(block=0, state_version=6),
        RunSweep(work=Hold(block=0, update=update(6, 0.125))),
    ]
    machine.validate()
    assert machine.handle(attempt(52, 6)) == []
    assert machine.handle(DONE) == [
        SetState(block=0, version=6),
        EndSweep(),
        SetSlot(block=0, slot=0, version=6),
        invalid(3, 0),
        BeginSweep(block=3, state_version=6),
        RunSweep(work=Hold(block=3, update=update(6, 0.125))),
    ]
    assert machine.handle(DONE) == [
        SetState(block=3, version=6),
        EndSweep(),
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
        BeginSweep(block=0, state_version=6),
        RunSweep(work=Hold(block=0, update=promised)),
    ]


def test_an_amend_previews_again_and_the_commit_only_flips() -> None:
    machine = reported()
    commit = record(6, 51, coefficient=0.5, decision=Decision.AMEND)
    assert machine.handle(AmendAsked(epoch=1, attempt=51, record=commit)) == [
        invalid(0, 0),
        RunSweep(work=Preview(block=0, update=update(6, 0.125))),
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
    assert machine.handle(ready(52))[-1] == RunSweep(work=Preview(block=0, update=update(6)))


def test_a_skip_amid_an_advance_keeps_the_settle_and_drops_the_weights() -> None:
    machine = live()
    machine.handle(attempt(51, 5))
    machine.handle(ready(51))
    assert machine.handle(SkipAsked(epoch=1, attempt=51)) == []
    assert machine.handle(DONE) == [SetState(block=0, version=5), EndSweep()]


def test_settle_brings_every_block_up_once() -> None:
    machine = live(blocks=TWO_BLOCKS)
    assert machine.handle(SettleAsked(epoch=1, version=5)) == [
        BeginSweep(block=0, state_version=5),
        RunSweep(work=Settle(block=0, update=update(5))),
    ]
    assert machine.handle(SettleAsked(epoch=1, version=5)) == []
    assert machine.handle(QUIET) == [
        SetState(block=0, version=5),
        EndSweep(),
        BeginSweep(block=3, state_version=5),
        RunSweep(work=Settle(block=3, update=update(5))),
    ]
    assert machine.handle(QUIET) == [
        SetState(block=3, version=5),
        EndSweep(),
        SendSettled(epoch=1, version=5),
    ]
    assert machine.handle(SettleAsked(epoch=1, version=5)) == [SendSettled(epoch=1, version=5)]


def test_drain_lets_the_running_sweep_finish_and_drops_the_rest() -> None:
    machine = live(blocks=TWO_BLOCKS)
    machine.handle(attempt(51, 5))
    machine.handle(ready(51, block=0))
    machine.handle(ready(51, block=3))
    assert machine.handle(DrainAsked(epoch=2)) == []
    assert machine.handle(ready(51, block=3)) == []
    # The weights belong to an attempt that is no more; the state is one commit further for good.
    assert machine.handle(DONE) == [SetState(block=0, version=5), EndSweep(), SendDrained(epoch=2)]


def test_drain_when_idle_is_answered_at_once_old_ones_never() -> None:
    machine = live()
    assert machine.handle(DrainAsked(epoch=3)) == [SendDrained(epoch=3)]
    assert machine.handle(DrainAsked(epoch=2)) == []
    assert machine.handle(begin(facts(5, {0: (5, 4, 5)}), epoch=2)) == []
    assert machine.handle(attempt(51, 5)) == []


def test_frozen_blocks_follow_the_commits_without_a_sweep() -> None:
    blocks = (OwnedBlock(index=0, contributions=0),)
    machine = OptimizerMachine(blocks)
    machine.handle(begin(facts(5, {0: (5, 4, 5)})))
    heard = SendHeard(epoch=1, attempt=51)
    assert machine.handle(attempt(51, 5)) == [heard], "no status of a block will say so"
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
    machine = OptimizerMachine(REMOTE)
    assert machine.handle(begin(facts(5, {0: (5, 4, 5)}))) == [
        CancelPulls(),
        SetEpoch(epoch=1),
        SendReady(epoch=1),
    ]
    assert machine.handle(attempt(51, 5)) == [pull(6, 51, since=1)]
    assert machine.handle(ready(51)) == []
    assert machine.handle(ready(51, contribution=1)) == []
    assert machine.handle(arrived(6, 51))[-1] == RunSweep(work=Preview(block=0, update=update(6)))


def test_pulls_follow_the_backward() -> None:
    """Pulls run one by one: the blocks whose gradients are there first come first."""
    blocks = [OwnedBlock(index=b, contributions=2, remote=frozenset([1])) for b in range(3)]
    machine = OptimizerMachine(blocks)
    machine.handle(begin(facts(5, {b: (5, 4, 5) for b in range(3)})))
    pulls = [effect for effect in machine.handle(attempt(51, 5)) if isinstance(effect, Pull)]
    assert [(effect.block, effect.contribution) for effect in pulls] == [(2, 1), (1, 1), (0, 1)]


def test_begin_pulls_pending_remote_gradients_again_of_whatever_epoch() -> None:
    machine = OptimizerMachine(REMOTE)
    undo = UndoWords(armed=True, tag=sweep_tag(0, 5), completed=0)
    found = facts(
        5,
        {0: (4, INVALID_VERSION, 5)},
        interrupted=SweepIntent(block=0, state_version=5),
        undo=undo,
    )
    assert machine.handle(begin(found)) == [CancelPulls(), pull(5, 50, since=0)]
    assert machine.handle(arrived(5, 50)) == [
        RunSweep(work=FinishSettle(block=0, update=update(5)))
    ]
    assert machine.handle(QUIET)[-1] == SendReady(epoch=1)


def test_pulled_gradients_survive_a_change_of_epoch() -> None:
    machine = OptimizerMachine(REMOTE)
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


def test_stop_waits_for_the_running_sweep() -> None:
    machine = live()
    machine.handle(attempt(51, 5))
    machine.handle(ready(51))
    assert machine.handle(StopAsked()) == []
    assert machine.handle(DrainAsked(epoch=2)) == []
    assert machine.handle(DONE) == [
        SetState(block=0, version=5),
        EndSweep(),
        Exit(code=ExitCode.DONE),
    ]
    assert live().handle(StopAsked()) == [Exit(code=ExitCode.DONE)]


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (attempt(52, 5), "attempt 52 begins, but 51 is undecided"),
        (CommitAsked(epoch=1, record=record(6, 52)), "attempt 52 is decided"),
        (CommitAsked(epoch=1, record=record(7, 51)), "leads to version 6"),
        (CommitAsked(epoch=1, record=record(6, 51)), "before the sweep of blocks [0]"),
        (AmendAsked(epoch=1, attempt=51, record=record(6, 51)), "before the sweep of blocks [0]"),
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
    of_memory = isinstance(event, RecoveryAsked)
    code = ExitCode.BAD_CONFIG if of_memory else ExitCode.LOST_MEMBERS
    assert leave == Exit(code=code, reason=failed.error)


def test_an_attempt_must_be_based_on_the_committed_version() -> None:
    failed, _ = live().handle(attempt(51, 4))
    assert isinstance(failed, SendFailed) and "based on version 4, but 5" in failed.error


def test_a_sweep_that_cannot_run_ends_the_run() -> None:
    machine = live()
    assert machine.handle(EffectFailed(error="no such array")) == [
        SendFailed(error="no such array", code=ExitCode.LOST_MEMBERS),
        Exit(code=ExitCode.LOST_MEMBERS, reason="no such array"),
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
        BeginSweep(block=3, state_version=5),
        RunSweep(work=Settle(block=3, update=update(5))),
    ]
    assert machine.handle(ready(51, block=3)) == [], "its next gradients wait for the settle"
    assert machine.handle(QUIET) == [
        SetState(block=3, version=5),
        EndSweep(),
        invalid(3, 0),
        RunSweep(work=Preview(block=3, update=update(6))),
    ]


def test_a_block_of_a_device_is_settled_and_vacated_and_then_left_to_the_worker() -> None:
    machine = live(blocks=(DEVICE_BLOCK,))
    assert machine.handle(attempt(51, 5)) == [
        invalid(0, 0),
        BeginSweep(block=0, state_version=5),
        RunSweep(work=Settle(block=0, update=update(5))),
    ]
    assert machine.handle(ready(51)) == []
    assert machine.handle(QUIET) == [SetState(block=0, version=5), EndSweep()]
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
        RunSweep(work=Preview(block=0, update=update(6, 0.125))),
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
    assert machine.handle(ready(51)) == [RunSweep(work=GradientStatus(block=0, version=6))]
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
    assert exited == Exit(code=ExitCode.LOST_MEMBERS, reason=failed.error)


def test_a_settle_that_is_asked_for_counts_those_that_are_under_way_already() -> None:
    machine = live(blocks=(DEVICE_BLOCK,))
    machine.handle(attempt(51, 5))
    machine.handle(SkipAsked(epoch=1, attempt=51))
    assert machine.handle(SettleAsked(epoch=1, version=5)) == []
    assert machine.handle(QUIET) == [
        SetState(block=0, version=5),
        EndSweep(),
        SendSettled(epoch=1, version=5),
    ]


FLUSH_BLOCK = OwnedBlock(index=0, contributions=1, policy=UpdatePolicy.FLUSH)


def test_a_commit_takes_over_what_a_worker_flushed_and_nothing_is_settled() -> None:
    """Until the state's version says so, behind the commit, the other copy is the state."""
    machine = live(state=5, blocks=(FLUSH_BLOCK,))
    assert machine.handle(attempt(51, 5)) == [invalid(0, 0)]
    assert machine.handle(ready(51)) == []
    assert machine.handle(updated(51)) == [SetSlot(block=0, slot=0, version=6), status(51)]
    commit = CommitAsked(epoch=1, record=record(6, 51))
    assert machine.handle(commit) == [
        WriteRecord(record=record(6, 51)),
        FlipCommitted(version=6),
        SetState(block=0, version=6),
    ]
    machine.validate()
    assert machine.handle(attempt(52, 6)) == [invalid(0, 1)], "nothing is left to settle"


def test_what_is_not_committed_as_it_was_flushed_is_settled_by_us() -> None:
    machine = live(state=5, blocks=(FLUSH_BLOCK,))
    machine.handle(attempt(51, 5))
    machine.handle(updated(51))
    commit = record(6, 51, coefficient=0.5, decision=Decision.AMEND)
    assert machine.handle(AmendAsked(epoch=1, attempt=51, record=commit)) == [
        invalid(0, 0),
        RunSweep(work=Preview(block=0, update=update(6, 0.125))),
    ]
    machine.handle(DONE)
    assert machine.handle(CommitAsked(epoch=1, record=commit)) == [
        WriteRecord(record=commit),
        FlipCommitted(version=6),
    ]
    assert machine.handle(attempt(52, 6)) == [
        invalid(0, 1),
        BeginSweep(block=0, state_version=6),
        RunSweep(work=Settle(block=0, update=update(6, 0.125))),
    ]
