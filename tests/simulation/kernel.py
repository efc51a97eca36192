"""Virtual time, tasks that look like threads, and processes that can die between any two steps.

One event heap, one greenlet at a time. A task runs until it waits (:meth:`Kernel.park`); who wakes
it (:meth:`Kernel.wake`) only puts an event on the heap, a random moment later, so that ready tasks
run in an order that the seed decides. A killed process's tasks are never resumed: none of their
``finally`` runs while anybody can see it.
"""

from __future__ import annotations

import contextvars
import random
import sys
import time as clocks
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from penstock.host import world

BEGIN_S = 1000.0
SCHEDULING_S = 60e-6
"""Longest delay between a wake-up and the task's running on an idle machine."""
SOON_S, LATE_S, LATE = 2e-4, 8e-3, 0.03
"""For how long at most a thread stands still while others run; and where its core is taken away, as
often as this: a message then overtakes what comes before the next step.
"""
HELD_S = 2e-3
"""A held task looks again after so long whether it may go on."""


class Violation(Exception):
    """The simulated cluster did what it must not."""


class Task:
    """One thread of a process."""

    __slots__ = (
        "done",
        "error",
        "glet",
        "held",
        "hung",
        "ident",
        "joiners",
        "name",
        "process",
        "token",
        "waiting",
        "waking",
        "woken",
    )

    def __init__(self, process: Process, target: Callable[[], object], name: str) -> None:
        self.process = process
        self.name = name
        self.ident: int | None = None
        self.done = self.held = self.hung = False
        self.waiting = self.waking = self.woken = False
        self.error: BaseException | None = None
        self.token = 0
        self.joiners: list[Task] = []
        self.glet = greenlet(lambda: self._run(target), parent=process.kernel.hub)
        self.glet.gr_context = process.context.copy()

    def _run(self, target: Callable[[], object]) -> None:
        try:
            target()
        except GreenletExit:
            return
        except BaseException as error:
            self.error = error
            self.process.crashed(self, error)
        self.done = True
        for joiner in self.joiners:
            self.process.kernel.wake(joiner)


@dataclass(eq=False)
class Machine:
    """What processes of one node share. ``boot``: its kernel's boot id; ``cut_from``: machines that
    it cannot send to.
    """

    name: str
    up: bool = True
    boot: str = "1"
    slow: float = 1.0
    watchers: list[Task] = field(default_factory=list)
    cut_from: set[str] = field(default_factory=set)


