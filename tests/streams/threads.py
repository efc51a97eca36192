"""What threads of the host learn of each other: from locks, queues and joins.

Whoever takes a lock knows what everybody knew who let go of it before; conditions, events, queues,
futures and pools of threads are made of locks. Threads know what whoever started them knew then.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.streams.checker import Checker, this_thread
from tests.streams.clocks import merge
from tests.streams.operators import Watched

_LOCK, _RLOCK = threading.Lock, threading.RLock


class _Known:
    """What is known behind a lock."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self._known: dict[str, int] = {}

    def learn(self) -> None:
        with self._checker.lock:
            self._checker.clocks.learns(this_thread(), self._known)

    def tell(self) -> None:
        with self._checker.lock:
            self._checker.clocks.tick(this_thread())
            merge(self._known, self._checker.clocks.knows(this_thread()))


class WatchedLock:
    """A lock of either kind."""

    def __init__(self, checker: Checker, real: Any) -> None:
        self._real = real
        self._known = _Known(checker)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As the real one."""
        taken = bool(self._real.acquire(blocking, timeout))
        if taken:
            self._known.learn()
        return taken

    def release(self) -> None:
        """As the real one."""
        self._known.tell()
        self._real.release()

    def locked(self) -> bool:
        """As the real one."""
        return bool(self._real.locked())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._real._at_fork_reinit()


class WatchedRLock(WatchedLock):
    """What conditions ask of a lock that can be taken twice."""

    def _is_owned(self) -> bool:
        return bool(self._real._is_owned())

    def _release_save(self) -> Any:
        self._known.tell()
        return self._real._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._real._acquire_restore(state)
        self._known.learn()


class WatchedQueue:
    """A ``queue.SimpleQueue`` of Python; that of C shows nobody what it knows."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Never waits."""
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Waits for an item."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout if block else 0):
                raise queue.Empty
            return self._items.popleft()

    put_nowait = put

    def get_nowait(self) -> Any:
        """Does not wait."""
        return self.get(block=False)

    def empty(self) -> bool:
        """Returns whether it is, now."""
        return not self._items

    def qsize(self) -> int:
        """Returns how many there are, now."""
        return len(self._items)


@contextmanager
def watching(checker: Checker) -> Iterator[None]:
    """Threads, locks and queues made inside are watched, and operators of this thread and of those
    that it starts.
    """
    start, run, join = threading.Thread.start, threading.Thread.run, threading.Thread.join
    simple = queue.SimpleQueue

    def watched_start(thread: threading.Thread) -> None:
        told = _Known(checker)
        told.tell()
        thread._told = told  # type: ignore[attr-defined]
        thread._ended = _Known(checker)  # type: ignore[attr-defined]
        start(thread)

    def watched_run(thread: threading.Thread) -> None:
        told = getattr(thread, "_told", None)
        if told is None:
            return run(thread)
        told.learn()
        try:
            with Watched(checker):
                run(thread)
        finally:
            thread._ended.tell()  # type: ignore[attr-defined]
        return None

    def watched_join(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        ended = getattr(thread, "_ended", None)
        if ended is not None and not thread.is_alive():
            ended.learn()

    try:
        threading.Thread.start, threading.Thread.run = watched_start, watched_run  # type: ignore[method-assign]
        threading.Thread.join = watched_join  # type: ignore[method-assign]
        threading.Lock = lambda: WatchedLock(checker, _LOCK())  # type: ignore[assignment]
        threading.RLock = lambda: WatchedRLock(checker, _RLOCK())  # type: ignore[assignment]
        queue.SimpleQueue = WatchedQueue  # type: ignore[assignment,misc]
        with Watched(checker):
            yield
    finally:
        threading.Thread.start, threading.Thread.run = start, run  # type: ignore[method-assign]
        threading.Thread.join = join  # type: ignore[method-assign]
        threading.Lock, threading.RLock = _LOCK, _RLOCK  # type: ignore[assignment,misc]
        queue.SimpleQueue = simple  # type: ignore[misc]
