"""The machine of memoryd: a few events in, the whole list of effects out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.daemons.memory.machine.events import (
    BeginOrdered,
    CancelJob,
    DrainOrdered,
    Effect,
    Event,
    Exit,
    Ignore,
    JobCancelled,
    JobFailed,
    RefusedByScheduler,
    Restored,
    RestoreOrdered,
    Saved,
    SaveOrdered,
    SendDrained,
    SendFailed,
    SendReady,
    SendRestored,
    SendSaved,
    ShutdownOrdered,
    StartRestore,
    StartSave,
    StopAsked,
    UnlinkMemory,
)
from penstock.daemons.memory.machine.state import MemoryState, Phase
from penstock.daemons.memory.tensorfile import WrittenFile

DRAIN = DrainOrdered(epoch=1)
RESTORE = RestoreOrdered(epoch=1, incarnation=4, source="", version=0)
BEGIN = BeginOrdered(epoch=1)
SAVE = SaveOrdered(epoch=1, version=7, directory="d")
SHUTDOWN = ShutdownOrdered(keep_memory=False, reason="done")
KEEP = ShutdownOrdered(keep_memory=True, reason="stopped")
FILES = (WrittenFile(name="block-0000.safetensors", num_bytes=5, sha256="00"),)
END = Exit(exit_code=0, reason="done")


@pytest.fixture
def state() -> Iterator[MemoryState]:
    found = MemoryState()
    yield found
    found.validate()


def feed(state: MemoryState, *events: Event) -> list[Effect]:
    """The effects of the last event."""
    effects: list[Effect] = []
    for event in events:
        effects = state.handle(event)
    return effects


def test_first_epoch(state: MemoryState) -> None:
    assert feed(state, DRAIN) == [SendDrained(epoch=1)]
    assert feed(state, RESTORE) == [StartRestore(incarnation=4, source="", version=0)]
    assert feed(state, Restored()) == [SendRestored(epoch=1, incarnation=4)]
    assert feed(state, BEGIN) == [SendReady(epoch=1)]
    assert state.phase is Phase.READY


def test_adopted_memory_needs_no_restore(state: MemoryState) -> None:
    assert feed(state, DRAIN, BEGIN) == [SendReady(epoch=1)]


def test_save(state: MemoryState) -> None:
    assert feed(state, DRAIN, BEGIN, SAVE) == [StartSave(version=7, directory="d")]
    assert feed(state, Saved(files=FILES)) == [SendSaved(epoch=1, version=7, files=FILES, error="")]
    assert feed(state, SAVE) == [StartSave(version=7, directory="d")]
    state.handle(JobCancelled())


def test_a_failed_save_does_not_end_the_run(state: MemoryState) -> None:
    feed(state, DRAIN, BEGIN, SAVE)
    assert feed(state, JobFailed(error="disk full", exit_code=3)) == [
        SendSaved(epoch=1, version=7, files=(), error="disk full")
    ]
    assert state.phase is Phase.READY


def test_a_failed_restore_ends_the_process(state: MemoryState) -> None:
    feed(state, DRAIN, RESTORE)
    assert feed(state, JobFailed(error="block-0001 is damaged", exit_code=2)) == [
        SendFailed(epoch=1, error="block-0001 is damaged", exit_code=2),
        Exit(exit_code=2, reason="block-0001 is damaged"),
    ]
    assert feed(state, DRAIN) == [Ignore(why="DrainOrdered after the end")]


@pytest.mark.parametrize("last", [JobCancelled(), Restored(), JobFailed(error="x", exit_code=2)])
def test_a_drain_waits_for_the_end_of_a_restore(state: MemoryState, last: Event) -> None:
    feed(state, DRAIN, RESTORE)
    assert feed(state, DrainOrdered(epoch=2)) == [CancelJob()]
    assert feed(state, DrainOrdered(epoch=3)) == []
    assert feed(state, last) == [SendDrained(epoch=3)]
    assert (state.epoch, state.phase) == (3, Phase.DRAINED)


@pytest.mark.parametrize(
    "last", [JobCancelled(), Saved(files=FILES), JobFailed(error="x", exit_code=2)]
)
def test_a_drain_waits_for_the_end_of_a_save(state: MemoryState, last: Event) -> None:
    feed(state, DRAIN, BEGIN, SAVE)
    assert feed(state, DrainOrdered(epoch=2)) == [CancelJob()]
    assert feed(state, last) == [SendDrained(epoch=2)]


def test_shutdown(state: MemoryState) -> None:
    assert feed(state, DRAIN, BEGIN, SHUTDOWN) == [UnlinkMemory(), END]


def test_shutdown_that_keeps_memory(state: MemoryState) -> None:
    assert feed(state, DRAIN, KEEP) == [Exit(exit_code=0, reason="stopped")]


def test_shutdown_before_the_first_drain(state: MemoryState) -> None:
    assert feed(state, SHUTDOWN) == [UnlinkMemory(), END]


def test_shutdown_during_a_restore_outweighs_a_drain(state: MemoryState) -> None:
    feed(state, DRAIN, RESTORE, DrainOrdered(epoch=2))
    assert feed(state, SHUTDOWN) == []
    assert feed(state, DrainOrdered(epoch=3)) == []
    assert feed(state, JobCancelled()) == [UnlinkMemory(), END]


def test_stop_keeps_memory(state: MemoryState) -> None:
    assert feed(state, DRAIN, BEGIN, StopAsked()) == [
        Exit(exit_code=130, reason="asked to stop; memory is kept")
    ]


def test_refused(state: MemoryState) -> None:
    assert feed(state, RefusedByScheduler(reason="fenced")) == [Exit(exit_code=4, reason="fenced")]


@pytest.mark.parametrize(
    ("before", "event"),
    [
        ((), RESTORE),
        ((), BEGIN),
        ((), SAVE),
        ((DRAIN,), SAVE),
        ((DRAIN,), RestoreOrdered(epoch=2, incarnation=4, source="", version=0)),
        ((DRAIN, BEGIN), RESTORE),
        ((DRAIN, BEGIN), SaveOrdered(epoch=0, version=1, directory="d")),
        ((DRAIN, DrainOrdered(epoch=5)), DrainOrdered(epoch=4)),
        ((DRAIN, DrainOrdered(epoch=5)), BEGIN),
    ],
)
def test_stale_and_early_orders_are_ignored(
    state: MemoryState, before: tuple[Event, ...], event: Event
) -> None:
    feed(state, *before)
    phase = state.phase
    (effect,) = feed(state, event)
    assert isinstance(effect, Ignore)
    assert type(event).__name__ in effect.why
    assert state.phase is phase


def test_a_repeated_drain_is_answered_again(state: MemoryState) -> None:
    assert feed(state, DRAIN, DRAIN) == [SendDrained(epoch=1)]
