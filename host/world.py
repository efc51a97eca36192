"""A process's port to the world: clocks, waiting, threads, queues, sockets, the journal's file.

What waits, spawns, sleeps or reads a clock asks here instead of ``time``, ``threading``, ``queue``
or ``zmq``. In production each function is the one of the standard library or of ZeroMQ. In
``tests/simulation`` another :class:`World` answers: threads are cooperative tasks, time is virtual,
and sockets, streams and disks are simulated (docs/SIMULATION.md).

Which world is meant is a context variable. A new thread begins without it, so in production it is
always :data:`REAL`; to look it up takes about 50 ns.
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
    """Whether the kernel says how much a connection has brought, so that somebody can watch."""

    def monotonic(self) -> float:
        """``time.monotonic``, in seconds."""
        return clocks.monotonic()

    def perf_counter(self) -> float:
        """``time.perf_counter``, in seconds; on Linux the same clock as :meth:`monotonic`."""
        return clocks.perf_counter()

    def wall(self) -> float:
        """``time.time``: seconds since 1970."""
        return clocks.time()

    def sleep(self, seconds: float) -> None:
        """``time.sleep``."""
        clocks.sleep(seconds)

    def look_again(self, since_s: float) -> bool:
        """Wait a moment before a word of shared memory is looked at again, which another process
        changes: nobody is notified. Returns whether it slept.

        In the first 0.1 ms of a wait that began at ``since_s`` (:meth:`perf_counter`) it does not,
        then it sleeps 0.2 ms. A simulation may return when a word was written.
        """
        if clocks.perf_counter() - since_s <= _SPIN_S:
            return False
        clocks.sleep(_SHORT_SLEEP_S)
        return True

    def pid(self) -> int:
        """``os.getpid``."""
        return os.getpid()

    def random_bits(self, count: int) -> int:
        """``secrets.randbits``."""
        return secrets.randbits(count)

    def thread(self, target: Callable[..., object], **options: Any) -> threading.Thread:
        """``threading.Thread``, not started."""
        return threading.Thread(target=target, **options)

    def current_thread(self) -> threading.Thread:
        """``threading.current_thread``."""
        return threading.current_thread()

    def event(self) -> threading.Event:
        """``threading.Event``."""
        return threading.Event()

    def lock(self) -> threading.Lock:
        """``threading.Lock``."""
        return threading.Lock()

    def condition(self) -> threading.Condition:
        """``threading.Condition``."""
        return threading.Condition()

    def queue(self) -> queues.SimpleQueue[Any]:
        """``queue.SimpleQueue``."""
        return queues.SimpleQueue()

    def executor(self, max_workers: int, name: str) -> ThreadPoolExecutor:
        """``concurrent.futures.ThreadPoolExecutor``, whose threads' names begin with ``name``."""
        return ThreadPoolExecutor(max_workers=max_workers, thread_name_prefix=name)

    def sockets(self) -> zmq.Context[Any]:
        """``zmq.Context``."""
        return zmq.Context()

    def poller(self) -> zmq.Poller:
        """``zmq.Poller``."""
        return zmq.Poller()

    def database(self, path: Path, *, timeout_s: float) -> sqlite3.Connection:
        """``sqlite3.connect``, without transactions of its own, for any thread."""
        return sqlite3.connect(
            path, timeout=timeout_s, isolation_level=None, check_same_thread=False
        )


REAL = World()
_HERE: ContextVar[World] = ContextVar("world", default=REAL)


def here() -> World:
    """Returns the world of the calling thread."""
    return _HERE.get()


def enter(world: World) -> None:
    """Have the calling thread, or task, live in ``world`` from now on."""
    _HERE.set(world)


def monotonic() -> float:
    """See :meth:`World.monotonic`; so for all that follow."""
    return _HERE.get().monotonic()


def perf_counter() -> float:
    """Seconds of the clock that measures."""
    return _HERE.get().perf_counter()


def wall() -> float:
    """Seconds since 1970."""
    return _HERE.get().wall()


def sleep(seconds: float) -> None:
    """Wait ``seconds``."""
    _HERE.get().sleep(seconds)


def look_again(since_s: float) -> bool:
    """A pause between two looks at a word of shared memory; returns whether it slept."""
    return _HERE.get().look_again(since_s)


def pid() -> int:
    """The calling process."""
    return _HERE.get().pid()


def random_bits(count: int) -> int:
    """A number that nobody guesses."""
    return _HERE.get().random_bits(count)


def thread(target: Callable[..., object], **options: Any) -> threading.Thread:
    """A thread that is not started; ``options`` as of ``threading.Thread``."""
    return _HERE.get().thread(target, **options)


def current_thread() -> threading.Thread:
    """The calling thread."""
    return _HERE.get().current_thread()


def event() -> threading.Event:
    """A flag that threads can wait for."""
    return _HERE.get().event()


def lock() -> threading.Lock:
    """A lock."""
    return _HERE.get().lock()


def condition() -> threading.Condition:
    """A lock with a wait for somebody who notifies."""
    return _HERE.get().condition()


def queue() -> queues.SimpleQueue[Any]:
    """A queue without bound."""
    return _HERE.get().queue()


def executor(max_workers: int, name: str) -> ThreadPoolExecutor:
    """Threads that work off what is submitted."""
    return _HERE.get().executor(max_workers, name)


def sockets() -> zmq.Context[Any]:
    """A context of ZeroMQ sockets."""
    return _HERE.get().sockets()


def poller() -> zmq.Poller:
    """Waits for several ZeroMQ sockets."""
    return _HERE.get().poller()


def database(path: Path, *, timeout_s: float) -> sqlite3.Connection:
    """A connection to an SQLite file, which waits ``timeout_s`` for another's lock."""
    return _HERE.get().database(path, timeout_s=timeout_s)
