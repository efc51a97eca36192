"""Preloaders that a process has from birth on: its environment says which, as for descriptors that
a service manager hands over.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass

VARIABLE = "PENSTOCK_PRELOADERS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heir:
    """A preloader of the calling process: what it imports, the owner's socket, its pid, and whether
    it has said that it is ready.
    """

    kind: str
    descriptor: int
    pid: int
    warm: bool = False


def announce(heirs: Iterable[Heir]) -> None:
    """Writes down what the calling process owns."""
    text = ",".join(f"{h.kind}:{h.descriptor}:{h.pid}:{int(h.warm)}" for h in heirs)
    os.environ.pop(VARIABLE, None)
    if text:
        os.environ[VARIABLE] = text


def take_heirs(environment: MutableMapping[str, str]) -> dict[str, Heir]:
    """Returns what the calling process owns, by kind, and forgets it: children own nothing of
    it.
    """
    entries = [entry.split(":") for entry in environment.pop(VARIABLE, "").split(",") if entry]
    heirs = (
        Heir(kind=kind, descriptor=int(descriptor), pid=int(pid), warm=warm == "1")
        for kind, descriptor, pid, warm in entries
    )
    return {heir.kind: heir for heir in heirs}
