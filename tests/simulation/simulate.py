"""One seed: a configuration, a cluster, faults, and what must have come of it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from penstock.daemons.scheduler.machine.activities.activity import MAX_IN_A_ROW
from penstock.host.errors import ExitCode
from penstock.protocol.run.run_result import RunEnd
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.segment import list_segments
from tests.simulation.cluster import Cluster
from tests.simulation.configurations import SHAPES, Shape, clean, drawn_shape, prepare
from tests.simulation.faults import HUNG_PATIENCE_S, PATIENCE_S, Injector
from tests.simulation.kernel import BEGIN_S, Kernel
from tests.simulation.many import FOLDER
from tests.simulation.plans import Fault, draw
from tests.simulation.rare import GAVE_UP
from tests.simulation.results import GOLDEN, Result
from tests.simulation.simulated import divide_arrays
from tests.simulation.vouched import Key

LONGEST_S = 8000.0
CALM_S = 1.0
"""So long nothing has gone wrong before the end of a run that is calm."""
LEAVES_S = 3.0
"""In which all leave: it takes 0.6 s at most."""


@dataclass
class Outcome:
    """What came of a seed."""

    seed: int
    shape: str
    violations: list[str] = field(default_factory=list)
    effective: Counter[str] = field(default_factory=Counter)
    rare: Counter[str] = field(default_factory=Counter)
    delays: int = 0
    events: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    switches: int = 0
    plan: tuple[Fault, ...] = ()
    metrics: str = ""
    rows: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    """Rows of the journal at the end of the run, by table; empty after a violation."""
    result: Result | None = None

    @property
    def digest(self) -> str:
        """A checksum of all that happened, in order."""
        text = json.dumps([self.events, self.switches, self.metrics])
        return hashlib.sha256(text.encode()).hexdigest()


class Laboratory:
    """Prepared run directories, one for each shape, in a folder of their own. ``undisturbed``: what
    shapes are known to leave.
    """

    def __init__(self, undisturbed: Mapping[str, Result] | None = None) -> None:
        logging.disable(logging.CRITICAL)
        prefix = f"{FOLDER}{os.getpid()}-"
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm", prefix=prefix)
        self.base = Path(self._folder.name)
        self._runs: dict[str, RunDirectory] = {}
        self._undisturbed = dict(undisturbed or {})
        self.batches: dict[Any, Any] = {}

    def run_of(self, shape: Shape) -> RunDirectory:
        """Returns the prepared run of a shape."""
        if shape.name not in self._runs:
            self._runs[shape.name] = prepare(shape, self.base / shape.name)
        return self._runs[shape.name]

    def undisturbed(self, shape: Shape) -> Result:
        """Returns what the run of a shape leaves that nobody disturbs."""
        if shape.name not in self._undisturbed:
            outcome = simulate(self, shape, 0, ())
            assert not outcome.violations, outcome.violations
            assert outcome.result is not None
            assert outcome.result.digest == _golden().get(shape.name, outcome.result.digest), (
                f"{shape.name}, undisturbed: other states or metrics than golden.json has"
            )
            self._undisturbed[shape.name] = outcome.result
        return self._undisturbed[shape.name]

    def known(self, shape: Shape) -> Mapping[Key, int]:
        """Returns what words vouched for in the undisturbed run of a shape, if it has been run."""
        result = self._undisturbed.get(shape.name)
        return {} if result is None else result.vouched

    def close(self) -> None:
        """Remove the folder; the process logs again."""
        self._folder.cleanup()
        logging.disable(logging.NOTSET)


@cache
def _golden() -> dict[str, str]:
    return dict(json.loads(GOLDEN.read_text(encoding="utf-8")))


def run_seed(laboratory: Laboratory, seed: int, kinds: tuple[str, ...] = ()) -> Outcome:
    """Run a seed and compare what it leaves with what its shape leaves undisturbed."""
    shape = drawn_shape(seed)
    plan = draw(seed, several_nodes=shape.nodes > 1, partners=shape.partners, kinds=kinds)
    return run_plan(laboratory, shape, seed, plan)


def run_plan(laboratory: Laboratory, shape: Shape, seed: int, plan: Sequence[Fault]) -> Outcome:
    """Run a shape with these faults, and compare."""
    expected = laboratory.undisturbed(shape)
    outcome = simulate(laboratory, shape, seed, tuple(plan))
    if not outcome.violations and outcome.result is not None:
        outcome.violations += outcome.result.differences(expected)
    return outcome


def simulate(laboratory: Laboratory, shape: Shape, seed: int, plan: tuple[Fault, ...]) -> Outcome:
    """Run a shape with faults to its end."""
    run = laboratory.run_of(shape)
    clean(run.path)
    begun_s = time.process_time()
    kernel = Kernel(seed)
    divide_arrays(into_ranges=not shape.partners)
    cluster = Cluster(kernel, shape, run, laboratory.batches, laboratory.known(shape))
    cluster.history.undisturbed = not plan
    injector = Injector(cluster, plan)
    outcome = Outcome(seed=seed, shape=shape.name, plan=plan)
    try:
        cluster.start()
        injector.start()
        _to_the_end(kernel, cluster, injector)
        if not kernel.violations:
            outcome.result = Result.of(run.path, cluster.vouched.seen, keeps_bits=shape.keeps_bits)
            outcome.metrics = (run.path / "metrics.jsonl").read_text()  # times, too
            outcome.rows = cluster.disk.rows(run.path / "journal.sqlite")
            _nothing_left(kernel, run)
            _was_soon_over(kernel, cluster, injector)
            history, metrics = cluster.history, run.path / "metrics.jsonl"
            was_full = bool(history.effective["full disk"])
            history.complain(history.numbers.differences(metrics, was_full=was_full))
    finally:
        injector.settle()
        outcome.violations = list(kernel.violations)
        outcome.events = list(kernel.events)
        outcome.switches = kernel.switches
        outcome.virtual_s = kernel.now - BEGIN_S
        outcome.effective = cluster.history.effective
        outcome.rare = cluster.history.rare
        outcome.delays = cluster.history.delays
        kernel.close()
        cluster.disk.unmount()
        cluster.vouched.close()
        cluster.reclaim()
        outcome.cpu_s = time.process_time() - begun_s
    return outcome


def _to_the_end(kernel: Kernel, cluster: Cluster, injector: Injector) -> None:
    """Until the run is done: what ended for a reason that may be is started again."""
    while not kernel.violations:

        def over() -> bool:
            hung = any(process.hung for process in cluster.living)
            patience_s = HUNG_PATIENCE_S if hung else PATIENCE_S
            since_s = max(injector.last_s, cluster.history.decided_s)
            quiet = injector.done and kernel.now - since_s > patience_s
            return cluster.ended or quiet or kernel.now > BEGIN_S + LONGEST_S

        kernel.run(over, BEGIN_S + 2 * LONGEST_S)
        if kernel.violations:
            return
        if not cluster.ended:
            kernel.violations.append(f"the run did not end: {cluster.state()}")
            return
        codes = set(cluster.codes.values())
        if codes == {0}:
            if not cluster.complete():
                kernel.violations.append("the run ended as a finished one, and is not")
            return
        if cluster.hangs_in_a_row >= MAX_IN_A_ROW:
            cluster.excused.add(ExitCode.LOST_MEMBERS)
        end = RunEnd.read(cluster.run.path)
        if end is not None and cluster.disk.was_replaced and "replaced while the run" in end.reason:
            cluster.history.effective["replace the journal"] += 1
            cluster.disk.was_replaced = False
            cluster.excused.add(end.code)
        if not codes <= {0, *cluster.excused, *_STOPPED}:
            kernel.violations.append(f"the run ended with exit codes {sorted(codes)}")
            return
        kernel.note("the same command again", str(sorted(codes)))
        cluster.history.rare[GAVE_UP] += ExitCode.LOST_MEMBERS in codes
        cluster.start_again()


_STOPPED = (130, 5)


def _was_soon_over(kernel: Kernel, cluster: Cluster, injector: Injector) -> None:
    """Where nothing was wrong when the run's end was noted, nor was since, all leave at once."""
    history, took_s = cluster.history, kernel.now - cluster.history.noted_s
    away = injector.under_way > 0  # or somebody is, for a while, who does not hear it
    calm = history.calm and not away and history.noted_s - injector.last_s > CALM_S
    half_open = any(fault.kind == "half-open stream" for fault in injector.plan)
    if calm and not half_open and took_s > LEAVES_S:
        kernel.violations.append(f"the run took {took_s:.1f} s to end, and nothing was wrong")


def _nothing_left(kernel: Kernel, run: RunDirectory) -> None:
    left = [name for name in list_segments() if run.run_id in name]
    if left:
        kernel.violations.append(f"memory was left: {left}")
    temporary = [path.name for path in (run.path / "state").glob(".tmp*")]
    if temporary:
        kernel.violations.append(f"temporary states were left: {temporary}")


__all__ = ["SHAPES", "Laboratory", "Outcome", "run_plan", "run_seed", "simulate"]
