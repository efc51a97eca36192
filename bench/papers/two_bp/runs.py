"""Real runs of the paper's four kinds of models, small, with and without 2BP.

    python -m bench.papers.two_bp.runs [--kinds llama bert mamba resnet] [--rounds 3]

Profiles each kind with ``penstock profile``, then trains it with ``penstock train`` on two workers,
one thread each: real text, or scikit-learn's pictures of digits. Unsplit and split runs take turns.
Writes ``bench/papers/data/two_bp_runs.json``, a kind at a time: seconds of each step after the
first two, the peak of the worker that held most, and what the simulator says of both with the
profile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from bench.papers.two_bp.pictures import LEVELS, SEQUENCE_LENGTH, write_digits
from penstock.host.files import write_atomically
from penstock.planner.planning.pricing import config_prices
from penstock.planner.simulate import simulate
from penstock.protocol.plan.profile import load_profile
from penstock.protocol.run.rundir import RunDirectory

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "bench" / "papers" / "data" / "two_bp_runs.json"
SCHEDULES = {"1F1B-1": 2, "1F1B-2": 4}
"""Micro-batches for two workers."""
WAYS: dict[str, list[str]] = {"unsplit": [], "split": ["split-backward", "fill-bubbles"]}

_STEPS, _WARM_UP = 12, 2
_TEXT = {"path": "@stdlib", "tokenizer": "byte"}
_ATTENTION = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 128}

KINDS: dict[str, dict[str, Any]] = {
    "llama": {
        "hf": {
            "model_type": "llama",
            "num_hidden_layers": 8,
            "num_key_value_heads": 4,
            "intermediate_size": 704,
            **_ATTENTION,
        },
        "data": {**_TEXT, "sequence_length": 128},
        "micro_batch": 4,
    },
    "bert": {
        "hf": {
            "model_type": "bert",
            "num_hidden_layers": 8,
            "intermediate_size": 1024,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            **_ATTENTION,
        },
        "data": {**_TEXT, "sequence_length": 128, "objective": "masked"},
        "micro_batch": 4,
    },
    "mamba": {
        "hf": {
            "model_type": "mamba",
            "hidden_size": 256,
            "state_size": 8,
            "num_hidden_layers": 8,
        },
        "data": {**_TEXT, "sequence_length": 64},
        "micro_batch": 4,
    },
    "resnet": {
        "hf": {
            "model_type": "resnet-blocks",
            "vocab_size": LEVELS,
            "hidden_sizes": [64, 128, 256, 512],
            "embedding_size": 16,
            "depths": [3, 8, 36, 3],
            "shown_side": 128,
        },
        "imports": ["bench.papers.two_bp.resnet"],
        "data": {
            "sequence_length": SEQUENCE_LENGTH,
            "objective": "bench.papers.two_bp.pictures:digits",
        },
        "micro_batch": 8,
    },
}
"""ResNet has the depth of ResNet-152 and a quarter of its widths."""


def configuration(kind: str, way: str, schedule: str, root: Path) -> dict[str, Any]:
    """Returns the configuration of one run below ``root``."""
    chosen, micro_batches = KINDS[kind], SCHEDULES[schedule]
    data = dict(chosen["data"])
    if "path" not in data:
        data["tokens"] = str(root / "digits.bin")
    return {
        "run": {"name": f"{kind}-{way}", "seed": 7, "dir": str(root / f"{kind}-{schedule}-{way}")},
        "model": {
            "hf": chosen["hf"],
            "imports": chosen.get("imports", []),
            "import_path": str(ROOT),
        },
        "data": data,
        "train": {
            "steps": _STEPS,
            "micro_batch": chosen["micro_batch"],
            "global_batch": chosen["micro_batch"] * micro_batches,
            "clip_grad_norm": None,
        },
        "schedule": {"scheme": "1f1b", "passes": WAYS[way], "profile": str(root / f"{kind}.json")},
        "cluster": {"workers": 2, "threads_per_worker": 1},
        "observability": {"memory": True},
    }


def penstock(*words: str) -> None:
    """Runs a command of Penstock's, from the root of the repository; its output goes nowhere.

    Raises:
        subprocess.CalledProcessError: it failed; has what it said.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "penstock.client.main", *words],
        check=True,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


def run_once(kind: str, way: str, schedule: str, root: Path) -> dict[str, Any]:
    """Trains once; returns seconds of the steps after the first ones, and bytes of the peak."""
    fields = configuration(kind, way, schedule, root)
    run_dir = Path(fields["run"]["dir"])
    number = len(list(root.glob(f"{run_dir.name}*.yaml")))
    run_dir = run_dir.with_name(f"{run_dir.name}-{number}")
    fields["run"]["dir"] = str(run_dir)
    path = root / f"{run_dir.name}.yaml"
    path.write_text(yaml.safe_dump(fields))
    penstock("train", str(path))
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["phase"] == "train"][_WARM_UP:]
    files = RunDirectory(run_dir)
    prices = config_prices(files.config, files.table)
    simulation = simulate(files.plan, prices.costs, prices.cluster, stops_early=True)
    return {
        "seconds": [line["seconds"] for line in steps],
        "losses": [line["loss"] for line in steps],
        "peak_bytes": max(line["peak_device_bytes"] for line in steps),
        "simulated_s": simulation.makespan_s,
        "simulated_peak_bytes": max(peak.total_bytes for peak in simulation.peaks),
        "load": os.getloadavg()[0],
    }


def measure(kind: str, rounds: int) -> dict[str, Any]:
    """Profiles a kind, then trains it unsplit and split in turns; returns all results."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="two-bp-") as folder:
        root = Path(folder)
        write_digits(root / "digits.bin")
        config = root / "profiled.yaml"
        fields = configuration(kind, "unsplit", "1F1B-1", root)
        del fields["schedule"]["profile"]
        config.write_text(yaml.safe_dump(fields))
        penstock("profile", str(config), "--out", str(root / f"{kind}.json"))
        found["parameters"] = load_profile(root / f"{kind}.json").table.num_parameters
        for schedule in SCHEDULES:
            for _ in range(rounds):
                for way in WAYS:
                    made = run_once(kind, way, schedule, root)
                    found.setdefault(schedule, {}).setdefault(way, []).append(made)
                    sys.stderr.write(f"{kind} {schedule} {way}: {made['seconds'][-1]:.2f} s\n")
    return found


def main() -> None:
    """Measures the chosen kinds, and writes the results after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {"kinds": {}}
        record["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, shared with others"
        record["kinds"][kind] = measure(kind, arguments.rounds)
        write_atomically(RECORD, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
