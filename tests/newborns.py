"""Stops newborn processes between their birth and their program, where no signal could be timed.

A thread traces (ptrace) the thread of another process that gives birth. It lets a newborn make some
system calls, stops it by SIGSTOP, and lets go of it: from then on the kernel shows a process that a
signal has stopped.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from penstock.host.process_identity import parent_of, start_ticks

CONT, DETACH, SYSCALL, SEIZE, EVENT_MESSAGE, INTERRUPT = 7, 17, 24, 0x4206, 0x4201, 0x4207
FORK, VFORK, EXEC, STOP = 1, 2, 4, 128
OPTIONS = 1 << FORK | 1 << VFORK | 1 << EXEC
ALL = 0x40000000  # __WALL: newborns of every kind
LOOK_S = 0.0005


class NewbornStopper:
    """Stops newborns of ``parent``'s main thread, or with ``generation`` 2 those of its newborns.

    ``system_calls``: called for each of them; after how many stops at system calls (two for each:
    entry and exit) it is to be stopped itself; None lets it be. ``stopped``: pids, in their order;
    ``died_s``: how long each lived after that.
    """

    def __init__(
        self, parent: int, system_calls: Callable[[], int | None], generation: int = 1
    ) -> None:
        self.stopped: list[int] = []
        self.died_s: dict[int, float] = {}
        self._parent = parent
        self._system_calls = system_calls
        self._generation = generation
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.argtypes = [
            ctypes.c_long,
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self._libc.ptrace.restype = ctypes.c_long
        self._ending = threading.Event()
        self._traces = threading.Event()
        self._refusal: OSError | None = None
        self._since_s: dict[int, float] = {}
        self._thread = threading.Thread(target=self._run, name="newborns")

    @contextmanager
    def tracing(self) -> Iterator[NewbornStopper]:
        """Traces inside the block."""
        self._thread.start()
        self._traces.wait()
        try:
            if self._refusal is not None:
                pytest.skip(f"no process may be traced here: {self._refusal}")
            yield self
        finally:
            self._ending.set()
            self._thread.join()
            for pid in self._since_s:  # what was not found: nobody else ends it
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _ptrace(self, request: int, pid: int, data: object = None) -> None:
        if self._libc.ptrace(request, pid, None, data) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), f"ptrace {request:#x} of {pid}")

    def _run(self) -> None:
        try:
            self._ptrace(SEIZE, self._parent, OPTIONS)
        except OSError as error:
            self._refusal = error
            return
        finally:
            self._traces.set()
        try:
            while not self._ending.is_set():
                self._look_at_stopped()
                stop = self._stop_of(self._parent, waits=False)
                if stop is None:
                    time.sleep(LOOK_S)
                else:
                    self._go_on(self._parent, stop)
            self._ptrace(INTERRUPT, self._parent)
            while (stop := self._stop_of(self._parent)) is not None and stop >> 8 != STOP:
                self._go_on(self._parent, stop)
        except OSError:
            pass  # the parent was killed
        self._let_go(self._parent)
        while not self._ending.is_set():
            self._look_at_stopped()
            time.sleep(LOOK_S)

    def _let_go(self, pid: int) -> None:
        """Lets go of a traced process that is at a stop, or dying."""
        try:
            self._ptrace(DETACH, pid)
        except OSError:
            self._release(pid)

    def _stop_of(self, pid: int, *, waits: bool = True) -> int | None:
        """Returns at what a traced process has stopped: a signal, and an event eight bits above it.
        None: it has not, or is dead.
        """
        while True:
            result = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | ALL)
            if result is not None:
                return result.si_status
            if start_ticks(pid) is None:
                self._release(pid)
                raise ProcessLookupError(pid)
            if not waits:
                return None
            time.sleep(LOOK_S)

    def _release(self, pid: int) -> None:
        """The parent of a dead process hears of it when the tracer has; the test's own children are
        left to the test.
        """
        with suppress(ChildProcessError):
            while parent_of(pid) != os.getpid():
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | ALL) is not None:
                    return
                time.sleep(LOOK_S)  # other threads of the process still die

    def _go_on(self, pid: int, stop: int, generation: int = 1) -> None:
        """Lets a traced process go on from a stop, and looks after the newborn that it has."""
        event = stop >> 8
        if event in (FORK, VFORK):
            newborn = self._newborn_of(pid)
            self._ptrace(CONT if generation == 1 else DETACH, pid)
            try:
                self._attend(newborn, generation)
            except OSError:
                self._let_go(newborn)  # the newborn was killed
        elif event:
            self._ptrace(CONT, pid)
        else:
            self._ptrace(CONT, pid, stop)

    def _newborn_of(self, pid: int) -> int:
        number = ctypes.c_ulong()
        self._ptrace(EVENT_MESSAGE, pid, ctypes.byref(number))
        return number.value

    def _attend(self, newborn: int, generation: int) -> None:
        self._stop_of(newborn)
        if generation < self._generation:
            self._ptrace(CONT, newborn)
            stop = self._stop_of(newborn)
            assert stop is not None
            self._go_on(newborn, stop, generation + 1)
            return
        count = self._system_calls()
        for _ in range(count or 0):
            self._ptrace(SYSCALL, newborn)
            event = (self._stop_of(newborn) or 0) >> 8
            if event == EXEC:
                count = None
                break
            if event in (FORK, VFORK):  # it is traced from birth on
                other = self._newborn_of(newborn)
                self._stop_of(other)
                self._ptrace(DETACH, other)
        if count is not None:
            os.kill(newborn, signal.SIGSTOP)  # before it is let go: no instruction comes between
        self._ptrace(DETACH, newborn)
        if count is not None:
            self._since_s[newborn] = time.monotonic()
            self.stopped.append(newborn)

    def _look_at_stopped(self) -> None:
        for pid in list(self._since_s):
            if start_ticks(pid) is None:
                self.died_s[pid] = time.monotonic() - self._since_s.pop(pid)
