"""What a save costs: how long steps wait for it, and how fast it is beside ``cp``.

    python -m bench.saving [--hidden 512] [--layers 6] [--steps 24] [--every 6] [--rounds 1]
                           [--devices cpu emulated] [--disks real emulated]
                           [--slow-mb-per-s 40] [--folder DIR] [--json]

Workers compute on the cores that a save needs, too (``cpu``), or are *emulated devices*, which
leave them alone as GPUs do, with about as much state by default. Each round trains with each kind
of devices twice into ``--folder``: on its disk as it is, and on an *emulated disk*, whose every
write also takes the time of ``--slow-mb-per-s`` (a ``sitecustomize`` around
``daemons/memory/disk.py``). Of each run:

* ``step`` is the median time between decisions of steps that no save touches, ``tail`` the median
  of ``optimizer_tail_seconds``;
* ``stall`` is what the steps from a save's start to its end took longer than that, a save; beside
  it ``bound``: max(tail, write - step);
* ``write`` is the median of memoryd's writing during training, ``blocking`` what the last save took
  that all waits for, as every save was before saves went on beside training;
* ``cp`` copies the same files to the same disk and syncs them, right after the run.

On a busy machine only the ratios of one call count.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

SLOW_DISK = """
import os, threading, time

if "memoryd" in " ".join(getattr(__import__("sys"), "orig_argv", ())):
    from penstock.daemons.memory.disk import Disk

    _write, _lock, _rate = Disk.write, threading.Lock(), float(os.environ["BENCH_MB_PER_S"]) * 1e6

    def _slowly(self, file, content):
        _write(self, file, content)
        with _lock:  # one disk
            time.sleep(len(content) / _rate)

    Disk.write = _slowly
"""


EMULATED = {
    "model": {"dtype": "fp16"},
    "data": {"path": "@stdlib", "tokenizer": "byte", "sequence_length": 1024},
    "optimizer": {"grad_dtype": "bf16"},
    "schedule": {"scheme": "spipe", "forward_stages": 8, "backward_stages": 24},
    "cluster": {
        "workers": 4,
        "device": "emulated:analytic:V100-PCIE-32:spipe-10b",
        "preload": False,
    },
    "emulation": {"scale": "1/500", "time_scale": 0.02},
}


def llama(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the configuration of a model of ``--hidden`` and ``--layers``."""
    return {
        "model_type": "llama",
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 64,
    }


def config(options: argparse.Namespace, run_dir: Path, devices: str) -> dict[str, Any]:
    """Returns a configuration of few tokens and many parameters: saves take long, steps do not."""
    computed = {
        "run": {"name": "saving", "seed": 1, "dir": str(run_dir)},
        "model": {
            "dtype": "fp32",
            "hf": llama(options),
        },
        "data": {"path": "@stdlib", "tokenizer": "byte", "sequence_length": 64},
        "train": {
            "steps": options.steps,
            "global_batch": 4,
            "micro_batch": 1,
            "save_every": options.every,
        },
        "schedule": {"scheme": "1f1b"},
        "cluster": {"workers": 2, "threads_per_worker": 1, "preload": False},
        "observability": {"metrics_port": 0},
    }
    if devices == "cpu":
        return computed
    train = {**computed["train"], "global_batch": 16, "micro_batch": 2}
    return {**computed, **EMULATED, "train": train}


