"""Trainings of one model in two ways: their rates, and the ratio over some rounds."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.host.files import write_atomically

WARMUP_STEPS = 3
"""First steps of a run that do not count in its rate."""

Figures = Mapping[str, float]
"""Figures of a training; ``rate`` is that of counted tokens per second."""


def train(config: Mapping[str, Any], watch: Callable[[], None] = lambda: None) -> float:
    """Trains in the folder ``run.dir``; returns counted tokens per second. ``watch`` is called five
    times a second.
    """
    run = Path(config["run"]["dir"])
    path = run.with_suffix(".yaml")
    write_atomically(path, json.dumps(config))
    command = [sys.executable, "-m", "penstock.client.main", "train", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            watch()
            time.sleep(0.2)
    assert process.returncode == 0, f"{run.name}: exit code {process.returncode}"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["phase"] == "train"][WARMUP_STEPS:]
    return float(sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines))


def compare(
    options: argparse.Namespace,
    measure: Callable[[Path], Mapping[str, Figures]],
    shown: Callable[[str, Figures], str],
) -> None:
    """Measures ``options.rounds`` times; prints a line for each round and the median, or all as
    JSON. ``measure`` trains in a folder, first the way that the other one is compared with, and
    ``shown`` returns the figures of a way in words.
    """
    lines: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as name:
            figures = measure(Path(name))
        first, second = (each["rate"] for each in figures.values())
        lines.append({**figures, "ratio": second / first})
        if not options.json:
            words = [shown(way, each) for way, each in figures.items()]
            print("  ".join([*words, f"ratio {second / first:.2f}"]), flush=True)
    if options.json:
        print(json.dumps(lines, indent=1))
    else:
        print(f"median ratio {statistics.median(line['ratio'] for line in lines):.2f}")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns the options that all comparisons have; the first line of ``description`` is shown."""
    options = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", action="store_true")
    return options
