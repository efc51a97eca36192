"""Others beside Penstock, on the same models and batches; the loops are in :mod:`.loops`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch

from bench.gpu.measures.loops import Step, deepspeed, fsdp, plain, roundpipe, timed
from bench.gpu.memory import waken
from bench.gpu.running import Measurement, Task
from bench.gpu.shapes import Shape, shape

_HOST_BYTES = 18
"""Of each parameter, of those that keep the state in host memory: masters, gradients, moments."""


def run(task: Task, *, of: str, steps: int, loop: Callable[[Task, Shape], Step]) -> None:
    """Takes steps of a loop, and reports the figures."""
    one = shape(of, tiny=task.tiny)
    # Read when CUDA is first used: pieces of memory grow, so that none is lost between them.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if getattr(loop, "func", loop) is not plain:
        waken(_HOST_BYTES * one.parameters, task.left_s / 4)
    torch.manual_seed(0)
    timed(task, one, loop(task, one), steps=steps)


def _row(
    name: str, deadline_s: float, of: str, steps: int, loop: Callable[[Task, Shape], Step]
) -> Measurement:
    return Measurement(
        name=f"{of} {name}", deadline_s=deadline_s, run=partial(run, of=of, steps=steps, loop=loop)
    )


COMPILED = "plain resident loop, compiled"
PLAIN, FSDP, FSDP_ONCE = "plain resident loop", "FSDP2", "FSDP2, gradients once a step"
MEASUREMENTS = (
    _row(PLAIN, 60, "4 B", 4, plain),
    _row(COMPILED, 90, "4 B", 4, partial(plain, compiled=True)),
    _row(FSDP_ONCE, 90, "4 B", 2, partial(fsdp, once=True)),
    _row(FSDP, 110, "4 B", 1, partial(fsdp, once=False)),
    _row(PLAIN, 35, "1.2 B", 6, plain),
    _row("DeepSpeed ZeRO-3", 120, "4 B", 1, partial(deepspeed, stage=3)),
    _row("DeepSpeed ZeRO-2", 120, "4 B", 1, partial(deepspeed, stage=2)),
    _row("RoundPipe, synchronous", 90, "4 B", 2, partial(roundpipe, stale=False)),
    _row("RoundPipe, one step stale", 90, "4 B", 2, partial(roundpipe, stale=True)),
    _row(PLAIN, 60, "7 B", 3, plain),
)
