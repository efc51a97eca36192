"""``python bench/papers/spipe.py``: predicts workloads of the SPipe paper's clusters.

``--predict`` one workload, ``--csv FILE`` the rows of a file with the columns of the artifact's
``expected.csv``. Everything comes from data sheets and the committed constants.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.papers.spipe_cluster import zero3
from bench.papers.spipe_cluster.measured import DEVICES_PER_NODE, Row, Workload, read_rows
from bench.papers.spipe_cluster.systems import SYSTEMS, Prediction, predict
from bench.papers.spipe_cluster.testbed import TEST_BEDS, TestBed
from penstock.host.errors import ConfigError
from penstock.planner.cost.catalogue import MODELS

_NAMES = {name.lower(): name for name in (*SYSTEMS, zero3.NAME)}
_SIZES = sorted(int(name[6:-1]) for name in MODELS if name.startswith("spipe-"))


def predicted(system: str, workload: Workload, bed: TestBed) -> Prediction:
    """Predicts an iteration of a system, by its name in any case.

    Raises:
        ConfigError: unknown system or size of model, or a workload that the system cannot run.
    """
    if system.lower() not in _NAMES:
        raise ConfigError(f"system = {system!r}: expected one of {', '.join(_NAMES)}")
    if workload.billions not in _SIZES:
        known = ", ".join(map(str, _SIZES))
        raise ConfigError(f"billions = {workload.billions}: expected one of {known}")
    name = _NAMES[system.lower()]
    if name == zero3.NAME:
        return zero3.predict(workload, bed)
    return predict(SYSTEMS[name], workload, bed)


def bed_of(cluster: str) -> TestBed:
    """Returns the test-bed of a cluster: ``v100``, or as the artifact writes it, ``spipe-v100``.

    Raises:
        ConfigError: it is unknown; lists what is accepted.
    """
    name = cluster.lower().removeprefix("spipe-").removeprefix("rtx")
    if name not in TEST_BEDS:
        raise ConfigError(f"cluster = {cluster!r}: expected one of {', '.join(TEST_BEDS)}")
    return TEST_BEDS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A row of a file beside its prediction; errors are relative, ``None`` where nothing was
    measured.
    """

    row: Row
    prediction: Prediction

    @property
    def error(self) -> float | None:
        """Of the iteration."""
        run = self.row.run
        return None if run is None else self.prediction.iteration_s / run.iteration_s - 1.0

    @property
    def gpu_error(self) -> float | None:
        """Of the GPUs' part."""
        run = self.row.run
        return None if run is None or not run.gpu_s else self.prediction.gpu_s / run.gpu_s - 1.0

    @property
    def tail_error(self) -> float | None:
        """Of the optimizer's part."""
        run = self.row.run
        return None if run is None or not run.tail_s else self.prediction.tail_s / run.tail_s - 1.0


def compare(rows: Sequence[Row]) -> tuple[Compared, ...]:
    """Predicts every row.

    Raises:
        ConfigError: as :func:`predicted` and :func:`bed_of`.
    """
    return tuple(
        Compared(
            row=row, prediction=predicted(row.system, row.workload, bed_of(row.cluster or "v100"))
        )
        for row in rows
    )


def mean_errors(compared: Sequence[Compared]) -> dict[str, float]:
    """Returns the means of absolute errors, of what has any: ``iteration``, ``gpu``, ``tail``."""
    means = {}
    for what in ("error", "gpu_error", "tail_error"):
        errors = [abs(e) for one in compared if (e := getattr(one, what)) is not None]
        if errors:
            means[what] = sum(errors) / len(errors)
    return means


