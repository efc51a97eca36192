"""mirrord's machine: what it orders, and that its replica is right whatever is killed when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.daemons.kit.events import DrainAsked, Exit, SendReady, ShutdownAsked
from penstock.daemons.mirror.machine.events import (
    CancelSeeds,
    FollowAsked,
    MirroredBlock,
    PresentAsked,
    ReplicaFacts,
    Seed,
    Seeded,
    SendMirrored,
    SendReplica,
    SetHeld,
    SetIncarnation,
    UnlinkReplica,
    VoidReplica,
)
from penstock.daemons.mirror.machine.machine import BEGINS_ANEW, MirrorMachine
from penstock.daemons.optimizer.machine.events import (
    AttemptAsked,
    BeginSweep,
    CancelPulls,
    CommitAsked,
    EndSweep,
    FlipCommitted,
    Pull,
    Pulled,
    RunSweep,
    SetState,
    SweepDone,
    UndoWords,
    WriteRecord,
)
from penstock.daemons.optimizer.machine.sweeps import Settle
from penstock.protocol.plan.step import OptimizerStep
from tests.mirror.lives import INCARNATION, Life, record_of

NOTHING = ReplicaFacts(
    incarnation=0,
    committed=0,
    record=None,
    interrupted=None,
    undo=UndoWords(armed=False, tag=0, completed=0),
    states={},
    held={},
)


def begun() -> MirrorMachine:
    machine = MirrorMachine([MirroredBlock(index=4, contributions=1)], NOTHING)
    machine.handle(DrainAsked(epoch=1))
    machine.handle(FollowAsked(epoch=1, record=record_of(0, 0)))
    return machine


def attempt(number: int, base: int) -> AttemptAsked:
    return AttemptAsked(
        epoch=1,
        attempt=number,
        base_version=base,
        loss_scale=1.0,
        learning_rate=0.1,
        hold=False,
    )


def pulled(number: int, version: int) -> Pulled:
    return Pulled(epoch=1, attempt=number, version=version, block=4, contribution=0)


def test_a_new_replica_adopts_the_commit_and_reads_what_is_missing() -> None:
    machine = MirrorMachine([MirroredBlock(index=4, contributions=1)], NOTHING)
    drained = machine.handle(DrainAsked(epoch=1))
    assert drained[-1] == SendReplica(
        epoch=1, incarnation=0, committed=0, attempt=0, complete=False
    )
    record = record_of(0, 0)
    assert machine.handle(FollowAsked(epoch=1, record=record)) == [
        VoidReplica(),
        WriteRecord(record=record),
        FlipCommitted(version=0),
        SetIncarnation(incarnation=INCARNATION),
        SendReady(epoch=1),
        Seed(epoch=1, block=4),
    ]


def test_a_replica_that_the_journal_does_not_know_is_removed_and_begun_anew() -> None:
    """Its tokens are not the journal's, so it would fill no memory for as long as it is there."""
    machine = MirrorMachine([MirroredBlock(index=4, contributions=1)], NOTHING)
    machine.handle(DrainAsked(epoch=1))
    removed, end = machine.handle(FollowAsked(epoch=1, record=record_of(0, 0), is_strange=True))
    assert removed == UnlinkReplica()
    assert isinstance(end, Exit) and end.reason == BEGINS_ANEW


def test_an_attempt_is_mirrored_without_the_blocks_that_are_missing() -> None:
    machine = begun()
    assert machine.handle(attempt(1, 0)) == [SendMirrored(epoch=1, attempt=1, blocks_missing=1)]


def test_a_step_from_gradients_to_settled_state() -> None:
    machine = begun()
    seeded = machine.handle(Seeded(epoch=1, block=4, version=0, incarnation=INCARNATION))
    assert seeded[0] == SetState(block=4, version=0)
    pull = Pull(epoch=1, since_epoch=1, attempt=1, version=1, block=4, contribution=0)
    assert machine.handle(attempt(1, 0)) == [pull]
    assert machine.handle(pulled(1, 1)) == [
        SetHeld(block=4, copy=1, contribution=0, attempt=1),
        SendMirrored(epoch=1, attempt=1, blocks_missing=0),
    ]
    record = record_of(1, 1)
    settle = Settle(block=4, update=OptimizerStep.of(record))
    assert machine.handle(CommitAsked(epoch=1, record=record)) == [
        WriteRecord(record=record),
        FlipCommitted(version=1),
        BeginSweep(block=4, state_version=1),
        RunSweep(work=settle),
    ]
    assert machine.handle(attempt(2, 1))[-1].attempt == 2  # type: ignore[union-attr]
    assert machine.handle(pulled(2, 2))[1:] == [], "not before the step before is settled"
    assert machine.handle(SweepDone(status=None, seconds=0.1)) == [
        SetState(block=4, version=1),
        EndSweep(),
        SendMirrored(epoch=1, attempt=2, blocks_missing=0),
    ]


