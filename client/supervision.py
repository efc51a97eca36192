"""Supervises the node processes of ``penstock train``, and handles its stop signals.

Forwards stop requests, replaces dead nodes, and waits until all nodes have ended.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from penstock.client.views.display import Display
from penstock.client.views.run_view import Observer, RunView
from penstock.config.schema import Config
from penstock.daemons.node.endpoint import remove_endpoint
from penstock.daemons.node.machine.budget import RestartBudget
from penstock.daemons.node.main import LAUNCHER
from penstock.daemons.node.run_lock import remove_empty_memory, remove_memory, wait_until_dead
from penstock.daemons.preload.client import ChildProcess
from penstock.daemons.preload.preloaders import NODE, PLAIN, TORCH
from penstock.daemons.preload.starting import Starter
from penstock.host.errors import ExitCode, LostMemberError, PenstockError, failure_code, reason
from penstock.host.files import make_directory, reserve, writing
from penstock.host.stopping import (
    STOP_ORDER,
    Demand,
    Grace,
    StopDeadline,
    StopEscalation,
    StoppedDetector,
    stopping_signals,
)
from penstock.protocol.run.run_result import RunEnd, forget_end
from penstock.protocol.run.rundir import RunDirectory

LOOK_INTERVAL_S = 0.5
"""Seconds between two checks of the nodes. Every second check also asks the scheduler, for which a
status takes some milliseconds.
"""
LINGER_S = 90.0
"""Seconds that the other nodes have to end after the first one ended."""
CONSOLE_BYTES = 64 << 10
"""Bytes reserved for the console file, so that a full disk loses no message."""


def console_path(run_dir: Path) -> Path:
    """Returns the file with stdout and stderr of the run's processes since the last start."""
    return run_dir / "logs" / "console.txt"


def empty_console(run_dir: Path) -> None:
    """Empties the console file, and reserves space in case the disk fills up.

    Raises:
        PenstockError: the file cannot be written, or the disk has no space.
    """
    path = console_path(run_dir)
    make_directory(path.parent)
    with writing(path, CONSOLE_BYTES), path.open("wb") as file:
        reserve(file.fileno(), CONSOLE_BYTES)


