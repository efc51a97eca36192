"""From a kill to the first step of a later epoch, and from the command to the first step: with
preloaded processes and without.

    python -m bench.recovery [--config examples/tiny.yaml] [--rounds 5] [--out FILE]

Each round trains once with ``cluster.preload`` and once without, one after the other, and kills one
process of each kind in turn; ``train`` is the command itself, which is then given again. Medians of
the rounds are printed. On a busy machine only the ratios of one call count.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

KINDS = ("memoryd", "optimizerd", "schedulerd", "worker", "node", "train")
SMALL = (
    "model.hf.hidden_size=64",
    "model.hf.intermediate_size=176",
    "model.hf.num_hidden_layers=8",
    "model.hf.num_attention_heads=4",
    "model.hf.num_key_value_heads=4",
    "data.sequence_length=32",
    "train.steps=100000",
    "cluster.threads_per_worker=1",
)
"""Steps take little: what is measured is what lies between them."""
DEADLINE_S = 120.0
SETTLED_S = 3.0
"""So long a run trains before the next kill: what was started beside it has come to its end."""


class MeasuredRun:
    """One training in a directory of its own. Call :meth:`end` in any case."""

    def __init__(self, config: Path, run_dir: Path, preload: bool) -> None:
        self.run_dir = run_dir
        settings = (*SMALL, f"cluster.preload={str(preload).lower()}")
        chosen = [word for setting in settings for word in ("--set", setting)]
        self._command = [sys.executable, "-m", "penstock.client.main", "train", str(config)]
        self._command += [*chosen, "--run-dir", str(run_dir)]
        self._began_s = 0.0
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._began_s = time.time()
        return subprocess.Popen(
            self._command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def newest(self) -> dict[str, float]:
        """Returns the newest line of metrics; step 0 of epoch 0 before the first."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        whole = [line for line in lines if line.endswith("}")]
        return json.loads(whole[-1]) if whole else {"epoch": 0, "step": 0, "time": 0.0}

    def first_after(self, epoch: int) -> float:
        """Waits for the first step of a later epoch; returns when it was committed."""
        deadline = time.monotonic() + DEADLINE_S
        while (line := self.newest())["epoch"] <= epoch:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step of an epoch after {epoch} in {DEADLINE_S:g} s")
            time.sleep(0.01)
        for text in (self.run_dir / "metrics.jsonl").read_text().splitlines():
            line = json.loads(text)
            if line["epoch"] > epoch:
                return float(line["time"])
        raise AssertionError("the line was there")

    def started_s(self) -> float:
        """Waits for the first step; returns how long after the command it was committed."""
        return self.first_after(0) - self._began_s

    def recovered_s(self, kind: str) -> float:
        """Kills a process of ``kind``; returns how long after that a step was committed."""
        epoch = int(self.newest()["epoch"])
        victim = self.process.pid if kind == "train" else self._pid_of(kind)
        killed_s = time.time()
        os.kill(victim, signal.SIGKILL)
        if kind == "train":
            self.process.wait()
            self.process = self._start()
        return self.first_after(epoch) - killed_s

    def _pid_of(self, kind: str) -> int:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_text().split("\0")
                except OSError:
                    continue  # ended meanwhile
                if kind in words and any(str(self.run_dir) in word for word in words):
                    return int(entry.name)
        raise ProcessLookupError(f"{self.run_dir} has no {kind}")

    def end(self) -> None:
        """Stops the run at once, and waits for its memory to be given back."""
        self.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        clean = [sys.executable, "-m", "penstock.client.main", "doctor", "--clean", "--force"]
        clean += ["--run-dir", str(self.run_dir)]
        subprocess.run(clean, check=False, stdout=subprocess.DEVNULL)


def measure(config: Path, rounds: int, kinds: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Returns seconds of all rounds, by what was done and ``preloaded`` or ``spawned``."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(rounds):
        for preload in (True, False) if number % 2 else (False, True):
            how = "preloaded" if preload else "spawned"
            with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
                run = MeasuredRun(config, Path(directory) / "run", preload)
                try:
                    found["first start"][how].append(run.started_s())
                    for kind in kinds:
                        time.sleep(SETTLED_S)
                        found[kind][how].append(run.recovered_s(kind))
                finally:
                    run.end()
            show(found)
    return found


def show(found: dict[str, dict[str, list[float]]]) -> None:
    """Prints medians so far, and the extremes of what is preloaded."""
    lines = [f"{'from':12}  spawned  preloaded  ratio  (least, most)"]
    for kind, by in found.items():
        if len(by) == 2:
            plain, fast = statistics.median(by["spawned"]), statistics.median(by["preloaded"])
            extremes = f"({min(by['preloaded']):.2f}, {max(by['preloaded']):.2f})"
            lines.append(f"{kind:12} {plain:7.2f}s {fast:9.2f}s {plain / fast:6.2f}  {extremes}")
    sys.stdout.write("\n".join(lines) + "\n\n")
    sys.stdout.flush()


def main() -> None:
    """Measures, prints, and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("examples/tiny.yaml"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = measure(given.config, given.rounds, given.kinds.split(","))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
