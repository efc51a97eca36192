"""Who may write shared memory, and in which order: a process that has said Drained writes nothing
until it is told to; memory that has a model is not filled; nothing follows the last word of a
refill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock.host import world
from penstock.protocol.wire.member import MemberLink
from tests.simulation.kernel import Process

WRITES_AGAIN = ("begin", "restore", "settle")
"""Messages that end the silence which a Drained began."""
ANY_TIME = frozenset({"set_pin", "set_epoch"})
"""Words of no attempt: a save goes on over barriers, and an epoch's word says that one ended."""
FILLS = frozenset(
    {
        *("set_slot_version", "set_state_version", "clear_history", "write_record"),
        *("set_committed", "set_generation", "set_lost_attempt"),
    }
)
"""Words that a memoryd stores only while there is no model in its memory."""

FILLERS = ("memoryd", "mirrord")
"""Kinds of processes that fill memory, or begin a replica anew."""

_real_send, _real_receive = MemberLink.send, MemberLink.receive


def _here() -> Process:
    process = world.here().process  # type: ignore[attr-defined]
    assert isinstance(process, Process)
    return process


def send(link: MemberLink, message: Any) -> None:
    """As the real one; who says Drained is quiet from then on."""
    if message.HasField("drained"):
        _here().quiet = True
    _real_send(link, message)


def receive(link: MemberLink, timeout_s: float | None) -> Any:
    """As the real one; an order that lets a process write ends its silence."""
    message = _real_receive(link, timeout_s)
    if message is not None and message.WhichOneof("body") in WRITES_AGAIN:
        _here().quiet = False
    return message


def writes(process: Process, what: str) -> None:
    """A process is about to write shared memory, or has just done so."""
    if process.quiet and process.alive:
        history = process.world.cluster.history
        history.violation(f"{process.name} has said Drained, and goes on: {what}")


def before_word(control: Any, kind: str, name: str, args: tuple[Any, ...]) -> Iterator[str]:
    """A process of ``kind`` is about to store a word: memory is filled while it has no model."""
    fills = name in FILLS if kind == "memoryd" else name == "clear_history"
    if kind in FILLERS and fills and control.incarnation:
        yield f"{kind} stores {name}{args} in memory that has a model"


def behind_word(
    control: Any, process: Process, name: str, args: tuple[Any, ...], announced: Any
) -> Iterator[str]:
    """A word was stored: what it promises was there before."""
    if name == "set_committed" and control.record(args[0]) is None:
        yield f"{process.name} flips to version {args[0]}, which has no record"
    if name == "set_incarnation" and args[0] and process.kind in FILLERS:
        record = control.record(control.committed)
        if record is None or record.incarnation != args[0]:
            yield f"{process.name} names filling {args[0]}, and its record is {record}"
        if process.kind == "memoryd":
            yield from announced.filled(
                process.name, args[0], control.generation, control.lost_attempt
            )


def replace_links(put: Callable[[Any, str, Any], None]) -> None:
    """Have members' links note who is quiet."""
    put(MemberLink, "send", send)
    put(MemberLink, "receive", receive)
