"""What tracing costs: CPU time of an event times their number, and attempts with and without.

    python -m bench.observability [CONFIG] [--steps 410] [--set key=value …]

One run of ``penstock train`` with every second attempt traced, so that both kinds share all noise
of the machine. Printed are the CPU time of keeping and writing an event (alone, in this process),
the events of a traced attempt, their product as a share of the median step, and the ratio of the
medians of traced and untraced attempts with a 95 % interval (bootstrap, 10,000 draws). CPU time of
metricsd and observerd is what /proc says of them at the end, as a share of the run's time.
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
from collections.abc import Sequence
from pathlib import Path

from penstock.protocol.run.trace import TraceLane, TraceLog
from penstock.protocol.run.trace_reading import read_traces

EVENTS = 200
WARM_UP = 10
HELPERS = ("metricsd", "observerd")


def event_seconds(folder: Path) -> float:
    """CPU seconds of an event, kept and written, with :data:`EVENTS` in an attempt."""
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
    """CPU seconds of living helpers of a run, by name."""
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


def ratio_interval(traced: Sequence[float], untraced: Sequence[float]) -> tuple[float, float]:
    """95 % of the ratio of medians over bootstrap samples."""
    draw = random.Random(1)
    ratios = sorted(
        statistics.median(draw.choices(traced, k=len(traced)))
        / statistics.median(draw.choices(untraced, k=len(untraced)))
        for _ in range(10_000)
    )
    return ratios[250], ratios[9750]


def train(config: Path, run_dir: Path, steps: int, changes: Sequence[str]) -> dict[str, float]:
    """Trains with every second attempt traced; returns the helpers' CPU seconds near the end."""
    keys = [f"train.steps={steps}", "observability.sample_every=2", *changes]
    words = [word for key in keys for word in ("--set", key)]
    command = [sys.executable, "-m", "penstock.client.main", "train", str(config), *words]
    run = subprocess.Popen([*command, "--run-dir", str(run_dir)], stdout=subprocess.DEVNULL)
    spent: dict[str, float] = {}
    while run.poll() is None:
        spent |= helper_seconds(run_dir)
        time.sleep(1.0)
    if run.returncode:
        raise SystemExit(f"penstock train ended with exit code {run.returncode}")
    return spent


def main() -> None:
    """Parse arguments, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("config", type=Path, nargs="?", default=Path("examples/tiny.yaml"))
    parser.add_argument("--steps", type=int, default=410)
    parser.add_argument("--set", action="append", default=[], dest="changes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        spent = train(arguments.config, run_dir, arguments.steps, arguments.changes)
        event_s = event_seconds(Path(folder))
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        steps = [line for line in lines if line["phase"] == "train"][WARM_UP:]
        events = sum(len(life.events) for life in read_traces(run_dir).members)
    seconds = {
        parity: [line["seconds"] for line in steps if line["attempt"] % 2 == parity]
        for parity in (0, 1)
    }
    step_s = statistics.median(seconds[1])
    per_attempt = events / (arguments.steps / 2)
    low, high = ratio_interval(seconds[0], seconds[1])
    ratio = statistics.median(seconds[0]) / step_s
    total_s = sum(line["seconds"] for line in steps)
    report = [
        f"attempts: {len(seconds[0])} traced, {len(seconds[1])} not; median step {step_s:.4g} s",
        f"an event: {1e6 * event_s:.2f} µs of a core; {per_attempt:.0f} in an attempt:"
        f" {100 * event_s * per_attempt / step_s:.3f} % of a step if all are traced,"
        f" {2 * event_s * per_attempt / step_s:.4f} % with every 50th",
        f"traced over untraced: {ratio:.4f} (95 %: {low:.4f} to {high:.4f})",
        *(
            f"{name}: {cpu_s:.2f} s of a core, {100 * cpu_s / total_s:.2f} % of the run"
            for name, cpu_s in sorted(spent.items())
        ),
    ]
    sys.stdout.write("\n".join(report) + "\n")


if __name__ == "__main__":
    main()