def trained(options: argparse.Namespace, folder: Path, devices: str, *, slow: bool) -> Path:
    """Trains; returns the run directory."""
    run_dir, file = folder / "run", folder / "config.yaml"
    file.write_text(yaml.safe_dump(config(options, run_dir, devices)))
    env = dict(os.environ)
    if slow:
        (folder / "sitecustomize.py").write_text(SLOW_DISK)
        env |= {"PYTHONPATH": str(folder), "BENCH_MB_PER_S": str(options.slow_mb_per_s)}
    command = [sys.executable, "-m", "penstock.client.main", "train", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return run_dir


def measured(run_dir: Path) -> dict[str, float]:
    """Returns seconds and bytes of one run, by name."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    train = [line for line in lines if line["phase"] == "train"]
    ends = {line["step"]: line["time"] for line in train}
    tail = statistics.median(line["optimizer_tail_seconds"] for line in train[2:])
    saves = list(_saves(run_dir))
    first = 2  # the first steps warm up
    gaps = {step: ends[step] - ends[step - 1] for step in ends if step > first}
    touched = {
        step
        for step in gaps
        for began_s, ended_s in saves
        if ends[step - 1] < ended_s and ends[step] > began_s
    }
    step_s = statistics.median(gap for step, gap in gaps.items() if step not in touched)
    during = [save for save in saves if save[1] < max(ends.values())]
    stalls = [
        sum(max(0.0, gaps[s] - step_s) for s in gaps if ends[s - 1] < end and ends[s] > begin)
        for begin, end in during
    ]
    writes = _write_seconds(run_dir)
    newest = max((run_dir / "state").glob("step-*"))
    num_bytes = sum(path.stat().st_size for path in newest.iterdir())
    write_s = statistics.median(writes[:-1])
    return {
        "bytes": num_bytes,
        "step_s": step_s,
        "tail_s": tail,
        "stall_s": statistics.median(stalls),
        "bound_s": max(tail, write_s - step_s),
        "write_s": write_s,
        "blocking_s": saves[-1][1] - saves[-1][0],
        "cp_s": _copied(newest, run_dir.parent / "copy"),
    }


def _said(run_dir: Path, process: str, word: str) -> list[dict[str, Any]]:
    path = run_dir / "logs" / f"{process}.jsonl"
    lines = (json.loads(line) for line in path.open())
    return [line for line in lines if word in line["message"]]


def _saves(run_dir: Path) -> list[tuple[float, float]]:
    """Returns start and end of each save from memoryd's log."""
    ends = [line["time"] for line in _said(run_dir, "schedulerd", "saved step ")]
    took = []
    for line in _said(run_dir, "memoryd.a", "saved version "):
        words = line["message"].split()
        took.append(float(words[4]) + float(words[7]))
    return [(end - seconds, end) for end, seconds in zip(ends, took, strict=True)]


def _write_seconds(run_dir: Path) -> list[float]:
    said = _said(run_dir, "memoryd.a", "saved version ")
    return [float(line["message"].split()[4]) for line in said]


def _copied(source: Path, target: Path) -> float:
    """Returns seconds that ``cp`` takes for the files, forced to disk."""
    started_s = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", "-f", str(target)], check=True)
    seconds = time.perf_counter() - started_s
    shutil.rmtree(target)
    return seconds


def to_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line for each kind of disk."""
    names = ("step_s", "tail_s", "stall_s", "bound_s", "write_s", "blocking_s", "cp_s")
    lines = [f"{'devices':>10} {'disk':>10} {'MB':>8} " + " ".join(f"{name:>10}" for name in names)]
    for row in rows:
        seconds = " ".join(f"{row[name]:>10.3f}" for name in names)
        lines.append(f"{row['devices']:>10} {row['disk']:>10} {row['bytes'] / 1e6:>8.1f} {seconds}")
    return "\n".join(lines)


def main() -> None:
    """Measures as the module describes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--slow-mb-per-s", type=float, default=40.0)
    parser.add_argument("--devices", nargs="+", default=["cpu", "emulated"])
    parser.add_argument("--disks", nargs="+", default=["real", "emulated"])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        for devices, disk in product(options.devices, options.disks):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                run_dir = trained(options, Path(folder), devices, slow=disk == "emulated")
                rows.append({"devices": devices, "disk": disk, **measured(run_dir)})
                if not options.json:
                    print(to_text(rows[-1:]), flush=True)
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
