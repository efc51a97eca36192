"""A run under faults: waits for the instant of each fault, injects the fault, and observes the
outcome.
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

from penstock.chaos.disks import Disk
from penstock.chaos.fault_injector import FaultInjector
from penstock.chaos.faults import Action, Fault, FaultKind, Moment, Targets
from penstock.chaos.processes import TrainCommand, members
from penstock.client.views.run_view import MetricsTail
from penstock.host.errors import ExitCode, LostMemberError

POLL_S = 0.005
CLOSED_SETTLES_S = 1.0
"""Seconds within which a process that lost a connection reports the loss, or continues."""


class Outcome(StrEnum):
    """Outcomes of a fault."""

    RECOVERED = "recovered by itself"
    WENT_BACK = "went back to a saved step"
    UNHARMED = "went on"
    CONTINUED = "the same command went on"
    REFUSED = "refused"
    ENDED = "the run had ended well"


class RunEndedError(Exception):
    """The run ended before a fault could happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault that was injected, and its outcome.

    ``seconds`` count from the last action to the first step of a later membership. If no process
    was replaced, they count from the end of the fault (a process woke, a disk had room) to the next
    step. ``timeout``: True if only a timeout can detect the fault.
    """

    fault: Fault
    run: int
    step: int
    epoch: int
    outcome: Outcome
    seconds: float
    timeout: bool

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON fields of a line in ``faults.jsonl``."""
        return {
            "run": self.run,
            "kind": self.fault.kind,
            "moment": self.fault.moment,
            "targets": sorted(self.fault.targets),
            "strikes": [str(injection) for injection in self.fault.injections],
            "step": self.step,
            "epoch": self.epoch,
            "outcome": self.outcome,
            "seconds": round(self.seconds, 3),
            "timeout": self.timeout,
        }


@dataclass(slots=True, kw_only=True)
class _Watch:
    """Events since the last action of a fault (at ``since_s``) and since its end (at ``woke_s``).

    A fault ends when the last paused process wakes or the full disk has room. Times are Unix times.
    """

    epoch: int
    since_s: float
    woke_s: float
    restarted: bool = False
    replaced_s: float | None = None
    went_on_s: float | None = None


