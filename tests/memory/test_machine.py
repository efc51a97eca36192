"""The machine of memoryd: a few events in, the whole list of effects out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.daemons.kit.events import (
    BeginAsked,
    DrainAsked,
    Exit,
    LogLine,
    RefusedByScheduler,
    SendDrained,
    SendFailed,
    SendReady,
    ShutdownAsked,
    StopAsked,
)
from penstock.daemons.memory.machine.events import (
    CancelJob,
    Effect,
    Event,
    JobCancelled,
    JobFailed,
    RestoreAsked,
    Restored,
    SaveAsked,
    Saved,
    SendPinned,
    SendRestored,
    SendSaved,
    SourceDamaged,
    StartRestore,
    StartSave,
    UnlinkMemory,
    WrittenFile,
)
from penstock.daemons.memory.machine.machine import MemoryMachine, MemoryPhase

DRAIN = DrainAsked(epoch=1)
RESTORE = RestoreAsked(epoch=1, incarnation=4, source="", version=0)
BEGIN = BeginAsked(epoch=1)
FILES = (WrittenFile(name="block-0000.safetensors", num_bytes=5, sha256="00"),)
SAVE = SaveAsked(epoch=1, number=1, version=7, directory="d")
STARTED = [
    StartSave(version=7, directory="d"),
    SendPinned(epoch=1, number=1, version=7),
]
SAVED = SendSaved(epoch=1, number=1, version=7, files=FILES, error="")
SHUTDOWN = ShutdownAsked(keep_memory=False, reason="done")
KEEP = ShutdownAsked(keep_memory=True, reason="stopped")
END = Exit(code=0, reason="done")


@pytest.fixture
def machine() -> Iterator[MemoryMachine]:
    found = MemoryMachine()
    yield found
    found.validate()


def feed(machine: MemoryMachine, *events: Event) -> list[Effect]:
    """The effects of the last event."""
    effects: list[Effect] = []
    for event in events:
        effects = machine.handle(event, now_s=0.0)
        machine.validate()
    return effects


def test_first_epoch(machine: MemoryMachine) -> None:
    assert feed(machine, DRAIN) == [SendDrained(epoch=1)]
    assert feed(machine, RESTORE) == [StartRestore(incarnation=4, source="", version=0)]
    assert feed(machine, Restored()) == [SendRestored(epoch=1, incarnation=4)]
    assert feed(machine, BEGIN) == [SendReady(epoch=1)]
    assert machine.phase is MemoryPhase.READY


def test_adopted_memory_needs_no_restore(machine: MemoryMachine) -> None:
    assert feed(machine, DRAIN, BEGIN) == [SendReady(epoch=1)]


def test_save(machine: MemoryMachine) -> None:
    assert feed(machine, DRAIN, BEGIN, SAVE) == STARTED
    assert feed(machine, Saved(files=FILES)) == [SAVED]
    assert feed(machine, SAVE) == STARTED
    assert feed(machine, JobCancelled()) == []
    assert machine.phase is MemoryPhase.READY


def test_a_failed_save_does_not_end_the_run(machine: MemoryMachine) -> None:
    feed(machine, DRAIN, BEGIN, SAVE)
    assert feed(machine, JobFailed(error="disk full", exit_code=3)) == [
        SendSaved(epoch=1, number=1, version=7, files=(), error="disk full")
    ]
    assert machine.phase is MemoryPhase.READY


def test_a_save_goes_on_over_a_barrier_that_names_it(machine: MemoryMachine) -> None:
    feed(machine, DRAIN, BEGIN, SAVE)
    assert feed(machine, DrainAsked(epoch=2, saving=1)) == [SendDrained(epoch=2)]
    assert feed(machine, BeginAsked(epoch=2)) == [SendReady(epoch=2)]
    assert feed(machine, Saved(files=FILES)) == [SAVED], "of the epoch in which it was ordered"


def test_how_a_save_ended_is_said_again_to_who_may_not_have_heard(machine: MemoryMachine) -> None:
    feed(machine, DRAIN, BEGIN, SAVE, Saved(files=FILES))
    assert feed(machine, DrainAsked(epoch=2, saving=1)) == [SendDrained(epoch=2), SAVED]
    assert feed(machine, DrainAsked(epoch=3)) == [SendDrained(epoch=3)]
    assert feed(machine, DrainAsked(epoch=4, saving=1)) == [SendDrained(epoch=4)]


def test_a_newer_save_takes_the_place_of_one_under_way(machine: MemoryMachine) -> None:
    feed(machine, DRAIN, BEGIN, SAVE)
    newer = SaveAsked(epoch=1, number=2, version=8, directory="e")
    assert feed(machine, newer) == [CancelJob()]
    assert feed(machine, JobCancelled()) == [
        StartSave(version=8, directory="e"),
        SendPinned(epoch=1, number=2, version=8),
    ]
    feed(machine, JobCancelled())


def test_a_restore_waits_for_the_end_of_a_save(machine: MemoryMachine) -> None:
    feed(machine, DRAIN, BEGIN, SAVE, DrainAsked(epoch=2, saving=1))
    restore = RestoreAsked(epoch=2, incarnation=4, source="", version=0)
    assert feed(machine, restore) == [CancelJob()]
    assert feed(machine, JobCancelled()) == [StartRestore(incarnation=4, source="", version=0)]


def test_a_damaged_saved_state_is_told_and_another_one_can_follow(machine: MemoryMachine) -> None:
    feed(machine, DRAIN, RESTORE)
    assert feed(machine, SourceDamaged(error="block-0001: cut short")) == [
        SendRestored(epoch=1, incarnation=4, damaged="block-0001: cut short")
    ]
    assert feed(machine, RESTORE) == [StartRestore(incarnation=4, source="", version=0)]


def test_a_failed_restore_ends_the_process(machine: MemoryMachine) -> None:
    feed(machine, DRAIN, RESTORE)
    assert feed(machine, JobFailed(error="block-0001 is damaged", exit_code=2)) == [
        SendFailed(epoch=1, error="block-0001 is damaged", code=2),
        Exit(code=2, reason="block-0001 is damaged"),
    ]
    assert feed(machine, DRAIN) == [LogLine(text="ignored: DrainAsked after the end")]


@pytest.mark.parametrize("last", [JobCancelled(), Restored(), JobFailed(error="x", exit_code=2)])
def test_a_drain_waits_for_the_end_of_a_restore(machine: MemoryMachine, last: Event) -> None:
    feed(machine, DRAIN, RESTORE)
    assert feed(machine, DrainAsked(epoch=2)) == [CancelJob()]
    assert feed(machine, DrainAsked(epoch=3)) == []
    assert feed(machine, last) == [SendDrained(epoch=3)]
    assert (machine.epoch, machine.phase) == (3, MemoryPhase.DRAINED)


@pytest.mark.parametrize(
    "last", [JobCancelled(), Saved(files=FILES), JobFailed(error="x", exit_code=2)]
)
def test_a_drain_waits_for_the_end_of_a_save(machine: MemoryMachine, last: Event) -> None:
    feed(machine, DRAIN, BEGIN, SAVE)
    assert feed(machine, DrainAsked(epoch=2)) == [CancelJob()]
    assert feed(machine, last) == [SendDrained(epoch=2)]


def test_shutdown(machine: MemoryMachine) -> None:
    assert feed(machine, DRAIN, BEGIN, SHUTDOWN) == [UnlinkMemory(), END]


def test_shutdown_that_keeps_memory(machine: MemoryMachine) -> None:
    assert feed(machine, DRAIN, KEEP) == [Exit(code=0, reason="stopped")]


def test_shutdown_before_the_first_drain(machine: MemoryMachine) -> None:
    assert feed(machine, SHUTDOWN) == [UnlinkMemory(), END]


def test_shutdown_during_a_restore_outweighs_a_drain(machine: MemoryMachine) -> None:
    feed(machine, DRAIN, RESTORE, DrainAsked(epoch=2))
    assert feed(machine, SHUTDOWN) == []
    assert feed(machine, DrainAsked(epoch=3)) == []
    assert feed(machine, JobCancelled()) == [UnlinkMemory(), END]


def test_a_shutdown_outweighs_a_stop_before_and_behind_it(machine: MemoryMachine) -> None:
    feed(machine, DRAIN, RESTORE, StopAsked())
    assert feed(machine, SHUTDOWN) == []
    assert feed(machine, StopAsked()) == []
    assert feed(machine, JobCancelled()) == [UnlinkMemory(), END]


def test_stop_keeps_memory(machine: MemoryMachine) -> None:
    assert feed(machine, DRAIN, BEGIN, StopAsked()) == [
        Exit(code=130, reason="asked to stop; memory is kept")
    ]


def test_refused(machine: MemoryMachine) -> None:
    assert feed(machine, RefusedByScheduler(reason="fenced")) == [Exit(code=4, reason="fenced")]


@pytest.mark.parametrize(
    ("before", "event"),
    [
        ((), RESTORE),
        ((), BEGIN),
        ((), SAVE),
        ((DRAIN,), SAVE),
        ((DRAIN,), RestoreAsked(epoch=2, incarnation=4, source="", version=0)),
        ((DRAIN, BEGIN), RESTORE),
        ((DRAIN, BEGIN), SaveAsked(epoch=0, number=1, version=1, directory="d")),
        ((DRAIN, DrainAsked(epoch=5)), DrainAsked(epoch=4)),
        ((DRAIN, DrainAsked(epoch=5)), BEGIN),
    ],
)
def test_stale_and_early_orders_are_ignored(
    machine: MemoryMachine, before: tuple[Event, ...], event: Event
) -> None:
    feed(machine, *before)
    phase = machine.phase
    (effect,) = feed(machine, event)
    assert isinstance(effect, LogLine)
    assert type(event).__name__ in effect.text
    assert machine.phase is phase


def test_a_repeated_drain_is_answered_again(machine: MemoryMachine) -> None:
    assert feed(machine, DRAIN, DRAIN) == [SendDrained(epoch=1)]
