"""What being watched by Prometheus costs a run: CPU time of a scrape, of each process.

    python -m bench.scraping [CONFIG] [--scrapes 100] [--interval 5]

Starts the run of CONFIG (default: examples/tiny.yaml) in a temporary folder, scrapes each of its
nodes ``--scrapes`` times, as fast as metricsd asks processes anew, and compares what the threads
that hand out metrics used (``penstock_metrics_cpu_seconds_total``), and metricsd (all of its CPU
time beyond that when nobody asks), with the step's time, if a scrape comes every ``--interval``
seconds. In the processes of a step a page is made by Python and holds its interpreter lock, so CPU
time is also what a scrape can hold them up by; metricsd's is another core's where there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from penstock.daemons.monitor.metrics.collection import FRESH_S
from penstock.daemons.monitor.metrics.targets import addresses

SAMPLES = "penstock_metrics_cpu_seconds_total"
PROCESS = "penstock_process_cpu_seconds_total"
METRICSD = "metricsd."


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeCost:
    """CPU seconds of one scrape of all nodes: of each process that hands out its page, and of all
    metricsd together. ``page_bytes``: of all nodes. ``step_s``: mean of the steps meanwhile.
    """

    process_s: Mapping[str, float]
    metricsd_s: float
    page_bytes: int
    step_s: float

    def share(self, interval_s: float) -> float:
        """Returns CPU seconds per second of the run, if it is scraped every ``interval_s``."""
        return (sum(self.process_s.values()) + self.metricsd_s) / interval_s


def scrape_cost(run_dir: Path, scrapes: int) -> ScrapeCost:
    """Scrapes the nodes of a living run, and says what that cost."""
    urls = tuple(addresses(run_dir).values())
    quiet = scrapes * FRESH_S / 2
    before, _ = _read(urls)
    time.sleep(quiet)
    idle, _ = _read(urls)
    begun_s = time.monotonic()
    for _ in range(scrapes - 1):
        time.sleep(FRESH_S)
        _read(urls)
    time.sleep(FRESH_S)
    after, page_bytes = _read(urls)
    wall_s = time.monotonic() - begun_s
    process_s = {
        process: (after[SAMPLES, process] - idle[SAMPLES, process]) / scrapes
        for name, process in after
        if name == SAMPLES and (SAMPLES, process) in idle
    }
    daemons = [p for name, p in after if name == PROCESS and p.startswith(METRICSD)]
    at_rest = sum(idle[PROCESS, p] - before[PROCESS, p] for p in daemons) / quiet
    used = sum(after[PROCESS, p] - idle[PROCESS, p] for p in daemons)
    count, seconds = (
        sum(value for (name, _), value in after.items() if name == f"penstock_attempt_seconds_{n}")
        - sum(v for (name, _), v in idle.items() if name == f"penstock_attempt_seconds_{n}")
        for n in ("count", "sum")
    )
    return ScrapeCost(
        process_s=process_s,
        metricsd_s=max(0.0, used - at_rest * wall_s) / scrapes,
        page_bytes=page_bytes,
        step_s=seconds / count if count else float("nan"),
    )


def _read(urls: tuple[str, ...]) -> tuple[dict[tuple[str, str], float], int]:
    """Returns (name, process) -> value of all samples, and the bytes of all pages."""
    found: dict[tuple[str, str], float] = {}
    total = 0
    for url in urls:
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        total += len(text)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name, sample.labels["process"]] = sample.value
    return found, total


@contextlib.contextmanager
def _running(config: Path, folder: Path) -> Iterator[Path]:
    """Trains for as long as the context lasts; yields the run directory after the second step."""
    run_dir = folder / "run"
    command = [sys.executable, "-m", "penstock.client.main", "train", str(config)]
    command += ["--run-dir", str(run_dir), "--set", "train.steps=1000000"]
    with (folder / "console").open("wb") as console:
        process = subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT)
    try:
        lines = run_dir / "metrics.jsonl"
        while not lines.exists() or lines.read_text().count("\n") < 2:
            if process.poll() is not None:
                raise SystemExit((folder / "console").read_text())
            time.sleep(0.2)
        yield run_dir
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGINT)
        process.wait(60)


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", nargs="?", type=Path, default=Path("examples/tiny.yaml"))
    parser.add_argument("--scrapes", type=int, default=100)
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between scrapes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, _running(given.config, Path(folder)) as run_dir:
        cost = scrape_cost(run_dir, given.scrapes)
    print("| process | CPU of a scrape |\n| --- | --- |")
    for process, seconds in sorted(cost.process_s.items()):
        print(f"| {process} | {1e3 * seconds:.2f} ms |")
    print(f"| metricsd, all nodes | {1e3 * cost.metricsd_s:.2f} ms |")
    a_step_s = cost.share(given.interval) * cost.step_s
    print(
        f"\n{cost.page_bytes / 1e3:.0f} kB; scraped every {given.interval:g} s:"
        f" {1e3 * a_step_s:.3f} ms of CPU time a step of {1e3 * cost.step_s:.0f} ms,"
        f" {cost.share(given.interval):.3%} of a core"
    )


if __name__ == "__main__":
    main()
