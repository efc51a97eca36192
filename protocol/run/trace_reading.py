"""Reading of traces: those of all members at once, or lines since the last call.

:mod:`penstock.protocol.run.trace` defines the files and the clock of their times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.host.errors import ConfigError, reason
from penstock.host.files import parse_json
from penstock.protocol.run.trace import TraceEvent, TraceOrigin


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeTrace:
    """Events of one life of a process, on its own clock."""

    origin: TraceOrigin
    events: tuple[TraceEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberTrace:
    """Events of one life of a process, on the common clock, in the order of the file."""

    member: str
    pid: int
    events: tuple[TraceEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTrace:
    """All traces of a run. ``skipped_lines``: lines that were cut short or damaged. ``machines``:
    how many machines wrote them.
    """

    members: tuple[MemberTrace, ...]
    skipped_lines: int
    machines: int

    @classmethod
    def of(cls, lives: Sequence[LifeTrace], skipped_lines: int) -> RunTrace:
        """Returns the events of lives of processes, on the clock of the first one's machine."""
        return cls(
            members=tuple(_on_common_clock(lives)),
            skipped_lines=skipped_lines,
            machines=len({life.origin.boot_id for life in lives}),
        )

    def slowed(self, factor: float) -> RunTrace:
        """Returns all times multiplied by ``factor``: the clock of an emulated cluster runs
        faster.
        """
        members = (
            replace(member, events=tuple(_stretched(member.events, factor)))
            for member in self.members
        )
        return replace(self, members=tuple(members))


def read_traces(run_dir: Path) -> RunTrace:
    """Reads and merges all traces of a run.

    Raises:
        ConfigError: the path is no run directory, or has no trace; the message names a remedy.
    """
    if not (run_dir / "run.json").exists():
        raise ConfigError(f"{run_dir}: no run directory (it has no run.json)")
    files = sorted((run_dir / "trace").glob("*.jsonl"), key=lambda p: (".old." not in p.name, p))
    lives: list[LifeTrace] = []
    skipped = 0
    for path in files:
        life_traces, damaged = _read(path)
        lives += life_traces
        skipped += damaged
    if not lives:
        raise ConfigError(
            f"{run_dir}: this run has no trace; observability.sample_every says how often an"
            " attempt is traced, --set observability.trace=true has all of them (on a new run or a"
            " resume)"
        )
    return RunTrace.of(lives, skipped)


def _read(path: Path) -> tuple[list[LifeTrace], int]:
    lives: list[tuple[TraceOrigin, list[TraceEvent]]] = []
    skipped = 0
    try:
        text = path.read_bytes().decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it: {reason(error)}") from error
    for line in filter(None, text.split("\n")):
        try:
            values = parse_json(line)
            if values[0] == "trace":
                lives.append((TraceOrigin.from_list(values), []))
            else:
                lives[-1][1].append(TraceEvent.from_list(values))
        except (ValueError, OverflowError, TypeError, KeyError, IndexError):
            skipped += 1
    return [LifeTrace(origin=origin, events=tuple(events)) for origin, events in lives], skipped


def _on_common_clock(lives: Iterable[LifeTrace]) -> Iterator[MemberTrace]:
    """Yields traces on the clock of the first machine, with one offset for each machine, so that
    its order is kept.
    """
    offsets: dict[str, float] = {}
    first: float | None = None
    for life in lives:
        origin, events = life.origin, life.events
        offset_s = offsets.setdefault(origin.boot_id, origin.offset_s)
        first = offset_s if first is None else first
        shift_s = offset_s - first
        yield MemberTrace(
            member=origin.member,
            pid=origin.pid,
            events=events if shift_s == 0.0 else tuple(_moved(events, shift_s)),
        )


def _stretched(events: Iterable[TraceEvent], factor: float) -> Iterator[TraceEvent]:
    for event in events:
        yield replace(
            event,
            start_s=event.start_s * factor,
            end_s=event.end_s * factor,
            waited_s=event.waited_s * factor,
        )


def _moved(events: Iterable[TraceEvent], shift_s: float) -> Iterator[TraceEvent]:
    for event in events:
        yield replace(event, start_s=event.start_s + shift_s, end_s=event.end_s + shift_s)


MAX_READ_BYTES = 16 << 20
"""Most bytes that one call reads of a file."""


@dataclass(slots=True)
class _Followed:
    """A file that grows. ``rest``: the begin of a line without an end so far."""

    inode: int
    offset: int = 0
    rest: bytes = b""
    origin: TraceOrigin | None = None


@dataclass(slots=True)
class TraceFollower:
    """Reads what is added to a run's traces: the events of training that ``wanted(member,
    attempt)``. Others are not even parsed. ``skipped_lines`` were damaged.
    """

    run_dir: Path
    wanted: Callable[[str, int], bool]
    skipped_lines: int = 0
    _files: dict[Path, _Followed] = field(default_factory=dict)

    def look(self) -> list[LifeTrace]:
        """Returns new events, in the order of the files' names."""
        traces: list[LifeTrace] = []
        for path in sorted((self.run_dir / "trace").glob("*.jsonl")):
            if ".old." not in path.name:
                traces += self._follow(path)
        return traces

    def _follow(self, path: Path) -> Iterator[LifeTrace]:
        try:
            with path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                followed = self._files.get(path)
                if followed is None or followed.inode != inode:
                    followed = self._files[path] = _Followed(inode)
                file.seek(followed.offset)
                added = file.read(MAX_READ_BYTES)
        except OSError:
            return  # moved away: the next call reads the new one
        followed.offset += len(added)
        *lines, followed.rest = (followed.rest + added).split(b"\n")
        yield from self._lives(path.name.removesuffix(".jsonl"), followed, lines)

    def _lives(self, member: str, file: _Followed, lines: list[bytes]) -> Iterator[LifeTrace]:
        events: list[TraceEvent] = []
        for line in filter(None, lines):
            try:
                if line.startswith(b'["trace"'):
                    if events and file.origin is not None:
                        yield LifeTrace(origin=file.origin, events=tuple(events))
                    events, file.origin = [], TraceOrigin.from_list(parse_json(line))
                elif self._is_wanted(member, line):
                    events.append(TraceEvent.from_list(parse_json(line)))
            except (ValueError, OverflowError, TypeError, KeyError, IndexError):
                self.skipped_lines += 1
        if events and file.origin is not None:
            yield LifeTrace(origin=file.origin, events=tuple(events))

    def _is_wanted(self, member: str, line: bytes) -> bool:
        """Checks a line without parsing it. Quotation marks inside strings are escaped, so ``","``
        occurs between strings only.
        """
        phase, _, numbers = line.split(b'","', 2)[2].partition(b'",')
        return phase == b"train" and self.wanted(member, int(numbers.partition(b",")[0]))
