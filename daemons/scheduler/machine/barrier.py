"""The barrier between two epochs: drain, restore if needed, begin.

Started when every member is there and every lost process is dead. It ends with all members at one
committed version and nothing of an older epoch running anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.daemons.kit.events import Say
from penstock.daemons.kit.messages import record_message
from penstock.daemons.scheduler.machine.activity import Activity, send_all
from penstock.daemons.scheduler.machine.events import Effect, Send
from penstock.daemons.scheduler.machine.membership import Membership
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.rules import Role, Rules, RunPhase
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.control import CommitRecord, Decision


class Barrier(Activity):
    """Drain -> Restore (sometimes) -> Begin, as ``docs/INTERNALS.md`` numbers them.

    ``finished_before``: the memory is empty and the newest saved state is already the last one, so
    there is nothing to restore it for.
    """

    title = "restoring"

    def __init__(self, rules: Rules, mirror: JournalMirror, members: Membership) -> None:
        super().__init__(rules, mirror)
        self.phase = RunPhase.DRAINING
        self.finished_before = False
        self._members = members
        self._memory: dict[str, pb.MemoryState] = {}
        self._restoration: CommitRecord | None = None
        self._daemons = (*rules.memoryds, *rules.optimizerds)

    @property
    def unfinished(self) -> tuple[str, ...]:
        """memoryds that fill their memory; all else has a deadline."""
        return tuple(sorted(self.waiting)) if self.phase is RunPhase.RESTORING else ()

    def start(self, now_s: float) -> list[Effect]:
        """Nodes take no part: they have no work to abandon."""
        journaled = self.mirror.begin_epoch(self._members.epochs_seen(), self._members.pids())
        self.waiting = {*self._daemons, *self.rules.workers}
        self.deadline_s = now_s + self.rules.deadlines.drain_s
        drain = pb.SchedulerMessage(drain=pb.Drain(epoch=self.mirror.epoch))
        drains = send_all((*self._daemons, *self.rules.workers), drain)
        return [Say(text=f"epoch {self.mirror.epoch}: draining"), journaled, *drains]

    def _on_drained(self, member: str, body: pb.Drained, now_s: float) -> list[Effect]:
        if self.phase is not RunPhase.DRAINING:
            return []
        if self._members.role_of(member) is Role.MEMORYD:
            self._memory[member] = body.memory
        if not self.answered(member):
            return []
        reason = self._why_restore()
        return self._restore(reason) if reason else self._begin(now_s)

    def _why_restore(self) -> str:
        """Returns why memory is not what the journal says; empty if it is.

        A memoryd may be one version behind: the commit was journaled and not announced to its node.
        No more, because the attempt after it starts only with everyone's Ready or on streams that
        carried the commit first.
        """
        record = self.mirror.record
        if record is None:
            return "the journal has no committed version"
        explained = {record.version}
        if record.decision is not Decision.RESTORE:
            explained.add(record.version - 1)
        for member, memory in sorted(self._memory.items()):
            if memory.incarnation == 0:
                return f"{member} has no model in memory"
            if memory.incarnation != record.incarnation:
                return f"memory of {member} is not of the journal's filling"
            if memory.committed not in explained:
                return f"{member} is at version {memory.committed}, the journal at {record.version}"
        return ""

    def _restore(self, reason: str) -> list[Effect]:
        saved, steps = self.mirror.saved, self.rules.config.train.steps
        if saved is not None and saved.version >= steps:
            self.finished_before = self.done = True
            text = f"nothing to do: saved at step {saved.version}, train.steps is {steps}"
            return [Say(text=text)]
        self.phase = RunPhase.RESTORING
        self.waiting, self.deadline_s = set(self.rules.memoryds), None
        record = self._restoration = self.mirror.restoration()
        restore = pb.Restore(
            epoch=self.mirror.epoch,
            incarnation=record.incarnation,
            source="" if saved is None else saved.directory,
            version=record.version,
        )
        source = "initial weights" if saved is None else f"saved state of step {saved.version}"
        message = pb.SchedulerMessage(restore=restore)
        return [
            Say(text=f"restoring from {source}: {reason}"),
            *self._lost(source, reason),
            *send_all(self.rules.memoryds, message),
        ]

    def _lost(self, source: str, reason: str) -> list[Effect]:
        """Committed steps that nobody saved are gone with the memory."""
        first, last = self.mirror.saved_version + 1, self.mirror.version
        if last < first:
            return []
        which = f"step {last} is" if first == last else f"steps {first} to {last} are"
        text = (
            f"{which} lost: shared memory alone had them, and {reason}. That is so after a reboot,"
            " on other machines than before, and where the epilogue of a job, or logind"
            f" (RemoveIPC), cleans /dev/shm. Training goes on from {source}; with train.save_every"
            " less is lost"
        )
        return [Say(text=text, warning=True)]

    def _on_restored(self, member: str, body: pb.Restored, now_s: float) -> list[Effect]:
        record = self._restoration
        if record is None or body.incarnation != record.incarnation or not self.answered(member):
            return []
        return [self.mirror.restored(record), *self._begin(now_s)]

    def _begin(self, now_s: float) -> list[Effect]:
        self.phase = RunPhase.BEGINNING
        self.waiting = set(self._daemons)
        self.deadline_s = now_s + self.rules.deadlines.begin_s
        return self._begins(self._daemons)

    def _on_ready(self, member: str, body: pb.Ready, now_s: float) -> list[Effect]:
        if self.phase is not RunPhase.BEGINNING or not self.answered(member):
            return []
        if member in self.rules.workers:
            self.done = True
            return [Say(text=f"epoch {self.mirror.epoch} begins at version {self.mirror.version}")]
        # The commit is applied everywhere: only now may workers read weights.
        self.waiting = set(self.rules.workers)
        self.deadline_s = now_s + self.rules.deadlines.begin_s
        return self._begins(self.rules.workers)

    def _begins(self, members: Iterable[str]) -> list[Effect]:
        """Each member hears of its own peers only, and of the plan by its digest: with all of them
        and the plan itself Begins would grow with the square of the members.
        """
        assert self.mirror.record is not None, "an epoch begins with what is committed"
        fields: dict[str, Any] = {
            "epoch": self.mirror.epoch,
            "record": record_message(self.mirror.record),
            "plan_digest": self.rules.plan_digest,
            "next_attempt": self.mirror.next_attempt,
            "next_evaluation": self.mirror.next_evaluation,
        }
        begins = {
            name: pb.Begin(endpoints=self._members.endpoints(name), **fields) for name in members
        }
        return [
            Send(member=name, message=pb.SchedulerMessage(begin=begin))
            for name, begin in begins.items()
        ]

    answers = {"drained": _on_drained, "restored": _on_restored, "ready": _on_ready}  # noqa: RUF012
