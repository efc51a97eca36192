"""Named states that few runs get into: how often each was reached is counted.

A name says who died (or what refused), between which two of its steps, and what the run was doing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Death:
    """``kind`` of the process, the ``point`` it had come to, the scheduler's ``phase``; ``others``:
    how many processes were missing besides; ``nodes`` of the cluster.
    """

    kind: str
    point: str
    phase: str
    others: int
    nodes: int


PULLED = "gradients were pulled from another node"
"""What is counted as rare states are, and is none."""

_PHASES = (
    *("gathering", "fencing", "draining", "restoring", "beginning"),
    *("running", "deciding", "amending", "settling", "saving", "evaluating", "stopping"),
)


def _dies(kind: str, point: str) -> Callable[[Death], bool]:
    return lambda d: d.kind == kind and d.point == point


def _while(kind: str, phase: str) -> Callable[[Death], bool]:
    return lambda d: d.kind == kind and d.phase == phase


_OPTIMIZER = {
    "write_record": "before a record is written",
    "half a record": "in the middle of a record",
    "set_committed": "between record and flip",
    "begin_sweep": "before a sweep's intent",
    "end_sweep": "between a state version and the end of its intent",
    "set_state_version": "between a sweep and its state version",
    "set_slot_version": "before a slot is marked",
    "sweep": "before a sweep",
    "swept": "between a sweep and its words",
    "cut": "in the middle of a sweep",
    "set_epoch": "before the epoch's word",
    "pulls": "while it pulls gradients",
    "pulled": "between pulled gradients and their event",
}
_SCHEDULER = {
    "before the journal": "before its row is durable",
    "journaled": "between journal and announcement",
    "send": "in the middle of a broadcast",
    "disk write": "in the middle of a row's write",
}
_WORKER = {
    "computes": "before it computes",
    "begin_gradients": "before it writes gradients",
    "end_gradients": "between gradients and their sequence",
    "set_ready": "between gradients and their ready word",
    "word": "between two words",
}
_MEMORYD = {
    "set_incarnation": "before the incarnation's word",
    "clear_history": "before history is cleared",
    "loads": "while it loads initial weights",
    "casts": "between master and weights",
    "set_slot_version": "between bytes and slot of a restore",
    "set_state_version": "before a state version of a restore",
    "write_record": "before the record of a restore",
    "set_committed": "before the committed word of a restore",
}

RARE: dict[str, Callable[[Death], bool]] = {
    **{f"optimizerd killed {text}": _dies("optimizerd", p) for p, text in _OPTIMIZER.items()},
    **{f"schedulerd killed {text}": _dies("schedulerd", p) for p, text in _SCHEDULER.items()},
    **{f"worker killed {text}": _dies("worker", p) for p, text in _WORKER.items()},
    **{f"memoryd killed {text}": _dies("memoryd", p) for p, text in _MEMORYD.items()},
    **{
        f"{kind} killed while {phase}": _while(kind, phase)
        for kind in ("worker", "optimizerd", "memoryd", "schedulerd")
        for phase in _PHASES
        if (kind, phase) != ("schedulerd", "fencing")
    },
    "node killed while draining": _while("node", "draining"),
    "node killed while restoring": _while("node", "restoring"),
    "node killed while running": _while("node", "running"),
    "killed while three others are gone": lambda d: d.others >= 3,
}
"""Name -> whether a death is one of these."""
