"""What happened in a simulated cluster, and whether it may happen: a small model of its own.

The model knows versions, attempts and epochs and nothing of how daemons work. It hears every
decision that was journaled, every word that was stored, and every message of the scheduler's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from penstock.daemons.mirror.machine.machine import BEGINS_ANEW
from penstock.daemons.scheduler.machine.history import BreakCause
from penstock.daemons.scheduler.machine.requests import BARRIER_S
from penstock.daemons.scheduler.machine.rules import RunPhase
from penstock.host.errors import ExitCode
from penstock.protocol.run.run_result import RunEnd
from penstock.shm.inventory import inventory
from tests.simulation.announced import Announcements
from tests.simulation.kernel import Kernel, Process
from tests.simulation.partners import Partners
from tests.simulation.promises import Numbers
from tests.simulation.quiet import ANY_TIME, writes
from tests.simulation.rare import CAME_LATE, LOSSES, RARE, Death, Loss
from tests.simulation.vouched import Vouched

HEARD_S = 0.5
"""In which a scheduler looks at the time again."""
CALM_S = 0.5
"""So long nobody has died, and nobody was started, before the end of a run that is calm."""
UNDISTURBED_S = 0.9
"""In which an attempt is decided where nobody disturbs: who asks again after a
silence, or looks now and then, takes longer.
"""
SAVERS = ("optimizerd", "memoryd")
SAVING = ("saving", "settling")
"""What a scheduler is at, and who does it, when a state is saved."""
AFTER_A_STOP = 2
"""The attempt under way when a stop comes, and one that the scheduler begins before it hears it."""


class History:
    """Hears what happens; :attr:`Kernel.violations` gets what must not."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.rare: Counter[str] = Counter()
        self.effective: Counter[str] = Counter()
        self.delays = 0
        self.num_decided = 0
        self.on_decision: Callable[[], None] = lambda: None
        self.at_cut: list[Callable[[], None]] = []
        self.at_decision: list[Callable[[], None]] = []
        self.at_save: list[Callable[[], None]] = []
        self.at_settle: list[Callable[[], None]] = []
        self.at_restore: list[Callable[[], None]] = []
        self.at_refill: list[Callable[[], None]] = []
        self.at_reseed: list[Callable[[], None]] = []
        self.at_end: list[Callable[[], None]] = []
        self.at_fence: list[Callable[[str, int], None]] = []
        self._has_journal: Process | None = None
        self._since_stop: dict[Process, int] = {}
        """Attempts decided since a stop was heard that is not forgotten while this process lives.
        """
        self.cluster: Any = None
        kernel.died = self.died
        self._samples = 0
        self._maybe: tuple[str, Any] | None = None
        self._journaled = 0
        self._attempts: set[int] = set()
        self._incarnations: set[int] = set()
        self.epoch = 0
        self.numbers: Numbers
        self._hopeless: Process | None = None
        self.announced: Announcements
        self.vouched: Vouched | None = None
        """None where steps are taken back by arithmetic."""
        self.partners: Partners
        """Set by the cluster, as are the numbers."""
        self.undisturbed = False
        self.deaths_alone = False
        """Whether nothing goes wrong but that processes and machines die."""
        self.stalls = 0
        """What goes on that keeps processes from getting on, without killing them."""
        self.stalled_s = float("-inf")
        """When such a thing ended for the last time."""
        self._began_s = 0.0
        self._generations: dict[str, int] = {}
        self._fills = False  # lost memory is being filled from partners
        self._saved = 0
        self._recipe: Any = None
        """The newest durable row of the numerics recipe."""
        self.decided_s = self.noted_s = 0.0
        self.calm = False
        """Whether nothing was wrong when the end was noted, and nobody has been killed since."""

    def violation(self, text: str) -> None:
        """Something happened that must not."""
        self._kernel.violations.append(text)

    def broke(self, cause: BreakCause, reason: str) -> None:
        """The scheduler breaks an epoch. Who is said to hang where nobody stood still since the
        last decision is wronged; or waits for what somebody ought to know is lost. Among deaths
        alone nobody says that it cannot go on.
        """
        if self.deaths_alone and cause is BreakCause.FAILED:
            self.violation(f"{cause.value} among deaths alone: {reason}")
        if cause is not BreakCause.HUNG or self.stalls:
            return
        hung = [p.name for p in self.cluster.living if p.hung and p.kind in SAVERS]
        if hung and reason.startswith(SAVING) and not any(name in reason for name in hung):
            self.violation(f"{', '.join(hung)} hang, and somebody else is blamed: {reason}")
        stands_still = any(p.hung or p.stopped for p in self.cluster.living)
        if not stands_still and self.stalled_s < max(self.decided_s, self._began_s):
            self.violation(f"{cause.value} where nobody hangs: {reason}")

    def gave_up(self, name: str, reason: str) -> None:
        """A process ends by itself, with an error; a replica of an old machine is begun anew."""
        if self.deaths_alone and reason != BEGINS_ANEW:
            self.violation(f"{name} gives up among deaths alone: {reason}")

    def died(self, process: Process) -> None:
        """A process is dead: look which rare states that was."""
        self.cluster.changed_s = self._kernel.now
        if process.hung or process.stopped:
            self.stalled_s = self._kernel.now
        self._look_for_end()
        if process.code is not None and process.code >= 0:
            return
        self.calm = False
        cluster, partners = self.cluster, self.partners
        node = cluster.machines.index(process.machine)
        self._look()
        machine = cluster.scheduler
        missing = 0 if machine is None else len(machine.members.missing)
        death = Death(
            kind=process.kind,
            point=process.last_point,
            phase=_phase(machine),
            others=missing,
            nodes=len(cluster.machines),
            reseeds=partners.num_reseeded > 0,
            reseeds_itself=bool(partners.kept_by(node) - partners.whole),
            fills=self._fills,
        )
        for name, matches in RARE.items():
            if matches(death):
                self.rare[name] += 1

    def cut(self) -> None:
        """A sweep was cut short."""
        self.effective["cut a sweep"] += 1
        _begin(self.at_cut)

    def begins_to_write(self, row: str, effect: Any) -> None:
        """A row is about to be written: if its scheduler dies now, it may count or not. So where
        the disk refuses it: SQLite may have had all of it in its log when the end failed. The
        scheduler then ends, nobody having heard of the row.
        """
        self._maybe = (row, effect)

    def wrote(self) -> None:
        """The row is durable."""
        assert self._maybe is not None
        (row, effect), self._maybe = self._maybe, None
        if row == "begin_epoch":
            self._epoch_began(effect.epoch)
        elif row == "replace":
            self._replaced(effect)
        elif row == "evaluate":
            self.numbers.evaluated(effect.evaluation, effect.metrics_json)
        elif row == "follow":
            self._recipe = effect
        else:
            numbers, line = self.numbers, effect.metrics_json
            self.complain(numbers.decided(effect.record, effect.position, line))
            self.complain(self.announced.decided(effect.record, effect.position, line))
            self._look_at_skips()
            self._decided(effect.epoch, effect.record, effect.position)

    def fences(self, member: str, pid: int) -> None:
        """The scheduler has a process killed."""
        actions, self.at_fence = self.at_fence, []
        for action in actions:
            action(member, pid)

    def opened(self, process: Process) -> None:
        """A scheduler has the journal open, and believes it."""
        before = self._has_journal
        both = before is not None and before is not process and before.alive
        if both and not self.cluster.disk.was_replaced:  # or they have different files
            self.violation(f"process {process.pid} has the journal open beside a living one")
        self._has_journal = process

    def closed(self, process: Process) -> None:
        """A scheduler has closed the journal."""
        if self._has_journal is process:
            self._has_journal = None

    def loaded(self, facts: Any) -> None:
        """A scheduler has read the journal: it must hold what was durable."""
        generations = dict(facts.generations)
        if self._maybe is not None and self._maybe[0] == "replace":
            if generations.items() >= dict(self._maybe[1].generations).items():
                self.wrote()
            self._maybe = None
        if self._maybe is not None and self._maybe[0] == "evaluate":
            if facts.evaluation == self._maybe[1].evaluation:
                self.wrote()
            self._maybe = None
        if self._maybe is not None and self._maybe[0] == "follow":
            if facts.numerics == self._maybe[1]:
                self.wrote()
            self._maybe = None
        if facts.numerics != self._recipe:
            self.violation(f"the journal has {facts.numerics}, durable was {self._recipe}")
        if self._maybe is not None:
            row, effect = self._maybe
            counts = (
                facts.epoch == effect.epoch
                if row == "begin_epoch"
                else facts.position is not None
                and facts.next_attempt > effect.record.attempt
                and facts.position.data_position == effect.position.data_position
            )
            if counts and (row == "begin_epoch" or self._samples != facts.position.data_position):
                self.wrote()
            elif counts and facts.record is not None and facts.record == effect.record:
                self.wrote()
            self._maybe = None
        self.complain(self.numbers.loaded(facts))
        version = 0 if facts.record is None else facts.record.version
        if version != self._journaled or facts.epoch != self.epoch:
            self.violation(
                f"the journal is at version {version} of epoch {facts.epoch}, durable was"
                f" {self._journaled} of {self.epoch}"
            )
        if generations != self._generations:
            self.violation(
                f"the journal has generations {generations}, durable was {self._generations}"
            )

    def machine_lost(self, index: int) -> None:
        """A machine's memory is about to go."""
        self._look()
        partners = self.partners
        if partners.mirrors and partners.committed.incarnation:
            loss = Loss(
                phase=_phase(self.cluster.scheduler),
                whole=index in partners.whole,
                keeps_lost=bool(partners.kept_by(index) & partners.lost),
                fills=self._fills,
                hosts=index == 0,
            )
            for name, matches in LOSSES.items():
                if matches(loss):
                    self.rare[name] += 1
        partners.machine_lost(index, self.epoch)

    def _look(self) -> None:
        """Replicas that were whole must still be."""
        self._look_for_end()
        self.complain(self.partners.look())
        self._audit()

    def _audit(self) -> None:
        """All that words vouch for must be there."""
        if self.vouched is not None:
            self.complain(self.vouched.audit())

    def _look_for_end(self) -> None:
        """A run that has ended, with all saved, gives its memory back."""
        end = RunEnd.read(self.cluster.run.path)
        if end is not None and not end.keep_memory:
            self.partners.run_ended()

    def ends(self) -> None:
        """The scheduler has noted that the run is over."""
        self.noted_s = now_s = self._kernel.now
        still = any(process.hung or process.stopped for process in self.cluster.living)
        self.calm = not self.stalls and not still and now_s - self.cluster.changed_s > CALM_S
        _begin(self.at_end)

    def scheduler_begins(self, machine: Any) -> None:
        """A scheduler has read the journal: if the run has ended it tells members so, no more."""
        if RunEnd.read(self.cluster.run.path) is None:
            return
        self.rare[CAME_LATE] += 1
        if machine.phase not in (RunPhase.DONE, RunPhase.FAILED):
            self.violation(f"a scheduler is {machine.phase.value}, and the run has ended")

    def saves(self) -> None:
        """A save begins: optimizerds settle, or memoryds write."""
        _begin(self.at_save)

    def save_failed(self, member: str, error: str) -> None:
        """A memoryd that lives could not write its part of a saved state."""
        if ExitCode.NO_MEMORY not in self.cluster.excused:
            self.violation(f"{member} cannot save, and no disk was full: {error}")

    def settles(self) -> None:
        """optimizerds are asked to settle for a save."""
        self.saves()
        _begin(self.at_settle)

    def stop_heard(self, owner: Process) -> None:
        """The scheduler is asked to stop the run, and asked again as long as ``owner`` lives."""
        self._since_stop.setdefault(owner, 0)

    def _look_at_skips(self) -> None:
        """Something was decided: nothing is, by a scheduler that had to end the run."""
        if self._hopeless is not None and self._hopeless.alive:
            self.violation("goes on after too many attempts in a row without a step")
        self._hopeless = None
        if self.numbers.is_hopeless:
            self._hopeless = self.cluster.scheduler_process
            self.cluster.excused.add(int(ExitCode.LOST_MEMBERS))

    def _look_at_stops(self) -> None:
        """An attempt was decided: nothing begins after a stop but what waited before it."""
        for owner in [owner for owner in self._since_stop if owner.alive]:
            self._since_stop[owner] += 1
            if self._since_stop[owner] > AFTER_A_STOP:
                self.violation(f"trains on after a stop that {owner.name} has heard")

    def _look_at_deadline(self, attempt: int) -> None:
        """An attempt was decided: with a stop that must be over soon, and before which the state is
        to be saved, it should have been dropped.
        """
        scheduler = self.cluster.scheduler
        deadline = None if scheduler is None else scheduler.requests.deadline
        if deadline is None:  # or a scheduler that only opens its journal finds the row in it
            return
        late_s = self._kernel.now - (deadline.give_up_s - BARRIER_S)
        if late_s > HEARD_S:
            self.violation(f"attempt {attempt} left no time to save before a stop")

    def _look_at_pace(self) -> None:
        """An attempt was decided."""
        took_s = self._kernel.now - self.decided_s
        if self.undisturbed and self.decided_s and took_s > UNDISTURBED_S:
            self.violation(f"an attempt took {took_s:.1f} s, and nobody disturbs")

    def told(self, name: str) -> None:
        """A node's child has to be told to end: of itself it does when the scheduler says so."""
        if self.undisturbed:
            self.violation(f"{name} does not end by itself, and nobody disturbs")

    def node_ended(self, index: int) -> None:
        """A node has ended of its own accord: memory that never held a model is of no use."""
        for entry in inventory():
            cluster = self.cluster
            mine = entry.node_name.partition(".")[0] == cluster.machines[index].name
            if mine and entry.run_id == cluster.run.run_id and entry.committed is None:
                self.violation(f"{entry.node_name} has ended and leaves memory without a model")

    def complain(self, objections: Iterable[str]) -> None:
        for text in objections:
            self.violation(text)

    def _replaced(self, effect: Any) -> None:
        """Memory is going to be filled from partners."""
        for name, generation in effect.generations:
            before = self._generations.get(name, 0)
            if generation != before + 1:
                self.violation(f"generation {generation} of {name}, the one before is {before}")
            self._generations[name] = generation
        self.announced.replaced(dict(effect.generations))
        self._fills = True
        _begin(self.at_refill)

    def _epoch_began(self, epoch: int) -> None:
        """The scheduler journaled an epoch."""
        if epoch <= self.epoch:
            self.violation(f"epoch {epoch} was journaled after epoch {self.epoch}")
        if RunEnd.read(self.cluster.run.path) is not None:
            self.violation(f"epoch {epoch} begins, and the run has ended")
        self._kernel.note("epoch", str(epoch))
        self.announced.epoch_began(epoch)
        self._audit()
        self._began_s = self._kernel.now
        self.epoch = epoch
        self._fills = False
        steps = [path.name for path in (self.cluster.run.path / "state").glob("step-*")]
        self._saved = max((int(name.removeprefix("step-")) for name in steps), default=0)

    def _decided(self, epoch: int, record: Any, position: Any) -> None:
        """The scheduler journaled a decision."""
        version, attempt, name = record.version, record.attempt, record.decision.name
        self._kernel.note("decided", name, f"attempt {attempt}", f"version {version}")
        if epoch != self.epoch:
            self.violation(f"a decision of epoch {epoch} in epoch {self.epoch}")
        if name == "RESTORE":
            lossy = version < self._journaled
            if lossy and not self.partners.may_restore(self._new_optimizers()):
                self.violation(f"restored version {version}, {self._journaled} was committed")
            if version < self._saved:
                self.violation(f"restored version {version}, {self._saved} was saved")
            same_step = version == self._journaled and version > 0
            if same_step and position.data_position < self._samples:
                self.violation(
                    f"restored version {version} at sample {position.data_position}, skips led to"
                    f" {self._samples}"
                )
            if record.incarnation in self._incarnations:
                self.violation(f"incarnation {record.incarnation} is used again")
            self._incarnations.add(record.incarnation)
            self._generations.clear()
        else:
            if attempt in self._attempts:
                self.violation(f"attempt {attempt} was decided twice")
            self._attempts.add(attempt)
            if name == "SKIP" and self.vouched is not None:
                self.vouched.skipped(attempt)
            self._look_at_stops()
            self._look_at_deadline(attempt)
            digest = self.cluster.run.numerics_digest
            recipe, step = self._recipe, self._journaled + 1
            if recipe is None or recipe.digest != digest or recipe.step > step:
                self.violation(f"no row of recipe {digest} holds for step {step}")
            expected = self._journaled + (name != "SKIP")
            if version != expected:
                self.violation(f"{name} leads to version {version} from {self._journaled}")
            global_batch = self.cluster.run.config.train.global_batch
            if position.data_position != self._samples + global_batch:
                self.violation(
                    f"attempt {attempt} ends at sample {position.data_position}, the one before at"
                    f" {self._samples}"
                )
        self._fills = False
        objections = self.partners.decided(epoch, record, undisturbed=self.undisturbed)
        self.complain(objections)
        self._audit()
        self._journaled, self._samples = version, position.data_position
        if name != "RESTORE":
            self._look_at_pace()
            self.decided_s = self._kernel.now
            _begin(self.at_decision)
        self.num_decided += 1
        self.on_decision()

    def stored(
        self, process: Process, name: str, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """A word of a control segment was stored."""
        if name not in ANY_TIME:
            writes(process, f"{name}{args}")
        if self.vouched is not None:
            node = self.cluster.machines.index(process.machine)
            self.complain(self.vouched.stored(node, process.kind, name, args, named))
        if name == "set_pin" and args[1] is not None:
            self.saves()
        if name == "clear_history" and process.kind == "memoryd":
            _begin(self.at_restore)
        if name == "clear_history" and process.kind == "mirrord":
            _begin(self.at_reseed)
        if name == "set_incarnation" and process.kind == "memoryd" and not args[0]:
            self._given_up(process)
        if name == "set_epoch" and args[0] > self.epoch:
            self.violation(f"{process.name} enters epoch {args[0]}, journaled is {self.epoch}")
        if name == "set_committed":
            version = args[0]
            if version > self._journaled:
                self.violation(
                    f"{process.name} flips to version {version}, the journal is at"
                    f" {self._journaled}"
                )

    def _given_up(self, process: Process) -> None:
        """A memory is about to be filled: what was in it is void from now on."""
        node = self.cluster.machines.index(process.machine)
        begun = self.partners.committed.incarnation != 0
        if begun and not self.partners.given_up(node, self.epoch, self._new_optimizers()):
            self.violation(f"{process.name} gives up what is committed, and could keep it")

    def _new_optimizers(self) -> set[int]:
        """Returns the nodes whose optimizerds took part in no attempt that was decided."""
        old = {
            process.machine.name
            for process in self.cluster.living
            if process.kind == "optimizerd" and process.started_s < self.decided_s
        }
        return {i for i, machine in enumerate(self.cluster.machines) if machine.name not in old}

    @property
    def committed(self) -> int:
        """The last journaled version."""
        return self._journaled


def _begin(waiting: list[Callable[[], None]]) -> None:
    """What waited for this moment happens."""
    actions = list(waiting)
    waiting.clear()
    for action in actions:
        action()


def _phase(machine: Any) -> str:
    """Returns what the scheduler is at, as its status says it."""
    if machine is None:
        return "gathering"
    return str(machine.phase.value)