class NodeProcess:
    """A node process, which is replaced when it is killed."""

    def __init__(
        self, run_dir: Path, name: str, max_restarts: int, starter: Starter, *, alone: bool
    ) -> None:
        self.name = name
        self._starter = starter
        # One node's preloader imports torch while daemons start; several nodes share one preloader.
        self._needs = NODE if alone else TORCH
        self._code: int | None = None
        self.restarts = RestartBudget(limit=max_restarts)
        self._run_dir = run_dir
        self._stopping = False
        self.failure = ""
        """Reason why a killed process was not replaced: the kernel started no process. Empty: none.
        """
        self._process = self._spawn()

    @property
    def pid(self) -> int:
        """The pid of the current process."""
        return self._process.pid

    def poll(self, *, replace: bool) -> int | None:
        """Returns the exit code, or None while the process runs. With ``replace``, a killed process
        is started again.
        """
        if self._code is None and self._process.ended():
            self._code = self._process.reap()
        killed = self._code is not None and self._code < 0
        if killed and replace and not self.failure and self.restarts.take(time.monotonic()):
            try:
                self._process = self._spawn()
            except PenstockError as error:
                self.failure = str(error)
                return self._code
            self._code = None
            if self._stopping:
                self.signal(STOP_ORDER)  # pending until the new process handles signals
        return self._code

    @property
    def ends(self) -> int | None:
        """Descriptor that becomes readable when the process ends; None after the end."""
        return self._process.pidfd if self._code is None else None

    @property
    def stopped(self) -> bool:
        """True if a signal (SIGSTOP) has stopped the process."""
        return self._code is None and self._process.stopped

    def stop(self) -> None:
        """Asks for a clean stop: this process now, and each replacement after its start."""
        if not self._stopping:  # a second signal would escalate to a kill
            self._stopping = True
            self.signal(STOP_ORDER)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal if the process still runs."""
        if self._code is None:
            self._process.signal(number)

    def kill(self) -> None:
        """Sends SIGKILL and reaps; the children of the process die with it."""
        self.signal(signal.SIGKILL)
        if self._code is None:
            self._code = self._process.reap()

    def _spawn(self) -> ChildProcess:
        """Starts the process.

        Raises:
            LostMemberError: the system cannot start a process.
        """
        # The node starts with stop signals blocked, until it handles them. It has its own process
        # group, so that Ctrl-C reaches only this process, which asks for a clean stop.
        arguments = ("node", "--config", str(self._run_dir / "resolved.yaml"))
        names = ("--node", self.name, "--parent-pid", str(os.getpid()))
        words, path = (*arguments, *names), console_path(self._run_dir)
        try:
            with path.open("ab") as console, open(os.devnull, "rb") as nothing:
                streams = (nothing.fileno(), console.fileno(), console.fileno())
                return self._starter.start(
                    LAUNCHER[-1], words, streams, inherits=(PLAIN, TORCH), needs=self._needs
                )
        except OSError as error:
            raise LostMemberError(
                f"node.{self.name}: cannot start its process: {reason(error)}"
            ) from error


class Interruptions:
    """Receives stop signals while installed. Only the main thread can handle signals.

    ``asked_s`` is the time of the first stop request (monotonic seconds), or None. ``insisted`` is
    True after a second request, which kills the run.
    """

    def __init__(self) -> None:
        self.asked_s: float | None = None
        self.insisted = False
        self._escalation = StopEscalation()
        # A pipe: the handler writes a byte to wake the loop.
        self._wake_write: int | None = None
        self._wake_read: int | None = None

    @property
    def state(self) -> tuple[bool, bool]:
        """Two flags: a stop was requested; the run shall be killed."""
        return self.asked_s is not None, self.insisted

    def ask(self) -> None:
        """Requests a stop, like the first signal."""
        if self.asked_s is None:
            self.asked_s = time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Runs between two bytecodes of the main thread: only records the signal; the loop acts.
        now_s = time.monotonic()
        demand = self._escalation.heard(number, now_s)
        if demand is Demand.STOP:
            self.asked_s = now_s
        elif demand is Demand.NOW:
            self.insisted = True
        if self._wake_write is not None:
            with suppress(BlockingIOError):  # the pipe is full, so the loop wakes anyway
                os.write(self._wake_write, b"\0")

    def wait(self, seconds: float, seen: tuple[bool, bool], ends: Sequence[int] = ()) -> None:
        """Waits up to ``seconds``, or until ``state`` differs from ``seen`` or a descriptor in
        ``ends`` becomes readable.
        """
        if self.state != seen:
            return
        wakes = [] if self._wake_read is None else [self._wake_read]
        ready = select.select([*wakes, *ends], [], [], seconds)[0]
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)

    @contextmanager
    def installed(self, *, process_ends: bool) -> Iterator[Interruptions]:
        """Handles stop signals inside the block. With ``process_ends``, later signals are ignored:
        a late one must not change the exit code.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        before = {number: signal.signal(number, self._handle) for number in stopping_signals()}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if process_ends else handler)
            descriptors = (self._wake_read, self._wake_write)
            self._wake_read = self._wake_write = None
            for descriptor in descriptors:
                os.close(descriptor)


