"""Vector clocks of streams and host threads: what is known to have happened before what.

Every stream and every thread counts what it does, and knows how far it may rely on the others to
have come. An access is ordered behind another one if whoever makes it knows of that one.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Mapping

Actor = str
"""A stream, or a thread of the host."""

Known = Mapping[Actor, int]
"""How far others had come at some point, as far as that point knows."""


class Clocks:
    """The clocks of one process; whoever uses them holds the checker's lock."""

    def __init__(self) -> None:
        self._known: defaultdict[Actor, dict[Actor, int]] = defaultdict(dict)

    def tick(self, actor: Actor) -> int:
        """Returns the number of the next thing that the actor does."""
        known = self._known[actor]
        known[actor] = known.get(actor, 0) + 1
        return known[actor]

    def knows(self, actor: Actor) -> dict[Actor, int]:
        """Returns what an actor knows now; changes with it."""
        return self._known[actor]

    def learns(self, actor: Actor, known: Known) -> None:
        """From now on the actor relies on what another point knew."""
        merge(self._known[actor], known)


def merge(into: dict[Actor, int], known: Known) -> None:
    """Take over what is newer."""
    for other, count in known.items():
        if count > into.get(other, 0):
            into[other] = count


_NUMBERS = itertools.count()
_SELF = threading.local()


def this_thread() -> Actor:
    """Returns the calling thread, as an actor: the system gives numbers of ended threads again."""
    actor: Actor | None = getattr(_SELF, "actor", None)
    if actor is None:
        known = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
        name = "starting" if known is None else known.name
        actor = _SELF.actor = f"thread {next(_NUMBERS)} ({name})"
    return actor
