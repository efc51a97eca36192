"""Named states that few runs get into: how often each was reached is counted.

A name says who died (or what refused), between which two of its steps, and what the run was doing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Death:
    """``kind`` of the process, the ``point`` it had come to, the scheduler's ``phase``; ``others``:
    how many processes were missing besides; ``nodes`` of the cluster; ``reseeds``: a replica is not
    whole yet, ``reseeds_itself``: the one that the process keeps; ``fills``: a lost memory is being
    filled from its partner.
    """

    kind: str
    point: str
    phase: str
    others: int
    nodes: int
    reseeds: bool = False
    reseeds_itself: bool = False
    fills: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A machine lost with its memory, of a run with partners. ``whole``: its replica is;
    ``keeps_lost``: it kept the replica of a node that is lost, too; ``fills``: as of
    :class:`Death`; ``hosts``: the scheduler was on it.
    """

    phase: str
    whole: bool
    keeps_lost: bool
    fills: bool
    hosts: bool


PULLED = "gradients were pulled from another node"
GAVE_UP = "a run ended for lost members, and was started again"
CAME_LATE = "a scheduler was started where the end of the run was noted"
HUNG_EARLY = "a process that hung before it joined was replaced"
COUNTED = (PULLED, GAVE_UP, CAME_LATE, HUNG_EARLY)
"""What is counted as rare states are, and is none."""

_PHASES = (
    *("gathering", "fencing", "draining", "restoring", "beginning"),
    *("running", "deciding", "amending", "settling", "saving", "evaluating", "stopping"),
)
_MIRRORING_PHASES = (
    *("gathering", "draining", "restoring", "beginning", "running", "deciding", "amending"),
    *("mirroring", "saving"),
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
_MIRRORD = {
    "set_held": "between gradients and the word that they are here",
    "write_record": "before a record is written",
    "half a record": "in the middle of a record",
    "set_committed": "between record and flip",
    "begin_sweep": "before a settle's intent",
    "cut": "in the middle of a settle",
    "swept": "between a settle and its words",
    "set_state_version": "between a settle and its version",
    "end_sweep": "between a version and the end of its intent",
    "clear_history": "before what it follows no more is void",
    "set_incarnation": "before the word of the filling that it follows",
}

POINTS: dict[str, tuple[str, ...]] = {
    "optimizerd": tuple(_OPTIMIZER),
    "schedulerd": (*_SCHEDULER, "noted the end"),
    "worker": (
        *_WORKER,
        "copies gradients",
        "fetches state",
        "previews",
        "half a preview",
        "previewed",
    ),
    "memoryd": (*_MEMORYD, "set_generation", "set_lost_attempt", "reads a state", "saves"),
    "mirrord": tuple(_MIRRORD),
}
"""Kind of a process -> names of points at which it may be struck."""

WORK: dict[str, tuple[str, ...]] = {
    "optimizerd": ("sweep", "pulls"),
    "worker": ("computes", "copies gradients", "fetches state", "previews", "half a preview"),
    "memoryd": ("loads", "casts", "reads a state", "saves"),
    "mirrord": ("sweep", "pulls"),
}
"""Kind of a process -> names of points at which something begins that takes a while."""

MESSAGES: dict[str, tuple[str, ...]] = {
    "schedulerd": (
        *("drain", "restore", "begin", "run_attempt", "amend", "commit", "skip", "settle"),
        *("save", "evaluate"),
    ),
    "worker": ("drained", "ready", "attempt_done", "evaluation_done"),
    "optimizerd": ("drained", "ready", "block_status", "amended", "settled", "attempt_heard"),
    "memoryd": ("drained", "restored", "ready", "saved", "pinned"),
    "mirrord": ("drained", "ready", "settled", "mirrored"),
}
"""Kind of a process -> messages that are lost at times, with the stream that they leave on."""
OF_SAVES = ("save", "settle", "settled", "saved", "pinned")
"""Messages that are sent where a state is saved."""

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
    **{f"mirrord killed {text}": _dies("mirrord", p) for p, text in _MIRRORD.items()},
    **{f"mirrord killed while {phase}": _while("mirrord", phase) for phase in _MIRRORING_PHASES},
    "mirrord killed while it re-seeds": lambda d: d.kind == "mirrord" and d.reseeds_itself,
    "mirrord killed while a node is filled": lambda d: d.kind == "mirrord" and d.fills,
    "memoryd killed while a partner fills it": lambda d: d.kind == "memoryd" and d.fills,
    "memoryd killed before the generation's word": _dies("memoryd", "set_generation"),
    "schedulerd killed while a node is filled": lambda d: d.kind == "schedulerd" and d.fills,
    "schedulerd killed between journal and announcement while a partner re-seeds": (
        lambda d: d.kind == "schedulerd" and d.point == "journaled" and d.reseeds
    ),
    **{
        f"{kind} killed while mirroring": _while(kind, "mirroring")
        for kind in ("worker", "optimizerd", "memoryd", "schedulerd")
    },
    "node killed while draining": _while("node", "draining"),
    "node killed while restoring": _while("node", "restoring"),
    "node killed while running": _while("node", "running"),
    "killed while three others are gone": lambda d: d.others >= 3,
}
"""Name -> whether a death is one of these."""

LOSSES: dict[str, Callable[[Loss], bool]] = {
    "node lost whose replica is whole": lambda loss: loss.whole,
    "node lost while its partner's replica is re-seeded": lambda loss: not loss.whole,
    "partner lost in the recovery from a lost node": lambda loss: loss.keeps_lost,
    "partner lost while it fills a node": lambda loss: loss.keeps_lost and loss.fills,
    "node lost while it is filled": lambda loss: loss.fills and not loss.keeps_lost,
    "the scheduler's node lost, and its replica whole": lambda loss: loss.hosts and loss.whole,
    **{
        f"node with a partner lost while {phase}": (lambda loss, phase=phase: loss.phase == phase)
        for phase in ("restoring", "running", "mirroring", "saving")
    },
}
"""Name -> whether a loss is one of these."""
