"""A process's port to the world: clocks, waiting, threads, queues, sockets, the journal's file.

Code that waits, starts threads, sleeps or reads a clock calls this module instead of ``time``,
``threading``, ``queue`` or ``zmq``. In production each function is the one of the standard library
or of ZeroMQ. In ``tests/simulation`` another :class:`World` answers: threads are cooperative tasks,
time is virtual, and sockets, streams and disks are simulated (docs/SIMULATION.md).

The world is a context variable. A new thread begins without it, so production always uses
:data:`REAL`; one access takes about 50 ns.
"""

from __future__ import annotations

import os
import queue as queues
import secrets
import sqlite3
import threading
import time as clocks
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import zmq

_SPIN_S = 100e-6
_SHORT_SLEEP_S = 200e-6


class World:
    """The real one. Everything has the meaning of its namesake in the standard library."""

    guards_sockets = True
    """True if the kernel counts the bytes of connections, so that limits can be enforced."""

    def monotonic(self) -> float:
        """Returns ``time.monotonic()``, in seconds."""
        return clocks.monotonic()

    def perf_counter(self) -> float:
        """Returns ``time.perf_counter()``, in seconds; on Linux the clock of :meth:`monotonic`."""
        return clocks.perf_counter()

    def wall(self) -> float:
        """Returns ``time.time()``: seconds since 1970."""
        return clocks.time()

    def sleep(self, seconds: float) -> None:
        """Calls ``time.sleep``."""
        clocks.sleep(seconds)

    def look_again(self, since_s: float) -> bool:
        """Waits a moment between two polls of a word of shared memory that another process changes
        without a notification. Returns whether it slept.

        In the first 0.1 ms of a wait that began at ``since_s`` (:meth:`perf_counter`) it does not
        sleep, then it sleeps 0.2 ms. A simulation may return when a word was written.
        """
        if clocks.perf_counter() - since_s <= _SPIN_S:
            return False
        clocks.sleep(_SHORT_SLEEP_S)
        return True

    def pid(self) -> int:
        """Returns ``os.getpid()``."""
        return os.getpid()

    def random_bits(self, count: int) -> int:
        """Returns ``secrets.randbits(count)``."""
        return secrets.randbits(count)

    def thread(self, target: Callable[..., object], **options: Any) -> threading.Thread:
        """Returns a ``threading.Thread`` that is not started."""
        return threading.Thread(target=target, **options)

    def current_thread(self) -> threading.Thread:
        """Returns ``threading.current_thread()``."""
        return threading.current_thread()

    def event(self) -> threading.Event:
        """Returns a ``threading.Event``."""
        return threading.Event()

    def lock(self) -> threading.Lock:
        """Returns a ``threading.Lock``."""
        return threading.Lock()

    def condition(self) -> threading.Condition:
        """Returns a ``threading.Condition``."""
        return threading.Condition()

    def queue(self) -> queues.SimpleQueue[Any]:
        """Returns a ``queue.SimpleQueue``."""
        return queues.SimpleQueue()

    def executor(self, max_workers: int, name: str) -> ThreadPoolExecutor:
        """Returns a ``concurrent.futures.ThreadPoolExecutor``; names of its threads begin with
        ``name``.
        """
        return ThreadPoolExecutor(max_workers=max_workers, thread_name_prefix=name)

    def sockets(self) -> zmq.Context[Any]:
        """Returns a ``zmq.Context``."""
        return zmq.Context()

    def poller(self) -> zmq.Poller:
        """Returns a ``zmq.Poller``."""
        return zmq.Poller()

    def database(self, path: Path, *, timeout_s: float) -> sqlite3.Connection:
        """Returns an ``sqlite3`` connection for any thread, which begins no transactions itself."""
        return sqlite3.connect(
            path, timeout=timeout_s, isolation_level=None, check_same_thread=False
        )


REAL = World()
_HERE: ContextVar[World] = ContextVar("world", default=REAL)


def here() -> World:
    """Returns the world of the calling thread."""
    return _HERE.get()


def enter(world: World) -> None:
    """Moves the calling thread, or task, into ``world``."""
    _HERE.set(world)


def monotonic() -> float:
    """Calls :meth:`World.monotonic`; the functions below do the same for their namesakes."""
    return _HERE.get().monotonic()


def perf_counter() -> float:
    """Returns the seconds of the clock for measurements."""
    return _HERE.get().perf_counter()


def wall() -> float:
    """Returns seconds since 1970."""
    return _HERE.get().wall()


def sleep(seconds: float) -> None:
    """Waits ``seconds``."""
    _HERE.get().sleep(seconds)


def look_again(since_s: float) -> bool:
    """Pauses between two polls of a word of shared memory; returns whether it slept."""
    return _HERE.get().look_again(since_s)


def pid() -> int:
    """Returns the pid of the calling process."""
    return _HERE.get().pid()


def random_bits(count: int) -> int:
    """Returns an unpredictable number of ``count`` bits."""
    return _HERE.get().random_bits(count)


def thread(target: Callable[..., object], **options: Any) -> threading.Thread:
    """Returns a thread that is not started; ``options`` as of ``threading.Thread``."""
    return _HERE.get().thread(target, **options)


def current_thread() -> threading.Thread:
    """Returns the calling thread."""
    return _HERE.get().current_thread()


def event() -> threading.Event:
    """Returns a flag that threads can wait for."""
    return _HERE.get().event()


def lock() -> threading.Lock:
    """Returns a lock."""
    return _HERE.get().lock()


def condition() -> threading.Condition:
    """Returns a lock with waits for a notification."""
    return _HERE.get().condition()


def queue() -> queues.SimpleQueue[Any]:
    """Returns a queue without a bound."""
    return _HERE.get().queue()


def executor(max_workers: int, name: str) -> ThreadPoolExecutor:
    """Returns threads that execute submitted calls."""
    return _HERE.get().executor(max_workers, name)


def sockets() -> zmq.Context[Any]:
    """Returns a context of ZeroMQ sockets."""
    return _HERE.get().sockets()


def poller() -> zmq.Poller:
    """Returns an object that waits for several ZeroMQ sockets."""
    return _HERE.get().poller()


def database(path: Path, *, timeout_s: float) -> sqlite3.Connection:
    """Returns a connection to an SQLite file, which waits ``timeout_s`` for another connection's
    lock.
    """
    return _HERE.get().database(path, timeout_s=timeout_s)
