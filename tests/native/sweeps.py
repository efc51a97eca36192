"""Prints digests of sweeps by each path of a C++ module: ``python -S sweeps.py MODULE``.

Needs no package: numpy does not run on an emulated processor with few instructions.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import mmap
import os
import random
import sys
from pathlib import Path
from typing import Any

NUM_ELEMENTS = 4096 + 48
OPTIMIZERS = {"adamw": 2, "adam": 2}
"""Optimizers and the number of their arrays."""


def module_of(path: str) -> Any:
    """Returns the module ``_native`` of a file."""
    spec = importlib.util.spec_from_file_location("penstock._native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def floats(numbers: random.Random, scale: float = 1.0) -> memoryview:
    """Returns random floats, at the start of a page of memory."""
    values = memoryview(mmap.mmap(-1, 4 * NUM_ELEMENTS)).cast("f")
    for index in range(NUM_ELEMENTS):
        values[index] = numbers.random() * scale
    return values


def halves(values: memoryview) -> memoryview:
    """Returns the upper halves of floats: bf16."""
    bits = memoryview(mmap.mmap(-1, 2 * NUM_ELEMENTS)).cast("H")
    bits[:] = values.cast("B").cast("H")[1::2]
    return bits


def digest(native: Any, pool: Any, optimizer: str, dtype: Any, bf16: bool) -> str:
    """Returns a digest of state, weights and status after one ``advance``."""
    numbers = random.Random(5)
    master, pending, grads = (floats(numbers) for _ in range(3))
    arrays = [floats(numbers, 0.01) for _ in range(OPTIMIZERS[optimizer])]
    is_float = dtype == native.WeightsDtype.FLOAT32
    weights = memoryview(mmap.mmap(-1, 4 * NUM_ELEMENTS))
    weights = weights.cast("f") if is_float else weights[: 2 * NUM_ELEMENTS].cast("H")
    hypers = [
        native.Hyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, step=step, optimizer=optimizer)
        for step in (4, 5)
    ]
    status = native.advance(
        pool,
        master=master,
        arrays=arrays,
        pending_grads=[halves(pending) if bf16 else pending],
        pending_hyper=hypers[0],
        grads=[halves(grads) if bf16 else grads],
        hyper=hypers[1],
        weights=weights,
        weights_dtype=dtype,
        ranges=[(0, 1024, 0.1, 1.0), (1024, NUM_ELEMENTS, 0.0, 0.5)],
        undo=memoryview(mmap.mmap(-1, native.undo_bytes(4))),
    )
    written = (memory.tobytes() for memory in (master, *arrays, weights))
    return hashlib.sha256(b"".join([*written, status.sum_squares.hex().encode()])).hexdigest()


def main(path: str) -> None:
    """Prints a JSON object: the digest of each case by each path that this processor has."""
    native = module_of(path)
    outcomes: dict[str, dict[str, str]] = {}
    for name in native.available_vector_paths():
        with native.Pool([min(os.sched_getaffinity(0))], vector_path=name) as pool:
            outcomes[name] = {
                f"{optimizer} {dtype} {'bf16' if bf16 else 'fp32'}": digest(
                    native, pool, optimizer, dtype, bf16
                )
                for optimizer in OPTIMIZERS
                for dtype in native.WeightsDtype
                for bf16 in (False, True)
            }
    sys.stdout.write(json.dumps({"chosen": native.vector_path(), "outcomes": outcomes}))


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()))
