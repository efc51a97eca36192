"""A run that faults happen to: waits for their instants, carries them out, and watches what the run
makes of them.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.chaos.command import TrainCommand
from penstock.chaos.disks import Disk
from penstock.chaos.fault_injector import Strikes
from penstock.chaos.faults import Blow, Cast, Fault, FaultKind, Moment
from penstock.chaos.processes import members
from penstock.client.views.run_view import MetricsTail
from penstock.host.errors import ExitCode, LostMemberError

POLL_S = 0.005
CLOSED_SETTLES_S = 1.0
"""Who loses a connection says so within this, or goes on without."""


class Aftermath(StrEnum):
    """What became of a fault."""

    RECOVERED = "recovered by itself"
    WENT_BACK = "went back to a saved step"
    UNHARMED = "went on"
    CONTINUED = "the same command went on"
    REFUSED = "refused"
    ENDED = "the run had ended well"


class RunEndedError(Exception):
    """The run ended before a fault could happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suffered:
    """A fault that happened. ``seconds``: from its last blow to the first step of a later
    membership; or where nobody was replaced, from when it was over (a process woke, a disk had
    room) to the next step.

    ``timeout``: whether it was limited by a deadline of silence.
    """

    fault: Fault
    run: int
    step: int
    epoch: int
    outcome: Aftermath
    seconds: float
    timeout: bool

    def to_dict(self) -> dict[str, Any]:
        """Returns it for JSON."""
        return {
            "run": self.run,
            "kind": self.fault.kind,
            "moment": self.fault.moment,
            "targets": sorted(self.fault.targets),
            "strikes": [str(strike) for strike in self.fault.strikes],
            "step": self.step,
            "epoch": self.epoch,
            "outcome": self.outcome,
            "seconds": round(self.seconds, 3),
            "timeout": self.timeout,
        }


@dataclass(slots=True, kw_only=True)
class _Watch:
    """What happened since a fault's last blow at ``since_s``, and since the last process woke, or a
    disk had room again, at ``woke_s``.
    """

    epoch: int
    since_s: float
    woke_s: float
    restarted: bool = False
    replaced_s: float | None = None
    went_on_s: float | None = None


