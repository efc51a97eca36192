"""Measured runs of the SPipe paper's artifact: rows of its CSV files, as workloads and times.

``data/spipe_figure9_v100.csv``: the expected results of figure 9, 16 workloads on four systems.
``data/spipe_figure12_v100.csv``: a part of those of figure 12, other sizes of micro-batches.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.host.errors import ConfigError

DATA = Path(__file__).parents[1] / "data"
FIGURE_9 = DATA / "spipe_figure9_v100.csv"
FIGURE_12 = DATA / "spipe_figure12_v100.csv"

DEVICES_PER_NODE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model (billion parameters) and its sequence length on nodes, and the sizes of a step."""

    billions: int
    sequence: int
    nodes: int
    micro_batch: int
    mini_batch: int

    def __post_init__(self) -> None:
        for name in ("billions", "sequence", "nodes", "micro_batch", "mini_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: expected 1 or more")
        if self.mini_batch % self.micro_batch:
            raise ConfigError(
                f"mini_batch = {self.mini_batch}: expected a multiple of micro_batch ="
                f" {self.micro_batch}"
            )

    @property
    def num_devices(self) -> int:
        """How many GPUs the workload has."""
        return self.nodes * DEVICES_PER_NODE

    @property
    def num_microbatches(self) -> int:
        """How many micro-batches an iteration has."""
        return self.mini_batch // self.micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A measured run: seconds of an iteration, and of its part till the GPUs are done (``None``
    where it is not measured).
    """

    iteration_s: float
    gpu_s: float | None

    @property
    def tail_s(self) -> float | None:
        """Seconds of the iteration after the GPUs."""
        return None if self.gpu_s is None else self.iteration_s - self.gpu_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a CSV file; ``run`` is ``None`` where it ran out of memory, of which ``failure``
    tells.
    """

    system: str
    cluster: str
    workload: Workload
    run: MeasuredRun | None
    failure: str = ""


_COLUMNS = (
    "system",
    "cluster",
    "model_billion",
    "micro_batch",
    "mini_batch",
    "nodes",
    "sequence",
    "iteration_ms",
    "gpu_ms",
)


def read_rows(path: Path) -> tuple[Row, ...]:
    """Returns the rows of a CSV file with the artifact's columns; empty ones are left out.

    Raises:
        ConfigError: no such file, a column is missing, or a row says something else than a number
            where one is needed; names file, line and field.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    reader = csv.DictReader(lines)
    missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"{path}: expected the columns {', '.join(_COLUMNS)}; no {missing[0]!r}")
    return tuple(
        _row(path, reader.line_num, fields) for fields in reader if (fields["system"] or "").strip()
    )


def _row(path: Path, line: int, fields: dict[str, str]) -> Row:
    def number(name: str) -> int:
        try:
            return int(fields[name])
        except (TypeError, ValueError):
            raise ConfigError(
                f"{path}, line {line}: {name} = {fields[name]!r}: expected a whole number"
            ) from None

    workload = Workload(
        billions=number("model_billion"),
        sequence=number("sequence"),
        nodes=number("nodes"),
        micro_batch=number("micro_batch"),
        mini_batch=number("mini_batch"),
    )
    iteration_s, gpu_s = _seconds(fields["iteration_ms"]), _seconds(fields["gpu_ms"])
    run = None if iteration_s is None else MeasuredRun(iteration_s=iteration_s, gpu_s=gpu_s)
    failure = "" if run else (fields["iteration_ms"] or "").strip()
    return Row(
        system=fields["system"].strip(),
        cluster=(fields["cluster"] or "").strip(),
        workload=workload,
        run=run,
        failure=failure,
    )


def _seconds(milliseconds: str | None) -> float | None:
    """Returns seconds, or None for what is no number ("OOM", "")."""
    try:
        value = float(milliseconds or "")
    except ValueError:
        return None
    return value / 1e3 if value > 0.0 else None


@lru_cache(maxsize=1)
def figure_9() -> tuple[Row, ...]:
    """Returns the rows of figure 9 on the V100 cluster."""
    return read_rows(FIGURE_9)


@lru_cache(maxsize=1)
def figure_12() -> tuple[Row, ...]:
    """Returns the rows at hand of figure 12."""
    return read_rows(FIGURE_12)


@lru_cache(maxsize=1)
def measured() -> Mapping[Workload, Mapping[str, MeasuredRun]]:
    """Returns the runs of figure 9 by workload and system: Mobius, Megatron and SPipe."""
    return MappingProxyType(by_workload(row for row in figure_9() if row.run and row.run.gpu_s))


def by_workload(rows: Iterator[Row]) -> dict[Workload, dict[str, MeasuredRun]]:
    """Returns the runs of rows by workload and system."""
    runs: dict[Workload, dict[str, MeasuredRun]] = {}
    for row in rows:
        if row.run is not None:
            runs.setdefault(row.workload, {})[row.system] = row.run
    return runs


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Records what a search or a series of simulations found, with four digits."""
    rounded = [
        {name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in row.items()}
        for row in rows
    ]
    path.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
