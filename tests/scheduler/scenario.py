"""Stories of a run as text: events of scripted members in, effects of the scheduler's machine out.

A scenario is a text file. A line of prose starts with ``#``. A line that starts with ``>`` is a
command (a method of :class:`Scenario` named ``do_COMMAND``, with words and ``key=value`` pairs as
arguments). The lines below a command are the effects, the log and the transitions that follow.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from penstock.daemons.kit.events import EffectFailed, LogLine, StopAsked
from penstock.daemons.scheduler.machine.events import (
    ControlAsked,
    ControlCall,
    Effect,
    Event,
    JournalTokens,
    NoteEnd,
    Reply,
    SavedFound,
    SaveFinished,
    SavePrepared,
)
from penstock.daemons.scheduler.machine.mirror import JournalFacts
from penstock.daemons.scheduler.machine.states import EpochState, MemberState
from penstock.host.errors import ExitCode
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.names import place_of_member
from tests.scheduler.conftest import (
    INCARNATION,
    Driver,
    describe,
    facts_at,
    make_config,
    make_rules,
    saved_at,
)
from tests.scheduler.test_numerics import RECIPE, row
from tests.scheduler.transitions import Step


class Scenario:
    """Runs the commands of one scenario over a real machine."""

    def __init__(self) -> None:
        self._driver: Driver | None = None
        self._lines: list[str] = []
        self._before: dict[str, int] = {}
        self.steps: list[Step] = []
        """All transitions so far."""

    def rewritten(self, text: str) -> str:
        """Returns a scenario with the output of this machine below each command."""
        return "\n".join(self._rewritten(text.splitlines())) + "\n"

    def _rewritten(self, lines: list[str]) -> Iterator[str]:
        for line in lines:
            if line.startswith(">"):
                yield line
                yield from self.run(line[1:])
            elif line.startswith("#") or not line:
                yield line

    def run(self, command: str) -> list[str]:
        """Runs one command; returns its output, indented."""
        name, *words = shlex.split(command)
        fields = {key: _value(value) for key, _, value in map(_pair, words) if key}
        names = [word for word in words if "=" not in word]
        self._lines = []
        getattr(self, f"do_{name}")(*names, **fields)
        return [f"    {line}" for line in _grouped(self._lines)]

    @property
    def driver(self) -> Driver:
        """The machine with its scripted members; made by ``given`` or by the first command."""
        if self._driver is None:
            self.do_given()
        assert self._driver is not None
        return self._driver

    def do_given(
        self,
        *,
        journal: int | None = None,
        saved: int | None = None,
        device: str = "",
        **keys: Any,
    ) -> None:
        """A run: configuration keys (``train.steps=3``), nodes, committed and saved version, and
        the GPU that worker.0 had before.
        """
        sections: dict[str, dict[str, Any]] = {}
        nodes, owner = str(keys.pop("nodes", "")).split(), keys.pop("owners", "")
        pids = tuple(_pairs(keys.pop("pids", "")))
        for key, value in keys.items():
            section, _, field = key.partition(".")
            sections.setdefault(section, {})[field] = value
        if nodes:
            places = [
                {"name": name, "host": f"10.0.0.{index}"} for index, name in enumerate(nodes, 1)
            ]
            sections["cluster"] = {"workers": 1, "nodes": places} | sections.get("cluster", {})
        facts = JournalFacts() if journal is None else facts_at(journal, pids=pids)
        rules = make_rules(make_config(**sections))
        if device:
            before = row(1, worker_0={"GPU": device})
            rules, facts = replace(rules, numerics=RECIPE), replace(facts, numerics=before)
        if owner:
            rules = replace(rules, owners=(owner,) * len(rules.owners))
        driver = Driver(rules, facts, None if saved is None else saved_at(saved))
        feed = driver.feed

        def recorded(event: Event, after_s: float = 0.0) -> list[str]:
            lines = feed(event, after_s)
            self._record()
            return lines

        driver.feed = recorded  # type: ignore[method-assign]
        self._driver = driver

    def _record(self) -> None:
        self._lines += [line for effect in self.driver.effects for line in _shown(effect)]
        steps = self.driver.steps
        self.steps += steps
        notes = [
            f"{type(step.after).__name__.removesuffix('State').lower()} {step.after}"
            for step in steps
            if not isinstance(step.after, MemberState)
        ]
        if notes:
            self._lines.append(f"-- {', '.join(notes)}")

    # ---- members ----

    def do_join(self, *names: str, **fields: Any) -> None:
        """Processes say Hello: all members, or those named. ``again=true``: the same process;
        ``device``: the GPU of a worker.
        """
        if "device" in fields:
            fields["facts"] = [pb.Fact(name="GPU", value=fields.pop("device"))]
        again = fields.pop("again", False)
        for name in names or tuple(member.name for member in self.driver.rules.members):
            pid = self._before[name] if again else fields.get("pid", 0)
            self.driver.join(name, **{**fields, "pid": pid})

    def do_close(self, *names: str) -> None:
        """Streams of members end."""
        for name in names:
            self._before[name] = self.driver.pids[name]
            self.driver.close(name)

    def do_dead(self, *names: str) -> None:
        """Nodes report that the lost processes of members are dead."""
        for name in names:
            node = place_of_member(self.driver.rules.config, name)[0]
            [pid] = {pid for lost, pid in self.driver.machine.members._dying if lost == name}
            self.driver.fenced(name, pid, f"node.{node}")

    def do_fence(self, name: str, *, pid: int) -> None:
        """The node reports that a process of a scheduler before this one is dead."""
        node = place_of_member(self.driver.rules.config, name)[0]
        self.driver.fenced(name, pid, f"node.{node}")

    def do_wait(self, seconds: str, *, silent: str = "", stuck: str = "") -> None:
        """Time passes; ``silent`` members send no heartbeats, ``stuck`` ones no progress."""
        for name in silent.split():
            self._before[name] = self.driver.pids[name]
        for _ in range(round(float(seconds) / 0.5)):
            for name in [name for name in self.driver.streams if name not in silent.split()]:
                waiting = bool(stuck) and name not in stuck.split()
                beat = pb.Heartbeat(waiting=waiting, activity="B 1 0 of train 1" if stuck else "")
                self.driver.say(name, heartbeat=beat)
            self.driver.tick(0.5)
        for name in stuck.split():
            self._before[name] = self.driver.pids[name]

    def do_stopped(self, seconds: str) -> None:
        """The scheduler itself is stopped for some seconds."""
        self.driver.tick(float(seconds))

    def do_leave(self) -> None:
        """Streams of all members end."""
        self.driver.leave_all()

    def do_fail(self, name: str, *, error: str, code: int = 4, timed_out: bool = False) -> None:
        """A member reports that it cannot go on."""
        self._before[name] = self.driver.pids[name]
        failed = pb.Failed(
            error=error, exit_code=code, epoch=self.driver.epoch, timed_out=timed_out
        )
        self.driver.say(name, failed=failed)

    def do_cut(self, name: str, *, loss: str, epoch: int = 0) -> None:
        """A member reports a lost connection to another member, in an epoch."""
        self.driver.say(name, cut_off=pb.CutOff(epoch=epoch or self.driver.epoch, loss=loss))

    def do_hello(self, name: str) -> None:
        """A member says Hello on a stream on which it is known already."""
        self._before[name] = self.driver.pids[name]
        self.driver.say(name, hello=pb.Hello(member=name))

    # ---- barrier ----

    def do_drain(self, *names: str, memory: int | str = "committed") -> None:
        """Members drain; memory is at a version, or ``empty``."""
        mirror = self.driver.machine.mirror
        version = mirror.version if memory == "committed" else memory
        committed = None if version == "empty" or mirror.record is None else int(version)
        incarnation = INCARNATION if mirror.record is None else mirror.record.incarnation
        if not names:
            self.driver.drained(committed, incarnation)
            return
        fields = {"incarnation": incarnation, "committed": committed}
        empty = committed is None
        for name in names:
            drained = pb.Drained(epoch=self.driver.epoch)
            if name in self.driver.rules.memoryds:
                drained.memory.CopyFrom(pb.MemoryState(**({} if empty else fields)))
            elif name in self.driver.rules.mirrords:
                drained.replica.CopyFrom(pb.ReplicaState(**fields, complete=True))
            self.driver.say(name, drained=drained)

    def do_restored(self, *names: str, damaged: str = "") -> None:
        """memoryds are filled, or find the saved state damaged."""
        record = self.driver.machine.activity._restoration  # type: ignore[union-attr]
        incarnation = INCARNATION if record is None else record.incarnation
        for name in names or self.driver.rules.memoryds:
            restored = pb.Restored(
                epoch=self.driver.epoch, incarnation=incarnation, damaged=damaged
            )
            self.driver.say(name, restored=restored)

    def do_found(self, *, saved: int | None = None, error: str = "") -> None:
        """The disk thread found an older saved state, or none."""
        self.driver.feed(SavedFound(saved=None if saved is None else saved_at(saved), error=error))

    def do_ready(self, *names: str) -> None:
        """Daemons, then workers, are ready."""
        rules = self.driver.rules
        daemons = (*rules.memoryds, *rules.optimizerds, *rules.mirrords)
        ready = pb.Ready(epoch=self.driver.epoch)
        for name in names or (*daemons, *rules.workers):
            self.driver.say(name, ready=ready)

    def do_begin(self) -> None:
        """All members join, drain, are filled if needed, and begin. Only the end is shown."""
        driver = self.driver
        if driver.machine.epoch_state is EpochState.GATHERING:
            driver.join_all()
        record = driver.machine.mirror.record
        if record is None:
            driver.drained(None)
        else:
            driver.drained(record.version, record.incarnation)
        if driver.machine.epoch_state is EpochState.RESTORING:
            driver.restored()
        self._lines = []
        self.do_ready()

    # ---- attempts ----

    def do_attempt(self, *, norm: float = 0.5, finite: bool = True) -> None:
        """All members report an attempt with gradients of a norm."""
        blocks = self.driver.rules.blocks
        for worker in self.driver.rules.workers:
            self.driver.done(worker)
        for block in blocks:
            self.do_block(str(block), norm=norm, finite=finite)

    def do_done(self, *workers: str) -> None:
        """Workers end their part of the attempt."""
        for worker in workers:
            self.driver.done(worker)

    def do_block(self, block: str, *, norm: float = 0.5, finite: bool = True) -> None:
        """The owner of a block reports its share of the squared norm."""
        share = norm**2 / len(self.driver.rules.blocks)
        owner = self.driver.rules.owners[int(block)]
        status = pb.BlockStatus(
            epoch=self.driver.epoch,
            attempt=self.driver.attempt,
            block=int(block),
            sum_squares=share,
            finite=finite,
        )
        self.driver.say(owner, block_status=status)

    def do_heard(self, *optimizerds: str) -> None:
        """optimizerds without blocks know the attempt."""
        for name in optimizerds:
            self.driver.heard(name)

    def do_amended(self) -> None:
        """All optimizerds have previewed the clipped update."""
        amended = pb.Amended(epoch=self.driver.epoch, attempt=self.driver.attempt)
        self.driver.each(self.driver.rules.optimizerds, amended=amended)

    def do_mirrored(self, *names: str) -> None:
        """Replicas have the gradients of the attempt."""
        mirrored = pb.Mirrored(epoch=self.driver.epoch, attempt=self.driver.attempt)
        self.driver.each(names or self.driver.rules.mirrords, mirrored=mirrored)

    def do_settled(self, *names: str) -> None:
        """State is at the committed version."""
        version = self.driver.machine.mirror.version
        settled = pb.Settled(epoch=self.driver.epoch, version=version)
        self.driver.each(names or self.driver.rules.optimizerds, settled=settled)

    def do_evaluated(self, *, number: int) -> None:
        """All workers report an evaluation."""
        done = pb.EvaluationDone(
            epoch=self.driver.epoch, evaluation=number, loss_sum=10.0, loss_tokens=10
        )
        self.driver.each(self.driver.rules.workers, evaluation_done=done)

    # ---- saves ----

    def do_prepared(self, *, error: str = "") -> None:
        """The disk thread has made the directory of the save, or could not."""
        save = self.driver.machine.saves.under_way
        assert save is not None
        self.driver.feed(SavePrepared(number=save.number, error=error))

    def do_pinned(self, *names: str) -> None:
        """memoryds hold back sweeps."""
        save = self.driver.machine.saves.under_way
        assert save is not None
        pinned = pb.Pinned(epoch=save.epoch, version=save.version, number=save.number)
        self.driver.each(names or self.driver.rules.memoryds, pinned=pinned)

    def do_written(self, *names: str, error: str = "") -> None:
        """memoryds have written their files, or could not."""
        for name in names or self.driver.rules.memoryds:
            save = self.driver.machine.saves.under_way
            assert save is not None
            saved = pb.Saved(epoch=save.epoch, version=save.version, number=save.number)
            saved.error, saved.write_seconds = error, self.driver.now_s - save.started_s
            if not error:
                saved.files.append(pb.SavedFile(name=f"of-{name}", bytes=3, sha256="ab"))
            self.driver.say(name, saved=saved)

    def do_completed(self, *, error: str = "") -> None:
        """The disk thread has completed the saved state, or could not."""
        save = self.driver.machine.saves.under_way
        assert save is not None
        directory = "" if error else f"/run/state/step-{save.version:08d}"
        self.driver.feed(
            SaveFinished(number=save.number, version=save.version, directory=directory, error=error)
        )

    # ---- the outside ----

    def do_call(
        self, call: str, *, ticket: int = 1, within: float | None = None, directory: str = ""
    ) -> None:
        """A control client calls."""
        event = ControlAsked(
            ticket=ticket, call=ControlCall(call), within_s=within, directory=directory
        )
        self.driver.feed(event)

    def do_signal(self, *, again: bool = False, within: float | None = None) -> None:
        """A stop signal arrives."""
        self.driver.feed(StopAsked(again=again, within_s=within))

    def do_disk(self, *, error: str, code: int = ExitCode.NO_MEMORY) -> None:
        """An effect fails."""
        self.driver.feed(EffectFailed(error=error, code=ExitCode(code)))

    def do_status(self) -> None:
        """Shows the phase, the message and the members that are not ready."""
        status = self.driver.status
        self._lines.append(
            f"{status.phase}, step {status.version}: {status.message or 'no message'}"
        )
        for member in status.members:
            if member.state not in (MemberState.READY, MemberState.JOINING):
                self._lines.append(
                    f"{member.member} is {member.state}: {member.why}; {member.next}"
                )


def _pair(word: str) -> tuple[str, str, str]:
    key, sign, value = word.partition("=")
    return (key, sign, value) if sign else ("", "", "")


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


def _pairs(text: str) -> Iterator[tuple[str, int]]:
    for pair in text.split():
        name, _, pid = pair.partition(":")
        yield name, int(pid)


def _shown(effect: Effect) -> Iterator[str]:
    match effect:
        case LogLine(text=text, warning=warning):
            yield f"{'warning' if warning else 'log'}: {text}"
        case NoteEnd(code=code, keep_memory=keep):
            yield f"note the end: code {int(code)}{', memory is kept' if keep else ''}"
        case Reply(ticket=ticket, reply=pb.ControlReply(message=message)):
            yield f"reply {ticket}: {message}"
        case Reply(ticket=ticket, reply=pb.SnapshotReply(directory=directory)):
            yield f"reply {ticket}: {directory}"
        case Reply(ticket=ticket, reply=pb.WeightsReply(version=version, files=files)):
            yield f"reply {ticket}: weights of v{version} in {', '.join(f.name for f in files)}"
        case JournalTokens():
            return
        case _:
            line = describe(effect)
            if line is not None and line != "beat":
                yield line


def _grouped(lines: list[str]) -> Iterator[str]:
    """Yields lines; one line for the same message to several members in a row."""
    for is_message, group in groupby(lines, key=lambda line: line.partition(" <- ")[2]):
        block = list(group)
        if is_message and len(block) > 1:
            names = ", ".join(line.partition(" <- ")[0] for line in block)
            yield f"{names} <- {is_message}"
        else:
            yield from block