@dataclass(slots=True, kw_only=True)
class DisturbedRun:
    """A run and what happens to it. ``say`` is told each event; ``history`` keeps them.

    ``steps``: of the whole run. ``patience_s``: without a step for so long it hangs. ``went_back``:
    how often steps were done again.
    """

    command: TrainCommand
    number: int
    steps: int
    cast: Cast
    source: random.Random
    disks: Mapping[str, Disk]
    patience_s: float
    eval_every: int
    say: Callable[[str], None]
    history: list[str] = field(default_factory=list)
    suffered: list[Suffered] = field(default_factory=list)
    process: subprocess.Popen[bytes] = field(init=False)
    step: int = 0
    epoch: int = 0
    went_back: int = 0
    _tail: MetricsTail = field(init=False)
    _strikes: Strikes = field(init=False)
    _began_s: float = field(init=False)
    _moved_s: float = field(init=False)
    _expected: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self._began_s = self._moved_s = time.monotonic()
        self._tail = MetricsTail(self.command.run_dir / "metrics.jsonl")
        self._strikes = Strikes(self)

    # ---- the run ----

    def start(self) -> None:
        """Starts the command."""
        self.process = self.command.start()
        self._moved_s = time.monotonic()
        self.note("started")

    def suffer(self, fault: Fault) -> bool:
        """Carries a fault out, waits until the run has dealt with it, and returns True; False: the
        run ended before its instant.

        Raises:
            LostMemberError: the run failed, hangs, or did otherwise than it should.
        """
        self.read()
        self.note(f"next: {fault}")
        self._expected = _expected_codes(fault)
        try:
            self._await_instant(fault)
            step, epoch, went_back = self.step, self.epoch, self.went_back
            self._strikes.carry_out(fault)
            outcome, seconds = self._await_outcome(fault, self._watch())
            if self.went_back > went_back:
                outcome = Aftermath.WENT_BACK
        except RunEndedError:
            self.note("the run ended before that")
            return False
        finally:
            for disk in self.disks.values():
                disk.clear()
        entry = Suffered(
            fault=fault,
            run=self.number,
            step=step,
            epoch=epoch,
            outcome=outcome,
            seconds=seconds,
            timeout=fault.waits_for_timeout(self.cast.heartbeat_timeout_s),
        )
        self.suffered.append(entry)
        self.note(f"{outcome} after {seconds:.3f} s, at step {self.step}, membership {self.epoch}")
        return True

    def finish(self) -> None:
        """Waits for the end, which must be a success.

        Raises:
            LostMemberError: it was none, or did not come.
        """
        with suppress(RunEndedError):
            self.wait(lambda: False, "the end")
        self.note(f"ended with {self.process.returncode}")

    def kill(self) -> None:
        """Kills what is left of it; the kernel kills its children after it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def note(self, what: str) -> None:
        """Keeps and says what happened when."""
        line = f"{time.monotonic() - self._began_s:8.3f} s  {what}"
        self.history.append(line)
        self.say(f"run {self.number} {line}")

    def wait(
        self, reached: Callable[[], bool], what: str, pause_s: float = POLL_S, limit_s: float = 0.0
    ) -> None:
        """Waits until ``reached``; the command is given again if a fault ended it before that.

        Raises:
            LostMemberError: no step came for ``patience_s``, or ``limit_s`` has passed.
            RunEndedError: the run has ended well.
        """
        deadline = time.monotonic() + limit_s if limit_s else None
        while not reached():
            self.read()
            self.revive()
            now_s = time.monotonic()
            if deadline is not None and now_s > deadline:
                raise LostMemberError(f"waited {limit_s:g} s for {what}")
            if now_s - self._moved_s > self.patience_s:
                raise LostMemberError(f"no step for {self.patience_s:g} s, waiting for {what}")
            time.sleep(pause_s)

    def read(self) -> list[dict[str, Any]]:
        """Returns fresh lines of metrics of training; remembers step and epoch."""
        lines = [line for line in self._tail.read() if line["phase"] == "train"]
        for line in lines:
            done_before = line["step"] - (line["decision"] != "skip")
            self.went_back += done_before < self.step
            self.step, self.epoch = line["step"], max(self.epoch, int(line["epoch"]))
            self._moved_s = time.monotonic()
        return lines

    def revive(self) -> bool:
        """Gives the command once more if a fault was meant to end it, and has; returns whether.

        Raises:
            LostMemberError: it ended otherwise.
            RunEndedError: the run is done.
        """
        code = self.process.poll()
        if code is None:
            return False
        if code == ExitCode.DONE:
            raise RunEndedError
        if code not in self._expected:
            raise LostMemberError(f"penstock train ended with {code}")
        for disk in self.disks.values():
            disk.clear()
        self.note(f"ended with {code}")
        self.start()
        return True

    @property
    def near_end(self) -> bool:
        """Returns whether there are too few steps left for a fault while it trains."""
        return self.step >= self.steps - 2 - self.cast.gap_steps

    # ---- when ----

    def _await_instant(self, fault: Fault) -> None:
        goal = min(self.step + fault.gap_steps, self.steps - 1)
        match fault.moment:
            case Moment.ENDING:
                self.wait(lambda: self.step >= self.steps, f"the instant of: {fault}")
            case Moment.START:
                self.wait(lambda: self.step >= goal or self.step == 0, f"the start for: {fault}")
                self._strikes.begin_anew(fault)
            case Moment.EVALUATION:
                every = self.eval_every
                goal = (self.step // every + 1) * every
                self.wait(lambda: self.step >= goal, f"the instant of: {fault}", 1e-3)
            case Moment.SAVING:
                self.wait(self._is_saving, f"the instant of: {fault}", 1e-3)
            case Moment.STEP:
                self.wait(lambda: self.step >= goal, f"the instant of: {fault}")

    def _is_saving(self) -> bool:
        return any((self.command.run_dir / "state").glob(".tmp-step-*"))

    # ---- what becomes of it ----

    def _watch(self) -> _Watch:
        # Blows before the last one are dealt with as far as lines were read: those were before it.
        since_s = self._strikes.last_s
        woke_s = max(since_s, self._strikes.woke_s)
        return _Watch(epoch=self.epoch, since_s=since_s, woke_s=woke_s)

    def _await_outcome(self, fault: Fault, watch: _Watch) -> tuple[Aftermath, float]:
        if fault.kind is FaultKind.SECOND:
            return Aftermath.REFUSED, self._strikes.took_s
        harmless = _may_be_harmless(fault)
        settles_s = self._settles_s(fault)
        while True:
            try:
                watch.restarted |= self.revive()
            except RunEndedError:
                return Aftermath.ENDED, time.time() - watch.woke_s
            self._look(watch)
            if watch.replaced_s is not None:
                outcome = Aftermath.CONTINUED if watch.restarted else Aftermath.RECOVERED
                return outcome, watch.replaced_s - watch.since_s
            quiet = time.time() - watch.woke_s > settles_s
            if harmless and watch.went_on_s is not None and quiet and self._complete(fault):
                there_s = time.time() if self._strikes.struck else watch.went_on_s
                return Aftermath.UNHARMED, there_s - watch.woke_s
            if time.monotonic() - self._moved_s > self.patience_s or (
                not harmless and time.time() - watch.woke_s > self.patience_s
            ):
                raise LostMemberError(
                    f"not recovered {self.patience_s:g} s after: {fault}; step {self.step},"
                    f" membership {self.epoch}"
                )
            time.sleep(POLL_S)

    def _look(self, watch: _Watch) -> None:
        for line in self.read():
            at_s = float(line["time"])
            if at_s < watch.since_s:
                # A blow before the last one is dealt with; only a later epoch shows that this is.
                watch.epoch = max(watch.epoch, int(line["epoch"]))
            elif line["epoch"] > watch.epoch:
                watch.replaced_s = watch.replaced_s or at_s
            elif watch.went_on_s is None and at_s >= watch.woke_s:
                watch.went_on_s = at_s

    def _settles_s(self, fault: Fault) -> float:
        if fault.kind is FaultKind.HALF_OPEN:
            return 2.0 * self.cast.heartbeat_timeout_s + 2.0
        return CLOSED_SETTLES_S if fault.kind in (FaultKind.CLOSED, FaultKind.DISK) else 0.0

    def _complete(self, fault: Fault) -> bool:
        """Returns whether the processes that were struck are there again."""
        there = members(self.command.run_dir)
        killed = {strike.target for strike in fault.strikes if strike.blow is Blow.KILL}
        return all(
            there.get(name) not in (None, pid)
            for name, pid in self._strikes.struck.items()
            if name in killed
        )


def _expected_codes(fault: Fault) -> frozenset[int]:
    """Returns how ``penstock train`` may end because of a fault."""
    codes: set[int] = set()
    if fault.moment is Moment.START:
        codes |= {-signal.SIGKILL}
    for strike in fault.strikes:
        if strike.blow is Blow.TERM:
            # Maybe before it listens.
            codes |= {-signal.SIGTERM, int(ExitCode.INTERRUPTED)}
        elif strike.blow is Blow.KILL and strike.target == "train":
            codes |= {-signal.SIGKILL}
        elif strike.blow is Blow.FILL:
            codes |= {int(ExitCode.NO_MEMORY)}
    return frozenset(codes)


def _may_be_harmless(fault: Fault) -> bool:
    """Returns whether the run may go on without a new epoch."""
    if fault.moment is Moment.START:
        return False  # every start begins an epoch
    return not any(strike.breaks_epoch for strike in fault.strikes)
