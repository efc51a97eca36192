"""Traces: times of everything that the processes of a run did, as files that outlive them.

Each process appends to ``RUN_DIR/trace/<member>.jsonl`` (:class:`TraceLog`). A line is an array.
The first line of every life of a process describes its clock, all others are events::

    ["trace", 1, member, pid, boot id, monotonic seconds, seconds since 1970]
    [lane, text, phase, attempt, start, end, waited]

``text`` is the instruction (``F 3 0 keep=all``), or a text of :class:`TraceLane`. Times are seconds
of CLOCK_MONOTONIC, which all processes of a machine share, and which cannot be set. ``waited``, the
seconds at the start that were spent waiting for input, is left out if it is 0.

Between machines there is no common clock. Readers (:mod:`penstock.protocol.run.trace_reading`)
shift times of other boot ids by the difference of their first lines' times since 1970. So these
times are as wrong as the machines' clocks (milliseconds with NTP). On one machine nothing is
shifted.

Events are kept in memory and appended with one ``write`` when an attempt is over. A killed process
leaves whole lines except possibly the last, which readers skip; events that it had not written are
lost. A file that has grown to :data:`MAX_FILE_BYTES` becomes ``<member>.old.jsonl``. A file that
cannot be written ends the trace, not the run.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

from penstock.host import world
from penstock.host.files import append_whole

FORMAT = 1
MAX_EVENTS = 32768
"""Most events that are kept in memory. One more, and all are written, also during an attempt."""
MAX_REMEMBERED = 32768
"""Starts of lines that are remembered."""
MAX_FILE_BYTES = 64 << 20
"""Bytes of a file; a process has at most twice as many on disk, because the previous file is
kept.
"""


_log = logging.getLogger(__name__)


class TraceLane(StrEnum):
    """Part of a process that was busy."""

    COMPUTE = "compute"
    """The interpreter runs an instruction that computes, or a load that it does itself."""
    ISSUE = "issue"
    """The interpreter runs any other instruction; what that started may take longer."""
    FETCH = "fetch"
    """Copies weights to the device, in parallel to the interpreter: ``FW 3 phase=forward``."""
    OFFLOAD = "offload"
    """Nothing was busy: the moment at which gradients were published, ``block contribution``."""
    DATA = "data"
    """The batch of an attempt is read, before its first instruction: ``batch``."""
    COPY = "copy"
    """Runs a copy that an instruction started in parallel to the interpreter, on a device that
    measures copies: ``OG 3``, ``SO 3 0 fraction=0.5``.
    """
    UPDATE = "update"
    """Previews a block on the device, in parallel to the interpreter: ``U 3``."""
    ARRIVAL = "arrival"
    """Nothing was busy: the moment at which a peer's tensor arrived, ``activation 3 0``."""
    MEMORY = "memory"
    """Nothing was busy: the moment at which the device held most in an attempt, ``bytes
    instruction``. It is the end of the attempt, without instruction, where single instructions are
    not measured.
    """
    PULL = "pull"
    """Nothing was busy: the moment at which another node's gradients had arrived, ``block
    contribution``.
    """
    OPTIMIZER = "optimizer"
    """A node's optimizer threads sweep over a block: ``advance 7``."""
    SCHEDULER = "scheduler"
    """The scheduler was busy: ``attempt`` from its announcement to the decision (or ``broken``),
    ``amending`` while optimizers clip, then ``commit``, ``amend`` or ``skip`` until that is
    journaled and announced; ``evaluation``, ``save``, ``restore``.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One thing that happened; the module explains the fields. Moments start and end at once."""

    lane: TraceLane
    text: str
    attempt: int
    start_s: float
    end_s: float
    phase: str = "train"
    waited_s: float = 0.0

    def to_line(self) -> str:
        """Returns a line of the file."""
        waited = f",{self.waited_s:.6f}" if self.waited_s else ""
        return (
            f'{_start_of_line(self.lane, self.text)}{self.phase}",{self.attempt},'
            f"{self.start_s:.6f},{self.end_s:.6f}{waited}]\n"
        )

    @classmethod
    def from_list(cls, line: list[Any]) -> TraceEvent:
        """Returns the event of a line that JSON has read: the inverse of :meth:`to_line`.

        Raises:
            ValueError, TypeError: it is no event.
        """
        lane, text, phase, attempt, start_s, end_s, *rest = line
        return cls(
            lane=TraceLane(lane),
            text=str(text),
            phase=str(phase),
            attempt=int(attempt),
            start_s=float(start_s),
            end_s=float(end_s),
            waited_s=float(rest[0]) if rest else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOrigin:
    """Process of the events that follow, and both clocks at one moment."""

    member: str
    pid: int
    boot_id: str
    monotonic_s: float
    realtime_s: float

    @classmethod
    def here(cls, member: str) -> TraceOrigin:
        """Returns the origin of this process, now."""
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return cls(
            member=member,
            pid=world.pid(),
            boot_id=boot_id,
            monotonic_s=now_s(),
            realtime_s=world.wall(),
        )

    @property
    def offset_s(self) -> float:
        """Seconds since 1970 minus the machine's monotonic clock."""
        return self.realtime_s - self.monotonic_s

    def to_line(self) -> str:
        """Returns the first line of a file."""
        times = round(self.monotonic_s, 6), round(self.realtime_s, 6)
        line = ["trace", FORMAT, self.member, self.pid, self.boot_id, *times]
        return json.dumps(line, separators=(",", ":")) + "\n"

    @classmethod
    def from_list(cls, line: list[Any]) -> TraceOrigin:
        """Returns the origin of a line that JSON has read: the inverse of :meth:`to_line`.

        Raises:
            ValueError, TypeError: it is no origin, or of another format.
        """
        _, version, member, pid, boot_id, monotonic_s, realtime_s = line
        if version != FORMAT:
            raise ValueError(f"format {version}, this Penstock reads {FORMAT}")
        return cls(
            member=str(member),
            pid=int(pid),
            boot_id=str(boot_id),
            monotonic_s=float(monotonic_s),
            realtime_s=float(realtime_s),
        )


def _start_of_line(lane: TraceLane, text: str) -> str:
    return f'["{lane.value}",{json.dumps(text)},"'


_Row: TypeAlias = tuple[TraceLane, str, str, int, float, float, float]
"""The fields of an event, as :meth:`TraceLog.record` has them."""


def now_s() -> float:
    """Returns the clock of traces in seconds; on Linux ``time.perf_counter`` reads the same one."""
    return world.monotonic()


class TraceLog:
    """The trace of this process. Any thread may add to it."""

    def __init__(self, path: Path | None, member: str, every: int = 1) -> None:
        """Appends to ``path``; without a path, no event is kept. ``every``: one attempt in
        ``every`` is traced, with a number that is a multiple of it; 1: all, and evaluations.
        """
        self._path = path if every else None
        self._member = member
        self._every = every
        self._rows: deque[_Row] = deque()
        self._starts: dict[tuple[str, str], str] = {}
        self._lock = world.lock()  # one thread writes at a time
        self._begun = False

    @classmethod
    def of_run(cls, run_dir: Path, member: str, every: int) -> TraceLog:
        """Returns the log of a member of a run; it keeps nothing where ``every`` is 0."""
        return cls(run_dir / "trace" / f"{member}.jsonl", member, every)

    @property
    def enabled(self) -> bool:
        """True if any event is kept."""
        return self._path is not None

    @property
    def is_complete(self) -> bool:
        """True if every event is kept."""
        return self._path is not None and self._every == 1

    def keeps(self, attempt: int, phase: str = "train") -> bool:
        """Returns whether events of an attempt (or of an evaluation) are kept: ask before they are
        made.
        """
        if self._path is None:
            return False
        return self._every == 1 or (phase == "train" and attempt % self._every == 0)

    def add(self, event: TraceEvent) -> None:
        """Keeps an event until the next :meth:`flush`."""
        self.record(
            event.lane,
            event.text,
            event.phase,
            event.attempt,
            event.start_s,
            event.end_s,
            event.waited_s,
        )

    def record(
        self,
        lane: TraceLane,
        text: str,
        phase: str,
        attempt: int,
        start_s: float,
        end_s: float,
        waited_s: float = 0.0,
    ) -> None:
        """Keeps what :class:`TraceEvent` has, without making one: a tuple is all that is made while
        an attempt runs.
        """
        if self._path is None:
            return
        # Appending to a deque is atomic. Without a lock the interpreter waits for the disk only
        # when the buffer is full.
        self._rows.append((lane, text, phase, attempt, start_s, end_s, waited_s))
        if len(self._rows) > MAX_EVENTS:
            self.flush()

    def flush(self) -> None:
        """Appends all events to the file."""
        if self._path is None or not self._rows:
            return
        with self._lock:
            # popleft, not iteration: other threads may be adding.
            rows = [self._rows.popleft() for _ in range(len(self._rows))]
            try:
                self._append(self._path, self._lines(rows))
            except OSError as error:
                _log.warning("%s: cannot write it, no trace from here on: %s", self._path, error)
                self._path = None  # a full disk must not end a run for the sake of its trace
                self._rows.clear()

    def _lines(self, rows: Iterable[_Row]) -> list[str]:
        """Returns lines of the file. They are written by hand: this is most of what tracing costs.
        Instructions come again in every attempt, so how their lines start is remembered.
        """
        starts, lines = self._starts, []
        for lane, text, phase, attempt, start_s, end_s, waited_s in rows:
            start = starts.get((lane, text))
            if start is None:
                if len(starts) >= MAX_REMEMBERED:
                    starts.clear()
                start = starts[lane, text] = _start_of_line(lane, text)
            waited = f",{waited_s:.6f}" if waited_s else ""
            lines.append(f'{start}{phase}",{attempt},{start_s:.6f},{end_s:.6f}{waited}]\n')
        return lines

    def _append(self, path: Path, lines: list[str]) -> None:
        if not self._begun:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif path.stat().st_size > MAX_FILE_BYTES:
            # One file back is kept, and the new one names its origin again: each reads by itself.
            path.replace(path.with_suffix(".old.jsonl"))
            self._begun = False
        start = ""
        if not self._begun:
            # The process before this one may have been killed within its last line.
            start = "\n" if path.exists() and path.stat().st_size else ""
            lines = [TraceOrigin.here(self._member).to_line(), *lines]
            self._begun = True
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            append_whole(descriptor, (start + "".join(lines)).encode())
        finally:
            os.close(descriptor)
