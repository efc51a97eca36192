"""Speed of the optimizer passes beside torch's, in one run: ``bench/optimizer.py --out f.json``.

All cases update the same number of parameters with bf16 gradients and bf16 weights on the same
number of threads. They run in turns, round after round, so that what else the machine does hits all
alike; figures are medians over the rounds. Ours works in shared memory (as in /dev/shm), advance
and settle with their undo area; torch works in its own memory.

============ ====================================================================================
case         what one run does
============ ====================================================================================
preview      weights ahead of state: 16 bytes a parameter
settle       master and state, crash safe: 26 bytes
advance      settle of the pending gradients and preview of the new ones: 30 bytes
in_place     the same kernel's classic step, not crash safe: 28 bytes
fused_copy   torch.optim.AdamW(fused=True) with fp32 gradients already there, then a copy to bf16
full_chain   bf16 gradients to fp32, unscale, clip_grad_norm_, finite check, fused_copy
============ ====================================================================================
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock import _native

LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 1e-4, 0.9, 0.95, 1e-8, 0.1
INVERSE_LOSS_SCALE = 1.0 / 1024
RATIOS = {
    "advance / fused_copy": ("advance", "fused_copy", 1.2),
    "advance / full_chain": ("advance", "full_chain", 2.3),
    "advance / in_place": ("advance", "in_place", 0.8),
}

Case = Callable[[], object]


def shared_array(num_elements: int, dtype: type[np.generic]) -> NDArray[Any]:
    """A zeroed array in shared memory, its pages touched."""
    array: NDArray[Any] = np.frombuffer(
        mmap.mmap(-1, num_elements * np.dtype(dtype).itemsize), dtype=dtype
    )
    array.fill(0)
    return array


def bf16_gradients(num_params: int, seed: int) -> NDArray[np.uint16]:
    """Random gradients as bf16 bit patterns in shared memory."""
    gradients = shared_array(num_params, np.uint16)
    values = torch.randn(num_params, generator=torch.Generator().manual_seed(seed))
    gradients[:] = values.to(torch.bfloat16).view(torch.uint16).numpy()
    return gradients


def our_cases(pool: _native.Pool, num_params: int) -> dict[str, Case]:
    """Passes of the native module over one block; half of it decays."""
    half = num_params // 32 * 16
    state: dict[str, Any] = {
        "master": shared_array(num_params, np.float32),
        "exp_avg": shared_array(num_params, np.float32),
        "exp_avg_sq": shared_array(num_params, np.float32),
        "ranges": [(0, half, WEIGHT_DECAY), (half, num_params, 0.0)],
    }
    hyper = _native.Hyper(
        lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, step=1000, coefficient=INVERSE_LOSS_SCALE
    )
    out: dict[str, Any] = {
        "weights": shared_array(num_params, np.uint16),
        "weights_dtype": _native.WeightsDtype.BFLOAT16,
    }
    pending, grads = [bf16_gradients(num_params, 1)], [bf16_gradients(num_params, 2)]
    undo = shared_array(_native.undo_bytes(pool.num_threads), np.uint8)
    return {
        "preview": lambda: _native.preview(pool, grads=grads, hyper=hyper, **out, **state),
        "settle": lambda: _native.settle(pool, grads=grads, hyper=hyper, undo=undo, **state),
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
        "in_place": lambda: _native.step_in_place(pool, grads=grads, hyper=hyper, **out, **state),
    }


def torch_cases(num_params: int) -> dict[str, Case]:
    """What a PyTorch user would write, on one flat parameter (the best case for torch)."""
    parameter = torch.nn.Parameter(torch.zeros(num_params))
    parameter.grad = torch.randn(num_params)
    optimizer = torch.optim.AdamW(
        [parameter], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    weights = torch.empty(num_params, dtype=torch.bfloat16)
    published = torch.randn(num_params).to(torch.bfloat16)

    def fused_copy() -> None:
        optimizer.step()
        weights.copy_(parameter.detach())

    def full_chain() -> None:
        gradient = parameter.grad
        assert gradient is not None
        gradient.copy_(published)
        gradient.mul_(INVERSE_LOSS_SCALE)
        norm = torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        if torch.isfinite(norm).item():
            fused_copy()

    return {"fused_copy": fused_copy, "full_chain": full_chain}


def measure(cases: dict[str, Case], rounds: int) -> dict[str, list[float]]:
    """Seconds of every run, per case, after one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for round_index in range(rounds + 1):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            elapsed = time.perf_counter() - start
            if round_index > 0:
                seconds[name].append(elapsed)
    return seconds


def summarize(seconds: dict[str, list[float]], num_params: int) -> dict[str, Any]:
    """Medians in million parameters per second, and the ratios that are required."""
    speed = {name: num_params / statistics.median(runs) / 1e6 for name, runs in seconds.items()}
    ratios = {
        name: {"value": speed[ours] / speed[other], "needed": needed}
        for name, (ours, other, needed) in RATIOS.items()
    }
    return {"million_params_per_second": speed, "ratios": ratios}


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Speed of the optimizer passes beside torch's.")
    parser.add_argument("--params", type=int, default=128 * 2**20, help="a multiple of 16")
    parser.add_argument("--rounds", type=int, default=15, help="after one to warm up")
    parser.add_argument(
        "--cores",
        type=int,
        nargs="+",
        default=sorted(os.sched_getaffinity(0))[:2],
        help="one thread a core",
    )
    parser.add_argument(
        "--vector-path", default="", choices=["", *_native.available_vector_paths()]
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    return parser.parse_args()


def main() -> int:
    """Measure, print, write; exit code 1 when a required ratio is missed."""
    options = parse_arguments()
    torch.set_num_threads(len(options.cores))
    with _native.Pool(options.cores, vector_path=options.vector_path) as pool:
        cases = our_cases(pool, options.params) | torch_cases(options.params)
        seconds = measure(cases, options.rounds)
        path = pool.vector_path
    result = {
        "params": options.params,
        "rounds": options.rounds,
        "threads": len(options.cores),
        "vector_path": path,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        **summarize(seconds, options.params),
        "seconds": seconds,
    }
    for name, speed in result["million_params_per_second"].items():
        print(f"{name:<22}{speed:8.0f} M params/s")
    for name, ratio in result["ratios"].items():
        print(f"{name:<22}{ratio['value']:8.2f} (needed {ratio['needed']:.2f})")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return int(any(ratio["value"] < ratio["needed"] for ratio in result["ratios"].values()))


if __name__ == "__main__":
    sys.exit(main())
