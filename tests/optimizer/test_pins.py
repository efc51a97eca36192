"""What a save reads is not overwritten: sweeps on pinned blocks wait, all others go on."""

from __future__ import annotations

import dataclasses

from penstock.daemons.optimizer.machine.events import (
    CommitAsked,
    OwnedBlock,
    PinsSeen,
    RunSweep,
    SendReady,
    SetSlot,
    SkipAsked,
    UpdatePolicy,
)
from penstock.daemons.optimizer.machine.machine import OptimizerMachine
from penstock.daemons.optimizer.machine.sweeps import Advance, Hold, Preview, Settle
from tests.optimizer.machine import (
    DONE,
    ONE_BLOCK,
    TWO_BLOCKS,
    attempt,
    begin,
    facts,
    invalid,
    live,
    ready,
    record,
    status,
    update,
)

FLUSH_BLOCK = OwnedBlock(index=0, contributions=1, policy=UpdatePolicy.FLUSH)


def sweeps(effects: list[object]) -> list[object]:
    return [effect.work for effect in effects if isinstance(effect, RunSweep)]


def test_the_sweep_that_leads_to_the_pinned_version_goes_on() -> None:
    machine = live(state=4)
    machine.handle(PinsSeen(pins={0: 5}))
    machine.handle(attempt(51, 5))
    assert sweeps(machine.handle(ready(51))) == [
        Advance(block=0, pending=update(5), update=update(6))
    ]


def test_a_sweep_away_from_it_waits_and_other_blocks_go_on() -> None:
    machine = live(state=4, blocks=TWO_BLOCKS)
    machine.handle(PinsSeen(pins={0: 4, 3: 5}))
    machine.handle(attempt(51, 5))
    assert sweeps(machine.handle(ready(51, block=0))) == [], "4 is read still"
    work = Advance(block=3, pending=update(5), update=update(6))
    assert sweeps(machine.handle(ready(51, block=3))) == [work]
    assert machine.handle(DONE)[-1] == status(51, block=3)
    assert dict(machine.pins) == {0: 4, 3: 5}
    work = Advance(block=0, pending=update(5), update=update(6))
    assert sweeps(machine.handle(PinsSeen(pins={3: 5}))) == [work]
    assert machine.handle(DONE)[-1] == status(51)


def test_previews_of_a_pinned_block_go_on() -> None:
    machine = live(state=5)
    machine.handle(PinsSeen(pins={0: 5}))
    machine.handle(attempt(51, 5))
    assert sweeps(machine.handle(ready(51))) == [Preview(block=0, update=update(6))]


def test_work_behind_a_settle_that_waits_waits_too() -> None:
    early = (OwnedBlock(index=0, contributions=1, policy=UpdatePolicy.SETTLE_EARLY),)
    machine = live(state=4, blocks=early)
    machine.handle(PinsSeen(pins={0: 4}))
    assert sweeps(machine.handle(attempt(51, 5))) == []
    assert sweeps(machine.handle(ready(51))) == []
    assert sweeps(machine.handle(PinsSeen(pins={}))) == [Settle(block=0, update=update(5))]
    assert sweeps(machine.handle(dataclasses.replace(DONE, status=None))) == [
        Preview(block=0, update=update(6))
    ]


def test_a_restarted_optimizerd_honours_pins() -> None:
    """The commit's weights are missing; what makes them would overwrite what is read."""
    machine = OptimizerMachine(ONE_BLOCK)
    found = dataclasses.replace(facts(4, {0: (4, 4, 2**64 - 1)}), pins={0: 4})
    effects = machine.handle(begin(found, record(5, 50)))
    assert sweeps(effects) == []
    assert not any(isinstance(effect, SendReady) for effect in effects)
    assert sweeps(machine.handle(PinsSeen(pins={}))) == [Hold(block=0, update=update(5))]
    assert machine.handle(dataclasses.replace(DONE, status=None))[-1] == SendReady(epoch=1)


def test_a_worker_flushes_over_a_version_only_when_it_was_read() -> None:
    machine = live(state=5, blocks=(FLUSH_BLOCK,))
    machine.handle(PinsSeen(pins={0: 4}))
    vacated = invalid(0, 0)
    assert vacated not in machine.handle(attempt(51, 5)), "the copy of 6 is that of 4"
    assert machine.handle(PinsSeen(pins={})) == [vacated]
    machine.handle(SkipAsked(epoch=1, attempt=51))
    machine = live(state=5, blocks=(FLUSH_BLOCK,))
    machine.handle(PinsSeen(pins={0: 5}))
    assert vacated in machine.handle(attempt(51, 5)), "the copy of 5 is another one"


def test_a_held_commit_waits_with_its_weights() -> None:
    machine = live(state=5)
    machine.handle(PinsSeen(pins={0: 5}))
    machine.handle(attempt(51, 5, hold=True))
    machine.handle(ready(51))
    machine.handle(DONE)
    effects = machine.handle(CommitAsked(epoch=1, record=record(6, 51)))
    assert sweeps(effects) == []
    assert not any(isinstance(e, SetSlot) and e.version == 6 for e in effects)
    assert sweeps(machine.handle(PinsSeen(pins={}))) == [Hold(block=0, update=update(6))]