class Supervision:
    """The nodes of one run, from start to end. Call :meth:`close` in every case."""

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        display: Display,
        observer: Observer,
        interruptions: Interruptions,
        grace: Grace,
        starter: Starter,
    ) -> None:
        self._starter = starter
        self._run_dir = run_dir
        self._display = display
        self._observer = observer
        self._interruptions = interruptions
        self._grace = grace
        self._names = [node.name for node in config.cluster.nodes]
        self._max_restarts = config.cluster.max_restarts
        self._nodes: list[NodeProcess] = []
        self._stopped_detector = StoppedDetector(config.cluster.heartbeat_timeout_s)
        self._end: RunEnd | None = None
        self._stopping = False
        self._killed = False
        self._looks = 0
        self._give_up_s: float | None = None
        self._linger_until_s: float | None = None

    def run(self) -> int:
        """Starts all nodes and waits until all have ended. Returns the common exit code
        (:func:`exit_code`).
        """
        alone = len(self._names) == 1
        for name in self._names:
            self._nodes.append(
                NodeProcess(self._run_dir, name, self._max_restarts, self._starter, alone=alone)
            )
        while True:
            seen = self._interruptions.state
            self._handle_stop()
            self._end = RunEnd.read(self._run_dir)
            self._kill_stopped()
            self._starter.look()
            codes = [self._poll(node) for node in self._nodes]
            ended = [code for code in codes if code is not None]
            if len(ended) == len(self._nodes):
                return exit_code(self._without_stragglers(ended), interrupted=self._stopping)
            if ended:
                self._linger(ended)
            self._looks += 1
            if self._looks % 2:
                self._show(self._observer.look())
            ends = [node.ends for node in self._nodes if node.ends is not None]
            self._interruptions.wait(LOOK_INTERVAL_S, seen, ends)

    def _poll(self, node: NodeProcess) -> int | None:
        """Returns a node's exit code, or None while it runs. Reports why a node is not replaced."""
        failed, code = node.failure, node.poll(replace=self._replaces)
        if node.failure != failed:
            self._display.say(f"{node.failure}; the node was killed and is not replaced")
        return code

    def _show(self, view: RunView) -> None:
        if any(entry.get("decision") != "skip" for entry in view.fresh):
            for node in self._nodes:
                node.restarts.forgive()  # the run makes progress
        self._display.show(view)

    def close(self) -> None:
        """Kills the remaining nodes, waits for the end of all their children, and removes what they
        leave.
        """
        for node in self._nodes:
            node.kill()
        end, run_id = RunEnd.read(self._run_dir), RunDirectory(self._run_dir).run_id
        remove = remove_empty_memory if end is None or end.keep_memory else remove_memory
        for name in self._names:
            try:
                wait_until_dead(self._run_dir, name)
            except PenstockError as error:
                self._display.say(str(error))
            remove(run_id, name)
        remove_endpoint(self._run_dir)
        forget_end(self._run_dir)  # every node has read it

    @property
    def _replaces(self) -> bool:
        """True if killed nodes are replaced: also during a stop, since a save needs all nodes, but
        not after the end of the run.
        """
        return not self._killed and self._linger_until_s is None and self._end is None

    def _handle_stop(self) -> None:
        """Acts on received signals and on the deadline of a stop."""
        asked_s, now_s = self._interruptions.asked_s, time.monotonic()
        if asked_s is not None and not self._stopping:
            self._stopping = True
            within_s = self._grace.left_s(time.time())
            if within_s is not None:
                self._give_up_s = StopDeadline.TRAIN.give_up_s(asked_s, within_s)
            self._display.say(
                "stopping: finishing the step under way and saving (Ctrl-C again: kill)"
            )
            # The first node hosts the scheduler, which stops all nodes.
            self._nodes[0].stop()
        if self._killed:
            return
        if self._interruptions.insisted:
            self._kill("killing all processes")
        elif self._give_up_s is not None and now_s >= self._give_up_s:
            self._kill("the time to stop is over: killing all processes")

    def _kill(self, reason: str) -> None:
        """Kills all nodes; the children die with them."""
        self._killed = True
        self._display.say(
            f"{reason}; the run's memory is kept, and the same command resumes from it"
        )
        for node in self._nodes:
            node.signal(signal.SIGKILL)

    def _kill_stopped(self) -> None:
        """Kills nodes that a signal stopped, since a stopped node supervises no process.

        The children die with the node, and the replacement starts new ones. If this process itself
        was stopped, all timers start again.
        """
        stopped = frozenset(node.name for node in self._nodes if node.stopped)
        still = self._stopped_detector.look(stopped, time.monotonic())
        if self._linger_until_s is not None:
            self._linger_until_s += self._stopped_detector.jump_s
        for node in self._nodes:
            if node.name in still:
                seconds = still[node.name]
                self._display.say(
                    f"node.{node.name} has been stopped for {seconds:.0f} s: killing it"
                )
                node.signal(signal.SIGKILL)

    def _without_stragglers(self, codes: list[int]) -> list[int]:
        """Returns the exit codes. A node killed after the end of the run counts with the run's
        code.
        """
        end = RunEnd.read(self._run_dir)
        return codes if end is None else [int(end.code) if code < 0 else code for code in codes]

    def _linger(self, ended: list[int]) -> None:
        """Ends the other nodes soon after the first one ended."""
        now_s = time.monotonic()
        if self._linger_until_s is None:
            self._linger_until_s = now_s + LINGER_S
            if any(code not in (ExitCode.DONE, ExitCode.STOPPED) for code in ended):
                for node in self._nodes:
                    node.stop()
        if now_s > self._linger_until_s:
            self._display.say(f"other nodes did not end within {LINGER_S:g} s: killing them")
            for node in self._nodes:
                node.signal(signal.SIGKILL)


def exit_code(codes: list[int], *, interrupted: bool) -> int:
    """Returns the exit code of the first node that failed by itself.

    Otherwise returns 0 for a finished run, 130 after an interruption, 4 if a node was killed, and 5
    for a run stopped by command.
    """
    regular = (ExitCode.DONE, ExitCode.STOPPED, ExitCode.INTERRUPTED)
    failures = [failure_code(code) for code in codes if code > 0 and code not in regular]
    if failures:
        return int(failures[0])
    if not any(codes):
        return int(ExitCode.DONE)
    if interrupted or ExitCode.INTERRUPTED in codes:
        return int(ExitCode.INTERRUPTED)
    killed = any(code < 0 for code in codes)
    return int(ExitCode.LOST_MEMBERS if killed else ExitCode.STOPPED)
