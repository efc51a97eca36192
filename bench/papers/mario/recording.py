"""``python -m bench.papers.mario``: computes what takes minutes, for the page to read.

All of it is deterministic, whatever the machine, but for the seconds of the tuner.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from bench.papers.mario.paper import FIGURE_6, TABLE_5
from bench.papers.mario.testbed import CONTEXT_BYTES, KINDS, SHAPES, Run, fitted
from bench.papers.mario.tuner import tuned
from penstock.planner.cost.catalogue import GPUS, MODELS
from penstock.planner.cost.frameworks import IDEAL, MEGATRON_DEEPSPEED, Framework
from penstock.planner.cost.language_models import LanguageModel
from penstock.protocol.plan.plan import StageRange

RECORD = Path(__file__).parents[1] / "data" / "mario.json"
_LIMIT_GB = GPUS["A100-40"].memory_bytes / 1e9
_SEQUENCE_STEP, _HIDDEN_STEP = 64, 256


def record(parts: tuple[str, ...]) -> None:
    """Computes the parts that are named, or all; the others stay as they were recorded."""
    found = load() if RECORD.exists() else {}
    makers = {
        "rates": rates,
        "parameters": largest_models,
        "sequences": longest_sequences,
        "cuts": uneven_cuts,
        "tuner": tuner,
    }
    for name, make in makers.items():
        if not parts or name in parts:
            sys.stderr.write(f"{name}\n")
            found[name] = make()
            text = json.dumps(found, indent=1)
            RECORD.write_text(text + "\n", encoding="utf-8")


def load() -> dict[str, Any]:
    """Returns what was recorded."""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def rates() -> dict[str, Any]:
    """Returns rates and memory of table 5 on 32 GPUs and of figure 6 on 8, by framework."""
    slow_host = fitted()
    rows = [
        row
        for framework in (IDEAL, MEGATRON_DEEPSPEED, slow_host)
        for devices, cases in ((32, TABLE_5), (8, FIGURE_6))
        for model, shape in cases
        for row in _bars(model, shape, devices, framework)
    ]
    return {"launch_us": round(slow_host.launch_s * 1e6), "rows": rows}


def _bars(model: str, shape: str, devices: int, framework: Framework) -> Iterator[Any]:
    for kind in KINDS:
        run = Run(model=model, shape=shape, kind=kind, framework=framework, devices=devices)
        key = {"model": model, "shape": shape, "kind": kind, "devices": devices}
        yield {**key, "framework": framework.name, "rate": run.rate, "memory_gb": run.memory_gb}


def largest_models() -> dict[str, Any]:
    """Returns figure 8: by shape and kind the billions of parameters of the largest model of 64
    layers that fits 16 GPUs.
    """
    sizes: dict[str, float] = {}
    for shape in SHAPES:
        for kind in KINDS:

            def fits(hidden: int, shape: str = shape, kind: str = kind) -> bool:
                run = Run(
                    model=_wide(hidden),
                    shape=shape,
                    kind=kind,
                    framework=MEGATRON_DEEPSPEED,
                    devices=16,
                    global_batch=64,
                )
                return _fits(run)

            hidden = _most(fits, 512, _HIDDEN_STEP)
            sizes[f"{shape}-{kind}"] = _wide(hidden).num_parameters / 1e9 if hidden else 0.0
    return sizes


def longest_sequences() -> dict[str, Any]:
    """Returns figure 9: by shape the longest sequences of GPT3-1.6B on 8 stages, without and with
    tensor parallelism of 2, and with Mario.
    """
    return {
        f"{shape} {name}": _longest(shape, tensor_parallel, kind)
        for shape in SHAPES
        for name, tensor_parallel, kind in (
            ("PP8 TP1", 1, "base"),
            ("PP8 TP2", 2, "base"),
            ("PP8 TP2 Mario", 2, "ovlp"),
        )
    }


def _longest(shape: str, tensor_parallel: int, kind: str) -> int:
    def fits(sequence: int) -> bool:
        run = Run(
            model="mario-gpt3-1.6b",
            shape=shape,
            kind=kind,
            framework=MEGATRON_DEEPSPEED,
            devices=8,
            global_batch=2 * 8 * (2 if shape == "W" else 1),
            sequence=sequence,
            tensor_parallel=tensor_parallel,
            micro_batch_given=1,
        )
        return _fits(run)

    return _most(fits, 1024, _SEQUENCE_STEP)


def _fits(run: Run) -> bool:
    return run.memory_gb[1] + CONTEXT_BYTES / 1e9 <= _LIMIT_GB


def _most(fits: Callable[[int], bool], first: int, step: int) -> int:
    """Returns the largest of first, first + step, … that fits, where smaller ones do; else 0."""
    if not fits(first):
        return 0
    low, high = 0, 1
    while fits(first + high * step):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(first + middle * step) else (low, middle)
    return first + low * step


def _wide(hidden: int) -> LanguageModel:
    return replace(
        MODELS["mario-gpt3-1.6b"],
        name=f"mario-gpt3-64x{hidden}",
        num_layers=64,
        num_heads=32,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        key_value_size=hidden,
    )


def uneven_cuts() -> dict[str, Any]:
    """Returns rates of section 7.1: GPT3-1.6B on 8 GPUs with k layers more from stage to stage, by
    k without and with checkpointing, over those of even stages.
    """
    found: dict[str, Any] = {}
    for kind in ("base", "ovlp"):
        rate = {k: _uneven(kind, k).rate for k in (-2, -1, 0, 1, 2)}
        found[kind] = {str(k): rate[k] / rate[0] for k in rate}
    return found


def _uneven(kind: str, k: int) -> Run:
    run = Run(
        model="mario-gpt3-1.6b", shape="V", kind=kind, framework=MEGATRON_DEEPSPEED, devices=8
    )
    steps = (-4, -3, -2, -1, 1, 2, 3, 4)  # eight stages have no middle one
    ends = [0, *accumulate(16 + k * step for step in steps)]
    # The embedding goes with the first stage, the head with the last.
    stages = tuple(
        StageRange(start=start + (start > 0), stop=stop + 1 + (stop == 128), device=device)
        for device, (start, stop) in enumerate(pairwise(ends))
    )
    layout = replace(run.base.layout, forward=stages, backward=stages)
    # The context asks the schedule where stages begin, so the cut has to be there first.
    vars(run)["base"] = replace(run.base, layout=layout)
    return run


def tuner() -> dict[str, Any]:
    """Returns figure 11: the best of the paper's space and of ours, and how long both took."""
    machine = f"{os.cpu_count()} cores ({platform.machine()})"
    return {"machine": machine, **tuned()}
