"""Injects faults into processes, connections and disks of a run."""

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
from penstock.chaos.connections import OpenConnection, close, connections_of, deafen
from penstock.chaos.disks import Disk
from penstock.chaos.faults import Action, Fault, FaultKind, Injection
from penstock.chaos.processes import TrainCommand, members, wait_until_stopped
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
    Action.KILL: signal.SIGKILL,
    Action.PAUSE: signal.SIGSTOP,
    Action.STOP: signal.SIGSTOP,
    Action.TERM: signal.SIGTERM,
    Action.LOSE: signal.SIGKILL,
}


class Scene(Protocol):
    """The members of the faulted run that the injector uses."""

    command: TrainCommand
    process: subprocess.Popen[bytes]
    source: random.Random
    disks: Mapping[str, Disk]
    patience_s: float
    step: int

    def note(self, event: str) -> None:
        """Keeps an event."""

    def start(self) -> None:
        """Starts the command."""

    def wait(self, reached: Callable[[], bool], what: str, *, limit_s: float = 0.0) -> None:
        """Waits until ``reached``; repeats an ended command."""


@dataclass(slots=True)
class FaultInjector:
    """Injects faults.

    ``last_s`` is the time of the last action that ends an epoch, or of the last action. ``woke_s``
    is the time at which the last process woke or the disk had room. Both are Unix times. ``hit``
    holds the pids of the targets by name. ``took_s`` is the duration of a refused second start.
    """

    scene: Scene
    last_s: float = 0.0
    woke_s: float = 0.0
    took_s: float = 0.0
    hit: dict[str, int] = field(default_factory=dict)
    _broken: bool = False

    def restart(self, fault: Fault) -> None:
        """Kills the command and repeats it, unless it has just started. A fault that fills /dev/shm
        does so before the start.
        """
        if self.scene.step:
            self.scene.process.kill()
            self.scene.process.wait()
            self.scene.note("kill train, to start it again")
            if fault.kind is FaultKind.SHM:
                self._fill(fault.injections[0])
            self.scene.start()

    def carry_out(self, fault: Fault) -> None:
        """Injects a fault; returns after its last action and after the last process woke.

        Raises:
            LostMemberError: a target did not appear, or a second start was not refused.
        """
        self.hit.clear()
        self._broken = False
        if fault.kind is FaultKind.SWEEP:
            self._kill_inside_sweep(fault.injections[0].target)
        elif fault.kind is FaultKind.SEVERAL:
            self._kill_at_once(fault)
        else:
            self._one_by_one(fault)

    def _one_by_one(self, fault: Fault) -> None:
        began_s = time.monotonic()
        wakes: list[tuple[float, int, str]] = []
        clears: list[tuple[float, Disk]] = []
        with ExitStack() as victims:
            for injection in fault.injections:
                time.sleep(max(0.0, began_s + injection.after_s - time.monotonic()))
                match injection.action:
                    case Action.FILL:
                        self._fill(injection)
                        until_s = time.monotonic() + injection.seconds
                        clears.append((until_s, self.scene.disks[injection.target]))
                    case Action.AGAIN:
                        self._start_again()
                    case Action.CLOSE | Action.DEAFEN:
                        self._cut(injection)
                    case _:
                        victim = victims.enter_context(self._victim(injection.target))
                        if injection.action is Action.LOSE:
                            self._lose_memory(injection.target)
                        self._signal(victim, injection)
                        if injection.action is Action.PAUSE:
                            until_s = time.monotonic() + injection.seconds
                            wakes.append((until_s, victim, injection.target))
                if injection.breaks_epoch or not self._broken:
                    self.last_s = time.time()
                self._broken |= injection.breaks_epoch
            self._wake(wakes)
        for until_s, disk in clears:
            self._clear(until_s, disk)

    def _kill_at_once(self, fault: Fault) -> None:
        time.sleep(fault.injections[0].after_s)
        with ExitStack() as opened:
            victims = [
                (opened.enter_context(self._victim(injection.target)), injection)
                for injection in fault.injections
            ]
            for victim, injection in victims:
                self._signal(victim, injection)
        self.last_s = time.time()

    def _signal(self, victim: int, injection: Injection) -> None:
        with suppress(ProcessLookupError):  # an earlier action killed it
            signal.pidfd_send_signal(victim, _SIGNALS[injection.action])
        if injection.action is Action.TERM:
            for pid in members(self.scene.command.run_dir).values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        self.scene.note(f"step {self.scene.step}: {injection.action} {injection.target}")

    def _lose_memory(self, target: str) -> None:
        """Unlinks the shared memory of a node. The pages are freed when the processes that map them
        die.
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
        """Yields a pidfd of the process that is ``target`` now."""
        descriptors: list[int] = []

        def opened() -> bool:
            pid = self._pid(target)
            try:
                descriptors.extend([os.pidfd_open(pid)] if pid is not None else [])
            except ProcessLookupError:
                return False
            if descriptors and pid is not None:
                self.hit[target] = pid
            return bool(descriptors)

        self.scene.wait(opened, f"process {target}", limit_s=self.scene.patience_s)
        try:
            yield descriptors[0]
        finally:
            os.close(descriptors[0])

    def _pid(self, target: str) -> int | None:
        if target == "train":
            return self.scene.process.pid
        return members(self.scene.command.run_dir).get(target)

    # ---- disks ----

    def _fill(self, injection: Injection) -> None:
        self.scene.disks[injection.target].fill()
        self.scene.note(f"step {self.scene.step}: {injection.target} is full")

    def _clear(self, until_s: float, disk: Disk) -> None:
        """Frees a disk at ``until_s``, or when the run has ended."""
        while time.monotonic() < until_s and self.scene.process.poll() is None:
            time.sleep(0.01)
        disk.clear()
        self.woke_s = time.time()
        self.scene.note("room again")

    # ---- connections ----

    def _cut(self, injection: Injection) -> None:
        deaf = injection.action is Action.DEAFEN
        chosen: list[OpenConnection] = []

        def choose() -> bool:
            pid = self._pid(injection.target)
            connections = [] if pid is None else connections_of(pid, tcp_only=deaf)
            if connections:
                chosen.append(connections[int(injection.which * len(connections))])
            return bool(chosen)

        self.scene.wait(
            choose, f"a connection of {injection.target}", limit_s=self.scene.patience_s
        )
        try:
            if deaf:
                pids = members(self.scene.command.run_dir).values()
                deafen(chosen[0], pids, one_way=injection.one_way)
            else:
                close(chosen[0])
        except ConfigError:
            raise
        except OSError as error:
            self.scene.note(f"{chosen[0]} was gone: {error}")
        self.scene.note(
            f"step {self.scene.step}: {injection.action} {injection.target}: {chosen[0]}"
        )

    # ---- a second start ----

    def _start_again(self) -> None:
        """Starts the same command while the run lives.

        Raises:
            LostMemberError: the start was not refused.
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
        if code != ExitCode.BAD_CONFIG or "is in use by process" not in second.text():
            if self.scene.process.poll() is not None:
                return  # the first command ended meanwhile
            raise LostMemberError(f"a second start ended with {code}: {second.text()}")
        self.scene.note(f"step {self.scene.step}: a second start is refused")

    # ---- native sweeps ----

    def _kill_inside_sweep(self, target: str) -> None:
        """Kills an optimizerd while a native sweep writes state.

        Stops an optimizerd, and reads in its undo area whether a sweep is active. Otherwise wakes
        the process and tries the optimizerd of the next node, since a node may own no blocks.
        """
        tried: list[str] = []

        def killed() -> bool:
            pids = members(self.scene.command.run_dir)
            names = sorted((n for n in pids if n.startswith("optimizerd")), key=target.__ne__)
            if not names:
                return False
            name = names[len(tried) % len(names)]
            tried.append(name)
            self.hit = {name: pids[name]}
            return self._killed_inside(pids[name], name.partition(".")[2])

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
                pass  # no sleep: a sweep takes less than a millisecond
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
