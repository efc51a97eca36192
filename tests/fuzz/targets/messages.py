"""What comes over gRPC: members' messages at the scheduler, and its messages at members."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from penstock.daemons.kit.messages import COMMON_EVENTS, event_of, record_message, record_of
from penstock.daemons.memory.service import _EVENTS as MEMORY_EVENTS
from penstock.daemons.node.service import _EVENTS as NODE_EVENTS
from penstock.daemons.optimizer.service import EVENTS as OPTIMIZER_EVENTS
from penstock.daemons.scheduler.intake import MAX_NAME, MAX_TEXT, cut_short, malformed
from penstock.daemons.scheduler.machine.events import (
    Joined,
    JournalDecision,
    JournalEpoch,
    JournalEvaluation,
    Received,
)
from penstock.host.errors import PenstockError
from penstock.protocol.generated import scheduler_pb2 as pb
from tests.fuzz.mutating import in_pieces, joined
from tests.fuzz.target import Decoder, Target, plainly
from tests.scheduler.conftest import RUN_ID, Driver, make_record

STRANGER = 999
"""A stream that said no Hello that was accepted."""
EPOCH, ATTEMPT = 1, 1
COUNTS = ("failed", "hello")
"""What counts in any epoch: a member that cannot go on, or says Hello twice, is lost."""


def _live_run() -> Driver:
    """A scheduler's machine in its first attempt."""
    driver = Driver()
    driver.begin()
    assert (driver.epoch, driver.attempt, driver.machine.phase.value) == (EPOCH, ATTEMPT, "running")
    return driver


def _fingerprint(driver: Driver) -> tuple[Any, ...]:
    machine = driver.machine
    return (machine.phase, driver.epoch, driver.attempt, machine.mirror.version)


@contextmanager
def _scheduler(folder: Path) -> Iterator[Decoder]:
    """Messages on streams of members and of a stranger, in an attempt. The machine contradicts
    nothing, and for strangers and words of another epoch it does nothing.
    """
    del folder

    def receive(data: bytes) -> None:
        driver = _live_run()
        streams = [STRANGER, *driver.streams.values()]
        for piece in in_pieces(data)[:8]:
            message = cut_short(pb.MemberMessage.FromString(piece[1:]))
            stream = streams[piece[0] % len(streams)] if piece else STRANGER
            kind = message.WhichOneof("body")
            body = None if kind is None else getattr(message, kind)
            old = getattr(body, "epoch", EPOCH) not in (0, driver.epoch) and kind not in COUNTS
            before = _fingerprint(driver)
            driver.feed(Received(stream=stream, message=message))
            if stream == STRANGER or old:
                assert _fingerprint(driver) == before, message
                rows = (JournalDecision, JournalEpoch, JournalEvaluation)
                assert not [e for e in driver.effects if isinstance(e, rows)], message

    yield receive


def _hello(data: bytes) -> None:
    """A Hello of whoever, where all members are there: none of them loses its stream."""
    message = pb.MemberMessage.FromString(data)
    if malformed(message.hello):
        return
    assert max(len(message.hello.member), len(message.hello.run_id)) <= MAX_NAME
    driver = _live_run()
    before = _fingerprint(driver)
    driver.feed(Joined(stream=STRANGER, hello=message.hello))
    assert _fingerprint(driver) == before, message
    for name, stream in driver.streams.items():
        assert driver.machine.members.name_of(stream) == name, message


def _bodies() -> list[pb.MemberMessage]:
    sweep = pb.BlockStatus(epoch=EPOCH, attempt=ATTEMPT, block=0, finite=True, sum_squares=1.0)
    done = pb.AttemptDone(
        epoch=EPOCH, attempt=ATTEMPT, loss_sum=2.0, loss_tokens=10, wall_seconds=1.0
    )
    memory = pb.MemoryState(incarnation=7000, committed=3)
    return [
        pb.MemberMessage(heartbeat=pb.Heartbeat(activity="F 0 0", progress=3)),
        pb.MemberMessage(block_status=sweep),
        pb.MemberMessage(attempt_done=done),
        pb.MemberMessage(drained=pb.Drained(epoch=EPOCH, memory=memory)),
        pb.MemberMessage(drained=pb.Drained(epoch=EPOCH - 1)),
        pb.MemberMessage(restored=pb.Restored(epoch=EPOCH, incarnation=7000)),
        pb.MemberMessage(ready=pb.Ready(epoch=EPOCH)),
        pb.MemberMessage(failed=pb.Failed(error="no room", exit_code=3, epoch=EPOCH)),
        pb.MemberMessage(saved=pb.Saved(epoch=EPOCH, version=1, error="")),
        pb.MemberMessage(fenced=pb.Fenced(member="worker.0", pid=101, death="killed")),
        pb.MemberMessage(cut_off=pb.CutOff(epoch=EPOCH, loss="worker 1")),
        pb.MemberMessage(hello=_greeting()),
    ]


