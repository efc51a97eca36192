"""Supervises the node processes of an embedded run, and takes the signals that are meant for it.

It passes stops on, replaces nodes that die, and waits until all have ended.
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
"""Nodes are looked at so often, and the scheduler is asked every other time: a status takes it some
milliseconds.
"""
LINGER_S = 90.0
"""The other nodes may take so long to end after one has."""
CONSOLE_BYTES = 64 << 10
"""So much of the console finds room even when the disk is full."""


def console_path(run_dir: Path) -> Path:
    """Returns the file with what the run's processes said on stdout and stderr since its last
    start.
    """
    return run_dir / "logs" / "console.txt"


def empty_console(run_dir: Path) -> None:
    """Begins a console anew, with room for what processes say when the disk is full.

    Raises:
        PenstockError: the file cannot be written, or has no such room.
    """
    path = console_path(run_dir)
    make_directory(path.parent)
    with writing(path, CONSOLE_BYTES), path.open("wb") as file:
        reserve(file.fileno(), CONSOLE_BYTES)


class NodeProcess:
    """One supervisor process, which is replaced when it is killed."""

    def __init__(
        self, run_dir: Path, name: str, max_restarts: int, starter: Starter, *, alone: bool
    ) -> None:
        self.name = name
        self._starter = starter
        # Torch is imported beside the node's daemons, then; for several nodes once for all.
        self._needs = NODE if alone else TORCH
        self._code: int | None = None
        self.restarts = RestartBudget(limit=max_restarts)
        self._run_dir = run_dir
        self._stopping = False
        self.failure = ""
        """Why a killed process is not replaced, where the kernel starts no other."""
        self._process = self._spawn()

    @property
    def pid(self) -> int:
        """The pid of the present process."""
        return self._process.pid

    def poll(self, *, replace: bool) -> int | None:
        """Returns the exit code, or None while the process runs. One that was killed is started
        anew if ``replace``.
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
                self.signal(STOP_ORDER)  # waits until the new process listens
        return self._code

    @property
    def ends(self) -> int | None:
        """Descriptor that becomes readable when the process ends; None: it has ended."""
        return self._process.pidfd if self._code is None else None

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the process."""
        return self._code is None and self._process.stopped

    def stop(self) -> None:
        """Asks for a clean stop of the run, of this process now and of every process that replaces
        it.
        """
        if not self._stopping:  # a second signal would insist
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
            LostMemberError: the system starts none; says why.
        """
        # Born with stop signals blocked, the node cannot be hit before it is ready to listen, and
        # in a group of its own: Ctrl-C reaches only this process, which asks for a clean stop.
        arguments = ("node", "--config", str(self._run_dir / "resolved.yaml"))
        named = ("--node", self.name, "--parent-pid", str(os.getpid()))
        words, path = (*arguments, *named), console_path(self._run_dir)
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
    """Receives stop signals while it is installed (in the main thread; elsewhere none come).

    ``asked_s``: when a stop was asked for first (monotonic seconds). ``insisted``: somebody does
    not want to wait for it.
    """

    def __init__(self) -> None:
        self.asked_s: float | None = None
        self.insisted = False
        self._escalation = StopEscalation()
        self._heard: int | None = None  # where the handler writes that there was a signal
        self._hears: int | None = None

    @property
    def state(self) -> tuple[bool, bool]:
        """Whether a stop was asked for, and insisted on."""
        return self.asked_s is not None, self.insisted

    def ask(self) -> None:
        """Asks for a stop, as the first signal does."""
        if self.asked_s is None:
            self.asked_s = time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # This runs between two bytecodes of the main thread: it takes a note, the loop acts.
        now_s = time.monotonic()
        demand = self._escalation.heard(number, now_s)
        if demand is Demand.STOP:
            self.asked_s = now_s
        elif demand is Demand.NOW:
            self.insisted = True
        if self._heard is not None:
            with suppress(BlockingIOError):
                os.write(self._heard, b"\0")

    def wait(self, seconds: float, seen: tuple[bool, bool], ends: Sequence[int] = ()) -> None:
        """Waits, but not past a change of ``state`` from ``seen``, or until one of the descriptors
        ``ends`` becomes readable.
        """
        if self.state != seen:
            return
        heard = [] if self._hears is None else [self._hears]
        ready = select.select([*heard, *ends], [], [], seconds)[0]
        if self._hears in ready:
            os.read(self._hears, 4096)

    @contextmanager
    def installed(self, *, process_ends: bool) -> Iterator[Interruptions]:
        """Handles the signals inside the block. With ``process_ends`` those after it are ignored:
        latecomers of a round of signals must not change how the process ends.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        self._hears, self._heard = os.pipe()
        os.set_blocking(self._heard, False)
        before = {number: signal.signal(number, self._handle) for number in stopping_signals()}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if process_ends else handler)
            descriptors, self._hears, self._heard = (self._hears, self._heard), None, None
            for descriptor in descriptors:
                os.close(descriptor)


class Supervision:
    """The nodes of one embedded run, from their start to their end. Call :meth:`close` in
    any case.
    """

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
        """Starts all nodes and waits until they have ended. Returns their common exit code
        (:func:`exit_code`).
        """
        alone = len(self._names) == 1
        for name in self._names:
            self._nodes.append(
                NodeProcess(self._run_dir, name, self._max_restarts, self._starter, alone=alone)
            )
        while True:
            seen = self._interruptions.state
            self._obey()
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
        """Returns a node's exit code, None while the node runs; says why one is not replaced."""
        failed, code = node.failure, node.poll(replace=self._replaces)
        if node.failure != failed:
            self._display.say(f"{node.failure}; the node was killed and is not replaced")
        return code

    def _show(self, view: RunView) -> None:
        if any(entry.get("decision") != "skip" for entry in view.fresh):
            for node in self._nodes:
                node.restarts.forgive()  # the run gets on
        self._display.show(view)

    def close(self) -> None:
        """Kills what is left, waits until it is dead with all its children, and tidies up
        after it.
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
        forget_end(self._run_dir)  # all have heard of it

    @property
    def _replaces(self) -> bool:
        """Whether nodes that are killed are started anew. They are also while a stop is under way,
        since the scheduler needs them all to save, but not when the run is over.
        """
        return not self._killed and self._linger_until_s is None and self._end is None

    def _obey(self) -> None:
        """Acts on signals that came, and on the end of the time that a stop may take."""
        asked_s, now_s = self._interruptions.asked_s, time.monotonic()
        if asked_s is not None and not self._stopping:
            self._stopping = True
            within_s = self._grace.left_s(time.time())
            if within_s is not None:
                self._give_up_s = StopDeadline.TRAIN.give_up_s(asked_s, within_s)
            self._display.say(
                "stopping: finishing the step under way and saving (Ctrl-C again: kill)"
            )
            # The first node hosts the scheduler, which stops everyone.
            self._nodes[0].stop()
        if self._killed:
            return
        if self._interruptions.insisted:
            self._kill("killing all processes")
        elif self._give_up_s is not None and now_s >= self._give_up_s:
            self._kill("the time for stopping is over: killing all processes")

    def _kill(self, why: str) -> None:
        """Kills all nodes; their children die with them."""
        self._killed = True
        self._display.say(f"{why}; the run's memory is kept, the same command goes on from it")
        for node in self._nodes:
            node.signal(signal.SIGKILL)

    def _kill_stopped(self) -> None:
        """Kills nodes that a signal stopped: they look after nobody. They are replaced together
        with their children, which die with them. After this process was stopped itself all have
        their full time again.
        """
        stopped = frozenset(node.name for node in self._nodes if node.stopped)
        still = self._stopped_detector.look(stopped, time.monotonic())
        if self._linger_until_s is not None:
            self._linger_until_s += self._stopped_detector.jump_s
        for node in self._nodes:
            if node.name in still:
                seconds = still[node.name]
                self._display.say(f"node.{node.name} is stopped for {seconds:.0f} s: killing it")
                node.signal(signal.SIGKILL)

    def _without_stragglers(self, codes: list[int]) -> list[int]:
        """Returns the codes, but for what a node died of after the end of the run: that does not
        change how the run ended.
        """
        end = RunEnd.read(self._run_dir)
        return codes if end is None else [int(end.code) if code < 0 else code for code in codes]

    def _linger(self, ended: list[int]) -> None:
        """Makes the other nodes end soon after one has."""
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
    """Returns the first failure of its own accord.

    Without one it returns 0 for a finished run, 130 after an interruption, 4 for what was killed,
    and 5 for a run that was stopped by command.
    """
    well = (ExitCode.DONE, ExitCode.STOPPED, ExitCode.INTERRUPTED)
    failures = [failure_code(code) for code in codes if code > 0 and code not in well]
    if failures:
        return int(failures[0])
    if not any(codes):
        return int(ExitCode.DONE)
    if interrupted or ExitCode.INTERRUPTED in codes:
        return int(ExitCode.INTERRUPTED)
    killed = any(code < 0 for code in codes)
    return int(ExitCode.LOST_MEMBERS if killed else ExitCode.STOPPED)
