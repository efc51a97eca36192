"""Who read and wrote which bytes, and which pairs of accesses nothing orders."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from tests.streams.clocks import Actor, Known


@dataclass(slots=True)
class Access:
    """Bytes [start, end) by address; ``count``: of its actor."""

    start: int
    end: int
    writes: bool
    actor: Actor
    count: int
    what: str

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} of {self.what} on {self.actor}"


@dataclass(slots=True)
class Region:
    """A range of addresses that is watched: memory of a device, or host memory it copies."""

    start: int
    size: int
    name: str
    accesses: list[Access] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Behind its last byte."""
        return self.start + self.size

    def conflict(self, access: Access, known: Known) -> Access | None:
        """Returns an earlier access of the same bytes that the new one may run beside."""
        for other in self.accesses:
            if (
                other.actor != access.actor
                and (other.writes or access.writes)
                and other.start < access.end
                and access.start < other.end
                and known.get(other.actor, 0) < other.count
            ):
                return other
        return None

    def add(self, access: Access) -> None:
        """Remember it in place of what it makes superfluous: whoever is ordered behind it is behind
        that, too.
        """
        start, end = access.start, access.end
        self.accesses = [
            other
            for other in self.accesses
            if not (
                start <= other.start
                and other.end <= end
                and (access.writes or (other.actor == access.actor and not other.writes))
            )
        ]
        self.accesses.append(access)


class Regions:
    """The watched memory of a process, by address; ranges do not overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: list[Region] = []

    def add(self, region: Region) -> None:
        """Watch a range from now on."""
        at = bisect.bisect_left(self._starts, region.start)
        self._starts.insert(at, region.start)
        self._regions.insert(at, region)

    def remove(self, start: int) -> None:
        """Watch the range that starts there no more."""
        at = self._starts.index(start)
        del self._starts[at], self._regions[at]

    def at(self, address: int) -> Region | None:
        """Returns the range that an address is in."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0 and address < self._regions[at].end:
            return self._regions[at]
        return None
