"""optimizerd's state machine: which epoch it is in, how it leaves it, how it ends.

Pure: events come in, effects go out (:mod:`penstock.daemons.optimizer.machine.events`), to be
carried out in order. No threads, sockets, clocks or memory; the control words are mirrored in a
:class:`~penstock.daemons.optimizer.machine.words.Ledger`. What happens within an epoch is in
:mod:`penstock.daemons.optimizer.machine.epoch` (steps in place:
:mod:`penstock.daemons.optimizer.machine.arithmetic`).

Life (``Phase``)::

    IDLE -- Begin --> RECOVERING -- all the commit promises is there --> LIVE
     ^                     |                                               |
     +------- Drain -------+-----------------------------------------------+
    any -- stop asked --> STOPPING -- the running sweep has ended --> STOPPED
    any -- a contradiction --> STOPPED
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, ClassVar

from penstock.daemons.optimizer.machine.arithmetic import ArithmeticEpoch
from penstock.daemons.optimizer.machine.contributions import Blocks, Pulls
from penstock.daemons.optimizer.machine.epoch import Epoch, LiveEvent
from penstock.daemons.optimizer.machine.events import (
    AmendAsked,
    AttemptAsked,
    BeginAsked,
    Broken,
    CommitAsked,
    DeviceUpdated,
    DrainAsked,
    Effect,
    Event,
    Exit,
    GradientsReady,
    OwnedBlock,
    Pulled,
    SendDrained,
    SendFailed,
    SendReady,
    SetEpoch,
    SettleAsked,
    SkipAsked,
    StopAsked,
    SweepDone,
)
from penstock.daemons.optimizer.machine.recovery import ImpossibleError, check_begin
from penstock.protocol.errors import ExitCode


class Phase(Enum):
    """See the module."""

    IDLE = auto()
    RECOVERING = auto()
    LIVE = auto()
    STOPPING = auto()
    STOPPED = auto()


class OptimizerState:
    """optimizerd of one node, which owns ``blocks``; ``together`` as in
    :class:`~penstock.daemons.optimizer.machine.contributions.Blocks`.
    """

    def __init__(self, blocks: Sequence[OwnedBlock], *, together: bool = False) -> None:
        self.phase = Phase.IDLE
        self._out: list[Effect] = []
        self._blocks = Blocks(blocks, together=together)
        self._pulls = Pulls(self._blocks, self._out)
        self._joined: Epoch | None = None  # of the last Begin; abandoned by a Drain or a stop
        self._newest = 0  # epoch of the last Drain or Begin: nothing older is obeyed
        self._farewell: Effect | None = None  # due when the running sweep has ended

    # ---- looking from outside ----

    @property
    def joined_epoch(self) -> int:
        """Epoch of the last Begin, 0 before the first."""
        return 0 if self._joined is None else self._joined.number

    @property
    def committed(self) -> int:
        """The committed version, 0 before the first Begin."""
        return 0 if self._joined is None else self._joined.ledger.committed

    @property
    def attempt(self) -> int:
        """Number of the attempt under way, 0 if there is none."""
        return 0 if self._joined is None else self._joined.attempt

    @property
    def queue_length(self) -> int:
        """Blocks that wait for their turn."""
        return 0 if self._joined is None else self._joined.queue_length

    def awaited(self) -> tuple[GradientsReady, ...]:
        """The contributions of this node that the attempt under way still waits for."""
        live = self._live()
        return () if live is None else live.awaited()

    def validate(self) -> None:
        """Check the invariants of memory and queue.

        Raises:
            ValueError: naming what contradicts what.
        """
        live = self._live()
        if live is not None:
            live.validate()

    def _live(self) -> Epoch | None:
        return self._joined if self.phase is Phase.LIVE else None

    # ---- the one entrance ----

    def handle(self, event: Event) -> list[Effect]:
        """React to an event; the effects are to be carried out in order, all of them."""
        if self.phase is Phase.STOPPED:
            return []
        try:
            self._HANDLERS[type(event)](self, event)
            self._proceed()
        except ImpossibleError as error:
            # A wrong memory is the user's to mend; either way nothing more is written.
            of_memory = isinstance(event, BeginAsked)
            self._fail(str(error), ExitCode.BAD_CONFIG if of_memory else ExitCode.LOST_MEMBERS)
        out = list(self._out)
        self._out.clear()  # in place: all parts append to the same list
        return out

    def _proceed(self) -> None:
        if self._joined is None:
            return
        self._joined.start_next()
        if self.phase is Phase.RECOVERING and self._joined.recovered:
            self.phase = Phase.LIVE
            self._out += [SetEpoch(epoch=self.joined_epoch), SendReady(epoch=self.joined_epoch)]

    # ---- from epoch to epoch ----

    def _too_old(self, epoch: int) -> bool:
        """Whether a new epoch is none; a stopping process enters none at all."""
        stopping = self.phase is Phase.STOPPING
        return stopping or epoch < self._newest or epoch <= self.joined_epoch

    def _on_begin(self, event: BeginAsked) -> None:
        if self._too_old(event.epoch):
            return
        if self._joined is not None and self._joined.busy:
            raise ImpossibleError(f"epoch {event.epoch} begins before the old one has drained")
        check_begin(event, self._blocks.all)
        self._newest = event.epoch
        self.phase = Phase.RECOVERING
        self._pulls.cancel()
        epoch = ArithmeticEpoch if self._blocks.in_place else Epoch
        self._joined = epoch(event, self._blocks, self._pulls, self._out)

    def _on_drain(self, event: DrainAsked) -> None:
        if self._too_old(event.epoch):
            return
        self._newest = event.epoch
        self.phase = Phase.IDLE
        self._leave(SendDrained(epoch=event.epoch))

    def _on_stop(self, event: StopAsked) -> None:
        self.phase = Phase.STOPPING
        self._leave(Exit(code=ExitCode.DONE))

    def _leave(self, farewell: Effect) -> None:
        if self._joined is not None:
            self._joined.abandon()
        self._pulls.cancel()
        self._farewell = farewell
        self._say_farewell()

    def _say_farewell(self) -> None:
        """Say what is due once no sweep is running."""
        if self._farewell is None or (self._joined is not None and self._joined.busy):
            return
        self._out.append(self._farewell)
        if isinstance(self._farewell, Exit):
            self.phase = Phase.STOPPED
        self._farewell = None

    # ---- within an epoch ----

    def _on_live(self, event: LiveEvent) -> None:
        """What only a live epoch may hear of, and only of itself."""
        live = self._live()
        if live is not None and event.epoch == live.number:
            live.handle(event)

    def _on_pulled(self, event: Pulled) -> None:
        entered = self.phase in (Phase.RECOVERING, Phase.LIVE)
        if self._joined is not None and entered and event.epoch == self._joined.number:
            self._joined.pulled(event)

    def _on_sweep_done(self, event: SweepDone) -> None:
        assert self._joined is not None, "no epoch, no sweep"
        self._joined.sweep_done(event)
        self._say_farewell()

    # ---- the end ----

    def _on_broken(self, event: Broken) -> None:
        self._fail(event.error, ExitCode.LOST_MEMBERS)

    def _fail(self, error: str, code: ExitCode) -> None:
        self.phase = Phase.STOPPED
        self._out += [SendFailed(error=error, exit_code=code), Exit(code=code)]

    _HANDLERS: ClassVar[Mapping[type[Any], Callable[[OptimizerState, Any], None]]] = {
        DrainAsked: _on_drain,
        BeginAsked: _on_begin,
        StopAsked: _on_stop,
        Pulled: _on_pulled,
        SweepDone: _on_sweep_done,
        Broken: _on_broken,
        AttemptAsked: _on_live,
        GradientsReady: _on_live,
        DeviceUpdated: _on_live,
        AmendAsked: _on_live,
        CommitAsked: _on_live,
        SkipAsked: _on_live,
        SettleAsked: _on_live,
    }