def _lines(compared: Sequence[Compared]) -> Iterator[str]:
    """Yields a table: seconds measured and predicted, errors in percent, and the means."""
    yield (
        f"{'system':<10}{'cluster':<9}{'billions':>8}{'micro':>6}{'mini':>5}{'nodes':>6}{'seq':>6}"
        f"{'measured':>10}{'predicted':>10}{'error':>8}{'gpu':>8}{'tail':>8}{'peak GB':>9}  fits"
    )
    for one in compared:
        w, run, made = one.row.workload, one.row.run, one.prediction
        measured = f"{run.iteration_s:.2f}" if run else one.row.failure or "-"
        errors = "".join(
            f"{_percent(error):>8}" for error in (one.error, one.gpu_error, one.tail_error)
        )
        yield (
            f"{one.row.system:<10}{bed_of(one.row.cluster or 'v100').name:<9}{w.billions:>8}"
            f"{w.micro_batch:>6}{w.mini_batch:>5}{w.nodes:>6}{w.sequence:>6}{measured:>10}"
            f"{made.iteration_s:>10.2f}{errors}{made.peak_gb:>9.1f}  {'yes' if made.fits else 'no'}"
        )
    for system in ("", *dict.fromkeys(one.row.system for one in compared)):
        of = [one for one in compared if system in ("", one.row.system)]
        means = mean_errors(of)
        values = "".join(
            f"{_percent(means.get(what), sign=False):>8}"
            for what in ("error", "gpu_error", "tail_error")
        )
        runs = sum(one.error is not None for one in of)
        yield f"mean error, {system or 'all'} ({runs} runs):".ljust(70) + values


def _percent(value: float | None, *, sign: bool = True) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.1f} %" if sign else f"{100 * value:.1f} %"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/papers/spipe.py",
        description=(
            "Predicts iterations of the systems of the SPipe paper on its two clusters, from data"
            " sheets and from constants fitted to a part of the runs on V100"
            " (bench/papers/data/spipe_constants.json)."
        ),
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--predict", action="store_true", help="one workload, as told by the rest")
    what.add_argument("--csv", type=Path, metavar="FILE", help="the rows of a file")
    parser.add_argument("--cluster", default="v100", choices=tuple(TEST_BEDS))
    parser.add_argument("--system", choices=tuple(_NAMES))
    parser.add_argument("--billions", type=int, help=f"size of the model: {_SIZES}")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences (default 2)")
    parser.add_argument("--mini-batch", type=int, help="sequences (default 16 for each node)")
    parser.add_argument("--nodes", type=int, default=1, help=f"of {DEVICES_PER_NODE} GPUs")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens (default 1024)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 2 for what it cannot predict."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.predict and (asked.system is None or asked.billions is None):
        parser.error("--predict needs --system and --billions")
    try:
        if asked.predict:
            _predict(asked)
        else:
            _compare(asked)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _predict(asked: argparse.Namespace) -> None:
    workload = Workload(
        billions=asked.billions,
        sequence=asked.sequence,
        nodes=asked.nodes,
        micro_batch=asked.micro_batch,
        mini_batch=16 * asked.nodes if asked.mini_batch is None else asked.mini_batch,
    )
    made = predicted(asked.system, workload, TEST_BEDS[asked.cluster])
    if asked.json:
        sys.stdout.write(json.dumps(asdict(made)) + "\n")
        return
    sys.stdout.write(
        f"iteration {made.iteration_s:.3f} s: GPUs {made.gpu_s:.3f} s, CPU step after them"
        f" {made.tail_s:.3f} s; fullest GPU {made.peak_gb:.1f} GB,"
        f" {'fits' if made.fits else 'does not fit'}\n"
    )


def _compare(asked: argparse.Namespace) -> None:
    compared = compare(read_rows(asked.csv))
    if not asked.json:
        sys.stdout.write("".join(f"{line}\n" for line in _lines(compared)))
        return
    rows = [
        {
            "system": one.row.system,
            "cluster": bed_of(one.row.cluster or "v100").name,
            **asdict(one.row.workload),
            "measured_s": one.row.run.iteration_s if one.row.run else None,
            "measured_gpu_s": one.row.run.gpu_s if one.row.run else None,
            "predicted": asdict(one.prediction),
            "error": one.error,
            "gpu_error": one.gpu_error,
            "tail_error": one.tail_error,
        }
        for one in compared
    ]
    sys.stdout.write(json.dumps({"rows": rows, "mean_errors": mean_errors(compared)}) + "\n")