def _greeting(**changes: Any) -> pb.Hello:
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "member": "worker.0",
        "pid": 4711,
        "epoch": 0,
        "data_endpoint": "tcp://10.0.0.1:4711",
        "nonce": 77,
    }
    return pb.Hello(**(fields | changes))


def _of_members() -> list[bytes]:
    words = [bytes([1 + i % 5]) + body.SerializeToString() for i, body in enumerate(_bodies())]
    return [joined(b"\0" + words[1][1:]), joined(*words[:3]), *map(joined, words)]


def _hellos() -> list[bytes]:
    greetings = [
        _greeting(),
        _greeting(member="worker.1", epoch=1, peers=pb.Peers(members=["worker.0"])),
        _greeting(member="node.a", run_id="0" * 12),
        _greeting(member="memoryd.b", nonce=0),
    ]
    return [pb.MemberMessage(hello=hello).SerializeToString() for hello in greetings]


def _order(data: bytes) -> None:
    """A message of the scheduler, as every kind of member hears it."""
    message = pb.SchedulerMessage.FromString(data)
    for events in (COMMON_EVENTS, MEMORY_EVENTS, NODE_EVENTS, OPTIMIZER_EVENTS):
        event_of(message, events)
    if message.WhichOneof("body") == "begin":
        record_of(message.begin.record)


def _orders() -> list[bytes]:
    record = record_message(make_record(3, 3))
    orders = [
        pb.SchedulerMessage(drain=pb.Drain(epoch=2)),
        pb.SchedulerMessage(restore=pb.Restore(epoch=2, incarnation=7, source="x", version=1)),
        pb.SchedulerMessage(begin=pb.Begin(epoch=2, record=record, plan_digest="feed")),
        pb.SchedulerMessage(commit=pb.Commit(epoch=2, record=record)),
        pb.SchedulerMessage(amend=pb.Amend(epoch=2, attempt=3, record=record)),
        pb.SchedulerMessage(run_attempt=pb.RunAttempt(epoch=2, attempt=4, loss_scale=1.0)),
        pb.SchedulerMessage(shutdown=pb.Shutdown(reason="done", exit_code=5, keep_memory=True)),
        pb.SchedulerMessage(fence=pb.Fence(member="worker.0", pid=3)),
        pb.SchedulerMessage(save=pb.Save(epoch=2, version=3, directory="/x")),
        pb.SchedulerMessage(refused=pb.Refused(reason="no")),
    ]
    return [order.SerializeToString() for order in orders]


def _long(data: bytes) -> None:
    """What is kept of free texts of a message is short enough to be shown."""
    message = cut_short(pb.MemberMessage.FromString(data))
    assert len(message.failed.error) <= MAX_TEXT + 1
    assert len(message.fenced.death) <= MAX_NAME + 1


MESSAGES = (
    Target(
        name="member-messages",
        open=_scheduler,
        covers=("daemons.scheduler.intake.cut_short",),
        seeds=_of_members,
        allowed=(PenstockError, DecodeError),
        examples=150,
    ),
    Target(
        name="hellos",
        open=plainly(_hello),
        covers=("daemons.scheduler.intake.malformed",),
        seeds=_hellos,
        allowed=(PenstockError, DecodeError),
        examples=100,
    ),
    Target(
        name="long-texts",
        open=plainly(_long),
        covers=("daemons.scheduler.intake.cut_short",),
        seeds=lambda: [
            pb.MemberMessage(failed=pb.Failed(error="x" * 20_000)).SerializeToString(),
            pb.MemberMessage(fenced=pb.Fenced(member="a", death="x" * 200)).SerializeToString(),
        ],
        allowed=(PenstockError, DecodeError),
        examples=20,
    ),
    Target(
        name="orders",
        open=plainly(_order),
        covers=("daemons.kit.messages.event_of", "daemons.kit.messages.record_of"),
        seeds=_orders,
        allowed=(PenstockError, DecodeError),
    ),
)