@dataclass(slots=True, kw_only=True)
class FaultedRun:
    """A run and its faults. ``say`` gets each event; ``history`` keeps all events.

    ``steps`` is the number of steps of the run. After ``patience_s`` without a step, the run has
    hung. ``went_back`` counts repeated steps.
    """

    command: TrainCommand
    number: int
    steps: int
    targets: Targets
    source: random.Random
    disks: Mapping[str, Disk]
    patience_s: float
    eval_every: int
    say: Callable[[str], None]
    history: list[str] = field(default_factory=list)
    injected: list[InjectedFault] = field(default_factory=list)
    process: subprocess.Popen[bytes] = field(init=False)
    step: int = 0
    epoch: int = 0
    went_back: int = 0
    _tail: MetricsTail = field(init=False)
    _injector: FaultInjector = field(init=False)
    _began_s: float = field(init=False)
    _moved_s: float = field(init=False)
    _expected: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self._began_s = self._moved_s = time.monotonic()
        self._tail = MetricsTail(self.command.run_dir / "metrics.jsonl")
        self._injector = FaultInjector(self)

    # ---- the run ----

    def start(self) -> None:
        """Starts the command."""
        self.process = self.command.start()
        self._moved_s = time.monotonic()
        self.note("started")

    def inject(self, fault: Fault) -> bool:
        """Injects a fault, and waits for the outcome. Returns False if the run ended before the
        instant of the fault.

        Raises:
            LostMemberError: the run failed, hung, or had an unexpected outcome.
        """
        self.read()
        self.note(f"next: {fault}")
        self._expected = _expected_codes(fault)
        try:
            self._await_instant(fault)
            step, epoch, went_back = self.step, self.epoch, self.went_back
            self._injector.carry_out(fault)
            outcome, seconds = self._await_outcome(fault, self._watch())
            if self.went_back > went_back:
                outcome = Outcome.WENT_BACK
        except RunEndedError:
            self.note("the run ended before that")
            return False
        finally:
            for disk in self.disks.values():
                disk.clear()
        entry = InjectedFault(
            fault=fault,
            run=self.number,
            step=step,
            epoch=epoch,
            outcome=outcome,
            seconds=seconds,
            timeout=fault.waits_for_timeout(self.targets.heartbeat_timeout_s),
        )
        self.injected.append(entry)
        self.note(f"{outcome} after {seconds:.3f} s, at step {self.step}, membership {self.epoch}")
        return True

    def finish(self) -> None:
        """Waits for the end of the run.

        Raises:
            LostMemberError: the run failed or hung.
        """
        with suppress(RunEndedError):
            self.wait(lambda: False, "the end")
        self.note(f"ended with {self.process.returncode}")

    def kill(self) -> None:
        """Kills the command; the kernel then kills its children."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def note(self, event: str) -> None:
        """Keeps and reports an event with its time."""
        line = f"{time.monotonic() - self._began_s:8.3f} s  {event}"
        self.history.append(line)
        self.say(f"run {self.number} {line}")

    def wait(
        self, reached: Callable[[], bool], what: str, pause_s: float = POLL_S, limit_s: float = 0.0
    ) -> None:
        """Waits until ``reached``; repeats the command if a fault ends it earlier.

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
        """Returns new lines of training metrics, and keeps the last step and epoch."""
        lines = [line for line in self._tail.read() if line["phase"] == "train"]
        for line in lines:
            done_before = line["step"] - (line["decision"] != "skip")
            self.went_back += done_before < self.step
            self.step, self.epoch = line["step"], max(self.epoch, int(line["epoch"]))
            self._moved_s = time.monotonic()
        return lines

    def revive(self) -> bool:
        """Repeats the command if the fault ended it as expected; returns whether it did.

        Raises:
            LostMemberError: the command ended with another exit code.
            RunEndedError: the run is complete.
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
        """Returns whether too few steps are left for another fault during training."""
        return self.step >= self.steps - 2 - self.targets.gap_steps

    # ---- instants ----

    def _await_instant(self, fault: Fault) -> None:
        goal = min(self.step + fault.gap_steps, self.steps - 1)
        match fault.moment:
            case Moment.ENDING:
                self.wait(lambda: self.step >= self.steps, f"the instant of: {fault}")
            case Moment.START:
                self.wait(lambda: self.step >= goal or self.step == 0, f"the start for: {fault}")
                self._injector.restart(fault)
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

    # ---- outcomes ----

    def _watch(self) -> _Watch:
        # Lines read so far precede the last action: they show outcomes of earlier actions only.
        since_s = self._injector.last_s
        woke_s = max(since_s, self._injector.woke_s)
        return _Watch(epoch=self.epoch, since_s=since_s, woke_s=woke_s)

    def _await_outcome(self, fault: Fault, watch: _Watch) -> tuple[Outcome, float]:
        if fault.kind is FaultKind.SECOND:
            return Outcome.REFUSED, self._injector.took_s
        harmless = _may_be_harmless(fault)
        settles_s = self._settles_s(fault)
        while True:
            try:
                watch.restarted |= self.revive()
            except RunEndedError:
                return Outcome.ENDED, time.time() - watch.woke_s
            self._observe(watch)
            if watch.replaced_s is not None:
                outcome = Outcome.CONTINUED if watch.restarted else Outcome.RECOVERED
                return outcome, watch.replaced_s - watch.since_s
            quiet = time.time() - watch.woke_s > settles_s
            if harmless and watch.went_on_s is not None and quiet and self._complete(fault):
                complete_s = time.time() if self._injector.hit else watch.went_on_s
                return Outcome.UNHARMED, complete_s - watch.woke_s
            if time.monotonic() - self._moved_s > self.patience_s or (
                not harmless and time.time() - watch.woke_s > self.patience_s
            ):
                raise LostMemberError(
                    f"not recovered {self.patience_s:g} s after: {fault}; step {self.step},"
                    f" membership {self.epoch}"
                )
            time.sleep(POLL_S)

    def _observe(self, watch: _Watch) -> None:
        for line in self.read():
            at_s = float(line["time"])
            if at_s < watch.since_s:
                # An epoch after an earlier action; the last action leads to a later one.
                watch.epoch = max(watch.epoch, int(line["epoch"]))
            elif line["epoch"] > watch.epoch:
                watch.replaced_s = watch.replaced_s or at_s
            elif watch.went_on_s is None and at_s >= watch.woke_s:
                watch.went_on_s = at_s

    def _settles_s(self, fault: Fault) -> float:
        if fault.kind is FaultKind.HALF_OPEN:
            return 2.0 * self.targets.heartbeat_timeout_s + 2.0
        return CLOSED_SETTLES_S if fault.kind in (FaultKind.CLOSED, FaultKind.DISK) else 0.0

    def _complete(self, fault: Fault) -> bool:
        """Returns whether all killed processes have been replaced."""
        pids = members(self.command.run_dir)
        killed = {
            injection.target for injection in fault.injections if injection.action is Action.KILL
        }
        return all(
            pids.get(name) not in (None, pid)
            for name, pid in self._injector.hit.items()
            if name in killed
        )


def _expected_codes(fault: Fault) -> frozenset[int]:
    """Returns the exit codes that a fault may give ``penstock train``."""
    codes: set[int] = set()
    if fault.moment is Moment.START:
        codes |= {-signal.SIGKILL}
    for injection in fault.injections:
        if injection.action is Action.TERM:
            # -SIGTERM: the signal came before the command handled it.
            codes |= {-signal.SIGTERM, int(ExitCode.INTERRUPTED)}
        elif injection.action is Action.KILL and injection.target == "train":
            codes |= {-signal.SIGKILL}
        elif injection.action is Action.FILL:
            codes |= {int(ExitCode.NO_MEMORY)}
    return frozenset(codes)


def _may_be_harmless(fault: Fault) -> bool:
    """Returns whether the run may continue in the same epoch."""
    if fault.moment is Moment.START:
        return False  # every start begins an epoch
    return not any(injection.breaks_epoch for injection in fault.injections)
