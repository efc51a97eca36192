"""``python -m bench.papers.spipe_cluster.fit``: fits the constants of the SPipe paper's clusters.

From the runs at hand (``data/spipe_figure9_v100.csv``, ``data/spipe_figure12_v100.csv``), all of
them weighted alike, by least squares of the logarithms of predicted over measured seconds: first
what the GPUs' time depends on, then the CPU step of the systems that wait for it, then that of one
stage of SPipe, then DeepSpeed's collectives. Writes ``data/spipe_constants.json``. Takes minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from math import log

from scipy.optimize import least_squares

from bench.papers.spipe_cluster import zero3
from bench.papers.spipe_cluster.measured import Row, figure_9, figure_12
from bench.papers.spipe_cluster.systems import SYSTEMS, simulate_system
from bench.papers.spipe_cluster.testbed import CONSTANTS, Constants

START = Constants(
    efficiency=0.7,
    small_tokens=100.0,
    blocking_s=2e-3,
    peer_bandwidth=6e9,
    step_bytes=64.0,
    stage_rate=4e8,
    gather_bandwidth=7e9,
    gather_bandwidth_32=4e9,
)

_STEP = 0.05
"""Relative step of the differences that stand for derivatives."""

Residuals = Callable[[Constants], list[float]]


def pipeline_rows() -> tuple[Row, ...]:
    """Returns the runs whose GPU time was measured."""
    return tuple(
        row
        for row in (*figure_9(), *figure_12())
        if row.system in SYSTEMS and row.run is not None and row.run.gpu_s is not None
    )


def gpu_residuals(known: Constants) -> list[float]:
    """Returns the logarithms of predicted over measured GPU time."""
    found = []
    for row in pipeline_rows():
        assert row.run is not None and row.run.gpu_s is not None
        made = simulate_system(SYSTEMS[row.system], row.workload, known=known)
        found.append(log(made.offloaded_s / row.run.gpu_s))
    return found


def tail_residuals(known: Constants, *, by_stage: bool) -> list[float]:
    """Returns the logarithms of predicted over measured tails, of systems of one kind."""
    found = []
    for row in pipeline_rows():
        system = SYSTEMS[row.system]
        if system.optimizer_by_stage is by_stage:
            assert row.run is not None and row.run.tail_s is not None
            made = simulate_system(system, row.workload, known=known)
            found.append(log((made.makespan_s - made.offloaded_s) / row.run.tail_s))
    return found


def zero3_residuals(known: Constants, *, slow: bool) -> list[float]:
    """Returns the logarithms of predicted over measured iterations of DeepSpeed, with 32 GPUs or
    fewer.
    """
    return [
        log(zero3.predict(row.workload, known=known).iteration_s / row.run.iteration_s)
        for row in figure_9()
        if row.system == zero3.NAME
        and row.run is not None
        and (row.workload.num_devices >= zero3.SLOW_DEVICES) is slow
    ]


def fitted(known: Constants, names: Sequence[str], residuals: Residuals) -> Constants:
    """Returns the constants with those of ``names`` where the residuals' squares are least."""
    starts = [getattr(known, name) for name in names]

    def at(shares: Sequence[float]) -> Constants:
        values = {n: s * x for n, s, x in zip(names, starts, shares, strict=True)}
        return replace(known, **values)

    found = least_squares(
        lambda shares: residuals(at(shares)),
        [1.0] * len(names),
        bounds=(0.05, 20.0),
        diff_step=_STEP,
        xtol=1e-3,
        ftol=1e-3,
    )
    return at(found.x.tolist())


_GPU = ("efficiency", "small_tokens", "blocking_s", "peer_bandwidth")


def fit() -> Constants:
    """Fits everything; says on stderr what is done."""
    known = START
    steps: tuple[tuple[str, tuple[str, ...], Residuals], ...] = (
        ("GPU time", _GPU, gpu_residuals),
        ("CPU step", ("step_bytes",), lambda k: tail_residuals(k, by_stage=False)),
        ("CPU step of a stage", ("stage_rate",), lambda k: tail_residuals(k, by_stage=True)),
        ("gathers", ("gather_bandwidth",), lambda k: zero3_residuals(k, slow=False)),
        ("gathers, 32", ("gather_bandwidth_32",), lambda k: zero3_residuals(k, slow=True)),
    )
    for what, names, residuals in steps:
        known = fitted(known, names, residuals)
        errors = [abs(one) for one in residuals(known)]
        sys.stderr.write(f"{what}: mean error {100 * sum(errors) / len(errors):.2f} %\n")
    return known


def main() -> int:
    """Writes the constants, rounded to four digits."""
    rounded = {name: float(f"{value:.4g}") for name, value in asdict(fit()).items()}
    CONSTANTS.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
