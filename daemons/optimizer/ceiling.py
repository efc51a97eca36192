"""Measures the memory bandwidth available to the optimizer: a sweep without arithmetic, on the same
cores.

Sweeps are compared with it, here and in ``bench/optimizer.py``. It is measured once for a run
directory, node and set of cores, before the node joins the run. It is skipped unless the state is
much larger than caches and than the measurement's memory: otherwise memory is no limit.
"""

from __future__ import annotations

import json
import logging
import mmap
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock import _ceiling
from penstock.host.errors import PenstockError
from penstock.host.files import DAMAGED, parse_json, write_atomically
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import MemorySpec

LEAST_STATE_BYTES = 4 << 30
NUM_ELEMENTS = 1 << 24
"""Elements of the swept block: 268 MB with 16-bit gradients and weights."""
ROUNDS = 3

_log = logging.getLogger(__name__)


def ceiling_of(run_dir: Path, spec: MemorySpec, cores: Sequence[int]) -> float | None:
    """Returns the bytes per second that ``cores`` move in a preview without arithmetic, as measured
    now or by an earlier optimizerd of this node; None where the node's state is small.
    """
    if spec.layout.sizes.get(SegmentKind.STATE, 0) < LEAST_STATE_BYTES:
        return None
    path = run_dir / f"ceiling-{spec.node_name}.json"
    try:
        known = parse_json(path.read_bytes())
        if known["cores"] == list(cores):
            return float(known["bytes_per_second"])
    except (OSError, *DAMAGED):
        pass  # there is none, or it makes no sense: measured again
    ceiling = measure_ceiling(cores)
    text = json.dumps({"cores": list(cores), "bytes_per_second": round(ceiling)})
    try:
        write_atomically(path, text)
    except (OSError, PenstockError) as error:
        _log.warning("the next optimizerd measures memory again: %s", error)
    return ceiling


def measure_ceiling(cores: Sequence[int], num_elements: int = NUM_ELEMENTS) -> float:
    """Returns bytes per second, of the fastest of a few rounds."""

    def array(dtype: type[np.generic]) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        mapping = mmap.mmap(-1, num_elements * np.dtype(dtype).itemsize)  # aligned to a page
        array = np.frombuffer(mapping, dtype=dtype)
        array.fill(0)
        return array

    arrays = {
        "master": array(np.float32),
        "arrays": [array(np.float32), array(np.float32)],
        "ranges": [(0, num_elements, 0.0, 1.0)],
        "grads": [array(np.uint16)],
        "weights": array(np.uint16),
    }
    hyper = _ceiling.Hyper(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, step=1)
    times_s = []
    with _ceiling.Pool(list(cores)) as pool:
        for _ in range(1 + ROUNDS):
            start_s = time.perf_counter()
            _ceiling.preview(
                pool, hyper=hyper, weights_dtype=_ceiling.WeightsDtype.BFLOAT16, **arrays
            )
            times_s.append(time.perf_counter() - start_s)
    return num_elements * (3 * 4 + 2 + 2) / min(times_s[1:])
