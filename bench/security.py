"""What TLS and CURVE cost a step of the example on two nodes, beside the same run without.

    python -m bench.security [--rounds 10] [--steps 12]

Both runs are there all the time, and take turns: one is paused while the other makes some steps, so
that what else runs on the machine disturbs both alike. Two nodes of one worker and one thread each,
on 127.0.0.1 and 127.0.0.2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.host.errors import PenstockError
from penstock.protocol.security.authority import make
from penstock.protocol.wire.control import ControlClient

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny.yaml"
NODES = "[{name: a, host: 127.0.0.1}, {name: b, host: 127.0.0.2}]"
START_TIMEOUT_S = 240.0
STEP_TIMEOUT_S = 120.0


class Run:
    """A run that goes on when it is told to."""

    def __init__(self, root: Path, security: str, keys: Path) -> None:
        self.run_dir = root / security
        settings = {
            "run.dir": str(self.run_dir),
            "train.steps": "100000",
            "cluster.nodes": NODES,
            "cluster.workers": "1",
            "cluster.threads_per_worker": "1",
            "cluster.security": security,
            "cluster.keys": str(keys),
        }
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        with (root / f"{security}.txt").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock.client.main", "train", str(EXAMPLE), *words],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def pause(self) -> None:
        """Waits until the run stands still; at first until it runs at all."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            try:
                with ControlClient.for_run(self.run_dir) as client:
                    client.pause()
                    if client.status().phase == "paused":
                        return
            except PenstockError:
                time.sleep(0.5)  # it is being prepared
            time.sleep(0.05)
        raise TimeoutError(f"{self.run_dir}: not paused within {START_TIMEOUT_S:g} s")

    def step_s(self, steps: int) -> float:
        """Returns the median time of so many steps, the first not counted, in seconds."""
        before, deadline_s = len(self._lines()), time.monotonic() + STEP_TIMEOUT_S
        with ControlClient.for_run(self.run_dir) as client:
            client.resume()
        while len(self._lines()) < before + steps + 1:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self.run_dir}: no {steps} steps in {STEP_TIMEOUT_S:g} s")
            time.sleep(0.02)
        self.pause()
        return statistics.median(line["seconds"] for line in self._lines()[before + 1 :])

    def _lines(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def close(self) -> None:
        """Stops the run."""
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        make(root / "keys", "tiny", ["a", "b"])
        runs = {}
        for security in ("none", "tls"):
            runs[security] = Run(root, security, root / "keys")
            stack.callback(runs[security].close)
            runs[security].pause()
        times: dict[str, list[float]] = {security: [] for security in runs}
        for number in range(given.rounds):
            order = list(runs) if number % 2 else list(runs)[::-1]
            for security in order:
                times[security].append(runs[security].step_s(given.steps))
        ratios = sorted(t / n for n, t in zip(times["none"], times["tls"], strict=True))
    for security, found in times.items():
        print(f"{security:5} {statistics.median(found) * 1e3:7.1f} ms a step")
    print(
        f"ratio of medians, round by round: {statistics.median(ratios):.3f}"
        f" (from {ratios[0]:.3f} to {ratios[-1]:.3f}, {given.rounds} rounds)"
    )


if __name__ == "__main__":
    main()
