"""A scheduler's machine in a test's hands: scripted members, a clock, effects as short lines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.config.schema import Config, parse_config
from penstock.daemons.kit.events import Exit, LogLine, Tick
from penstock.daemons.scheduler.machine.activities.save import Save
from penstock.daemons.scheduler.machine.events import (
    Accept,
    AppendMetrics,
    CompleteSave,
    ControlAsked,
    ControlCall,
    Disconnect,
    Effect,
    Event,
    FindSaved,
    Joined,
    JournalDecision,
    JournalEpoch,
    JournalEvaluation,
    JournalGenerations,
    JournalNumerics,
    JournalTokens,
    NoteEnd,
    PrepareSave,
    Received,
    Refuse,
    Reply,
    ReplyError,
    SavedState,
    SaveFinished,
    SavePrepared,
    Send,
    StreamClosed,
)
from penstock.daemons.scheduler.machine.machine import SchedulerMachine
from penstock.daemons.scheduler.machine.membership import Membership
from penstock.daemons.scheduler.machine.mirror import JournalFacts, JournalMirror
from penstock.daemons.scheduler.machine.position import Position
from penstock.daemons.scheduler.machine.rules import Rules, member_specs
from penstock.daemons.scheduler.machine.status import status_reply
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.control import CommitRecord, Decision
from tests.scheduler.transitions import Observer, Step, unknown

RUN_ID = "0123456789ab"
INCARNATION = 7000


def make_config(**sections: dict[str, Any]) -> Config:
    """One node, two workers, batches of 8, heartbeat timeout 10 s; sections are merged in."""
    data: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"hf": {"model_type": "llama"}},
        "data": {"path": "@stdlib"},
        "train": {"steps": 100, "global_batch": 8, "clip_grad_norm": 1.0},
        "optimizer": {"lr": 0.5, "schedule": "constant"},
        "cluster": {"workers": 2},
    }
    for section, changes in sections.items():
        data[section] = {**data.get(section, {}), **changes}
    return parse_config(data)


def make_rules(config: Config | None = None, blocks: tuple[int, ...] = (0, 1)) -> Rules:
    """Rules of an invented run; block 2 of its three has nothing to train."""
    config = config or make_config()
    nodes = config.cluster.nodes
    return Rules(
        run_id=RUN_ID,
        config=config,
        members=member_specs(config),
        blocks=blocks,
        owners=tuple(f"optimizerd.{nodes[block % len(nodes)].name}" for block in range(3)),
        plan_digest="feed",
        plan_scheme="gpipe",
        state_dir="/run/state",
    )


def make_record(version: int, attempt: int, decision: Decision = Decision.COMMIT) -> CommitRecord:
    """A record as a clean attempt leaves it, of incarnation :data:`INCARNATION`."""
    return CommitRecord(
        version=version,
        attempt=attempt,
        decision=decision,
        coefficient=1.0,
        inverse_loss_scale=1.0,
        learning_rate=0.5,
        bias_step=version,
        incarnation=INCARNATION,
    )


def make_position(version: int, **changes: Any) -> Position:
    """A position after ``version`` clean commits of 8 samples."""
    fields: dict[str, Any] = {
        "version": version,
        "data_position": 8 * version,
        "loss_scale": 1.0,
        "clean_commits": version,
        "recent": ("c" * version)[-20:],
    } | changes
    return Position(**fields)


def facts_at(version: int, **changes: Any) -> JournalFacts:
    """A journal that was left after ``version`` clean commits in epoch 3."""
    fields: dict[str, Any] = {
        "epoch": 3,
        "next_attempt": version + 2,
        "record": make_record(version, version),
        "position": make_position(version),
    } | changes
    return JournalFacts(**fields)


def saved_at(version: int) -> SavedState:
    """A saved state after ``version`` clean commits."""
    directory = f"/run/state/step-{version:08d}"
    return SavedState(version=version, directory=directory, position=make_position(version))


def describe(effect: Effect) -> str | None:
    """An effect as a line; None for those that most tests do not care about."""
    match effect:
        case Send(member=member, message=message):
            kind = str(message.WhichOneof("body"))
            return f"{member} <- {kind}{_fields(kind, getattr(message, kind))}"
        case JournalEpoch(epoch=epoch, next_attempt=attempt):
            return f"journal epoch {epoch}, attempts from {attempt}"
        case JournalDecision(record=r):
            return f"journal {r.decision.name} v{r.version} a{r.attempt} c={r.coefficient:.4g}"
        case JournalEvaluation(score=score):
            return f"journal evaluation of v{score.version}"
        case JournalGenerations(generations=generations):
            named = ", ".join(f"{name} {generation}" for name, generation in generations)
            return f"journal generations {named}"
        case JournalTokens(tokens=tokens):
            return f"journal tokens of {', '.join(name for name, _ in tokens)}"
        case JournalNumerics(step=step):
            return f"journal numerics from step {step}"
        case Refuse(stream=stream):
            return f"refuse stream {stream}"
        case Disconnect(stream=stream):
            return f"disconnect stream {stream}"
        case PrepareSave(directory=directory):
            return f"prepare {directory}"
        case CompleteSave(version=version, files=files):
            return f"complete v{version} with {', '.join(name for name, _, _ in files)}"
        case Reply(ticket=ticket):
            return f"reply {ticket}"
        case ReplyError(ticket=ticket, error=error):
            return f"error {ticket}: {error}"
        case FindSaved(below=below):
            return f"find a saved state before {below}"
        case Exit(code=code):
            return f"exit {code}"
        case AppendMetrics():
            return "metrics line"
        case Accept() | LogLine() | NoteEnd():
            return None
    return type(effect).__name__.lower()


def _fields(kind: str, body: Any) -> str:
    match kind:
        case "drain":
            return f" e{body.epoch}"
        case "restore":
            source = body.partner or body.source or "initial weights"
            generation = f" generation {body.generation}" if body.generation else ""
            return f" e{body.epoch} v{body.version} from {source}{generation}"
        case "begin":
            bereft = f" without gradients of {', '.join(body.bereft)}" if body.bereft else ""
            strange = f" anew {', '.join(body.strange)}" if body.strange else ""
            return f" e{body.epoch} v{body.record.version}{bereft}{strange}"
        case "run_attempt":
            hold = " hold" if body.hold else ""
            place = f"v{body.base_version} data {body.data_position}"
            return f" e{body.epoch} a{body.attempt} {place}{hold}"
        case "commit" | "amend":
            return f" e{body.epoch} v{body.record.version} c={body.record.coefficient:.4g}"
        case "skip":
            return f" e{body.epoch} a{body.attempt}"
        case "settle":
            return f" e{body.epoch} v{body.version}"
        case "save":
            weights = f" weights into {body.directory}" if body.weights_only else ""
            return f" e{body.epoch} v{body.version}{weights}"
        case "evaluate":
            return f" e{body.epoch} v{body.base_version}"
        case "fence":
            return f" {body.member} {body.pid}"
        case "missing":
            return f" {body.member}"
        case "shutdown":
            return " keep memory" if body.keep_memory else ""
    return ""


class Driver:
    """A machine with scripted members. Lines come without heartbeats, streams and log texts."""

    def __init__(
        self,
        rules: Rules | None = None,
        facts: JournalFacts | None = None,
        saved: SavedState | None = None,
    ) -> None:
        self.rules = rules or make_rules()
        self.now_s = 1000.0
        self.streams: dict[str, int] = {}
        self.pids: dict[str, int] = {}
        self.effects: list[Effect] = []
        """Effects of the last event."""
        self._numbers = itertools.count(1)
        incarnations = itertools.count(INCARNATION)
        facts = facts or JournalFacts()
        mirror = JournalMirror(self.rules, facts, saved, lambda: next(incarnations))
        members = Membership(self.rules, facts.pids)
        self.machine = SchedulerMachine(self.rules, mirror, members, self.now_s)
        self.observer = Observer(self.machine)
        self.steps: list[Step] = []
        """Transitions by the last event."""

    @property
    def epoch(self) -> int:
        return self.machine.mirror.epoch

    @property
    def attempt(self) -> int:
        return self.machine.mirror.next_attempt - 1

    @property
    def status(self) -> pb.StatusReply:
        return status_reply(self.machine, self.now_s)

    def feed(self, event: Event, after_s: float = 0.0) -> list[str]:
        """Hand an event over ``after_s`` seconds later; the lines of its effects."""
        self.now_s += after_s
        self.effects = self.machine.handle(event, self.now_s)
        self.machine.validate()
        if self.observer.machine is not self.machine:  # a test made another one
            self.observer = Observer(self.machine)
        self.steps = self.observer.steps(event)
        assert not [step for step in self.steps if unknown(step)]
        lines = [describe(effect) for effect in self.effects]
        return [line for line in lines if line is not None and line != "beat"]

    def tick(self, after_s: float = 0.0) -> list[str]:
        """Time passes in one step."""
        return self.feed(Tick(), after_s)

    def wait(self, seconds: float, silent: tuple[str, ...] = ()) -> list[str]:
        """Time passes with ticks, and heartbeats of all but ``silent``; all lines of it."""
        lines = []
        for _ in range(round(seconds / 0.5)):
            for name in [name for name in self.streams if name not in silent]:
                lines += self.say(name, heartbeat=pb.Heartbeat())
            lines += self.tick(0.5)
        return lines

    def join(
        self,
        name: str,
        pid: int = 0,
        run_id: str = RUN_ID,
        epoch: int = 0,
        nonce: int = 0,
        peers: Sequence[str] | None = None,
        facts: Sequence[pb.Fact] = (),
    ) -> list[str]:
        """A process says Hello on a new stream; a fresh pid unless given."""
        stream = next(self._numbers)
        pid = pid or 100 + stream
        hello = pb.Hello(
            run_id=run_id,
            member=name,
            pid=pid,
            epoch=epoch,
            data_endpoint=f"tcp://{name}",
            nonce=nonce,
            peers=None if peers is None else pb.Peers(members=peers),
            facts=facts,
        )
        lines = self.feed(Joined(stream=stream, hello=hello))
        if self.machine.members.name_of(stream) is not None:
            self.streams[name], self.pids[name] = stream, pid
        return lines

    def join_all(self) -> list[str]:
        """Everyone joins; the lines after the last."""
        lines: list[str] = []
        for member in self.rules.members:
            lines = self.join(member.name)
        return lines

    def close(self, name: str) -> list[str]:
        """The member's stream ends."""
        return self.feed(StreamClosed(stream=self.streams.pop(name)))

    def say(self, name: str, stream: int | None = None, **body: Any) -> list[str]:
        """A member sends a message."""
        number = self.streams[name] if stream is None else stream
        return self.feed(Received(stream=number, message=pb.MemberMessage(**body)))

    def each(self, names: tuple[str, ...], **body: Any) -> list[str]:
        """Several members send the same; all lines."""
        return [line for name in names for line in self.say(name, **body)]

    def fenced(self, name: str, pid: int, node: str = "node.a") -> list[str]:
        """The node reports a death."""
        return self.say(node, fenced=pb.Fenced(member=name, pid=pid))

    def drained(self, committed: int | None = None, incarnation: int = INCARNATION) -> list[str]:
        """Everyone drains; memory says ``committed`` (None: it is empty)."""
        memory = pb.MemoryState(
            incarnation=0 if committed is None else incarnation, committed=committed or 0
        )
        lines = self.each(self.rules.memoryds, drained=pb.Drained(epoch=self.epoch, memory=memory))
        replica = pb.ReplicaState(
            incarnation=memory.incarnation, committed=memory.committed, complete=True
        )
        held = pb.Drained(epoch=self.epoch, replica=replica)
        lines += self.each(self.rules.mirrords, drained=held)
        others = (*self.rules.optimizerds, *self.rules.workers)
        return lines + self.each(others, drained=pb.Drained(epoch=self.epoch))

    def restored(self) -> list[str]:
        """All memoryds are filled with the incarnation that was last asked for."""
        [message] = {
            e.message.restore.incarnation
            for e in self.effects
            if isinstance(e, Send) and e.message.HasField("restore")
        }
        restored = pb.Restored(epoch=self.epoch, incarnation=message)
        return self.each(self.rules.memoryds, restored=restored)

    def ready(self) -> list[str]:
        """Daemons, then workers say Ready; the lines of their part, behind those of nodes."""
        ready = pb.Ready(epoch=self.epoch)
        daemons = (*self.rules.memoryds, *self.rules.optimizerds, *self.rules.mirrords)
        self.each(daemons, ready=ready)
        version, nodes = self.machine.mirror.version, self.rules.nodes
        lines = self.each(self.rules.workers, ready=ready)
        assert lines[: len(nodes)] == [f"{n} <- begin e{self.epoch} v{version}" for n in nodes]
        return lines[len(nodes) :]

    def begin(self) -> list[str]:
        """Brings a new run, or a broken epoch with all members back, to a live epoch."""
        if self.machine.phase.value == "gathering":
            self.join_all()
        version = self.machine.mirror.version
        empty = self.machine.mirror.record is None
        self.drained(None if empty else version)
        if self.machine.phase.value == "restoring":
            self.restored()
        return self.ready()

    def done(self, worker: str, **fields: Any) -> list[str]:
        """A worker ends its part of the attempt."""
        report = {"loss_sum": 20.0, "loss_tokens": 10, "busy_seconds": 1.0, "wall_seconds": 2.0}
        done = pb.AttemptDone(epoch=self.epoch, attempt=self.attempt, **{**report, **fields})
        return self.say(worker, attempt_done=done)

    def block(self, block: int, sum_squares: float = 0.125, **fields: Any) -> list[str]:
        """optimizerd reports a block's gradients."""
        values = {"epoch": self.epoch, "attempt": self.attempt, "finite": True} | fields
        status = pb.BlockStatus(block=block, sum_squares=sum_squares, **values)
        return self.say("optimizerd.a", block_status=status)

    def heard(self, optimizerd: str, attempt: int | None = None) -> list[str]:
        """An optimizerd without blocks to train knows of the attempt."""
        number = self.attempt if attempt is None else attempt
        heard = pb.AttemptHeard(epoch=self.epoch, attempt=number)
        return self.say(optimizerd, attempt_heard=heard)

    def run_attempt(self, sum_squares: float = 0.125, finite: bool = True) -> list[str]:
        """All report the attempt; the lines of the last report (the decision)."""
        for worker in self.rules.workers:
            self.done(worker)
        for block in self.rules.blocks[:-1]:
            self.block(block, sum_squares, finite=finite)
        return self.block(self.rules.blocks[-1], sum_squares, finite=finite)

    def amended(self) -> list[str]:
        """optimizerd has previewed again."""
        return self.say("optimizerd.a", amended=pb.Amended(epoch=self.epoch, attempt=self.attempt))

    def save(self, error: str = "") -> list[str]:
        """Pin, settle what is asked, write, complete; the lines after the last event."""
        self.pin()
        settled = pb.Settled(epoch=self.epoch, version=self.machine.mirror.version)
        self.each(self.rules.optimizerds, settled=settled)
        return self.written(error)

    def pin(self) -> list[str]:
        """The save's directory is there, and all memoryds hold back sweeps; the last lines."""
        save = self.machine.saves.under_way
        assert save is not None
        self.feed(SavePrepared(number=save.number))
        return self.each(self.rules.memoryds, pinned=pb.Pinned(**self._about(save)))

    def written(self, error: str = "") -> list[str]:
        """The memoryds have written, the disk has all; the lines after the last event."""
        save = self.machine.saves.under_way
        assert save is not None
        for memoryd in self.rules.memoryds:
            file = pb.SavedFile(name=f"of-{memoryd}", bytes=3, sha256="ab")
            saved = pb.Saved(
                **self._about(save),
                files=[] if error else [file],
                error=error,
                write_seconds=self.now_s - save.started_s,
            )
            lines = self.say(memoryd, saved=saved)
        if error:
            return lines
        directory = f"/run/state/step-{save.version:08d}"
        return self.feed(
            SaveFinished(number=save.number, version=save.version, directory=directory)
        )

    def _about(self, save: Save) -> dict[str, int]:
        return {"epoch": save.epoch, "version": save.version, "number": save.number}

    def ask(self, call: ControlCall, ticket: int = 1) -> list[str]:
        """A control call."""
        return self.feed(ControlAsked(ticket=ticket, call=call))

    def leave_all(self) -> list[str]:
        """Everyone's stream ends; the last lines."""
        lines: list[str] = []
        for name in list(self.streams):
            lines = self.close(name)
        return lines


@pytest.fixture
def live() -> Driver:
    """A run in its first attempt."""
    driver = Driver()
    driver.begin()
    return driver


@pytest.fixture
def live_with() -> Callable[..., Driver]:
    """Make a run in its first attempt, with configuration sections changed."""

    def make(**sections: dict[str, Any]) -> Driver:
        driver = Driver(make_rules(make_config(**sections)))
        driver.begin()
        return driver

    return make
