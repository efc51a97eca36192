"""Rows of the journal: the history is told what a scheduler writes and reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.daemons.scheduler.journal import Journal
from penstock.host import world

INTRUDER = "intruder"
"""A schedulerd that somebody starts beside the run's."""


def _here() -> Any:
    return world.here()


def _told(name: str) -> Callable[..., None]:
    """Returns a method of the journal that tells the history of its row."""
    method = getattr(Journal, name)

    def call(self: Any, effect: Any) -> None:
        history = _here().cluster.history
        history.begins_to_write(name, effect)
        method(self, effect)
        history.wrote()

    return call


def _load(self: Any) -> Any:
    """Who looks in beside a scheduler that lives, by mistake, goes no further."""
    facts, found = _real_load(self), _here()
    history, process = found.cluster.history, found.process
    history.opened(process)
    if process.kind == INTRUDER:
        process.kill()
        process.kernel.park_forever()
    history.loaded(facts)
    return facts


_real_load, _real_close = Journal.load, Journal.close


def _close(self: Any) -> None:
    """A scheduler that ends writes nothing more; the next one may begin."""
    _real_close(self)
    _here().cluster.history.closed(_here().process)


def replace_rows(put: Callable[[Any, str, Any], None]) -> None:
    """Have the history hear of rows."""
    for name in ("begin_epoch", "decide", "replace", "evaluate", "follow"):
        put(Journal, name, _told(name))
    put(Journal, "load", _load)
    put(Journal, "close", _close)