def test_a_block_one_step_behind_joins_only_while_its_gradients_stay() -> None:
    """Its commit's gradients are overwritten by the attempt behind the next commit, which waits for
    the block only if it joined before the attempt under way was mirrored.
    """
    machine = begun()
    machine.handle(attempt(1, 0))
    machine.handle(CommitAsked(epoch=1, record=record_of(1, 1)))
    machine.handle(attempt(2, 1))
    behind = Seeded(epoch=1, block=4, version=0, incarnation=INCARNATION)
    assert machine.handle(behind) == [Seed(epoch=1, block=4)]
    machine.handle(CommitAsked(epoch=1, record=record_of(2, 2)))
    joined = machine.handle(Seeded(epoch=1, block=4, version=1, incarnation=INCARNATION))
    pulls = [effect for effect in joined if isinstance(effect, Pull)]
    assert [(p.attempt, p.version, p.since_epoch) for p in pulls] == [(2, 2, 0)]


@pytest.mark.parametrize("version", [0, 3])
def test_a_block_two_steps_behind_or_one_ahead_is_read_again(version: int) -> None:
    """The gradients that stay are those of one commit: older state would miss the one before."""
    machine = MirrorMachine([MirroredBlock(index=4, contributions=1)], NOTHING)
    machine.handle(DrainAsked(epoch=1))
    machine.handle(FollowAsked(epoch=1, record=record_of(2, 2)))
    seeded = Seeded(epoch=1, block=4, version=version, incarnation=INCARNATION)
    assert machine.handle(seeded) == [Seed(epoch=1, block=4)]
    assert machine.replica.missing == (4,)
    one_behind = machine.handle(Seeded(epoch=1, block=4, version=1, incarnation=INCARNATION))
    assert one_behind[0] == SetState(block=4, version=1)


def test_a_block_one_step_behind_waits_for_its_owner_where_gradients_were_lost() -> None:
    machine = MirrorMachine([MirroredBlock(index=4, contributions=1)], NOTHING)
    machine.handle(DrainAsked(epoch=1))
    record = record_of(1, 1)
    machine.handle(FollowAsked(epoch=1, record=record, bereft=frozenset({4})))
    behind = Seeded(epoch=1, block=4, version=0, incarnation=INCARNATION)
    assert machine.handle(behind) == [Seed(epoch=1, block=4)]
    machine.handle(attempt(2, 1))
    machine.handle(CommitAsked(epoch=1, record=record_of(2, 2)))
    joined = machine.handle(Seeded(epoch=1, block=4, version=1, incarnation=INCARNATION))
    assert joined[0] == SetState(block=4, version=1), "of the next commit they are there"


def test_a_commit_that_was_not_mirrored_ends_the_process_and_not_the_run() -> None:
    machine = begun()
    machine.handle(Seeded(epoch=1, block=4, version=0, incarnation=INCARNATION))
    machine.handle(attempt(1, 0))
    (end,) = machine.handle(CommitAsked(epoch=1, record=record_of(1, 1)))
    assert isinstance(end, Exit) and "not mirrored" in end.reason


def test_memory_of_another_filling_is_dropped() -> None:
    machine = begun()
    machine.handle(Seeded(epoch=1, block=4, version=0, incarnation=INCARNATION))
    machine.handle(DrainAsked(epoch=2))
    effects = machine.handle(FollowAsked(epoch=2, record=record_of(0, 0, INCARNATION + 1)))
    assert effects[0] == VoidReplica()
    assert machine.replica.missing == (4,)


def test_what_is_asked_for_and_not_there_is_not_presented() -> None:
    machine = begun()
    machine.handle(DrainAsked(epoch=2))
    effects = machine.handle(PresentAsked(epoch=2, record=record_of(0, 0)))
    assert isinstance(effects[-1], Exit) and "[4]" in effects[-1].reason


def test_the_end_of_the_run_removes_the_replica() -> None:
    machine = begun()
    end = ShutdownAsked(reason="done", keep_memory=False)
    effects = machine.handle(end)
    assert effects[0] == UnlinkReplica() and isinstance(effects[-1], Exit)
    assert {CancelPulls(), CancelSeeds()} < set(effects)


def moves(life: Life) -> list[tuple[int, Callable[[], None]]]:
    """What can happen next, with weights."""
    return [
        (80, life.deliver),
        (80, life.publish),
        (80, life.advance_pull),
        (80, life.advance_sweep),
        (80, life.advance_seed),
        (60, life.settle_owner),
        (60, life.begin_attempt),
        (60, life.decide),
        (1, life.lose_owner),
        (2, life.lose_contributor),
        (1, life.kill),
        (2, life.lose_replica),
    ]


def walk(seed: int, steps: int) -> Life:
    life = Life(seed)
    life.begin_anew()
    weights, actions = zip(*moves(life), strict=True)
    for _ in range(steps):
        (action,) = life.random.choices(actions, weights)
        if action == life.kill and life.told and life.random.random() < 0.5:
            life.feed(life.told.popleft(), keep=life.random.randrange(3))  # in the middle
        if action == life.kill and life.random.random() < 0.3:
            life.advance_pull(killed=True)
        action()
        life.check()
    life.calm_down()
    return life


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_whatever_is_killed_or_lost_a_replica_is_right_or_says_that_it_is_not(first: int) -> None:
    counts = dict.fromkeys(Life(0).counts, 0)
    for seed in range(first, first + 30):
        try:
            life = walk(seed, 1500)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        for name, count in life.counts.items():
            counts[name] += count
    # Not vacuous: there was all of it, and most losses cost nothing.
    assert min(counts.values()) > 0, counts
    assert counts["kept"] > 20 and counts["commits"] > 500, counts
