"""The barrier between two epochs: drain, restore if needed, begin.

A barrier starts when every member is here and every lost process is dead. When it ends, all members
are at one committed version, and no work of an older epoch runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.daemons.kit.events import LogLine
from penstock.daemons.kit.messages import record_message
from penstock.daemons.scheduler.machine.activities.activity import Activity, send_all
from penstock.daemons.scheduler.machine.events import Effect, FindSaved, SavedFound, Send
from penstock.daemons.scheduler.machine.membership import Membership
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.node_loss import Holdings, Refill
from penstock.daemons.scheduler.machine.requests import early_end, is_finished
from penstock.daemons.scheduler.machine.rules import Role, Rules, RunPhase
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.numerics import differences
from penstock.shm.control import CommitRecord


class Barrier(Activity):
    """Drain -> Restore (sometimes) -> Begin, as ``docs/INTERNALS.md`` numbers them.

    ``finished_before``: memory is empty, and the newest saved state is the last step, evaluated if
    due. So no restore is needed.
    """

    title = "restoring"

    def __init__(
        self,
        rules: Rules,
        mirror: JournalMirror,
        members: Membership,
        *,
        cause: str = "",
        saving: int = 0,
    ) -> None:
        """Prepares a barrier. ``cause``: name of the failure in logs. ``saving``: number of the
        save under way, 0 for none.
        """
        super().__init__(rules, mirror)
        self._cause = cause
        self.phase = RunPhase.DRAINING
        self.finished_before = False
        self.failure = ""
        """Error that ends the run; empty for none."""
        self._saving = saving
        self._damaged: dict[str, str] = {}
        """Damage of the saved state under restore, by the memoryd that found it."""
        self._reason = ""
        """Reason of the restore from a saved state."""
        self._members = members
        self._holdings = Holdings()
        """Content of memory and replicas, as members drain."""
        self._refills: tuple[Refill, ...] = ()
        """Memory under refill from partners; empty before and after."""
        self._bereft: frozenset[str] = frozenset()
        """memoryds without the gradients of the committed version."""
        self._unfilled: list[str] = []
        """memoryds that could not read a replica."""
        self._restoration: CommitRecord | None = None
        """Record of the restore from a saved state or the initial weights, if one started."""
        self._daemons = (*rules.memoryds, *rules.optimizerds, *rules.mirrords)

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Members that fill memory, or settle a replica. All other stages have a deadline."""
        return tuple(sorted(self.waiting)) if self.phase is RunPhase.RESTORING else ()

    def start(self, now_s: float) -> list[Effect]:
        """Starts an epoch and drains all members but nodes, which have no work to drop."""
        journaled = self.mirror.begin_epoch(self._members.epochs_seen(), self._members.pids())
        self.waiting = {*self._daemons, *self.rules.workers}
        self.deadline_s = now_s + self.rules.deadlines.drain_s
        epoch = self.mirror.epoch
        drain = pb.SchedulerMessage(
            drain=pb.Drain(epoch=epoch, cause=self._cause, saving=self._saving)
        )
        drains = send_all((*self._daemons, *self.rules.workers), drain)
        return [LogLine(text=f"membership {self.mirror.epoch}: draining"), journaled, *drains]

    def _on_drained(self, member: str, body: pb.Drained, now_s: float) -> list[Effect]:
        if self.phase is not RunPhase.DRAINING:
            return []
        if self._members.role_of(member) is Role.MEMORYD:
            self._holdings.memory[member] = body.memory
        if self._members.role_of(member) is Role.MIRRORD:
            self._holdings.replicas[member] = body.replica
        return self._fill_or_begin(now_s) if self.answered(member) else []

    def _fill_or_begin(self, now_s: float) -> list[Effect]:
        record, steps = self.mirror.record, self.rules.config.train.steps
        self._holdings.forgetful = self._members.newcomers(self.rules.optimizerds)
        self._holdings.tokens = self.mirror.tokens
        unfit = self._holdings.unfit(self.rules, record, self.mirror.generations)
        self._bereft = self._holdings.bereft(record)
        if not unfit:
            assert record is not None, "without a committed version no memory is fit"
            tokens = self._holdings.recognisable(record)
            return [*self.mirror.recognised(record, tokens), *self._begin(now_s)]
        if self.mirror.saved is None or self.mirror.saved.version < steps:
            self._refills = self._holdings.refills(self.rules, record, unfit)
        if self._refills:
            return self._present()
        return self._restore(next(iter(unfit.values())))

    # ---- from partners ----

    def _present(self) -> list[Effect]:
        """Orders partners to apply the last commit to their replicas, which are read afterwards."""
        assert self.mirror.record is not None, "replicas are of what was committed"
        self.phase, self.deadline_s = RunPhase.RESTORING, None
        self.waiting = {refill.mirrord for refill in self._refills}
        warnings = [
            LogLine(
                text=f"{refill.memoryd} is filled from the replica of {refill.mirrord} at step"
                f" {self.mirror.version}, so no step is lost: {refill.reason}",
                warning=True,
            )
            for refill in self._refills
        ]
        settle = pb.Settle(
            epoch=self.mirror.epoch,
            version=self.mirror.version,
            record=record_message(self.mirror.record),
        )
        return [*warnings, *send_all(sorted(self.waiting), pb.SchedulerMessage(settle=settle))]

    def _on_settled(self, member: str, body: pb.Settled, now_s: float) -> list[Effect]:
        presenting = self.phase is RunPhase.RESTORING and self._refills
        if not presenting or body.version != self.mirror.version or not self.answered(member):
            return []
        assert self.mirror.record is not None, "replicas are of what was committed"
        self.waiting = {refill.memoryd for refill in self._refills}
        # Journaled first: from now on, memory of an older generation is never accepted.
        tokens = self._holdings.recognisable(self.mirror.record)
        effects: list[Effect] = [*self.mirror.recognised(self.mirror.record, tokens)]
        effects.append(self.mirror.replaced(self.waiting))
        for refill in self._refills:
            restore = pb.Restore(
                epoch=self.mirror.epoch,
                incarnation=self.mirror.record.incarnation,
                version=self.mirror.version,
                partner=self._members.address(refill.mirrord),
                record=record_message(self.mirror.record),
                generation=self.mirror.generations[refill.memoryd],
            )
            message = pb.SchedulerMessage(restore=restore)
            effects.append(Send(member=refill.memoryd, message=message))
        return effects

    def _refilled(self, member: str, body: pb.Restored, now_s: float) -> list[Effect]:
        assert self.mirror.record is not None, "replicas are of what was committed"
        if body.incarnation != self.mirror.record.incarnation:
            self._unfilled.append(member)
        if not self.answered(member):
            return []
        self._bereft |= {refill.memoryd for refill in self._refills}
        self._refills = ()
        if self._unfilled:
            return self._restore(f"no replica could be read by {', '.join(self._unfilled)}")
        return self._begin(now_s)

    # ---- from a saved state ----

    def _restore(self, reason: str) -> list[Effect]:
        saved, steps = self.mirror.saved, self.rules.config.train.steps
        if is_finished(self.rules, self.mirror):
            self.finished_before = self.done = True
            step = self.mirror.saved_version
            ends = f"train.steps is {steps}"
            if self.rules.config.train.epochs is not None:
                ends = f"train.epochs ends at step {steps}"
            ends = early_end(self.rules, self.mirror) or ends
            text = f"nothing to do: saved at step {step}, {ends}"
            return [LogLine(text=text)]
        self.phase, self._reason, self._damaged = RunPhase.RESTORING, reason, {}
        self.waiting, self.deadline_s = set(self.rules.memoryds), None
        self._bereft = frozenset()  # no gradients led there
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
            LogLine(text=f"restoring from {source}: {reason}"),
            *self._lost(source, reason),
            *send_all(self.rules.memoryds, message),
        ]

    def _lost(self, source: str, reason: str) -> list[Effect]:
        """Returns a warning about committed steps that were lost with the memory, if any."""
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
        return [LogLine(text=text, warning=True)]

    def _on_restored(self, member: str, body: pb.Restored, now_s: float) -> list[Effect]:
        if self._refills:
            return self._refilled(member, body, now_s)
        record = self._restoration
        if record is None or body.incarnation != record.incarnation:
            return []
        if body.damaged:
            self._damaged[member] = body.damaged
        if not self.answered(member):
            return []
        if self._damaged:
            return self._find_older()
        tokens = self.mirror.recognised(record, self._holdings.recognisable(record))
        return [*tokens, self.mirror.restored(record), *self._begin(now_s)]

    def _find_older(self) -> list[Effect]:
        """Requests an older saved state: this one is damaged, and no memoryd wrote its memory."""
        assert self.mirror.saved is not None, "initial weights are no saved state"
        name, damage = sorted(self._damaged.items())[0]
        state = self.mirror.saved.directory
        text = f"{damage} ({name}): {state} is left out, an older saved state is searched"
        return [LogLine(text=text, warning=True), FindSaved(below=self.mirror.saved.version)]

    def found(self, event: SavedFound) -> list[Effect]:
        """Restores the older saved state that the disk thread found, or ends the run without
        one.
        """
        if event.saved is None:
            self.failure, self.done = "; ".join([*self._damaged.values(), event.error]), True
            return []
        self.mirror.saved = event.saved
        return self._restore(self._reason)

    def _begin(self, now_s: float) -> list[Effect]:
        changed = self._other_devices()
        if changed and self.rules.config.run.strict:
            self.failure = f"run.strict: {changed}; restore them, or start without --strict"
            self.done = True
            return []
        self.phase = RunPhase.BEGINNING
        self.waiting = set(self._daemons)
        self.deadline_s = now_s + self.rules.deadlines.begin_s
        step = self.mirror.version + 1
        text = f"{changed}; layers may round otherwise from step {step} on"
        warnings = [LogLine(text=text, warning=True)] if changed else []
        return [*warnings, *self.mirror.follow(self._members.facts), *self._begins(self._daemons)]

    def _other_devices(self) -> str:
        """Returns in words the devices that differ from the devices of the newest recipe in the
        journal. Software of the preparing machine is left out: preparation compared it already.
        """
        newest, recipe = self.mirror.numerics, self.rules.numerics
        if newest is None or recipe is None:
            return ""
        compared = recipe.software.items()
        words = []
        for name, facts in self._members.facts.items():
            news = {key: value for key, value in facts.items() if (key, value) not in compared}
            changed = differences(newest.devices.get(name, {}), news)
            words += [f"{name}: {', '.join(changed)}"] if changed else []
        return f"devices differ from the last start: {'; '.join(words)}" if words else ""

    def _on_ready(self, member: str, body: pb.Ready, now_s: float) -> list[Effect]:
        if self.phase is not RunPhase.BEGINNING or not self.answered(member):
            return []
        if member in self.rules.workers:
            self.done = True
            self._members.take_part()
            news = pb.SchedulerMessage(begin=self._begin_message())
            return [  # nodes owe no answer: they learn that the run goes on
                *send_all(self.rules.nodes, news),
                LogLine(
                    text=f"membership {self.mirror.epoch} begins at version {self.mirror.version}"
                ),
            ]
        # The commit is applied everywhere: only now may workers read weights.
        self.waiting = set(self.rules.workers)
        self.deadline_s = now_s + self.rules.deadlines.begin_s
        return self._begins(self.rules.workers)

    def _begins(self, members: Iterable[str]) -> list[Effect]:
        """Returns Begins with each member's own peers, and the plan as a digest. With all addresses
        and the plan, Begins would grow with the square of the number of members.
        """
        begins = {name: self._begin_message(self._members.endpoints(name)) for name in members}
        return [
            Send(member=name, message=pb.SchedulerMessage(begin=begin))
            for name, begin in begins.items()
        ]

    def _begin_message(self, endpoints: Iterable[pb.Endpoint] = ()) -> pb.Begin:
        assert self.mirror.record is not None, "an epoch begins with what is committed"
        return pb.Begin(
            epoch=self.mirror.epoch,
            record=record_message(self.mirror.record),
            endpoints=endpoints,
            plan_digest=self.rules.plan_digest,
            numerics_digest="" if self.rules.numerics is None else self.rules.numerics.digest,
            next_attempt=self.mirror.next_attempt,
            next_evaluation=self.mirror.next_evaluation,
            bereft=sorted(self._bereft),
            strange=self._holdings.strange(self.mirror.record),
        )

    answers = {  # noqa: RUF012  # the base class says ClassVar
        "drained": _on_drained,
        "settled": _on_settled,
        "restored": _on_restored,
        "ready": _on_ready,
    }
