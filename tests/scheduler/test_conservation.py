"""Random kills, stops, scheduler crashes and late messages: nothing is lost, nothing doubled.

A model of two nodes with all members, whose messages and streams are delivered in any order that
streams allow, drives the real machine and the real journal. Gradients are a function of the data,
so whatever happens the run must decide exactly as the undisturbed one.
"""

from __future__ import annotations

import itertools
import math
import random
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.daemons.kit.events import Exit, Tick
from penstock.daemons.scheduler.journal import Journal
from penstock.daemons.scheduler.machine.events import (
    Accept,
    CompleteSave,
    Disconnect,
    Effect,
    Event,
    Joined,
    JournalDecision,
    JournalEpoch,
    PrepareSave,
    Received,
    Refuse,
    SaveFinished,
    SavePrepared,
    Send,
    StreamClosed,
)
from penstock.daemons.scheduler.machine.machine import SchedulerMachine
from penstock.daemons.scheduler.machine.membership import Membership
from penstock.daemons.scheduler.machine.mirror import JournalMirror, SavedState
from penstock.daemons.scheduler.machine.rules import RunPhase
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.control import Decision
from tests.scheduler.conftest import RUN_ID, make_config, make_rules

STEPS = 8
NODES = ("a", "b")
MEMBERS = {
    "a": ("memoryd.a", "optimizerd.a", "worker.0"),
    "b": ("memoryd.b", "optimizerd.b", "worker.1"),
}
RULES = make_rules(
    make_config(
        train={"steps": STEPS, "max_skips": 5},
        cluster={"workers": 1, "nodes": [{"name": name} for name in NODES]},
    )
)
MAX_ACTIONS = 20000

Decided = tuple[int, int, str, float]
"""(version, data position, decision, coefficient)"""


def gradients(data_position: int) -> tuple[float, bool]:
    """Sum of squares of each block, and whether it is finite."""
    number = data_position // 8
    if number % 5 == 3:
        return math.inf, False
    return (4.0, True) if number % 3 == 1 else (0.125, True)


@dataclass(eq=False)
class Stream:
    """Messages in flight on one connection. A closed one still delivers what it had carried up."""

    number: int
    process: Process
    up: deque[pb.MemberMessage] = field(default_factory=deque)
    down: deque[pb.SchedulerMessage] = field(default_factory=deque)
    closed: bool = False


@dataclass(eq=False)
class Process:
    """A member's process. ``inbox``: what an ended stream had carried down, and is not read yet."""

    name: str
    node: str
    pid: int
    alive: bool = True
    stopped: bool = False
    epoch: int = 0
    stream: Stream | None = None
    inbox: deque[pb.SchedulerMessage] = field(default_factory=deque)


@dataclass
class Memory:
    """A node's shared memory, with the records that were applied to it."""

    incarnation: int = 0
    committed: int = 0
    applied: list[pb.Record] = field(default_factory=list)

    def apply(self, record: pb.Record) -> None:
        assert record.incarnation == self.incarnation, "commit of another filling"
        if record.version == self.committed:
            return
        assert record.version == self.committed + 1, f"at {self.committed}: {record}"
        self.committed = record.version
        self.applied.append(record)


