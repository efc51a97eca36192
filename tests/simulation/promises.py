"""Promises beside those about versions: numbers that name one thing, calls that are answered, lines
of metrics that are all there, restarts that are counted, saves that let attempts go on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.config.schema import Config
from penstock.daemons.node.machine.machine import NodeLimits, NodePhase
from penstock.daemons.scheduler.machine.activities.save import Saving
from penstock.daemons.scheduler.machine.requests import is_last
from penstock.host.errors import ExitCode
from tests.simulation.kernel import Kernel, Process

ANSWERED_S = 1.0
"""In which a scheduler that is about to end answers its last calls."""
_SLACK_S = 1e-6


class Numbers:
    """Attempts, evaluations and lines of metrics, as the journal and members hear of them.

    ``is_hopeless``: the run is to end, as too many attempts in a row were skipped.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.is_hopeless = False
        self.lines: list[str] = []
        """Of ``metrics.jsonl``, in the journal's order."""
        self._begun: dict[int, int] = {}
        self._evaluation = 0
        self._named = 0
        """The highest attempt that a line of an evaluation names."""
        self._skips = 0
        self._scale = 0.0

    def begins(self, epoch: int, attempt: int) -> Iterator[str]:
        """Members are told to begin an attempt: no two of different epochs have one number."""
        before = self._begun.setdefault(attempt, epoch)
        if before != epoch:
            yield f"attempt {attempt} begins in epoch {epoch}, and has begun in epoch {before}"

    def evaluated(self, evaluation: int, line: str) -> None:
        """A finished evaluation is durable."""
        self._evaluation = evaluation
        self._named = json.loads(line)["attempt"]
        self.lines.append(line)

    def decided(self, record: Any, position: Any, line: str) -> Iterator[str]:
        """A decision is durable."""
        if line:
            self.lines.append(line)
        name, scale, self._scale = record.decision.name, self._scale, position.loss_scale
        self.is_hopeless = False
        if name == "RESTORE":
            self._skips = position.skips_in_a_row
            return
        if record.attempt <= self._named:
            yield f"attempt {record.attempt} ends, and a line of an evaluation before names it"
        self._skips = self._skips + 1 if name == "SKIP" else 0
        if position.skips_in_a_row != self._skips:
            yield f"{position.skips_in_a_row} skips in a row are noted, there were {self._skips}"
        dynamic = self._config.model.dtype == "fp16"
        lowest = not dynamic or scale <= self._config.optimizer.loss_scale_min
        self.is_hopeless = lowest and self._skips > self._config.train.max_skips

    def loaded(self, facts: Any) -> Iterator[str]:
        """A scheduler has read the journal."""
        if facts.evaluation != self._evaluation:
            yield f"the journal is at evaluation {facts.evaluation}, durable was {self._evaluation}"

    def differences(self, metrics: Path, *, was_full: bool) -> Iterator[str]:
        """What ``metrics.jsonl`` lacks in the end, or has too much. ``was_full``: there was no room
        for some time, perhaps to the end.
        """
        found = metrics.read_text().splitlines()
        expected = self.lines[: len(found)] if was_full else self.lines
        if found != expected:
            yield f"metrics.jsonl has {len(found)} lines, not the journal's {len(self.lines)}"


class Calls:
    """What control clients ask one scheduler."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._open: dict[int, tuple[str, float]] = {}

    def asked(self, ticket: int, call: str) -> None:
        """A call has arrived."""
        self._open[ticket] = call, self._kernel.now

    def answered(self, ticket: int) -> None:
        """It has its answer."""
        self._open.pop(ticket, None)

    def unanswered(self, scheduler: Any) -> Iterator[str]:
        """The scheduler ends of its own accord: who was not answered? Those who wait for a save
        that is under way hear that it ends.
        """
        save = None if scheduler is None else scheduler.saves.under_way
        for ticket, (call, asked_s) in self._open.items():
            if save is not None and ticket in save.tickets:
                continue
            if self._kernel.now - asked_s > ANSWERED_S:
                yield f"a call to {call} is {self._kernel.now - asked_s:.1f} s old, and unanswered"


class Restarts:
    """One node's children, and how often they may be started again."""

    def __init__(self, kernel: Kernel, limit: int) -> None:
        self._kernel = kernel
        self._limits = NodeLimits(max_restarts=limit)
        self._version = 0
        self._deaths: Counter[str] = Counter()
        """Of each child, since an epoch began with a new version: what a budget must allow."""
        self._alone_s: dict[str, tuple[float, float]] = {}
        """When a child died soon after its start, and not because its node had it killed; and until
        when that was soon.
        """
        self._refused = self._failed = False

    def begins(self, version: int) -> None:
        """The node hears of an epoch."""
        if version > self._version:
            self._deaths.clear()
        self._version = version

    def died(self, process: Process, *, ordered: bool) -> None:
        """A child is dead."""
        now_s = self._kernel.now
        self._deaths[process.name] += 1
        self._alone_s.pop(process.name, None)
        quick = now_s - process.started_s < self._limits.quick_death_s
        if quick and not ordered and process.code != 0:
            self._alone_s[process.name] = now_s, process.started_s + self._limits.quick_death_s

    def killed(self, name: str) -> None:
        """The node has a child killed, which may be dead already, and not reaped."""
        self._alone_s.pop(name, None)

    @property
    def used_up(self) -> bool:
        """Whether a child has died more often than may be."""
        return any(count > self._limits.max_restarts for count in self._deaths.values())

    def starts(self, name: str) -> Iterator[str]:
        """A child is started, perhaps again."""
        if self._deaths[name] > self._limits.max_restarts:
            yield f"{name} starts again after {self._deaths[name]} deaths without a new version"
        died_s, quick_until_s = self._alone_s.get(name, (float("-inf"), float("-inf")))
        since_s = self._kernel.now - died_s
        noticed = (
            self._kernel.now < quick_until_s
        )  # or its node, which stood still, may see it late
        if noticed and since_s + _SLACK_S < self._limits.first_backoff_s:
            yield f"{name} died at once, and starts again {since_s:.3f} s later"

    def refused(self) -> None:
        """The scheduler does not want this node."""
        self._refused = True

    def look(self, machine: Any) -> Iterator[str]:
        """The node gives up: for whose deaths?"""
        failing = machine.phase is NodePhase.FAILING
        if failing and not self._failed and not self._refused and not self.used_up:
            if machine.code == ExitCode.LOST_MEMBERS:
                yield f"a node gives up after {dict(self._deaths)} deaths without a new version"
        self._failed = failing


def lets_go(machine: Any) -> Iterator[str]:
    """A scheduler has heard something: with a save whose version is pinned attempts go on, unless
    there are none to do, or a newer version is to be saved.
    """
    waits, requests = machine.activity, machine.requests
    if not isinstance(waits, Saving) or not waits.save.is_pinned or waits.done:
        return
    others = requests.stop_reason or requests.paused or is_last(machine.rules, machine.mirror)
    if not others and waits.save.version == machine.mirror.version:
        yield f"attempts wait for the save of step {waits.save.version}, which is pinned"
