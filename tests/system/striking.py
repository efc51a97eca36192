"""Faults carried out on a real run: wait for the instant, find the process, signal it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from penstock import _native
from penstock.protocol.errors import ExitCode
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.control import ControlView
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import segment_name
from penstock.shm.segment import Segment, SegmentError
from tests.system import conftest as H
from tests.system.faults import Blow, Fault, Kind

RUN_TIMEOUT_S = 180.0
APPEAR_TIMEOUT_S = 60.0
"""A process that was struck before is replaced within this."""

SIGNALS = {
    Blow.KILL: signal.SIGKILL,
    Blow.PAUSE: signal.SIGSTOP,
    Blow.STOP: signal.SIGSTOP,
    Blow.TERM: signal.SIGTERM,
}


CUT_SHORT = (-signal.SIGKILL, -signal.SIGTERM, int(ExitCode.INTERRUPTED))
"""How ``penstock train`` ends that was killed, or asked to end (maybe before it listens)."""


class RunEndedError(Exception):
    """The run ended before a fault could happen."""


class DisturbedRun:
    """A run that faults happen to. ``history`` says what was done, when; ``struck`` counts."""

    def __init__(self, runner: H.Runner, config: Path, steps: int, source: random.Random) -> None:
        self.history: list[str] = []
        self.struck: Counter[str] = Counter()
        self._runner = runner
        self._config = config
        self._steps = steps
        self._source = source
        self._began_s = time.monotonic()
        self._cut_short = False
        self.run = runner.start(config)
        self._say("started")
        self._instants: dict[Kind, Callable[[int], bool]] = {
            Kind.START: lambda step: True,
            Kind.SAVING: lambda step: self._step >= step and self._is_saving(),
        }

    def suffer(self, fault: Fault) -> None:
        """Carry one fault out, unless the run ends before its instant."""
        self._say(f"next: {fault}")
        reached = self._instants.get(fault.kind, lambda step: self._step >= step)
        try:
            self._wait(lambda: reached(fault.step), f"the instant of: {fault}", RUN_TIMEOUT_S, 1e-3)
            if fault.kind is Kind.SWEEP:
                self._kill_inside_sweep(fault.strikes[0].target)
            else:
                self._strike(fault)
        except RunEndedError:
            self._say("the run ended before that")
            return
        self.struck.update(["faults", fault.kind])
        for strike in fault.strikes:
            self.struck[f"{strike.blow} {strike.target.partition('.')[0]}"] += 1

    def finish(self) -> str:
        """Wait for the end, which must be a success; what the last command printed."""
        with suppress(RunEndedError):
            self._wait(lambda: False, "the end", RUN_TIMEOUT_S)
        code, output = self.run.wait(RUN_TIMEOUT_S)
        self._say(f"ended with {code}")
        assert code == 0, f"exit code {code}\n{output}"
        return output

    def survivors(self) -> dict[int, str]:
        """Command lines of living processes that name the run's directory."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    words = (entry / "cmdline").read_bytes().decode(errors="replace")
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if str(self.run.run_dir) in words:
                    found[int(entry.name)] = words.replace("\0", " ")
        return found

    # ---- when ----

    @property
    def _step(self) -> int:
        return H.newest_step(self.run.run_dir)

    def _is_saving(self) -> bool:
        return any((self.run.run_dir / "state").glob(".tmp-step-*"))

    def _wait(
        self, reached: Callable[[], bool], what: str, timeout_s: float, pause_s: float = 0.02
    ) -> None:
        """Until ``reached``; the command is given again if it was killed before that."""
        deadline = time.monotonic() + timeout_s
        while not reached():
            self._revive()
            if self.run.process.poll() is not None:
                raise RunEndedError
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
            time.sleep(pause_s)

    def _revive(self) -> None:
        """Give the command once more if a fault made ``penstock train`` end."""
        if self._cut_short and self.run.process.poll() in CUT_SHORT:
            self._cut_short = False
            self.run.process.communicate(timeout=10)
            self.run = self._runner.start(self._config)
            self._say("started again")

    # ---- what ----

    def _strike(self, fault: Fault) -> None:
        began_s = time.monotonic()
        wakes: list[tuple[float, int, str]] = []
        steps: list[int] = []
        with ExitStack() as open_victims:
            for strike in fault.strikes:
                time.sleep(max(0.0, began_s + strike.after_s - time.monotonic()))
                victim = open_victims.enter_context(self._victim(strike.target))
                steps.append(self._step)
                self._signal(victim, SIGNALS[strike.blow])
                if strike.blow is Blow.TERM:
                    self._signal_members(signal.SIGTERM)
                self._cut_short |= strike.target == "train" and strike.blow is not Blow.PAUSE
                self._say(f"step {steps[-1]}: {strike.blow} {strike.target}")
                if strike.blow is Blow.PAUSE:
                    wakes.append((time.monotonic() + strike.seconds, victim, strike.target))
            for when_s, victim, target in sorted(wakes):
                time.sleep(max(0.0, when_s - time.monotonic()))
                try:
                    self._signal(victim, signal.SIGCONT)
                    self._say(f"step {self._step}: wake {target}")
                except RunEndedError:
                    self._say(f"step {self._step}: {target} was replaced before it woke")
            if fault.kind is Kind.RECOVERY and len(set(steps)) == 1:
                self.struck["one more before the next step"] += 1

    def _signal_members(self, number: signal.Signals) -> None:
        for pid in self.run.members().values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _signal(self, victim: int, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(victim, number)
        except ProcessLookupError:
            raise RunEndedError from None

    @contextmanager
    def _victim(self, target: str) -> Iterator[int]:
        """Descriptor of the process that is ``target`` now: a number could be another's later."""
        descriptors: list[int] = []

        def opened() -> bool:
            pid = self.run.process.pid if target == "train" else self.run.members().get(target)
            try:
                descriptors.extend([os.pidfd_open(pid)] if pid is not None else [])
            except ProcessLookupError:
                return False
            return bool(descriptors)

        self._wait(opened, target, APPEAR_TIMEOUT_S)
        try:
            yield descriptors[0]
        finally:
            os.close(descriptors[0])

    def _kill_inside_sweep(self, target: str) -> None:
        """Stop an optimizerd; kill it if its undo area says that a native sweep writes state, else
        wake it and try again, with the other nodes' in turn: one may own nothing.
        """
        tried: list[str] = []

        def killed() -> bool:
            members = self.run.members()
            found = sorted((n for n in members if n.startswith("optimizerd")), key=target.__ne__)
            tried.extend(found[len(tried) % len(found) :][:1] if found else [])
            return bool(found) and self._killed_inside(
                members[tried[-1]], tried[-1].partition(".")[2]
            )

        self._wait(killed, f"a native sweep of {target}", RUN_TIMEOUT_S, 1e-3)
        self._say(f"step {self._step}: kill {tried[-1]} inside a sweep (try {len(tried)})")

    def _killed_inside(self, pid: int, node: str) -> bool:
        run_id = RunDirectory(self.run.run_dir).run_id
        try:
            segment = Segment.attach(segment_name(run_id, node, SegmentKind.CONTROL))
            control = ControlView.open(segment.buffer, run_id=run_id, digest=None)
        except SegmentError:
            return False  # not created yet
        try:
            time.sleep(self._source.random() * 0.05)
            deadline = time.monotonic() + 0.3
            while not _native.undo_state(control.undo_area).armed and time.monotonic() < deadline:
                pass  # passes take less than a millisecond, and so should this loop
            os.kill(pid, signal.SIGSTOP)
            wait_until_stopped(pid)
            inside = _native.undo_state(control.undo_area).armed
            os.kill(pid, signal.SIGKILL if inside else signal.SIGCONT)
            return inside
        except ProcessLookupError:
            return False
        finally:
            del control
            segment.close()

    def _say(self, what: str) -> None:
        self.history.append(f"{time.monotonic() - self._began_s:8.3f} s  {what}")


def wait_until_stopped(pid: int, timeout_s: float = 10.0) -> None:
    """Until no thread of a process runs any more.

    Raises:
        ProcessLookupError: it is gone.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            states = [
                (task / "stat").read_text().rpartition(")")[2].split()[0]
                for task in Path(f"/proc/{pid}/task").iterdir()
            ]
        except (FileNotFoundError, ProcessLookupError):
            raise ProcessLookupError(pid) from None
        if all(state in "TZX" for state in states):
            return
    raise AssertionError(f"process {pid} did not stop in {timeout_s} s: {states}")
