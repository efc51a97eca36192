"""Blows to processes, connections and disks of a run: finds what is to be struck, and strikes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from penstock import _native
from penstock.chaos.command import TrainCommand
from penstock.chaos.connections import OpenConnection, close, connections_of, deafen
from penstock.chaos.disks import Disk
from penstock.chaos.faults import Blow, Fault, FaultKind, Strike
from penstock.chaos.processes import members, wait_until_stopped
from penstock.host.errors import ConfigError, ExitCode, LostMemberError
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.control import ControlView
from penstock.shm.inventory import inventory
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import segment_name
from penstock.shm.segment import Segment, SegmentError, unlink

SECOND_START_TIMEOUT_S = 60.0
_IN_SWEEP_S = 0.3
_SIGNALS = {
    Blow.KILL: signal.SIGKILL,
    Blow.PAUSE: signal.SIGSTOP,
    Blow.STOP: signal.SIGSTOP,
    Blow.TERM: signal.SIGTERM,
    Blow.LOSE: signal.SIGKILL,
}


class Scene(Protocol):
    """The run that is struck, as far as a blow needs it."""

    command: TrainCommand
    process: subprocess.Popen[bytes]
    source: random.Random
    disks: Mapping[str, Disk]
    patience_s: float
    step: int

    def note(self, what: str) -> None:
        """Keeps what happened."""

    def start(self) -> None:
        """Gives the command."""

    def wait(self, reached: Callable[[], bool], what: str, *, limit_s: float = 0.0) -> None:
        """Waits until ``reached``; an ended command is given again."""


@dataclass(slots=True)
class Strikes:
    """Carries faults out.

    ``last_s``: when the last blow fell that ends an epoch, or just the last one; ``woke_s``: when
    the last process woke, or a disk had room again; both in seconds since the epoch of Unix.
    ``struck``: name -> pid of who was hit; ``took_s``: how long a second start took until it was
    refused.
    """

    scene: Scene
    last_s: float = 0.0
    woke_s: float = 0.0
    took_s: float = 0.0
    struck: dict[str, int] = field(default_factory=dict)
    _broken: bool = False

    def begin_anew(self, fault: Fault) -> None:
        """Kills the command and gives it again, unless it has just begun. A full /dev/shm is full
        before that.
        """
        if self.scene.step:
            self.scene.process.kill()
            self.scene.process.wait()
            self.scene.note("kill train, to start it again")
            if fault.kind is FaultKind.SHM:
                self._fill(fault.strikes[0])
            self.scene.start()

    def carry_out(self, fault: Fault) -> None:
        """Strikes; returns after the last blow, and after the last process woke.

        Raises:
            LostMemberError: a process that should be there is not, or a second start was not
                refused.
        """
        self.struck.clear()
        self._broken = False
        if fault.kind is FaultKind.SWEEP:
            self._kill_inside_sweep(fault.strikes[0].target)
        elif fault.kind is FaultKind.SEVERAL:
            self._kill_at_once(fault)
        else:
            self._one_by_one(fault)

    def _one_by_one(self, fault: Fault) -> None:
        began_s = time.monotonic()
        wakes: list[tuple[float, int, str]] = []
        clears: list[tuple[float, Disk]] = []
        with ExitStack() as victims:
            for strike in fault.strikes:
                time.sleep(max(0.0, began_s + strike.after_s - time.monotonic()))
                match strike.blow:
                    case Blow.FILL:
                        self._fill(strike)
                        until_s = time.monotonic() + strike.seconds
                        clears.append((until_s, self.scene.disks[strike.target]))
                    case Blow.AGAIN:
                        self._start_again()
                    case Blow.CLOSE | Blow.DEAFEN:
                        self._cut(strike)
                    case _:
                        victim = victims.enter_context(self._victim(strike.target))
                        if strike.blow is Blow.LOSE:
                            self._lose_memory(strike.target)
                        self._signal(victim, strike)
                        if strike.blow is Blow.PAUSE:
                            until_s = time.monotonic() + strike.seconds
                            wakes.append((until_s, victim, strike.target))
                if strike.breaks_epoch or not self._broken:
                    self.last_s = time.time()
                self._broken |= strike.breaks_epoch
            self._wake(wakes)
        for until_s, disk in clears:
            self._clear(until_s, disk)

    def _kill_at_once(self, fault: Fault) -> None:
        time.sleep(fault.strikes[0].after_s)
        with ExitStack() as opened:
            victims = [
                (opened.enter_context(self._victim(strike.target)), strike)
                for strike in fault.strikes
            ]
            for victim, strike in victims:
                self._signal(victim, strike)
        self.last_s = time.time()

    def _signal(self, victim: int, strike: Strike) -> None:
        with suppress(ProcessLookupError):  # died of another blow: that counts
            signal.pidfd_send_signal(victim, _SIGNALS[strike.blow])
        if strike.blow is Blow.TERM:
            for pid in members(self.scene.command.run_dir).values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        self.scene.note(f"step {self.scene.step}: {strike.blow} {strike.target}")

    def _lose_memory(self, target: str) -> None:
        """Removes the names of all that a node has in shared memory. Its processes, which have that
        mapped, die with it.
        """
        run_id, node = RunDirectory(self.scene.command.run_dir).run_id, target.partition(".")[2]
        for entry in inventory():
            if (entry.run_id, entry.keeper) == (run_id, node):
                for name in entry.names:
                    unlink(name)

    def _wake(self, wakes: list[tuple[float, int, str]]) -> None:
        for until_s, victim, target in sorted(wakes):
            time.sleep(max(0.0, until_s - time.monotonic()))
            try:
                signal.pidfd_send_signal(victim, signal.SIGCONT)
            except ProcessLookupError:
                self.scene.note(f"{target} was replaced before it woke")
            else:
                self.woke_s = time.time()
                self.scene.note(f"wake {target}")

    @contextmanager
    def _victim(self, target: str) -> Iterator[int]:
        """Gives a descriptor of the process that is ``target`` now."""
        descriptors: list[int] = []

        def opened() -> bool:
            pid = self._pid(target)
            try:
                descriptors.extend([os.pidfd_open(pid)] if pid is not None else [])
            except ProcessLookupError:
                return False
            if descriptors and pid is not None:
                self.struck[target] = pid
            return bool(descriptors)

        self.scene.wait(opened, f"{target} to be there", limit_s=self.scene.patience_s)
        try:
            yield descriptors[0]
        finally:
            os.close(descriptors[0])

    def _pid(self, target: str) -> int | None:
        if target == "train":
            return self.scene.process.pid
        return members(self.scene.command.run_dir).get(target)

    # ---- disks ----

    def _fill(self, strike: Strike) -> None:
        self.scene.disks[strike.target].fill()
        self.scene.note(f"step {self.scene.step}: {strike.target} is full")

    def _clear(self, until_s: float, disk: Disk) -> None:
        """Frees a disk when its time is over, or the run has ended."""
        while time.monotonic() < until_s and self.scene.process.poll() is None:
            time.sleep(0.01)
        disk.clear()
        self.woke_s = time.time()
        self.scene.note("room again")

    # ---- connections ----

    def _cut(self, strike: Strike) -> None:
        deaf = strike.blow is Blow.DEAFEN
        chosen: list[OpenConnection] = []

        def found() -> bool:
            pid = self._pid(strike.target)
            there = [] if pid is None else connections_of(pid, tcp_only=deaf)
            if there:
                chosen.append(there[int(strike.which * len(there))])
            return bool(chosen)

        self.scene.wait(found, f"a connection of {strike.target}", limit_s=self.scene.patience_s)
        try:
            if deaf:
                pids = members(self.scene.command.run_dir).values()
                deafen(chosen[0], pids, one_way=strike.one_way)
            else:
                close(chosen[0])
        except ConfigError:
            raise
        except OSError as error:
            self.scene.note(f"{chosen[0]} was gone: {error}")
        self.scene.note(f"step {self.scene.step}: {strike.blow} {strike.target}: {chosen[0]}")

    # ---- a second start ----

    def _start_again(self) -> None:
        """Gives the same command while the run lives.

        Raises:
            LostMemberError: it was not refused as it should.
        """
        began_s = time.monotonic()
        output = self.scene.command.output.with_suffix(".second.txt")
        output.unlink(missing_ok=True)
        second = TrainCommand(
            config=self.scene.command.config,
            settings=self.scene.command.settings,
            run_dir=self.scene.command.run_dir,
            output=output,
        )
        process = second.start()
        try:
            code = process.wait(SECOND_START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise LostMemberError(
                f"a second start was not refused in {SECOND_START_TIMEOUT_S:g} s"
            ) from None
        self.took_s = time.monotonic() - began_s
        if code != ExitCode.BAD_CONFIG or "is in use by process" not in second.said():
            if self.scene.process.poll() is not None:
                return  # the first one ended meanwhile
            raise LostMemberError(f"a second start ended with {code}: {second.said()}")
        self.scene.note(f"step {self.scene.step}: a second start is refused")

    # ---- native sweeps ----

    def _kill_inside_sweep(self, target: str) -> None:
        """Stops an optimizerd; kills it if its undo area says that a native sweep writes state,
        else wakes it and tries again, with the other nodes' in turn: one may own nothing.
        """
        tried: list[str] = []

        def killed() -> bool:
            there = members(self.scene.command.run_dir)
            found = sorted((n for n in there if n.startswith("optimizerd")), key=target.__ne__)
            tried.extend(found[len(tried) % len(found) :][:1] if found else [])
            if not found:
                return False
            self.struck = {tried[-1]: there[tried[-1]]}
            return self._killed_inside(there[tried[-1]], tried[-1].partition(".")[2])

        self.scene.wait(killed, f"a native sweep of {target}")
        self.last_s = time.time()
        self.scene.note(
            f"step {self.scene.step}: kill {tried[-1]} inside a sweep (try {len(tried)})"
        )

    def _killed_inside(self, pid: int, node: str) -> bool:
        run_id = RunDirectory(self.scene.command.run_dir).run_id
        try:
            segment = Segment.attach(segment_name(run_id, node, SegmentKind.CONTROL))
        except SegmentError:
            return False  # not created yet
        control = None
        try:
            control = ControlView.open(segment.buffer, run_id=run_id, digest=None)
            time.sleep(self.scene.source.random() * 0.05)
            deadline = time.monotonic() + _IN_SWEEP_S
            while not _native.undo_state(control.undo_area).armed and time.monotonic() < deadline:
                pass  # passes take less than a millisecond, and so should this loop
            os.kill(pid, signal.SIGSTOP)
            wait_until_stopped(pid)
            inside = _native.undo_state(control.undo_area).armed
            os.kill(pid, signal.SIGKILL if inside else signal.SIGCONT)
            return inside
        except (ProcessLookupError, SegmentError):
            return False
        finally:
            control = None
            segment.close()
