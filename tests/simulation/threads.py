"""What ``threading``, ``queue`` and ``concurrent.futures`` offer, for tasks of the kernel."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from tests.simulation.kernel import Kernel, Process, Task


class Thread:
    """``threading.Thread``."""

    def __init__(
        self,
        process: Process,
        target: Callable[..., object],
        name: str = "thread",
        args: tuple[Any, ...] = (),
        daemon: bool | None = None,
    ) -> None:
        self.name = name
        self.daemon = daemon
        self._process = process
        self._task = Task(process, (lambda: target(*args)) if args else target, name)

    @property
    def ident(self) -> int | None:
        return self._task.ident

    def start(self) -> None:
        self._process.begin(self._task)

    def is_alive(self) -> bool:
        task = self._task
        return task.ident is not None and not task.done and not self._process.kernel.closed

    def join(self, timeout: float | None = None) -> None:
        kernel, task = self._process.kernel, self._task
        if task.done or kernel.closed:
            return
        assert kernel.current is not None
        task.joiners.append(kernel.current)
        deadline = None if timeout is None else kernel.now + timeout
        while not task.done:
            left = None if deadline is None else deadline - kernel.now
            if left is not None and left <= 0.0:
                return
            kernel.park(left)


class Waiters:
    """Tasks that wait for one thing, first come first served."""

    __slots__ = ("kernel", "tasks")

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.tasks: deque[Task] = deque()

    def wait(self, timeout: float | None) -> bool:
        task = self.kernel.current
        if task is None:
            self.kernel.park()
        assert task is not None
        self.tasks.append(task)
        woken = self.kernel.park(timeout)
        if not woken and task in self.tasks:
            self.tasks.remove(task)
        return woken

    def wake(self, count: int) -> None:
        while self.tasks and count > 0:
            self.kernel.wake(self.tasks.popleft())
            count -= 1


class Event:
    """``threading.Event``."""

    def __init__(self, kernel: Kernel) -> None:
        self._set = False
        self._waiters = Waiters(kernel)

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.wake(len(self._waiters.tasks))

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._waiters.wait(timeout)
        return self._set


class Lock:
    """``threading.RLock``, which does for a Lock, too."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._owner: Task | None = None
        self._count = 0
        self._waiters = Waiters(kernel)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._kernel.current
        while self._owner is not None and self._owner is not me:
            if not blocking:
                return False
            self._waiters.wait(None if timeout < 0 else timeout)
        self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        self._count -= 1
        if self._count <= 0:
            self._owner, self._count = None, 0
            self._waiters.wake(1)

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Condition(Lock):
    """``threading.Condition``."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._notified = Waiters(kernel)

    def wait(self, timeout: float | None = None) -> bool:
        count, self._count = self._count, 1
        self.release()
        woken = self._notified.wait(timeout)
        self.acquire()
        self._count = count
        return woken

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        deadline = None if timeout is None else self._kernel.now + timeout
        while not condition():
            left = None if deadline is None else deadline - self._kernel.now
            if left is not None and left <= 0.0:
                return False
            self.wait(left)
        return True

    def notify(self, n: int = 1) -> None:
        self._notified.wake(n)

    def notify_all(self) -> None:
        self._notified.wake(len(self._notified.tasks))


class Queue:
    """``queue.SimpleQueue``."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._items: deque[Any] = deque()
        self._waiters = Waiters(kernel)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        self._waiters.wake(1)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._items and block:
            deadline = None if timeout is None else self._kernel.now + timeout
            while not self._items:
                left = None if deadline is None else deadline - self._kernel.now
                if left is not None and left <= 0.0:
                    break
                self._waiters.wait(left)
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class Future:
    """``concurrent.futures.Future``."""

    def __init__(self, kernel: Kernel, work: Callable[[], object]) -> None:
        self._kernel = kernel
        self.work = work
        self._state = "pending"
        self._result: object = None
        self._error: BaseException | None = None
        self._waiters = Waiters(kernel)

    def run(self) -> None:
        if self._state != "pending":
            return
        self._state = "running"
        try:
            self._result = self.work()
        except Exception as error:
            self._error = error
        self._end("done")

    def cancel(self) -> bool:
        if self._state == "pending":
            self._end("cancelled")
        return self._state == "cancelled"

    def cancelled(self) -> bool:
        return self._state == "cancelled"

    def done(self) -> bool:
        return self._state in ("done", "cancelled")

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._await(timeout)
        return self._error

    def result(self, timeout: float | None = None) -> Any:
        self._await(timeout)
        if self._error is not None:
            raise self._error
        return self._result

    def _await(self, timeout: float | None) -> None:
        deadline = None if timeout is None else self._kernel.now + timeout
        while not self.done():
            left = None if deadline is None else deadline - self._kernel.now
            if left is not None and left <= 0.0:
                raise TimeoutError
            self._waiters.wait(left)
        if self._state == "cancelled":
            raise CancelledError

    def _end(self, state: str) -> None:
        self._state = state
        self._waiters.wake(len(self._waiters.tasks))


class Executor:
    """``concurrent.futures.ThreadPoolExecutor``."""

    def __init__(self, process: Process, max_workers: int, name: str) -> None:
        self._process = process
        self._name = name
        self._max = max_workers
        self._queue = Queue(process.kernel)
        self._threads: list[Thread] = []
        self._idle = 0

    def submit(self, function: Callable[..., object], *args: Any, **named: Any) -> Future:
        future = Future(self._process.kernel, lambda: function(*args, **named))
        self._queue.put(future)
        if len(self._threads) < self._max and self._queue.qsize() > self._idle:
            thread = Thread(self._process, self._work, f"{self._name}-{len(self._threads)}")
            self._threads.append(thread)
            thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for _ in self._threads:
            self._queue.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _work(self) -> None:
        while True:
            self._idle += 1
            future = self._queue.get()
            self._idle -= 1
            if future is None:
                return
            future.run()
