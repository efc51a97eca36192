"""Random kills, stops, scheduler crashes and late messages: nothing is lost, nothing doubled.

A model of two nodes with all members drives the real machine and the real journal. Messages arrive
in any order that streams allow. Gradients are a function of the data, so each run must decide
exactly as the undisturbed one. Saves are written while later attempts run: memoryds pin a version
and read it when it is settled, and sweeps that would overwrite it wait. A saved state must hold its
version only.
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
    SavedState,
    SaveFinished,
    SavePrepared,
    Send,
    StreamClosed,
)
from penstock.daemons.scheduler.machine.machine import SchedulerMachine
from penstock.daemons.scheduler.machine.membership import Membership
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.rules import RunPhase
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.control import Decision
from tests.scheduler.conftest import RUN_ID, make_config, make_rules

STEPS = 8
SAVE_EVERY = 3
NODES = ("a", "b")
MEMBERS = {
    "a": ("memoryd.a", "optimizerd.a", "worker.0"),
    "b": ("memoryd.b", "optimizerd.b", "worker.1"),
}
RULES = make_rules(
    make_config(
        train={"steps": STEPS, "max_skips": 5, "save_every": SAVE_EVERY},
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
    """A member's process. ``inbox``: unread messages of an ended stream.

    ``sweeps``: orders of an optimizerd. ``save``: the save that a memoryd writes. ``said``: the end
    of the last save, which the scheduler may not know yet.
    """

    name: str
    node: str
    pid: int
    alive: bool = True
    stopped: bool = False
    epoch: int = 0
    stream: Stream | None = None
    inbox: deque[pb.SchedulerMessage] = field(default_factory=deque)
    sweeps: deque[pb.RunAttempt | pb.Settle] = field(default_factory=deque)
    save: pb.Save | None = None
    said: pb.Saved | None = None


@dataclass
class Memory:
    """A node's shared memory, with the records that were applied to it.

    ``state``: the version of the optimizer's state, at most one behind. ``pin``: the version that
    no sweep may lead the state away from; it outlives the memoryd that set it.
    """

    incarnation: int = 0
    committed: int = 0
    state: int = 0
    pin: int | None = None
    applied: list[pb.Record] = field(default_factory=list)

    def apply(self, record: pb.Record) -> None:
        assert record.incarnation == self.incarnation, "commit of another filling"
        if record.version == self.committed:
            return
        assert record.version == self.committed + 1, f"at {self.committed}: {record}"
        assert self.state == self.committed, "the step before was never settled"
        self.committed = record.version
        self.applied.append(record)

    def waits(self, version: int) -> bool:
        """Whether a sweep that settles ``version`` would overwrite what is pinned."""
        return self.state < version and self.pin == self.state

    def settle(self, version: int) -> None:
        assert version == self.committed and not self.waits(version)
        assert self.state in (version - 1, version), f"state {self.state}, settled at {version}"
        self.state = version

    def written(self, version: int) -> str:
        """What a saved state holds: the attempts that led to it."""
        assert self.state == self.pin == version
        return " ".join(str(record.attempt) for record in self.applied if record.version <= version)


class World:
    """The cluster and the scheduler's process; every choice comes from ``choose``."""

    def __init__(self, directory: Path, choose: random.Random, crash_chance: float) -> None:
        self.choose = choose
        self.crash_chance = crash_chance
        self.now_s = 0.0
        self.path = directory / "journal.sqlite"
        self.saved: SavedState | None = None
        self.all_saved: list[CompleteSave] = []
        self.disk: deque[PrepareSave | CompleteSave] = deque()
        """Jobs of the disk thread, in this order, while the machine goes on."""
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
        self._laggard: Process | None = None

    # ---- what can happen ----

    def act(self, disturb: bool) -> None:
        """One random thing happens."""
        self.now_s += 0.001
        actions: list[Any] = [(self._deliver_up, s) for s in self.streams if s.up or s.closed]
        if self.choose.random() < 0.02:
            self._laggard = self.choose.choice([None, *self.processes.values()])
        for process in self._awake():
            if process.alive and not process.stopped:
                if process.inbox or (process.stream is not None and process.stream.down):
                    actions.append((self._read, process))
                if process.stream is None:
                    actions.append((self._connect, process))
                if self._can_sweep(process):
                    actions.append((self._sweep, process))
            if not process.alive and self._node_works(process) and not self._shut_down:
                actions.append((self._restart, process))
        if self.disk:
            actions.append((self._disk_works, None))
        writers = [process for process in self.processes.values() if self._can_write(process)]
        if not actions or self.choose.random() < 0.05:  # writing takes longer than messages
            actions += [(self._write, process) for process in writers]
        if disturb and self.choose.random() < 0.015:
            victim = self.choose.choice(list(self.processes.values()))
            disturbance = self.choose.choice([self._kill, self._kill, self._stop, self._cut])
            actions = [(disturbance, victim)]
            if self.choose.random() < 0.15:
                actions = [(self._crash_scheduler, None)]
        if not actions or self.choose.random() < 0.01:
            self._laggard = None
            actions = [(self._pass_time, None)]
        action, argument = self.choose.choice(actions)
        action(argument)

    def _awake(self) -> list[Process]:
        """All processes, or all but one that is slow for a while."""
        lagging = self._laggard is not None and self.choose.random() > 0.02
        return [p for p in self.processes.values() if not (lagging and p is self._laggard)]

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
            self._say(process, answer)

    def _say(self, process: Process, message: pb.MemberMessage) -> None:
        if process.stream is not None:
            process.stream.up.append(message)

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
        """Half a minute with heartbeats of all members that can send them."""
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
        for _ in range(self.choose.randint(0, len(self.disk))):
            self._on_disk(self.disk.popleft())
        self.disk.clear()
        for stream in self.streams:
            self._hang_up(stream)
        self.streams.clear()
        self._bound.clear()
        self.journal = Journal(self.path, RUN_ID)
        self.machine = self._machine()
        self._laggard: Process | None = None

    # ---- the scheduler's process ----

    def _machine(self) -> SchedulerMachine:
        facts = self.journal.load()
        mirror = JournalMirror(RULES, facts, self.saved, lambda: next(self._incarnations))
        return SchedulerMachine(RULES, mirror, Membership(RULES, facts.pids), self.now_s)

    def _feed(self, event: Event) -> None:
        if self.exit is not None:
            return
        effects = self.machine.handle(event, self.now_s)
        self.machine.validate()
        assert self.machine.hangs.in_a_row == 0, f"nobody hangs here: {self.machine.message}"
        for effect in effects:
            if self.crash_chance and self.choose.random() < self.crash_chance:
                self._crash_scheduler(None)
                return
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
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
            case PrepareSave() | CompleteSave():
                self.disk.append(effect)
            case Exit():
                self.exit = effect

    def _disk_works(self, _: None) -> None:
        self._feed(self._on_disk(self.disk.popleft()))

    def _on_disk(self, effect: PrepareSave | CompleteSave) -> Event:
        number = effect.number
        if isinstance(effect, PrepareSave):
            return SavePrepared(number=number)
        version = effect.version
        self.all_saved.append(effect)
        self.saved = SavedState(version=version, directory="saved", position=effect.position)
        return SaveFinished(number=number, version=version, directory="saved")

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
        if name.startswith("memoryd"):
            self.memory[node].pin = None  # no process reads the version that a dead one pinned

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

    def _on_missing(self, process: Process, body: pb.Missing) -> list[pb.MemberMessage]:
        return []  # no process hangs here before it joins

    def _on_drain(self, process: Process, body: pb.Drain) -> list[pb.MemberMessage]:
        if body.epoch == process.epoch:
            raise AssertionError("an epoch is drained for only once")
        process.epoch = body.epoch
        process.sweeps.clear()
        if not process.name.startswith("memoryd"):
            return [pb.MemberMessage(drained=pb.Drained(epoch=body.epoch))]
        held = self.memory[process.node]
        if process.save is not None and process.save.number != body.saving:
            process.save = held.pin = None
        if process.said is not None and process.said.number != body.saving:
            process.said = None
        memory = pb.MemoryState(incarnation=held.incarnation, committed=held.committed)
        answers = [pb.MemberMessage(drained=pb.Drained(epoch=body.epoch, memory=memory))]
        if process.said is not None:
            answers.append(pb.MemberMessage(saved=process.said))
        return answers

    def _on_restore(self, process: Process, body: pb.Restore) -> list[pb.MemberMessage]:
        assert process.save is None, "memory that is restored has nothing to save"
        self.memory[process.node] = Memory(body.incarnation, body.version, body.version)
        restored = pb.Restored(epoch=body.epoch, incarnation=body.incarnation)
        return [pb.MemberMessage(restored=restored)]

    def _on_begin(self, process: Process, body: pb.Begin) -> list[pb.MemberMessage]:
        if process.name.startswith("node."):
            process.epoch = body.epoch  # nodes have nothing to drain
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
        process.sweeps.append(body)
        return []

    def _can_sweep(self, process: Process) -> bool:
        if not process.sweeps:
            return False
        return not self.memory[process.node].waits(_settles(process.sweeps[0]))

    def _sweep(self, process: Process) -> None:
        """The last step goes into the state; an attempt's gradients then preview the next one."""
        body = process.sweeps.popleft()
        self.memory[process.node].settle(_settles(body))
        if isinstance(body, pb.Settle):
            settled = pb.Settled(epoch=body.epoch, version=body.version)
            self._say(process, pb.MemberMessage(settled=settled))
            return
        squares, finite = gradients(body.data_position)
        status = pb.BlockStatus(
            epoch=body.epoch,
            attempt=body.attempt,
            block=NODES.index(process.node),
            finite=finite,
            sum_squares=squares,
        )
        self._say(process, pb.MemberMessage(block_status=status))

    def _on_amend(self, process: Process, body: pb.Amend) -> list[pb.MemberMessage]:
        amended = pb.Amended(epoch=body.epoch, attempt=body.attempt)
        return [pb.MemberMessage(amended=amended)]

    def _on_commit(self, process: Process, body: pb.Commit) -> None:
        if process.name.startswith("optimizerd"):
            self.memory[process.node].apply(body.record)

    def _on_skip(self, process: Process, body: pb.Skip) -> None:
        pass

    def _on_settle(self, process: Process, body: pb.Settle) -> list[pb.MemberMessage]:
        process.sweeps.append(body)
        return []

    def _on_save(self, process: Process, body: pb.Save) -> list[pb.MemberMessage]:
        memory = self.memory[process.node]
        assert process.save is None and memory.pin is None, "one save at a time"
        assert memory.committed in (body.version - 1, body.version), "there is no such version"
        assert memory.state <= body.version, "it is overwritten already"
        process.save, process.said, memory.pin = body, None, body.version
        pinned = pb.Pinned(epoch=body.epoch, number=body.number, version=body.version)
        return [pb.MemberMessage(pinned=pinned)]

    def _can_write(self, process: Process) -> bool:
        save = process.save
        if save is None or not process.alive or process.stopped:
            return False
        state = self.memory[process.node].state
        assert state <= save.version, f"version {save.version} was overwritten before it was read"
        return state == save.version

    def _write(self, process: Process) -> None:
        """A memoryd reads the version that it has pinned, and unpins it."""
        save, memory = process.save, self.memory[process.node]
        assert save is not None
        content = memory.written(save.version)
        process.save = memory.pin = None
        process.said = pb.Saved(
            epoch=save.epoch,
            number=save.number,
            version=save.version,
            files=[pb.SavedFile(name=process.node, bytes=1, sha256=content)],
        )
        self._say(process, pb.MemberMessage(saved=process.said))

    def _on_shutdown(self, process: Process, body: pb.Shutdown) -> None:
        assert not body.keep_memory
        # It ends. If the scheduler dies before all members know, the nodes restart the run.
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
        self._check_saved([record.attempt for record in commits])

    def _check_saved(self, attempts: list[int]) -> None:
        """Each saved state has the files of all nodes, read at its version and position."""
        versions = [saved.version for saved in self.all_saved]
        assert versions == sorted(versions) and versions[-1] == STEPS
        assert all(version % SAVE_EVERY == 0 for version in set(versions) - {STEPS})
        for saved in self.all_saved:
            content = " ".join(str(attempt) for attempt in attempts[: saved.version])
            assert saved.files == tuple((node, 1, content) for node in NODES)
            assert saved.attempt >= attempts[saved.version - 1], "the attempt of its start"
            if saved.version < STEPS:
                assert saved.attempt < attempts[saved.version]
            last = [d for d in self.decisions if d.record.attempt <= saved.attempt][-1]
            assert saved.position == last.position


def _settles(body: pb.RunAttempt | pb.Settle) -> int:
    """The version that the state is at when a sweep is done."""
    return body.base_version if isinstance(body, pb.RunAttempt) else body.version


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
