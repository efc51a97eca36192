"""What tracing and metrics cost: CPU time of an event times their number, and attempts with and
without.

    python -m bench.observability [CONFIG] [--steps 410] [--set key=value …]

Two runs of ``penstock train``, each of which shares all noise of the machine between both kinds
of attempts: in the first every second attempt is traced; in the second nodes are scraped once a
second for five seconds, then for five seconds not. Printed are the CPU time of keeping and
writing an event and of what a worker counts in an attempt (alone, in this process), their number
in an attempt, their product as a share of the median step, and the ratios of the medians of
attempts with and without, with a 95 % interval (bootstrap, 10,000 draws). CPU time of metricsd
and observerd is what /proc says of them at the end of the first run, as a share of its time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from penstock.daemons.monitor.metrics.targets import addresses
from penstock.protocol.plan.instructions import Opcode, Program
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.trace import TraceLane, TraceLog
from penstock.protocol.run.trace_reading import read_traces
from penstock.workers.telemetry.account import IdleCause
from penstock.workers.telemetry.metrics import WorkerMetrics
from penstock.workers.telemetry.timing import Transferred

EVENTS = 200
WINDOW_S = 5.0
SENDS = (Opcode.SEND_ACTIVATION, Opcode.SEND_GRADIENT, Opcode.SEND_CHECKPOINT)
WARM_UP = 10
HELPERS = ("metricsd", "observerd")


def event_seconds(folder: Path) -> float:
    """Returns CPU seconds of an event, kept and written, with :data:`EVENTS` in an attempt."""
    log = TraceLog(folder / "trace" / "bench.jsonl", "bench", 1)
    texts = [f"F {number} 0 keep=all" for number in range(EVENTS)]
    rounds = 300
    begun_s = time.process_time()
    for attempt in range(rounds):
        for text in texts:
            log.record(TraceLane.COMPUTE, text, "train", attempt, 1.0, 2.0, 0.5)
        log.flush()
    return (time.process_time() - begun_s) / (rounds * EVENTS)


def helper_seconds(run_dir: Path) -> dict[str, float]:
    """Returns CPU seconds of living helpers of a run, by name."""
    found: dict[str, float] = {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, UnicodeDecodeError):
            continue
        names = [name for name in HELPERS if name in words]
        if names and any(str(run_dir) in word for word in words):
            ticks = int(fields[11]) + int(fields[12])
            found[names[0]] = ticks / os.sysconf("SC_CLK_TCK")
    return found


def ratio_interval(with_s: Sequence[float], without_s: Sequence[float]) -> tuple[float, float]:
    """Returns 95 % of the ratio of medians over bootstrap samples."""
    draw = random.Random(1)
    ratios = sorted(
        statistics.median(draw.choices(with_s, k=len(with_s)))
        / statistics.median(draw.choices(without_s, k=len(without_s)))
        for _ in range(10_000)
    )
    return ratios[250], ratios[9750]


def counting_seconds(program: Program, messages: int) -> float:
    """Returns the CPU seconds of a worker's counters in an attempt of ``program``."""
    metrics = WorkerMetrics(CollectorRegistry())
    account, counts = metrics.account, Counter(instruction.opcode for instruction in program)
    moved = {
        (direction, kind): Transferred(1.0, 1.0)
        for direction, kind in (("h2d", "weights"), ("d2h", "gradients"), ("send", "activations"))
    }
    account.turn(IdleCause.SCHEDULER)
    rounds = 500
    begun_s = time.process_time()
    for _ in range(rounds):
        account.turn(IdleCause.DATA)
        account.turn(IdleCause.OVERHEAD)
        for _ in program:
            now_s = time.perf_counter()
            account.waited(IdleCause.WEIGHTS, 0.0)
            account.computed("forward", now_s, now_s)
        for _ in range(messages):
            metrics.transferred("send", "activation", 1000)
        metrics.add_outcome("done")
        account.turn(IdleCause.PEERS)
        metrics.add_flops(1.0, 1.0)
        metrics.add_instructions(counts)
        metrics.add_transfers(moved)
        metrics.set_memory(1.0, 1.0)
        account.decided(0.0, 0.0)
    return (time.process_time() - begun_s) / rounds


@dataclass(slots=True, kw_only=True)
class Trained:
    """CPU seconds of helpers near the end, and when nodes were scraped (seconds since 1970)."""

    helpers_s: dict[str, float]
    scraped: list[tuple[float, float]]


