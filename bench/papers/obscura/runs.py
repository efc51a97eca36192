"""Obscura in real runs: three small models, three limits each, trained by the real workers.

``python -m tests.worker.test_obscura_limits`` makes them: four devices, one interpreter each on a
thread of its own, with shared memory and sockets; attempts under the three limits in turns. It
writes ``bench/papers/data/obscura_runs.json``: planned and measured peaks of the fullest device,
simulated and measured seconds of an attempt, and what the machine was. The page reads that file.

A measured peak is the most bytes of live storages of any attempt
(:mod:`penstock.models.profiling.storages`), as the worker counts them while it trains, not what the
plan says.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.papers.page import PaperTable
from penstock.config.schema import Config
from penstock.planner.memory.footprint import device_peaks
from penstock.planner.planning.pipeline import try_plan
from penstock.planner.planning.pricing import config_context
from penstock.protocol.plan.instructions import Forward, Keep, SwapOut
from penstock.protocol.plan.plan import Plan
from penstock.shm.table import BlockTable

RECORD = Path(__file__).parents[1] / "data" / "obscura_runs.json"
Row = dict[str, Any]


def row_of(model: str, config: Config, table: BlockTable, plan: Plan) -> Row:
    """Returns what the plan of a limit says, and the simulator of it; no run counts yet."""
    context = config_context(config, table)
    peaks = device_peaks(plan, context.prices.costs)
    simulated = try_plan(plan, context)
    return {
        "model": model,
        "limit": config.memory.device_limit,
        "planned": max(peak.total_bytes for peak in peaks),
        "simulated_s": simulated.makespan_s,
        "work_s": sum(device.busy_s for device in simulated.devices),
        "cores": os.cpu_count(),
        **choices(plan),
        "runs": [],
    }


def measured_peak(row: Row) -> float:
    """Returns the largest peak of all runs, bytes."""
    return float(max(run["peak"] for run in row["runs"]))


def measured_s(row: Row) -> float:
    """Returns the median of the runs' steps, seconds."""
    return statistics.median(float(run["step_s"]) for run in row["runs"])


def choices(plan: Plan) -> Row:
    """Returns the choice of Obscura: dropped operators by stage, forwards before the first
    backward, and swaps.
    """
    drops, ahead = [], []
    for program in plan.programs:
        work = [i for i in program if str(i).startswith(("F ", "B "))]
        first = next(i for i in work if isinstance(i, Forward))
        drops.append(list(first.drop) if first.keep is Keep.SELECTIVE else str(first.keep))
        ahead.append(next(n for n, i in enumerate(work) if not isinstance(i, Forward)))
    swaps = [sum(isinstance(i, SwapOut) for i in program) for program in plan.programs]
    return {"drops": drops, "ahead": ahead, "swaps": swaps}


def machine() -> str:
    """Returns the machine of the measurements."""
    load = os.getloadavg()[1]
    return f"{platform.machine()}, {os.cpu_count()} cores, load of others and ours {load:.0f}"


def recorded(path: Path = RECORD) -> Row:
    """Returns the measurements by model."""
    return dict(json.loads(path.read_text())) if path.exists() else {"models": {}}


def simulated_s(row: Row) -> float:
    """Returns the seconds of an attempt on the machine.

    These are the simulated seconds with a core for each device, or those of all work on the
    existing cores.
    """
    return float(max(row["simulated_s"], row["work_s"] / row["cores"]))


def same_order(rows: Sequence[Row]) -> bool:
    """Returns whether the limits of a model have the simulated order of speed."""
    by_model = sorted(rows, key=simulated_s)
    measured = [measured_s(row) for row in by_model]
    return measured == sorted(measured)


def runs_table(record: Row | None = None) -> PaperTable:
    """Returns the table of the recorded runs."""
    record = recorded() if record is None else record
    rows = [row for rows in record["models"].values() for row in rows["rows"]]
    machines = {rows["machine"] for rows in record["models"].values()}
    return PaperTable(
        title="Obscura: real runs under limits",
        text=(
            "`python -m tests.worker.test_obscura_limits`: three small models on four CPU devices"
            " (interpreters on threads of one process, real sockets and shared memory), eight"
            " micro-batches, `schedule.passes: [obscura]`, profiles measured there. *Peak*: live"
            " bytes of the fullest device, counted while it trains, beside the plan's. *Step*:"
            " medians of attempts in turns. The simulator gives each device a core; where there are"
            " fewer, its figure is the work of all on those. Machine:"
            f" {'; '.join(sorted(machines))}."
            " *Early*: forwards before the first backward, by stage."
        ),
        columns=(
            "model",
            "limit MB",
            "dropped by stage",
            "early",
            "swaps",
            "peak MB, planned",
            "measured",
            "planned is",
            "step s, simulated",
            "measured s",
            "same order",
        ),
        rows=tuple(_cells(row, record["models"][row["model"]]["rows"]) for row in rows),
    )


def _cells(row: Row, of_model: Sequence[Row]) -> tuple[str, ...]:
    return (
        row["model"],
        f"{row['limit'] / 1e6:.2f}",
        ", ".join(d if isinstance(d, str) else f"{len(d)} operators" for d in row["drops"]),
        ", ".join(map(str, row["ahead"])),
        ", ".join(map(str, row["swaps"])),
        f"{row['planned'] / 1e6:.2f}",
        f"{measured_peak(row) / 1e6:.2f}",
        f"{100 * (row['planned'] / measured_peak(row) - 1):+.2f} %",
        f"{simulated_s(row):.3f}",
        f"{measured_s(row):.3f}",
        "yes" if same_order(of_model) else "no",
    )


def keep(model: str, rows: list[Row]) -> None:
    """Replaces what is recorded of a model."""
    known = recorded()
    known["models"][model] = {"machine": machine(), "rows": rows}
    RECORD.write_text(json.dumps(known, indent=1) + "\n")