class Process:
    """A simulated process: its tasks, its sockets, and how it ended."""

    def __init__(self, kernel: Kernel, machine: Machine, name: str, pid: int) -> None:
        self.kernel = kernel
        self.machine = machine
        self.name = name
        self.pid = pid
        self.alive = True
        self.stopped = False
        self.continued_s = float("-inf")
        self.drained = 0
        self.quiet = False
        self.code: int | None = None
        self.steps_left: int | None = None
        self.fell = False
        self.last_point = ""
        self.tasks: list[Task] = []
        self.deferred: list[tuple[Task, int, bool]] = []
        self.at_death: list[Callable[[], None]] = []
        self.on_exit: Callable[[], None] = lambda: None
        self._on_stop: Callable[[], None] | None = None
        self._stop_waits = False
        self.context = contextvars.Context()
        self.world: Any = None
        self.started_s = kernel.now

    @property
    def kind(self) -> str:
        """``worker`` of ``worker.1``."""
        return self.name.partition(".")[0]

    def enter(self, here: world.World) -> None:
        """Have its tasks live in this world."""
        self.context.run(world.enter, here)

    def spawn(self, target: Callable[[], object], name: str) -> Task:
        """Make a task that starts now."""
        task = Task(self, target, name)
        self.begin(task)
        return task

    def begin(self, task: Task) -> None:
        """Start a task that was made."""
        self.kernel.number += 1
        task.ident = self.kernel.number
        self.tasks.append(task)
        task.waiting = True
        self.kernel.wake(task)

    def crashed(self, task: Task, error: BaseException) -> None:
        """A task ended with an exception: of production code that is a fault by itself."""
        if self.kernel.closed:
            return
        self.kernel.crash(self, task, error)

    @property
    def hung(self) -> bool:
        """Whether one of its tasks stands still for ever."""
        return any(task.hung for task in self.tasks)

    def kill(self, code: int = -9) -> None:
        """Die now: nothing of it runs any more, and its connections break."""
        if not self.alive:
            return
        self.alive, self.code = False, code
        self.kernel.note("dies", self.name, str(code), self.last_point)
        self.kernel.died(self)
        self.deferred.clear()
        ends, self.at_death = self.at_death, []
        for end in ends:
            end()
        self.on_exit()

    def doom(self, steps: int, fallen: Callable[[], None]) -> None:
        """Let it die at the n-th point from now, unless it ends before."""
        self.steps_left = steps
        self.at_death.append(lambda: fallen() if self.fell else None)

    def listen(self, on_stop: Callable[[], None]) -> None:
        """Obey orders to stop from now on; one that came before has waited."""
        self._on_stop = on_stop
        if self._stop_waits:
            on_stop()

    def order_to_stop(self) -> None:
        """The parent's signal, which is blocked until the process listens."""
        if self._on_stop is None:
            self._stop_waits = True
        else:
            self._on_stop()

    def stop(self) -> None:
        """SIGSTOP."""
        if self.alive and not self.stopped:
            self.stopped = True
            self.kernel.note("stopped", self.name)

    def go_on(self) -> None:
        """SIGCONT."""
        if self.alive and self.stopped:
            self.stopped, self.continued_s = False, self.kernel.now
            self.kernel.note("continued", self.name)
            deferred, self.deferred = self.deferred, []
            for task, token, woken in deferred:
                self.kernel.resume_later(task, token, woken, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """Waits at a named point for a process of a kind; ``passes``: those who go by unhurt before.
    ``springs`` hears who is in it, and how to break the stream that a message leaves on there.
    """

    kind: str
    point: str
    passes: int
    springs: Callable[[Process, Callable[[], None]], None]


class Kernel:
    """The heap, the clock and the dice of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = BEGIN_S
        self.number = 0
        self.closed = False
        self.look = True
        self.current: Task | None = None
        self.processes: list[Process] = []
        self.events: list[tuple[float, tuple[str, ...]]] = []
        self.points: Counter[str] = Counter()
        self.switches = 0
        self.cpu_limit_s = 20.0
        self.yields = 0.05
        """How often a point at which a process may die lets others run, too."""
        self.violations: list[str] = []
        self.trap: Trap | None = None
        self.died: Callable[[Process], None] = lambda process: None
        self._heap: list[Any] = []
        self._sequence = 0
        self.hub = getcurrent()

    # ---- time ----

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later, outside all tasks."""
        self._sequence += 1
        heappush(self._heap, (self.now + delay_s, self._sequence, None, action, False))

    def resume_later(self, task: Task, token: int, woken: bool, delay_s: float) -> None:
        """Resume a task that still waits with ``token`` by then."""
        self._sequence += 1
        heappush(self._heap, (self.now + delay_s, self._sequence, task, token, woken))

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Let things happen until ``until()``, which is asked when :attr:`look` is set and now and
        then; False if virtual time passed ``limit_s`` before, or nothing can happen any more.
        """
        heap, begun_s, count = self._heap, clocks.process_time(), 0
        while heap and not self.violations:
            count += 1
            if not count & 4095 and clocks.process_time() - begun_s > self.cpu_limit_s:
                self.violations.append(f"over {self.cpu_limit_s:g} s of computing: a livelock?")
                return False
            if self.look or not count & 63:
                self.look = False
                if until():
                    return True
            when, _, task, what, woken = heappop(heap)
            if when > limit_s:
                return False
            if when > self.now:
                self.now = when
            if task is None:
                what()
            elif task.token == what and task.waiting:
                self._resume(task, what, woken)
        return until()

    def _resume(self, task: Task, token: int, woken: bool) -> None:
        process = task.process
        if not process.alive or task.hung:
            return
        if process.stopped:
            process.deferred.append((task, token, woken))
            return
        task.waiting = task.waking = False
        task.woken = woken
        self.current = task
        self.switches += 1
        task.glet.switch()
        self.current = None

    # ---- tasks ----

    def park(self, timeout_s: float | None = None) -> bool:
        """Wait to be woken; returns False when ``timeout_s`` passed first."""
        task = self.current
        if self.closed or task is None:
            raise GreenletExit
        task.token += 1
        task.waiting = True
        if timeout_s is not None:
            self.resume_later(task, task.token, False, max(0.0, timeout_s))
        self.hub.switch()
        if self.closed:
            raise GreenletExit
        return task.woken

    def wake(self, task: Task) -> None:
        """Resume a waiting task soon."""
        if task.waiting and not task.waking:
            task.waking = True
            delay_s = self.random.random() * SCHEDULING_S * task.process.machine.slow
            self.resume_later(task, task.token, True, delay_s)

    def point(self, name: str) -> None:
        """A place where a process may die, or others may run, between two of its steps."""
        task = self.current
        if task is None or self.closed:
            return
        process = task.process
        process.last_point = name
        if process.steps_left is not None:
            process.steps_left -= 1
            if process.steps_left <= 0:
                process.steps_left = None
                process.fell = True
                self.note("dies at", process.name, name)
                process.kill()
                self.park_forever()
        self.pass_by(task, name, lambda: None)
        if self.random.random() < self.yields:
            longest_s = LATE_S if self.random.random() < LATE else SOON_S
            self.park(self.random.random() * longest_s * process.machine.slow)

    def pass_by(self, task: Task, name: str, break_stream: Callable[[], None]) -> None:
        """A task passes a place at which a trap may wait, and nothing else happens."""
        trap, process = self.trap, task.process
        if trap is None or (trap.point, trap.kind) != (name, process.kind):
            return
        if trap.passes:
            self.trap = replace(trap, passes=trap.passes - 1)
            return
        self.trap = None
        self.note("in the trap", process.name, trap.point)
        trap.springs(process, break_stream)
        if not process.alive:
            self.park_forever()
        if process.stopped:
            self.park(0.0)
        while task.held:
            self.park(HELD_S)

    def park_forever(self) -> None:
        """The task is dead."""
        self.park(None)
        raise GreenletExit

    # ---- what happened ----

    def note(self, *words: str) -> None:
        """Remember an event for the list that a person reads, and for the trace."""
        self.events.append((self.now, words))

    def crash(self, process: Process, task: Task, error: BaseException) -> None:
        """A task of production code raised what nobody caught."""
        text = "".join(traceback.format_exception(error)[-6:])
        self.violations.append(f"{process.name}, {task.name}: {error!r}\n{text}")

    def close(self) -> None:
        """End everything: what still waits is unwound where nobody sees it."""
        self.closed = True
        for process in self.processes:
            for task in process.tasks:
                glet = task.glet
                if glet and not glet.dead:
                    try:
                        glet.throw(GreenletExit)
                    except BaseException as error:
                        sys.stderr.write(f"while unwinding {process.name} {task.name}: {error!r}\n")
        self._heap.clear()
