"""Cost of copies of weights while training goes on, and of ``cp``: seconds, and steps a second.

    python -m bench.weights [--hidden 1024] [--layers 8] [--rounds 5] [--folder DIR] [--json]

One run trains in ``--folder`` on two CPU workers, on cores that copies need, too. After a warm-up,
each round measures in turn, on the same disk and during the same training:

* ``plain``: steps a second without a copy, for as long as the longer of the two copies took;
* ``copy``: a copy of the newest weights into a folder that was laid out before. ``copy_s`` are
  memoryd's seconds, forced to disk, without the wait for blocks to settle; ``call_s`` are those of
  the whole call, with the attempt under way;
* ``cp``: the files of that copy by ``cp -r``, forced to disk by ``sync`` of each file.

Ratios compare medians of one call. ``memory`` is the growth of memoryd's private memory during the
copies.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from bench.saving import llama
from penstock.chaos.processes import command_lines
from penstock.protocol.wire.control import ControlClient

WARM_UP_STEPS = 4


def config(options: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """Returns a configuration of few tokens and many parameters: copies take long, steps do not."""
    return {
        "run": {"name": "weights", "seed": 1, "dir": str(run_dir)},
        "model": {
            "dtype": "bf16",
            "hf": llama(options),
        },
        "data": {"path": "@stdlib", "tokenizer": "byte", "sequence_length": 64},
        "train": {"steps": 10**6, "global_batch": 4, "micro_batch": 1},
        "schedule": {"scheme": "1f1b"},
        "cluster": {"workers": 2, "threads_per_worker": 1, "preload": False},
        "observability": {"metrics_port": 0},
    }


def steps_of(run_dir: Path) -> list[float]:
    """Returns the times of the run's steps."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return [entry["time"] for entry in entries if entry["phase"] == "train"]


def speed(run_dir: Path, began_s: float, ended_s: float) -> float:
    """Returns steps a second between two times, with the parts of steps at both ends."""
    times = steps_of(run_dir)

    def position(at_s: float) -> float:
        later = next(index for index, time_s in enumerate(times) if time_s > at_s)
        before_s = times[later - 1]
        return later + (at_s - before_s) / (times[later] - before_s)

    return (position(ended_s) - position(began_s)) / (ended_s - began_s)


def private_bytes(run_dir: Path) -> int:
    """Returns memoryd's memory that no other process has."""
    for pid, words in command_lines():
        if "memoryd" in words and any(Path(word).is_relative_to(run_dir) for word in words):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    raise SystemExit("no memoryd runs")


class Peak(threading.Thread):
    """Notes the most private memory of memoryd until :meth:`end`."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(daemon=True)
        self._run_dir, self._over = run_dir, threading.Event()
        self.bytes = 0

    def run(self) -> None:
        while not self._over.wait(0.02):
            self.bytes = max(self.bytes, private_bytes(self._run_dir))

    def end(self) -> int:
        """Returns the peak in bytes."""
        self._over.set()
        self.join()
        return self.bytes


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Returns the times of the begin and the end of ``work``."""
    began_s = time.time()
    work()
    return began_s, time.time()


def copied_by_cp(source: Path, target: Path) -> None:
    """Copies a folder, and forces its files to disk."""
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", *map(str, target.iterdir())], check=True)


def laid_out(run_dir: Path, folder: Path) -> None:
    """Makes the files of a copy without weights."""
    folder.mkdir()
    module = "penstock.models.checkpoints.layout"
    subprocess.run([sys.executable, "-m", module, str(run_dir), str(folder)], check=True)


def copy_seconds(run_dir: Path) -> float:
    """Returns memoryd's seconds of the last copy."""
    lines = map(json.loads, (run_dir / "logs" / "memoryd.a.jsonl").open())
    messages = [line["message"] for line in lines if line["message"].startswith("copied version")]
    return float(messages[-1].split()[4])


def measured(run_dir: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Returns medians of all rounds."""
    calls: list[tuple[float, float]] = []
    plain: list[tuple[float, float]] = []
    cps: list[tuple[float, float]] = []
    copies, growth = [], []
    num_bytes = 0
    for number in range(rounds):
        copy, other = folder / f"copy{number}", folder / "cp"
        laid_out(run_dir, copy)
        subprocess.run(["sync", "-f", str(folder)], check=True)
        before, peak = private_bytes(run_dir), Peak(run_dir)
        peak.start()
        with ControlClient.for_run(run_dir) as client:
            calls.append(timed(lambda to=copy, by=client: by.weights(to)))  # type: ignore[misc]
        growth.append(peak.end() - before)
        copies.append(copy_seconds(run_dir))
        cps.append(timed(lambda of=copy, to=other: copied_by_cp(of, to)))  # type: ignore[misc]
        num_bytes = sum(path.stat().st_size for path in copy.glob("*.safetensors"))
        shutil.rmtree(copy)
        shutil.rmtree(other)
        longer_s = max(end - begin for begin, end in (calls[-1], cps[-1]))
        plain.append(timed(lambda wait_s=longer_s: time.sleep(wait_s)))  # type: ignore[misc]
    ended_s = time.time()
    while steps_of(run_dir)[-1] < ended_s:
        time.sleep(0.1)
    median = statistics.median
    rates = {
        name: median(speed(run_dir, *times) for times in spans)
        for name, spans in (("plain", plain), ("copy", calls), ("cp", cps))
    }
    cp_s = median(end - begin for begin, end in cps)
    return {
        "bytes": num_bytes,
        "copy_s": median(copies),
        "call_s": median(end - begin for begin, end in calls),
        "cp_s": cp_s,
        "ratio": median(copies) / cp_s,
        "ratios": [copy / (end - begin) for copy, (begin, end) in zip(copies, cps, strict=True)],
        "steps_per_s": rates,
        "slowdown": 1 - rates["copy"] / rates["plain"],
        "slowdown_by_cp": 1 - rates["cp"] / rates["plain"],
        "memory_bytes": max(growth),
    }


def to_text(row: Mapping[str, Any]) -> str:
    """Returns the result in lines."""
    rates = row["steps_per_s"]
    return (
        f"{row['bytes'] / 1e6:,.0f} MB: copy {row['copy_s']:.2f} s (call {row['call_s']:.2f} s),"
        f" cp {row['cp_s']:.2f} s, ratio {row['ratio']:.3f}"
        f" (rounds: {', '.join(f'{ratio:.2f}' for ratio in row['ratios'])})\n"
        f"steps a second: {rates['plain']:.3f} without, {rates['copy']:.3f} during a copy"
        f" ({row['slowdown']:.0%} slower), {rates['cp']:.3f} during cp"
        f" ({row['slowdown_by_cp']:.0%} slower)\n"
        f"memoryd's private memory grew by {row['memory_bytes'] / 1e6:.1f} MB at most"
    )


def main() -> None:
    """Measures as the module describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run_dir, file = Path(folder) / "run", Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(config(options, run_dir)))
        words = [sys.executable, "-m", "penstock.client.main"]
        train = subprocess.Popen([*words, "train", str(file)], stdout=subprocess.DEVNULL)
        try:
            while len(steps_of(run_dir)) < WARM_UP_STEPS:
                if train.poll() is not None:
                    raise SystemExit(f"the run ended with code {train.returncode}")
                time.sleep(0.2)
            row = measured(run_dir, Path(folder), options.rounds)
        finally:
            subprocess.run([*words, "stop", "--run-dir", str(run_dir)], check=False)
            train.wait()
        sys.stdout.write((json.dumps(row) if options.json else to_text(row)) + "\n")


if __name__ == "__main__":
    main()
