"""Rates of the optimizer's sweeps on this machine, measured with the native kernels.

The sweeps run over shared memory, on as many cores as the optimizer of a node will have.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from penstock import _native
from penstock.config.schema import Config
from penstock.protocol.plan.step import WEIGHTS_DTYPES, OptimizerStep
from penstock.protocol.run.hardware.placement import place
from penstock.shm.memory import NUMPY_TYPES
from penstock.shm.table import DType

NUM_ELEMENTS = 1 << 24
"""Parameters of a measurement: their arrays, some 300 MB, exceed caches of processors."""

_ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRates:
    """Rates of the sweeps of ``native/sweeps.h``, in parameters/s."""

    advance: float
    preview: float
    settle: float
    in_place: float


def measure_optimizer(config: Config, *, num_elements: int = NUM_ELEMENTS) -> OptimizerRates:
    """Returns the rates of the four sweeps over one block of ``num_elements`` parameters, with the
    configured types, on the cores of the configuration's first node.

    Raises:
        ConfigError: the cores that the configuration names are not there.
    """
    with _native.Pool(place(config, 0).optimizer) as pool:
        seconds = {
            name: median_seconds(run) for name, run in _sweeps(pool, config, num_elements).items()
        }
    return OptimizerRates(**{name: num_elements / took_s for name, took_s in seconds.items()})


def _sweeps(
    pool: _native.Pool, config: Config, num_elements: int
) -> dict[str, Callable[[], object]]:
    grads_dtype = NUMPY_TYPES[config.optimizer.grad_dtype]
    state: dict[str, Any] = {
        "master": _shared(num_elements, np.float32),
        "arrays": [
            _shared(num_elements, np.float32) for _ in config.optimizer.name.traits.state_arrays
        ],
        "ranges": [(0, num_elements, 0.1, 1.0)],
    }
    narrow = config.model.dtype is not DType.FP32
    out: dict[str, Any] = {
        "weights": _shared(num_elements, np.uint16 if narrow else np.float32),
        "weights_dtype": WEIGHTS_DTYPES[config.model.dtype],
    }
    step = OptimizerStep(version=1000, coefficient=1.0, learning_rate=1e-4, bias_step=1000)
    hyper = step.hyper(config.optimizer)
    pending: list[Any] = [_shared(num_elements, grads_dtype)]
    grads: list[Any] = [_shared(num_elements, grads_dtype)]
    undo = _shared(_native.undo_bytes(pool.num_threads), np.uint8)
    return {
        "advance": lambda: _native.advance(
            pool,
            pending_grads=pending,
            pending_hyper=hyper,
            grads=grads,
            hyper=hyper,
            undo=undo,
            **out,
            **state,
        ),
        "preview": lambda: _native.preview(pool, grads=grads, hyper=hyper, **out, **state),
        "settle": lambda: _native.settle(pool, grads=grads, hyper=hyper, undo=undo, **state),
        "in_place": lambda: _native.step_in_place(pool, grads=grads, hyper=hyper, **out, **state),
    }


def _shared(num_elements: int, dtype: DTypeLike) -> NDArray[Any]:
    """Returns a zeroed 1-D array in shared memory, its pages touched."""
    size = num_elements * np.dtype(dtype).itemsize
    array: NDArray[Any] = np.frombuffer(mmap.mmap(-1, size), dtype=dtype)
    array.fill(0)  # touches every page, so that no measurement pays for faults
    return array


def median_seconds(run: Callable[[], object]) -> float:
    """Returns the median seconds of seven runs, after one that warms caches up."""
    run()
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
