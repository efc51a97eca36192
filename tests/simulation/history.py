"""What happened in a simulated cluster, and whether it may happen: a small model of its own.

The model knows versions, attempts and epochs and nothing of how daemons work. It hears every
decision that was journaled, every word that was stored, and every message of the scheduler's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.simulation.kernel import Kernel, Process
from tests.simulation.rare import RARE, Death


class History:
    """Hears what happens; :attr:`Kernel.violations` gets what must not."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.rare: Counter[str] = Counter()
        self.effective: Counter[str] = Counter()
        self.delays = 0
        self.num_decided = 0
        self.on_decision: Callable[[], None] = lambda: None
        self.at_restore: list[Callable[[], None]] = []
        self.cluster: Any = None
        kernel.died = self.died
        self._samples = 0
        self._maybe: tuple[str, Any] | None = None
        self._journaled = 0
        self._attempts: set[int] = set()
        self._incarnations: set[int] = set()
        self.lost_in_epoch: int | None = None
        self.epoch = 0

    def violation(self, text: str) -> None:
        """Something happened that must not."""
        self._kernel.violations.append(text)

    def died(self, process: Process) -> None:
        """A process is dead: look which rare states that was."""
        if process.code is not None and process.code >= 0:
            return
        cluster = self.cluster
        machine = cluster.scheduler
        missing = 0 if machine is None else len(machine.members.missing)
        death = Death(
            kind=process.kind,
            point=process.last_point,
            phase=_phase(machine),
            others=missing,
            nodes=len(cluster.machines),
        )
        for name, matches in RARE.items():
            if matches(death):
                self.rare[name] += 1

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
        else:
            self._decided(effect.epoch, effect.record, effect.position)

    def loaded(self, facts: Any) -> None:
        """A scheduler has read the journal: it must hold what was durable."""
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
        version = 0 if facts.record is None else facts.record.version
        if version != self._journaled or facts.epoch != self.epoch:
            self.violation(
                f"the journal is at version {version} of epoch {facts.epoch}, durable was"
                f" {self._journaled} of {self.epoch}"
            )

    def _epoch_began(self, epoch: int) -> None:
        """The scheduler journaled an epoch."""
        if epoch <= self.epoch:
            self.violation(f"epoch {epoch} was journaled after epoch {self.epoch}")
        self._kernel.note("epoch", str(epoch))
        self.epoch = epoch

    def _decided(self, epoch: int, record: Any, position: Any) -> None:
        """The scheduler journaled a decision."""
        version, attempt, name = record.version, record.attempt, record.decision.name
        self._kernel.note("decided", name, f"attempt {attempt}", f"version {version}")
        if epoch != self.epoch:
            self.violation(f"a decision of epoch {epoch} in epoch {self.epoch}")
        if name == "RESTORE":
            if version < self._journaled and self.lost_in_epoch is None:
                self.violation(f"restored version {version}, {self._journaled} was committed")
            if record.incarnation in self._incarnations:
                self.violation(f"incarnation {record.incarnation} is used again")
            self._incarnations.add(record.incarnation)
            if self.lost_in_epoch is not None and self.lost_in_epoch < epoch:
                self.lost_in_epoch = None  # a loss since this epoch began needs another restore
        else:
            if attempt in self._attempts:
                self.violation(f"attempt {attempt} was decided twice")
            self._attempts.add(attempt)
            expected = self._journaled + (name != "SKIP")
            if version != expected:
                self.violation(f"{name} leads to version {version} from {self._journaled}")
            global_batch = self.cluster.run.config.train.global_batch
            if position.data_position != self._samples + global_batch:
                self.violation(
                    f"attempt {attempt} ends at sample {position.data_position}, the one before at"
                    f" {self._samples}"
                )
        self._journaled, self._samples = version, position.data_position
        self.num_decided += 1
        self.on_decision()

    def stored(
        self, process: Process, name: str, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """A word of a control segment was stored."""
        if name == "clear_history":
            begun, self.at_restore = self.at_restore, []
            for action in begun:
                action()
        if name == "set_epoch" and args[0] > self.epoch:
            self.violation(f"{process.name} enters epoch {args[0]}, journaled is {self.epoch}")
        if name == "set_committed":
            version = args[0]
            if version > self._journaled:
                self.violation(
                    f"{process.name} flips to version {version}, the journal is at"
                    f" {self._journaled}"
                )

    @property
    def committed(self) -> int:
        """The last journaled version."""
        return self._journaled


def _phase(machine: Any) -> str:
    """Returns what the scheduler is at, as its status says it."""
    if machine is None:
        return "gathering"
    return str(machine.phase.value)
