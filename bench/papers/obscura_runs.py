"""Obscura in real runs: three small models, three limits each, trained by the real workers.

    python -m bench.papers.obscura_runs [--models llama gpt2 qwen3] [--rounds 3] [--steps 6]

For each model: ``penstock profile``; limits between what full recomputation and none need; then
``penstock train`` on four CPU workers with ``schedule.passes: [obscura]`` under each limit, once
with ``observability.memory`` for the peaks of devices, and ``--rounds`` times without it for the
time of a step, all limits in turns. Writes ``bench/papers/data/obscura_runs.json``, model by model:
planned and measured peaks of the fullest device, simulated and measured seconds of a step, and what
the machine was. The page reads that file.

A measured peak is the most bytes of live storages of any attempt
(:mod:`penstock.models.profiling.storages`), as the worker counts them while it trains, not what the
plan says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from bench.papers.page import PaperTable
from penstock.planner.configured import config_context, config_prices, trainable_plan
from penstock.planner.memory.footprint import device_peaks
from penstock.planner.pipeline import try_plan
from penstock.protocol.config.schema import load_config
from penstock.protocol.plan.instructions import Forward, Keep, SwapOut
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.profile import load_profile
from penstock.protocol.run.rundir import RunDirectory

RECORD = Path(__file__).parent / "data" / "obscura_runs.json"
SHARES = (0.7, 0.42, 0.25)
"""Limits, as shares of the way from the peak of full recomputation to that of none."""
WORKERS, WARM_UP, TIMEOUT_S = 4, 2, 400.0
MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {
            "model_type": "llama",
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        },
        "gpt2": {
            "model_type": "gpt2",
            "n_embd": 192,
            "n_layer": 8,
            "n_head": 6,
            "n_positions": 256,
        },
        "qwen3": {
            "model_type": "qwen3",
            "hidden_size": 192,
            "intermediate_size": 576,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
        },
    }
)
OBSCURA = {"recompute": "none", "passes": ["obscura"]}

Row = dict[str, Any]


class Bench:
    """Configurations and runs of one model in a folder."""

    def __init__(self, model: str, folder: Path, steps: int) -> None:
        self._model, self._folder, self._steps = model, folder, steps
        self._profile: dict[str, str] = {}
        self._runs = 0
        file = folder / "profile.json"
        self._penstock("profile", str(self.configure({}, None)), "--out", str(file))
        self._profile = {"profile": str(file)}

    def configure(
        self, schedule: Mapping[str, Any], limit: int | None, memory: bool = False
    ) -> Path:
        """Write a configuration of eight micro-batches of two sequences."""
        config = {
            "model": {"dtype": "fp32", "hf": dict(MODELS[self._model])},
            "data": {"path": "@stdlib", "tokenizer": "byte", "sequence_length": 128},
            "train": {"steps": self._steps, "global_batch": 16, "micro_batch": 2},
            "optimizer": {"threads": 1},
            "schedule": {"scheme": "1f1b", **self._profile, **schedule},
            "cluster": {"workers": WORKERS, "device": "cpu", "threads_per_worker": 1},
            "memory": {"device_limit": limit},
            "observability": {"memory": memory},
        }
        file = self._folder / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        return file

    def limits(self) -> list[int]:
        """Bytes of the three limits."""
        found, table = [], load_profile(Path(self._profile["profile"])).table
        for mode in ("full", "none"):
            config = load_config(self.configure({"recompute": mode}, None))
            plan = trainable_plan(config, table)
            peaks = device_peaks(plan, config_prices(config, table).costs)
            found.append(max(peak.total_bytes for peak in peaks))
        least, most = found
        return [int(least + share * (most - least)) for share in SHARES]

    def train(self, limit: int, *, memory: bool) -> RunDirectory:
        """A whole run in a directory of its own."""
        self._runs += 1
        run_dir = self._folder / f"run-{self._runs}"
        config = self.configure(OBSCURA, limit, memory)
        self._penstock("train", str(config), "--run-dir", str(run_dir))
        return RunDirectory(run_dir)

    def _penstock(self, *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "penstock.client.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode:
            raise SystemExit(done.stdout)


def lines_of(run: RunDirectory) -> list[Row]:
    """The lines of a run's steps."""
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def measure(model: str, rounds: int, steps: int) -> list[Row]:
    """Returns a row a limit."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(model, Path(folder), steps)
        rows = [_planned(model, limit, bench.train(limit, memory=True)) for limit in bench.limits()]
        seconds: list[list[float]] = [[] for _ in rows]
        for _ in range(rounds):
            for row, found in zip(rows, seconds, strict=True):
                lines = lines_of(bench.train(row["limit"], memory=False))[WARM_UP:]
                found.append(statistics.median(line["seconds"] for line in lines))
        for row, found in zip(rows, seconds, strict=True):
            row |= {"step_s": statistics.median(found), "rounds": found}
        return rows


def _planned(model: str, limit: int, run: RunDirectory) -> Row:
    """What a run under a limit says of memory, and the simulator of its plan."""
    prices = config_prices(run.config, run.table)
    peaks = device_peaks(run.plan, prices.costs)
    simulated = try_plan(run.plan, config_context(run.config, run.table, prices))
    return {
        "model": model,
        "limit": limit,
        "planned": max(peak.total_bytes for peak in peaks),
        "measured": max(line["peak_device_bytes"] for line in lines_of(run)),
        "simulated_s": simulated.makespan_s,
        **choices(run.plan),
    }


def choices(plan: Plan) -> Row:
    """What Obscura chose: by stage what is dropped, forwards before the first backward, swaps."""
    drops, ahead = [], []
    for program in plan.programs:
        work = [i for i in program if str(i).startswith(("F ", "B "))]
        first = next(i for i in work if isinstance(i, Forward))
        drops.append(list(first.drop) if first.keep is Keep.SELECTIVE else str(first.keep))
        ahead.append(next(n for n, i in enumerate(work) if not isinstance(i, Forward)))
    swaps = [sum(isinstance(i, SwapOut) for i in program) for program in plan.programs]
    return {"drops": drops, "ahead": ahead, "swaps": swaps}


def machine() -> str:
    """What this was measured on."""
    load = os.getloadavg()[1]
    return f"{platform.machine()}, {os.cpu_count()} cores, load of others and ours {load:.0f}"


def recorded(path: Path = RECORD) -> Row:
    """What was measured, by model."""
    return dict(json.loads(path.read_text())) if path.exists() else {"models": {}}


def same_order(rows: Sequence[Row]) -> bool:
    """Whether the limits of a model have the simulated order of speed."""
    by_model = sorted(rows, key=lambda row: float(row["simulated_s"]))
    measured = [row["step_s"] for row in by_model]
    return measured == sorted(measured)


def runs_table(record: Row | None = None) -> PaperTable:
    """Returns the table of the recorded runs."""
    record = recorded() if record is None else record
    rows = [row for rows in record["models"].values() for row in rows["rows"]]
    machines = {rows["machine"] for rows in record["models"].values()}
    return PaperTable(
        title="Obscura: real runs under limits",
        text=(
            "`python -m bench.papers.obscura_runs`: three small models on four CPU workers, eight"
            " micro-batches, `schedule.passes: [obscura]` under limits of"
            f" {', '.join(f'{share:.0%}' for share in SHARES)} of the way from full recomputation"
            " to none; profiles measured there. *Peak*: live bytes of the fullest device, counted"
            " while it trains, beside the plan's. *Step*: medians of runs in turns; four workers"
            f" share the cores, the simulator gives each its own. Machine: {'; '.join(machines)}."
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
        f"{row['measured'] / 1e6:.2f}",
        f"{100 * (row['planned'] / row['measured'] - 1):+.2f} %",
        f"{row['simulated_s']:.3f}",
        f"{row['step_s']:.3f}",
        "yes" if same_order(of_model) else "no",
    )


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(None if arguments is None else list(arguments))
    for model in options.models:
        rows = measure(model, options.rounds, options.steps)
        record = recorded()
        record["models"][model] = {"machine": machine(), "rows": rows}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        for row in rows:
            print(json.dumps(row))


if __name__ == "__main__":
    main()
