"""Faults that are mistakes of who operates a run: with its journal, and with its scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.simulation.cluster import Cluster
from tests.simulation.rows import INTRUDER

AfterDecisions = Callable[[int, Callable[[], None]], None]


class Mistakes:
    """``effective`` counts a fault of a kind; ``after_decisions`` does something as soon as so many
    more attempts are decided.
    """

    def __init__(
        self, cluster: Cluster, effective: Callable[[str], None], after_decisions: AfterDecisions
    ) -> None:
        self._cluster = cluster
        self._effective = effective
        self._after_decisions = after_decisions

    def second_scheduler(self, dice: random.Random) -> None:
        """Another schedulerd of the run is started: it must not get at the journal."""
        cluster = self._cluster
        index = dice.randrange(len(cluster.machines))
        cluster.spawn(index, INTRUDER, cluster.run_beside, delay_s=1e-3)
        cluster.history.delays += 1

    def replace_the_journal(self, dice: random.Random) -> None:
        """A copy is put in its place while a scheduler lives. That one must notice; if it does not
        it dies a few decisions later, which are then not in the journal.
        """
        cluster = self._cluster
        scheduler = cluster.scheduler_process
        if scheduler is None or not scheduler.alive:
            return
        cluster.disk.replace(cluster.run.path / "journal.sqlite")

        def strike() -> None:
            if scheduler.alive:
                self._effective("replace the journal")
                scheduler.kill()

        self._after_decisions(dice.randint(1, 3), strike)


MISTAKES: dict[str, Callable[[Mistakes, random.Random], None]] = {
    "second scheduler": Mistakes.second_scheduler,
    "replace the journal": Mistakes.replace_the_journal,
}