class World:
    """The cluster and the scheduler's process; every choice comes from ``choose``."""

    def __init__(self, directory: Path, choose: random.Random, crash_chance: float) -> None:
        self.choose = choose
        self.crash_chance = crash_chance
        self.now_s = 0.0
        self.path = directory / "journal.sqlite"
        self.saved: SavedState | None = None
        self.exit: Exit | None = None
        self.decisions: list[JournalDecision] = []
        self.epochs: list[int] = []
        self.attempts: dict[int, pb.RunAttempt] = {}
        self.memory = {node: Memory() for node in NODES}
        self.streams: list[Stream] = []
        self._bound: dict[str, Stream] = {}
        self._pids = itertools.count(100)
        self._stream_numbers = itertools.count(1)
        self._incarnations = itertools.count(1)
        self.processes: dict[str, Process] = {}
        for node in NODES:
            self._start_node(node)
        self.journal = Journal(self.path, RUN_ID)
        self.machine = self._machine()

    # ---- what can happen ----

    def act(self, disturb: bool) -> None:
        """One random thing happens."""
        self.now_s += 0.001
        actions: list[Any] = [(self._deliver_up, s) for s in self.streams if s.up or s.closed]
        for process in self.processes.values():
            if process.alive and not process.stopped:
                if process.inbox or (process.stream is not None and process.stream.down):
                    actions.append((self._read, process))
                if process.stream is None:
                    actions.append((self._connect, process))
            if not process.alive and self._node_works(process) and not self._shut_down:
                actions.append((self._restart, process))
        if disturb and self.choose.random() < 0.015:
            victim = self.choose.choice(list(self.processes.values()))
            disturbance = self.choose.choice([self._kill, self._kill, self._stop, self._cut])
            actions = [(disturbance, victim)]
            if self.choose.random() < 0.15:
                actions = [(self._crash_scheduler, None)]
        if not actions or self.choose.random() < 0.01:
            actions = [(self._pass_time, None)]
        action, argument = self.choose.choice(actions)
        action(argument)

    @property
    def _shut_down(self) -> bool:
        return self.machine.phase in (RunPhase.DONE, RunPhase.FAILED)

    def wake_all(self) -> None:
        """No process stays stopped."""
        for process in self.processes.values():
            process.stopped = False

    def _deliver_up(self, stream: Stream) -> None:
        if not stream.up:
            self.streams.remove(stream)
            self._feed(StreamClosed(stream=stream.number))
            return
        message = stream.up.popleft()
        if message.HasField("hello"):
            self._feed(Joined(stream=stream.number, hello=message.hello))
        else:
            self._feed(Received(stream=stream.number, message=message))

    def _read(self, process: Process) -> None:
        """A process takes its next message; its answers are lost if it has no stream."""
        source = process.inbox
        if not source:
            assert process.stream is not None
            source = process.stream.down
        message = source.popleft()
        kind = str(message.WhichOneof("body"))
        body = getattr(message, kind)
        if getattr(body, "epoch", process.epoch) < process.epoch:
            return
        for answer in getattr(self, f"_on_{kind}")(process, body) or ():
            if process.stream is not None:
                process.stream.up.append(answer)

    def _connect(self, process: Process) -> None:
        hello = pb.Hello(run_id=RUN_ID, member=process.name, pid=process.pid, epoch=process.epoch)
        process.stream = Stream(next(self._stream_numbers), process)
        process.stream.up.append(pb.MemberMessage(hello=hello))
        self.streams.append(process.stream)

    def _kill(self, process: Process) -> None:
        process.alive = False
        self._hang_up(process.stream)
        if process.name == f"node.{process.node}":
            for name in MEMBERS[process.node]:
                if self.processes[name].alive:
                    self._kill(self.processes[name])

    def _cut(self, process: Process) -> None:
        """Only the connection breaks."""
        self._hang_up(process.stream)

    def _stop(self, process: Process) -> None:
        process.stopped = not process.stopped

    def _restart(self, process: Process) -> None:
        if process.name == f"node.{process.node}":
            self._start_node(process.node)
        else:
            self._start(process.name, process.node)

    def _pass_time(self, _: None) -> None:
        """Half a minute with heartbeats of all who can send any."""
        for _second in range(30):
            self.now_s += 1.0
            for stream in list(self.streams):
                if stream.process.alive and not stream.process.stopped and not stream.up:
                    beat = pb.MemberMessage(heartbeat=pb.Heartbeat())
                    self._feed(Received(stream=stream.number, message=beat))
            self._feed(Tick())

    def _crash_scheduler(self, _: None) -> None:
        """SIGKILL and restart: what is not in the journal is forgotten, all streams end.

        What was sent before may still arrive.
        """
        self.journal.close()
        for stream in self.streams:
            self._hang_up(stream)
        self.streams.clear()
        self._bound.clear()
        self.journal = Journal(self.path, RUN_ID)
        self.machine = self._machine()

    # ---- the scheduler's process ----

    def _machine(self) -> SchedulerMachine:
        facts = self.journal.load()
        mirror = JournalMirror(RULES, facts, self.saved, lambda: next(self._incarnations))
        return SchedulerMachine(RULES, mirror, Membership(RULES, facts.pids), self.now_s)

    def _feed(self, event: Event) -> None:
        pending: deque[Event] = deque([event])
        while pending and self.exit is None:
            effects = self.machine.handle(pending.popleft(), self.now_s)
            self.machine.validate()
            for effect in effects:
                if self.crash_chance and self.choose.random() < self.crash_chance:
                    self._crash_scheduler(None)
                    return
                follow_up = self._perform(effect)
                if follow_up is not None:
                    pending.append(follow_up)

    def _perform(self, effect: Effect) -> Event | None:
        match effect:
            case JournalEpoch():
                self.journal.begin_epoch(effect)
                self.epochs.append(effect.epoch)
            case JournalDecision():
                self.journal.decide(effect)
                self.decisions.append(effect)
            case Send(member=member, message=message):
                stream = self._bound.get(member)
                if stream is not None and not stream.closed:
                    stream.down.append(message)
            case Accept(stream=number, member=member):
                self._bound[member] = self._stream(number)
            case Refuse(stream=number):
                refused = pb.SchedulerMessage(refused=pb.Refused())
                self._stream(number).down.append(refused)
            case Disconnect(stream=number):
                self._hang_up(self._stream(number))
            case PrepareSave():
                return SavePrepared()
            case CompleteSave(version=version, position=position):
                self.saved = SavedState(version=version, directory="saved", position=position)
                return SaveFinished(version=version, directory="saved")
            case Exit():
                self.exit = effect
        return None

    def _stream(self, number: int) -> Stream:
        return next(stream for stream in self.streams if stream.number == number)

    def _hang_up(self, stream: Stream | None) -> None:
        if stream is not None and not stream.closed:
            stream.closed = True
            arrived = self.choose.randint(0, len(stream.down))
            stream.process.inbox.extend(itertools.islice(stream.down, arrived))
            stream.process.stream = None

    # ---- members ----

    def _start_node(self, node: str) -> None:
        self._start(f"node.{node}", node)
        for name in MEMBERS[node]:
            self._start(name, node)

    def _start(self, name: str, node: str) -> None:
        old = self.processes.get(name)
        assert old is None or not old.alive, f"two living processes of {name}"
        self.processes[name] = Process(name, node, next(self._pids))

    def _node_works(self, process: Process) -> bool:
        node = self.processes[f"node.{process.node}"]
        return process is node or (node.alive and not node.stopped)

    def _on_refused(self, process: Process, body: pb.Refused) -> None:
        self._kill(process)

    def _on_fence(self, process: Process, body: pb.Fence) -> list[pb.MemberMessage]:
        target = self.processes[body.member]
        if target.pid == body.pid and target.alive:
            self._kill(target)
            self._start(target.name, target.node)
        return [pb.MemberMessage(fenced=pb.Fenced(member=body.member, pid=body.pid))]

    def _on_drain(self, process: Process, body: pb.Drain) -> list[pb.MemberMessage]:
        if body.epoch == process.epoch:
            raise AssertionError("an epoch is drained for only once")
        process.epoch = body.epoch
        memory = None
        if process.name.startswith("memoryd"):
            held = self.memory[process.node]
            memory = pb.MemoryState(incarnation=held.incarnation, committed=held.committed)
        return [pb.MemberMessage(drained=pb.Drained(epoch=body.epoch, memory=memory))]

    def _on_restore(self, process: Process, body: pb.Restore) -> list[pb.MemberMessage]:
        self.memory[process.node] = Memory(body.incarnation, body.version)
        restored = pb.Restored(epoch=body.epoch, incarnation=body.incarnation)
        return [pb.MemberMessage(restored=restored)]

    def _on_begin(self, process: Process, body: pb.Begin) -> list[pb.MemberMessage]:
        assert body.epoch == process.epoch
        if process.name.startswith("optimizerd"):
            self.memory[process.node].apply(body.record)
        if process.name.startswith("worker"):
            for memory in self.memory.values():
                assert memory.committed == body.record.version, "workers begin last"
        return [pb.MemberMessage(ready=pb.Ready(epoch=body.epoch))]

    def _on_run_attempt(self, process: Process, body: pb.RunAttempt) -> list[pb.MemberMessage]:
        known = self.attempts.setdefault(body.attempt, body)
        assert known == body, "an attempt number means one thing for ever"
        place = {"epoch": body.epoch, "attempt": body.attempt}
        if process.name.startswith("worker"):
            done = pb.AttemptDone(loss_sum=1.0, loss_tokens=1, wall_seconds=1.0, **place)
            return [pb.MemberMessage(attempt_done=done)]
        squares, finite = gradients(body.data_position)
        block = NODES.index(process.node)
        status = pb.BlockStatus(block=block, finite=finite, sum_squares=squares, **place)
        return [pb.MemberMessage(block_status=status)]

    def _on_amend(self, process: Process, body: pb.Amend) -> list[pb.MemberMessage]:
        amended = pb.Amended(epoch=body.epoch, attempt=body.attempt)
        return [pb.MemberMessage(amended=amended)]

    def _on_commit(self, process: Process, body: pb.Commit) -> None:
        if process.name.startswith("optimizerd"):
            self.memory[process.node].apply(body.record)

    def _on_skip(self, process: Process, body: pb.Skip) -> None:
        pass

    def _on_settle(self, process: Process, body: pb.Settle) -> list[pb.MemberMessage]:
        assert self.memory[process.node].committed == body.version
        return [pb.MemberMessage(settled=pb.Settled(epoch=body.epoch, version=body.version))]

    def _on_save(self, process: Process, body: pb.Save) -> list[pb.MemberMessage]:
        return [pb.MemberMessage(saved=pb.Saved(epoch=body.epoch, version=body.version))]

    def _on_shutdown(self, process: Process, body: pb.Shutdown) -> None:
        assert not body.keep_memory
        # It ends. Should the scheduler die before all have heard, the nodes bring the run back.
        self._kill(process)

    # ---- what must hold ----

    def decided(self) -> list[Decided]:
        """All decisions but restores, with the data they are about."""
        return [
            (
                d.record.version,
                self.attempts[d.record.attempt].data_position,
                d.record.decision.name,
                d.record.coefficient,
            )
            for d in self.decisions
            if d.record.decision is not Decision.RESTORE
        ]

    def check(self) -> None:
        """Conservation over the whole history."""
        assert self.epochs == sorted(set(self.epochs))
        attempts = [d.record.attempt for d in self.decisions]
        assert attempts == sorted(attempts), "attempt numbers only rise"
        restores = [d.record for d in self.decisions if d.record.decision is Decision.RESTORE]
        assert [d.record for d in self.decisions[: len(restores)]] == restores, "memory lives on"
        commits = [
            d.record
            for d in self.decisions
            if d.record.decision in (Decision.COMMIT, Decision.AMEND)
        ]
        assert [record.version for record in commits] == list(range(1, STEPS + 1))
        positions = [position for _, position, _, _ in self.decided()]
        assert positions == [8 * i for i in range(len(positions))], "all data, each once"
        for memory in self.memory.values():
            applied = [(r.version, r.attempt, r.coefficient) for r in memory.applied]
            assert applied == [(r.version, r.attempt, r.coefficient) for r in commits]


def run_world(choose: random.Random, disturbances: int, crash_chance: float) -> World:
    """Disturb for some actions, then let it finish."""
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), choose, crash_chance)
        try:
            for number in range(MAX_ACTIONS):
                if world.exit is not None:
                    break
                if number == disturbances:
                    world.crash_chance = 0.0
                    world.wake_all()
                world.act(disturb=number < disturbances)
        finally:
            world.journal.close()
    assert world.exit is not None, f"stuck in {world.machine.phase}: {world.machine.message}"
    return world


@pytest.fixture(scope="module")
def undisturbed() -> list[Decided]:
    """What an undisturbed run decides."""
    world = run_world(random.Random(0), 0, 0.0)
    world.check()
    kinds = {decision for _, _, decision, _ in world.decided()}
    assert kinds == {"COMMIT", "AMEND", "SKIP"}
    return world.decided()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1), crash_chance=st.sampled_from([0.0, 0.004, 0.02]))
def test_any_interleaving_decides_as_the_undisturbed_run(
    undisturbed: list[Decided], seed: int, crash_chance: float
) -> None:
    world = run_world(random.Random(seed), 700, crash_chance)
    world.check()
    assert world.decided() == undisturbed
    assert world.exit == Exit(code=0)
