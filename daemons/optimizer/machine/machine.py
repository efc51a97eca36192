"""optimizerd's state machine: its current epoch, the end of an epoch, and the end of the process.

Pure: it turns events into effects (:mod:`penstock.daemons.optimizer.machine.events`), which the
caller carries out in order. It has no threads, sockets, clocks or memory. A
:class:`~penstock.daemons.optimizer.machine.words.WordsMirror` mirrors the control words. The
inside of an epoch is in
:mod:`penstock.daemons.optimizer.machine.epoch`, by the rules of
:mod:`penstock.daemons.optimizer.machine.exact` or, for steps in place,
:mod:`penstock.daemons.optimizer.machine.arithmetic`.

Life (``OptimizerPhase``)::

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

from penstock.daemons.kit.events import (
    DrainAsked,
    EffectFailed,
    Exit,
    RefusedByScheduler,
    SendDrained,
    SendFailed,
    SendReady,
    ShutdownAsked,
    StopAsked,
)
from penstock.daemons.optimizer.machine.arithmetic import ArithmeticSteps
from penstock.daemons.optimizer.machine.contributions import OwnedBlocks, Pulls
from penstock.daemons.optimizer.machine.epoch import Epoch, LiveEvent
from penstock.daemons.optimizer.machine.events import (
    AmendAsked,
    AttemptAsked,
    CommitAsked,
    DeviceUpdated,
    Effect,
    Event,
    GradientsReady,
    OwnedBlock,
    PinsSeen,
    Pulled,
    RecoveryAsked,
    SetEpoch,
    SettleAsked,
    SkipAsked,
    SweepDone,
)
from penstock.daemons.optimizer.machine.exact import ExactSteps
from penstock.daemons.optimizer.machine.recovery import ImpossibleError, check_begin
from penstock.daemons.optimizer.machine.steps import Steps, start_next, sweep_done
from penstock.host.errors import ExitCode


class OptimizerPhase(Enum):
    """Phases of an optimizerd's life; see the module's picture."""

    IDLE = auto()
    RECOVERING = auto()
    LIVE = auto()
    STOPPING = auto()
    STOPPED = auto()


class OptimizerMachine:
    """optimizerd of one node, which owns ``blocks``; ``together`` as in
    :class:`~penstock.daemons.optimizer.machine.contributions.OwnedBlocks`.
    """

    def __init__(self, blocks: Sequence[OwnedBlock], *, together: bool = False) -> None:
        self.phase = OptimizerPhase.IDLE
        self._out: list[Effect] = []
        self._blocks = OwnedBlocks(blocks, together=together)
        self._pulls = Pulls(self._blocks, self._out)
        self._joined: Steps | None = None  # of the last Begin; abandoned by a Drain or a stop
        self._newest = 0  # epoch of the last Drain or Begin: nothing older is obeyed
        self._farewell: Effect | None = None  # due when the running sweep has ended

    # ---- queries ----

    @property
    def joined_epoch(self) -> int:
        """Epoch of the last Begin, 0 before the first."""
        return 0 if self._joined is None else self._joined.epoch.number

    @property
    def committed(self) -> int:
        """The committed version, 0 before the first Begin."""
        return 0 if self._joined is None else self._joined.epoch.words.committed

    @property
    def attempt(self) -> int:
        """Number of the attempt under way, 0 if there is none."""
        return 0 if self._joined is None else self._joined.epoch.attempt_number

    @property
    def queue_length(self) -> int:
        """Blocks that wait for their turn."""
        return 0 if self._joined is None else self._joined.epoch.queue_length

    @property
    def waits_for(self) -> str | None:
        """The event that the next sweep waits for: gradients, fetches, decision, idle; None while
        one runs.
        """
        return "idle" if self._joined is None else self._joined.epoch.waits_for()

    @property
    def pins(self) -> Mapping[int, int]:
        """Block -> version of its state that was unread at the last check of pins."""
        return {} if self._joined is None else self._joined.epoch.words.pins

    def awaited(self) -> tuple[GradientsReady, ...]:
        """Returns the contributions of this node that the attempt under way still waits for."""
        live = self._live()
        return () if live is None else live.epoch.awaited()

    def validate(self) -> None:
        """Checks the invariants of memory and queue.

        Raises:
            ValueError: naming what contradicts what.
        """
        live = self._live()
        if live is not None:
            live.validate()

    def _live(self) -> Steps | None:
        return self._joined if self.phase is OptimizerPhase.LIVE else None

    # ---- the one entrance ----

    def handle(self, event: Event, now_s: float = 0.0) -> list[Effect]:
        """Returns the complete effects of ``event``, in order. No decision of an optimizerd depends
        on time.
        """
        if self.phase is OptimizerPhase.STOPPED:
            return []
        try:
            self._HANDLERS[type(event)](self, event)
            self._proceed()
        except ImpossibleError as error:
            # A wrong memory is the user's to mend; either way nothing more is written.
            of_memory = isinstance(event, RecoveryAsked)
            self._fail(str(error), ExitCode.BAD_CONFIG if of_memory else ExitCode.LOST_MEMBERS)
        out = list(self._out)
        self._out.clear()  # in place: all parts append to the same list
        return out

    def _proceed(self) -> None:
        if self._joined is None:
            return
        start_next(self._joined)
        if self.phase is OptimizerPhase.RECOVERING and self._joined.epoch.recovered:
            self.phase = OptimizerPhase.LIVE
            self._out += [SetEpoch(epoch=self.joined_epoch), SendReady(epoch=self.joined_epoch)]

    # ---- from epoch to epoch ----

    def _too_old(self, epoch: int) -> bool:
        """Returns whether an epoch is not new; a stopping process enters none at all."""
        stopping = self.phase is OptimizerPhase.STOPPING
        return stopping or epoch < self._newest or epoch <= self.joined_epoch

    def _on_begin(self, event: RecoveryAsked) -> None:
        if self._too_old(event.epoch):
            return
        if self._joined is not None and self._joined.epoch.busy:
            raise ImpossibleError(f"epoch {event.epoch} begins before the old one has drained")
        check_begin(event, self._blocks.all)
        self._newest = event.epoch
        self.phase = OptimizerPhase.RECOVERING
        self._pulls.cancel()
        steps = ArithmeticSteps if self._blocks.in_place else ExactSteps
        self._joined = steps(Epoch(event, self._blocks, self._pulls, self._out))

    def _on_drain(self, event: DrainAsked) -> None:
        if self._too_old(event.epoch):
            return
        self._newest = event.epoch
        self.phase = OptimizerPhase.IDLE
        self._leave(SendDrained(epoch=event.epoch))

    def _on_stop(self, event: StopAsked | ShutdownAsked) -> None:
        self.phase = OptimizerPhase.STOPPING
        self._leave(Exit(code=ExitCode.DONE))

    def _leave(self, farewell: Effect) -> None:
        if self._joined is not None:
            self._joined.abandon()
        self._pulls.cancel()
        self._farewell = farewell
        self._say_farewell()

    def _say_farewell(self) -> None:
        """Sends the last messages once no sweep is running."""
        if self._farewell is None or (self._joined is not None and self._joined.epoch.busy):
            return
        self._out.append(self._farewell)
        if isinstance(self._farewell, Exit):
            self.phase = OptimizerPhase.STOPPED
        self._farewell = None

    # ---- within an epoch ----

    def _on_live(self, event: LiveEvent) -> None:
        """Passes on events that only a live epoch accepts, and only its own."""
        live = self._live()
        if live is not None and event.epoch == live.epoch.number:
            live.handle(event)

    def _on_pulled(self, event: Pulled) -> None:
        entered = self.phase in (OptimizerPhase.RECOVERING, OptimizerPhase.LIVE)
        if self._joined is not None and entered and event.epoch == self._joined.epoch.number:
            self._joined.start(self._joined.epoch.pulled(event))

    def _on_pins(self, event: PinsSeen) -> None:
        """Handles pins even before the epoch is live: recovery may wait for them."""
        if self._joined is not None:
            self._joined.epoch.pins_seen(event.pins)

    def _on_sweep_done(self, event: SweepDone) -> None:
        assert self._joined is not None, "no epoch, no sweep"
        sweep_done(self._joined, event)
        self._say_farewell()

    # ---- the end ----

    def _on_refused(self, event: RefusedByScheduler) -> None:
        self.phase = OptimizerPhase.STOPPED
        reason = f"the scheduler refuses this optimizerd: {event.reason}"
        self._out.append(Exit(code=ExitCode.LOST_MEMBERS, reason=reason))

    def _on_failed(self, event: EffectFailed) -> None:
        self._fail(event.error, event.code)

    def _fail(self, error: str, code: ExitCode) -> None:
        self.phase = OptimizerPhase.STOPPED
        self._out += [SendFailed(error=error, code=code), Exit(code=code, reason=error)]

    _HANDLERS: ClassVar[Mapping[type[Any], Callable[[OptimizerMachine, Any], None]]] = {
        DrainAsked: _on_drain,
        RecoveryAsked: _on_begin,
        StopAsked: _on_stop,
        ShutdownAsked: _on_stop,
        RefusedByScheduler: _on_refused,
        EffectFailed: _on_failed,
        Pulled: _on_pulled,
        PinsSeen: _on_pins,
        SweepDone: _on_sweep_done,
        AttemptAsked: _on_live,
        GradientsReady: _on_live,
        DeviceUpdated: _on_live,
        AmendAsked: _on_live,
        CommitAsked: _on_live,
        SkipAsked: _on_live,
        SettleAsked: _on_live,
    }
