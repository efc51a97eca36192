"""The states of members, membership epochs, attempts and saves, and the events that move them.

The tables are data: the scheduler's code makes the transitions, and a test compares each transition
that the code makes with :data:`TABLES`. ``docs/STATES.md`` is drawn from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class MemberState(StrEnum):
    """State of a member, as ``penstock status`` shows it."""

    MISSING = "missing"
    """The member has no stream to the scheduler."""
    JOINING = "joining"
    """The member has a stream, and no epoch is live."""
    READY = "ready"
    """The member has a stream, and the epoch is live."""
    FENCING = "fencing"
    """The death of a process of the member is ordered, and its node has not reported it yet."""


class EpochState(StrEnum):
    """State of the membership epoch, from the loss of one epoch to the end of the run."""

    GATHERING = "gathering"
    """No epoch: some member has no stream."""
    FENCING = "fencing"
    """No epoch: the death of some process is ordered and not reported."""
    DRAINING = "draining"
    """The epoch has a number, and members leave the older epoch."""
    RESTORING = "restoring"
    """Memory is filled: from replicas, a saved state or the initial weights."""
    BEGINNING = "beginning"
    """All memory is at the committed version, and members enter the epoch."""
    LIVE = "live"
    """Attempts, saves and evaluations run, or the run is paused."""
    ENDING = "ending"
    """The run is over: members receive Shutdown, and the scheduler waits until they leave."""


class AttemptState(StrEnum):
    """State of an attempt. The last three are final."""

    RUNNING = "running"
    """Workers compute, and optimizerds report the gradients of blocks."""
    DECIDING = "deciding"
    """All workers have reported; statuses of blocks are missing."""
    AMENDING = "amending"
    """The norm is over the limit: optimizerds preview the update again, with clipped gradients."""
    MIRRORING = "mirroring"
    """The decision is made, and waits until all replicas have the gradients."""
    SETTLING = "settling"
    """The attempt is skipped, and optimizerds take back their steps in place."""
    COMMITTED = "committed"
    """The attempt is journaled as a commit, clipped or not."""
    SKIPPED = "skipped"
    """The attempt is journaled as a skip: its gradients were not finite."""
    DROPPED = "dropped"
    """The epoch broke, or the run ended, before the attempt was over."""


class SaveState(StrEnum):
    """State of a save. The last three are final."""

    PREPARING = "preparing"
    """The disk thread makes the directory."""
    PINNING = "pinning"
    """memoryds hold back each sweep that would overwrite the version. A copy begins here."""
    WRITING = "writing"
    """memoryds write their files while attempts run."""
    COMPLETING = "completing"
    """The disk thread writes the manifest and renames the directory."""
    SAVED = "saved"
    """The saved state is durable, or the copy of the weights is there."""
    FAILED = "failed"
    """The save has an error, and leaves no saved state."""
    DROPPED = "dropped"
    """The save was dropped before its end. Its snapshot calls wait for the next save."""


EPOCH_BEGINS = "epoch begins"
"""The event of a member or attempt when the epoch becomes ``live``."""
EPOCH_BREAKS = "epoch breaks"
"""The event of a member, attempt or save when a barrier or a live epoch is dropped."""
RUN_ENDS = "run ends"
"""The event of a member or attempt when the epoch becomes ``ending``."""
IS_DUE = "is due"
"""The event that makes an attempt or a save: the live epoch has nothing else to do first."""

ANY = "any event"
"""The event of a transition that a stop causes: each event may bring its deadline."""
DERIVED_EVENTS = frozenset((EPOCH_BEGINS, EPOCH_BREAKS, RUN_ENDS, IS_DUE, ANY))
"""Events that follow from another table or from the time. Every other event is the name of a class
in :mod:`.events`, or of a member's message in ``protocol/scheduler.proto``.
"""


@dataclass(frozen=True, slots=True)
class Transition:
    """A row: each of ``events`` may lead from each of ``states`` to ``next``."""

    states: tuple[StrEnum, ...]
    """States before the event; none for an attempt or a save that begins."""
    events: tuple[str, ...]
    """Names of events; each of them occurs, though not in each of the states."""
    next: StrEnum
    """State after the event."""
    effect: str
    """One sentence about the reason and the effects."""


_M, _E, _A, _S = MemberState, EpochState, AttemptState, SaveState
_HERE = (_M.JOINING, _M.READY)
_NO_EPOCH = (_E.GATHERING, _E.FENCING)
_ENTERED = (_E.DRAINING, _E.RESTORING, _E.BEGINNING, _E.LIVE)
_REPORTING = (_A.RUNNING, _A.DECIDING)
_REPORTS = ("attempt_done", "block_status", "attempt_heard")
_UNDECIDED = (*_REPORTING, _A.AMENDING, _A.MIRRORING)

MEMBERS = (
    Transition((_M.MISSING,), ("Joined",), _M.JOINING, "The scheduler accepts the process."),
    Transition(
        (_M.MISSING,),
        ("Joined",),
        _M.READY,
        "A node comes back while the epoch is live: the loss of a node breaks no epoch.",
    ),
    Transition(
        (_M.MISSING,),
        ("Joined",),
        _M.FENCING,
        "A replacement joins while its predecessor may be alive: the node kills the predecessor.",
    ),
    Transition(
        (_M.MISSING,),
        ("Tick",),
        _M.FENCING,
        "The process did not come back in time: its node kills it.",
    ),
    Transition(
        (_M.JOINING,),
        (EPOCH_BEGINS,),
        _M.READY,
        "Every member that is here takes part in the epoch.",
    ),
    Transition(
        (_M.READY,),
        (EPOCH_BREAKS, RUN_ENDS),
        _M.JOINING,
        "The process stays, and waits for the next epoch or for the shutdown.",
    ),
    Transition(
        _HERE,
        ("StreamClosed",),
        _M.FENCING,
        "A process of the scheduler's machine is lost: its node kills it.",
    ),
    Transition(
        _HERE,
        ("StreamClosed",),
        _M.MISSING,
        "A node is waited for. A process of another machine has a heartbeat's timeout to return.",
    ),
    Transition(
        _HERE,
        ("Tick", "failed", "hello"),
        _M.FENCING,
        "The process is silent, late, stuck, or broke the protocol: its node kills it.",
    ),
    Transition(
        _HERE,
        ("Tick", "hello"),
        _M.MISSING,
        "A node is silent or says Hello twice; or a process and its node are silent.",
    ),
    Transition(
        (_M.FENCING,),
        ("fenced",),
        _M.JOINING,
        "The node reports the death, and the replacement has joined already.",
    ),
    Transition(
        (_M.FENCING,),
        ("fenced",),
        _M.MISSING,
        "The node reports the death, and starts a replacement.",
    ),
)
"""Transitions of a member. A node is never fenced."""

EPOCHS = (
    Transition(
        (_E.GATHERING,),
        ("Joined",),
        _E.DRAINING,
        "The last member is here: the scheduler journals a new epoch number and sends Drain.",
    ),
    Transition(
        (_E.GATHERING,),
        ("Joined", "StreamClosed", "Tick", "failed"),
        _E.FENCING,
        "A process must die before the next epoch: its predecessor, or a lost process.",
    ),
    Transition(
        (_E.FENCING,),
        ("fenced",),
        _E.DRAINING,
        "The last lost process is dead and every member is here: a new epoch is journaled.",
    ),
    Transition(
        (_E.FENCING,),
        ("fenced",),
        _E.GATHERING,
        "The last lost process is dead; its replacement is missing.",
    ),
    Transition(
        (_E.DRAINING,),
        ("drained",),
        _E.RESTORING,
        "All have drained, and some memory is not at the committed version.",
    ),
    Transition(
        (_E.DRAINING,),
        ("drained",),
        _E.BEGINNING,
        "All have drained, and all memory is at the committed version: daemons receive Begin.",
    ),
    Transition(
        (_E.RESTORING,),
        ("restored",),
        _E.BEGINNING,
        "All memory is filled: the restore is journaled, and daemons receive Begin.",
    ),
    Transition(
        (_E.BEGINNING,),
        ("ready",),
        _E.LIVE,
        "Workers, which receive Begin after the daemons, are ready: attempts start.",
    ),
    Transition(
        _ENTERED,
        ("StreamClosed", "Tick", "failed", "hello"),
        _E.FENCING,
        "A member is lost: the epoch breaks, what ran is dropped, and the process must die.",
    ),
    Transition(
        _ENTERED,
        ("StreamClosed", "Tick"),
        _E.GATHERING,
        "A member is lost that may come back: the epoch breaks, and what ran is dropped.",
    ),
    Transition(
        _ENTERED,
        ("Joined", "cut_off"),
        _E.DRAINING,
        "The epoch breaks with all members here: a new stream, or a lost connection.",
    ),
    Transition(
        _ENTERED,
        ("Joined", "cut_off"),
        _E.GATHERING,
        "The epoch breaks in the same way while a node is missing.",
    ),
    Transition(
        (_E.LIVE,),
        (ANY,),
        _E.DRAINING,
        "A stop has a deadline, and the attempt would leave no time to save: it is dropped.",
    ),
    Transition(
        (_E.LIVE,),
        (ANY,),
        _E.GATHERING,
        "The attempt is dropped for the same reason while a node is missing.",
    ),
    Transition(
        (_E.DRAINING,),
        ("drained",),
        _E.ENDING,
        "The run is finished already, or run.strict forbids the changed devices.",
    ),
    Transition(
        (_E.RESTORING,),
        ("SavedFound", "restored"),
        _E.ENDING,
        "Every saved state is damaged, or run.strict forbids the changed devices.",
    ),
    Transition(
        (_E.BEGINNING,),
        ("ready",),
        _E.ENDING,
        "The last step is in memory, and is saved already.",
    ),
    Transition(
        (_E.LIVE,),
        ("SavePrepared", "SaveFinished", "saved"),
        _E.ENDING,
        "The last save is over: with success, or with an error that keeps the memory.",
    ),
    Transition(
        (_E.LIVE,),
        ("block_status", "attempt_done", "attempt_heard"),
        _E.ENDING,
        "Too many attempts were skipped in a row, or a stopped run has nothing to save.",
    ),
    Transition(
        (_E.LIVE,),
        ("evaluation_done",),
        _E.ENDING,
        "The last step is evaluated, and was saved before.",
    ),
    Transition(
        (*_NO_EPOCH, *_ENTERED),
        (ANY,),
        _E.ENDING,
        "A stop that has nothing to save, cannot save in time, or insists.",
    ),
    Transition(
        _ENTERED,
        ("Tick",),
        _E.ENDING,
        "The third hang in a row, of an attempt, an evaluation, a save or a restore.",
    ),
    Transition(
        (*_NO_EPOCH, *_ENTERED),
        ("failed", "EffectFailed"),
        _E.ENDING,
        "A member or the scheduler's disk has an error that a new epoch does not cure.",
    ),
)
"""Transitions of the membership epoch. A new epoch number in ``draining`` counts as one, too."""

ATTEMPTS = (
    Transition((), (IS_DUE,), _A.RUNNING, "Daemons receive RunAttempt, then workers."),
    Transition(
        (_A.RUNNING,),
        ("attempt_done",),
        _A.DECIDING,
        "The last worker has reported, and statuses of blocks are missing.",
    ),
    Transition(
        _REPORTING,
        _REPORTS,
        _A.AMENDING,
        "The norm is over the limit: optimizerds receive Amend with the coefficient.",
    ),
    Transition(
        _REPORTING,
        _REPORTS,
        _A.MIRRORING,
        "The attempt is a commit, and some replica lacks gradients of the attempt.",
    ),
    Transition(
        _REPORTING,
        _REPORTS,
        _A.COMMITTED,
        "The decision is journaled first, then announced to every member.",
    ),
    Transition(
        _REPORTING,
        _REPORTS,
        _A.SETTLING,
        "The skip is journaled and announced; steps in place are taken back.",
    ),
    Transition(
        _REPORTING,
        _REPORTS,
        _A.SKIPPED,
        "The skip is journaled and announced; its samples count as consumed.",
    ),
    Transition(
        (_A.AMENDING,),
        ("amended",),
        _A.MIRRORING,
        "The last preview is there, and some replica lacks gradients of the attempt.",
    ),
    Transition(
        (_A.AMENDING,),
        ("amended",),
        _A.COMMITTED,
        "The last preview is there: the clipped commit is journaled, then announced.",
    ),
    Transition(
        (_A.MIRRORING,),
        ("mirrored",),
        _A.COMMITTED,
        "The last replica has the gradients: the commit is journaled, then announced.",
    ),
    Transition(
        (_A.SETTLING,),
        ("settled",),
        _A.SKIPPED,
        "All steps in place are taken back.",
    ),
    Transition(
        (*_UNDECIDED, _A.SETTLING),
        (EPOCH_BREAKS, RUN_ENDS),
        _A.DROPPED,
        "Undecided, the attempt is repeated with the same samples under a new number.",
    ),
)
"""Transitions of an attempt."""

SAVES = (
    Transition((), (IS_DUE,), _S.PREPARING, "Attempts wait; the disk thread makes a directory."),
    Transition(
        (_S.PREPARING,),
        ("SavePrepared",),
        _S.PINNING,
        "The directory is there: memoryds receive Save.",
    ),
    Transition((_S.PREPARING,), ("SavePrepared",), _S.FAILED, "The directory cannot be made."),
    Transition(
        (),
        (IS_DUE,),
        _S.PINNING,
        "A copy of the weights: its caller has made the directory, memoryds receive Save.",
    ),
    Transition(
        (_S.PINNING,),
        ("pinned", "saved"),
        _S.WRITING,
        "All memoryds have pinned the version: attempts go on.",
    ),
    Transition(
        (_S.PINNING, _S.WRITING),
        ("saved",),
        _S.COMPLETING,
        "All memoryds have written: the disk thread completes the saved state.",
    ),
    Transition(
        (_S.PINNING, _S.WRITING),
        ("saved",),
        _S.SAVED,
        "All memoryds have copied the weights: the call is answered.",
    ),
    Transition(
        (_S.PINNING, _S.WRITING),
        ("saved",),
        _S.FAILED,
        "Some memoryd could not write; training goes on.",
    ),
    Transition(
        (_S.WRITING, _S.COMPLETING),
        ("drained", "fenced", "Joined"),
        _S.FAILED,
        "In the barrier: memory has to be restored, or a memoryd was replaced.",
    ),
    Transition(
        (_S.COMPLETING,),
        ("SaveFinished",),
        _S.SAVED,
        "The saved state is durable: snapshot calls are answered.",
    ),
    Transition(
        (_S.COMPLETING,),
        ("SaveFinished",),
        _S.FAILED,
        "The disk did not take the manifest or the name.",
    ),
    Transition(
        (_S.PREPARING, _S.PINNING),
        (EPOCH_BREAKS,),
        _S.DROPPED,
        "No sweep waits for an unpinned save: the next epoch starts it again.",
    ),
    Transition(
        (_S.WRITING,),
        (IS_DUE,),
        _S.DROPPED,
        "A stop with a deadline saves the newest version in the place of an older one.",
    ),
)
"""Transitions of a save. A save that is pinned outlives the epoch."""

TABLES: Mapping[type[StrEnum], tuple[Transition, ...]] = MappingProxyType(
    {MemberState: MEMBERS, EpochState: EPOCHS, AttemptState: ATTEMPTS, SaveState: SAVES}
)
"""All transitions, by the kind of state."""
