"""Kills, and two workers on one GPU: no step is lost or taken twice, and the bytes are the same.

A run that nobody disturbs and one whose worker is killed twice (SIGKILL) train alike and save;
their saved states are compared file by file. On a GPU kernels whose sums depend on timing may
differ in the last bits: then ``same_bytes`` is false, and ``largest_difference`` says by how much.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file

from bench.gpu.measures.trained import Recipe, kill, start, train_steps
from bench.gpu.running import Measurement, Task
from bench.gpu.shapes import TINY, Shape

SMALL = Shape(
    name="small",
    layers=8,
    hidden=512,
    intermediate=1408,
    heads=8,
    vocabulary=1000,
    sequence=512,
    micro_batch=4,
    global_batch=16,
)
_POLL_S = 0.05
_RESERVE_S = 4.0


def run(task: Task, *, schedule: dict[str, Any], workers: int, kills: int) -> None:
    """Trains twice, once with kills spread over the run."""
    one, steps = (TINY, 6) if task.tiny else (SMALL, 16)
    kills = min(kills, 1) if task.tiny else kills
    states = {}
    for name, times in (("undisturbed", 0), ("killed", kills)):
        folder = task.folder / name
        folder.mkdir()
        recipe = Recipe(
            shape=one,
            device=task.device,
            steps=steps,
            warmup_steps=0,
            workers=workers,
            schedule=schedule,
            trace=False,
        )
        pauses = _train(task, recipe, folder, times)
        numbers = [line["step"] for line in train_steps(folder / "run")]
        task.say(
            **{
                f"{name}_steps": len(numbers),
                f"{name}_each_once": numbers == list(range(1, steps + 1)),
                f"{name}_pauses_s": [round(pause, 2) for pause in pauses],
            }
        )
        states[name] = folder / "run" / "state"
    task.say(**compared(states["undisturbed"], states["killed"]))


def _train(task: Task, recipe: Recipe, folder: Path, kills: int) -> list[float]:
    """Trains to the end; the first worker is killed so many times. Returns, for each, the seconds
    from the kill to the first commit of the epoch after it.

    Raises:
        RuntimeError: the run failed, or time was over; has what it said.
    """
    recipe.shape.tokens(recipe.steps + 2).tofile(folder / "tokens.bin")
    configuration = recipe.configuration(replace(task, folder=folder))
    configuration["train"]["steps"] = recipe.steps
    configuration["run"]["seed"] = 7
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(configuration), encoding="utf-8")
    moments = [recipe.steps * (number + 1) // (kills + 1) for number in range(kills)]
    pauses, killed_s, epoch = [], 0.0, 0
    with (folder / "said").open("wb") as said:
        process = start(file, said)
        try:
            while process.poll() is None:
                done = train_steps(folder / "run")
                if killed_s and done[-1]["epoch"] > epoch:
                    pauses.append(time.monotonic() - killed_s)
                    killed_s = 0.0
                due = moments and not killed_s and len(done) >= moments[0]
                if due and (pid := worker_of(folder)) is not None:
                    os.kill(pid, signal.SIGKILL)
                    moments.pop(0)
                    killed_s, epoch = time.monotonic(), done[-1]["epoch"]
                if task.left_s < _RESERVE_S:
                    break
                time.sleep(_POLL_S)
            code = process.poll()
        finally:
            kill(process, folder)
    if code != 0:
        text = (folder / "said").read_text(encoding="utf-8", errors="replace").strip()
        raise RuntimeError(f"{'time was over' if code is None else f'exit code {code}'}: {text}")
    return pauses


def worker_of(folder: Path) -> int | None:
    """Returns the process of the run's first worker."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "worker" in words and any(str(folder) in word for word in words):
            if "--device" in words and words[words.index("--device") + 1] == "0":
                return int(entry.name)
    return None


def compared(one: Path, other: Path) -> dict[str, Any]:
    """Returns whether the last saved states are the same, and the largest difference."""
    states = [max(folder.glob("step-*")) for folder in (one, other)]
    names = [sorted(file.name for file in state.glob("*.safetensors")) for state in states]
    largest, same = 0.0, names[0] == names[1]
    for name in names[0] if same else []:
        here, there = (load_file(state / name) for state in states)
        for key, array in here.items():
            same = same and array.tobytes() == there[key].tobytes()
            wide = [np.asarray(a, np.float64) for a in (array, there[key])]
            largest = max(largest, float(np.abs(wide[0] - wide[1]).max(initial=0.0)))
    return {"same_bytes": same, "largest_difference": largest, "files": len(names[0])}


_STREAMED = {"scheme": "spipe", "forward_stages": 2, "backward_stages": 4}
_TWO = {"scheme": "1f1b", "recompute": "full"}
MEASUREMENTS = (
    Measurement(
        name="two workers on one GPU, one killed twice",
        deadline_s=80,
        run=partial(run, schedule=_TWO, workers=2, kills=2),
    ),
    Measurement(
        name="streamed weights, the worker killed twice",
        deadline_s=60,
        run=partial(run, schedule=_STREAMED, workers=1, kills=2),
    ),
)