def train(config: Path, run_dir: Path, changes: Sequence[str], *, scrape: bool) -> Trained:
    """Trains to the end."""
    words = [word for key in changes for word in ("--set", key)]
    command = [sys.executable, "-m", "penstock.client.main", "train", str(config), *words]
    run = subprocess.Popen([*command, "--run-dir", str(run_dir)], stdout=subprocess.DEVNULL)
    found = Trained(helpers_s={}, scraped=[])
    while run.poll() is None:
        found.helpers_s |= helper_seconds(run_dir)
        begun_s = time.time()
        if scrape and (run_dir / "metrics.jsonl").exists() and begun_s % (2 * WINDOW_S) < WINDOW_S:
            for url in addresses(run_dir).values():
                with suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
                    answer.read()
            found.scraped.append((begun_s, begun_s + 1.0))
        time.sleep(max(0.0, begun_s + 1.0 - time.time()))
    if run.returncode:
        raise SystemExit(f"penstock train ended with exit code {run.returncode}")
    return found


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the lines of training attempts, without the first ones."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["phase"] == "train"][WARM_UP:]


def compared(name: str, with_s: Sequence[float], without_s: Sequence[float]) -> str:
    """Returns a line: the ratio of medians."""
    low, high = ratio_interval(with_s, without_s)
    ratio = statistics.median(with_s) / statistics.median(without_s)
    return (
        f"{name}: {ratio:.4f} of others (95 %: {low:.4f} to {high:.4f}),"
        f" {len(with_s)} and {len(without_s)} attempts"
    )


def tracing(config: Path, run_dir: Path, steps: int, changes: Sequence[str]) -> Iterator[str]:
    """Yields the results of the first run, line by line."""
    keys = (f"train.steps={steps}", "observability.sample_every=2", *changes)
    trained = train(config, run_dir, keys, scrape=False)
    lines = steps_of(run_dir)
    traced, others = (
        [line["seconds"] for line in lines if line["attempt"] % 2 == parity] for parity in (0, 1)
    )
    step_s = statistics.median(others)
    event_s = event_seconds(run_dir)
    events = sum(len(life.events) for life in read_traces(run_dir).members) / (steps / 2)
    share = event_s * events / step_s
    yield f"median step {step_s:.4g} s"
    yield (
        f"an event: {1e6 * event_s:.2f} µs of a core; {events:.0f} in an attempt:"
        f" {100 * share:.3f} % of a step if all are traced, {2 * share:.4f} % with every 50th"
    )
    yield compared("traced attempts", traced, others)
    programs = RunDirectory(run_dir).plan.programs
    messages = sum(i.opcode in SENDS for program in programs for i in program)
    counting_s = max(counting_seconds(program, 2 * messages) for program in programs)
    yield (
        f"a worker counts for {1e6 * counting_s:.0f} µs of a core in an attempt:"
        f" {100 * counting_s / step_s:.3f} % of a step"
    )
    total_s = sum(line["seconds"] for line in lines)
    for name, cpu_s in sorted(trained.helpers_s.items()):
        yield f"{name}: {cpu_s:.2f} s of a core, {100 * cpu_s / total_s:.2f} % of the run"


def scraping(config: Path, run_dir: Path, steps: int, changes: Sequence[str]) -> Iterator[str]:
    """Yields the results of the second run."""
    keys = (f"train.steps={steps}", "observability.sample_every=1000000", *changes)
    scraped = train(config, run_dir, keys, scrape=True).scraped
    beside: list[float] = []
    others: list[float] = []
    for line in steps_of(run_dir):
        begun_s, ended_s = line["time"] - line["seconds"], line["time"]
        met = any(begun_s < until_s and since_s < ended_s for since_s, until_s in scraped)
        (beside if met else others).append(line["seconds"])
    yield compared("attempts beside a scrape a second", beside, others)


def main() -> None:
    """Parses arguments, runs, and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("config", type=Path, nargs="?", default=Path("examples/tiny.yaml"))
    parser.add_argument("--steps", type=int, default=410)
    parser.add_argument("--set", action="append", default=[], dest="changes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for part in (tracing, scraping):
            run_dir = Path(folder) / part.__name__
            for line in part(given.config, run_dir, given.steps, given.changes):
                print(line, flush=True)


if __name__ == "__main__":
    main()
