"""Speed of the optimizer sweeps, beside what memory allows and beside other libraries'.

``bench/optimizer.py [--params 64M,256M] [--threads 1,2] [--grads bf16,fp32] [--json]``

=========================== ========================================================================
row                         what one run does (bytes a parameter with bf16 | fp32 gradients)
=========================== ========================================================================
preview                     weights ahead of state (16 | 18)
settle                      master and state, crash safe (26 | 28)
advance                     settle of the pending gradients, preview of the new ones (30 | 34)
in-place                    the classic step: master, state, weights; not crash safe (28 | 30)
hold                        the same, crash safe, for gradients known to be good (28 | 30)
torch fused + bf16 copy     torch.optim.AdamW(fused=True), fp32 gradients there; a copy to bf16
torch full chain            bf16 gradients to fp32, unscale, clip_grad_norm_, finite check, that
deepspeed+bf16 copy         DeepSpeedCPUAdam on fp32 gradients, a copy to bf16
roundpipe+bf16 copy         roundpipe.optim.Adam likewise
=========================== ========================================================================

The last two where they are installed; both compile when first used (ninja on PATH; DeepSpeed with
``DS_ACCELERATOR=cpu``), and RoundPipe cannot be imported without a GPU. All cases run in turns,
round after round, so that what else the machine does hits all alike; a speed is the median over the
rounds, a share of the ceiling the median of the rounds' ratios.

The ceiling of a sweep is the same sweep without arithmetic and without undo area: it loads, stores,
streams and prefetches the same arrays in the same order on threads of the same cores
(``native/ceiling.cpp``: the module ``penstock._ceiling``, which has the functions of
``penstock._native``). Everything of ours is
in /dev/shm, laid out as training lays it out (:mod:`penstock.shm.layout`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock import _ceiling, _native
from penstock.shm.layout import NodeLayout, Ownership
from penstock.shm.table import BlockSpec, BlockTable, DType, TensorSpec

LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 1e-4, 0.9, 0.95, 1e-8, 0.1
INVERSE_LOSS_SCALE = 1.0 / 1024
SWEEPS = ("preview", "settle", "advance", "in-place", "hold")
BYTES = {  # a parameter, beside gradients: read and written; gradients read
    "preview": (14, 1),
    "settle": (24, 1),
    "advance": (26, 2),
    "in-place": (26, 1),
    "hold": (26, 1),
}
RATIOS = {  # with bf16 gradients: what is wanted of the first beside the second
    ("in-place", "deepspeed+bf16 copy"): 1.5,
    ("hold", "deepspeed+bf16 copy"): 1.5,
    ("in-place", "torch full chain"): 2.7,
    ("hold", "torch full chain"): 2.7,
    ("advance", "in-place"): 0.82,
    ("hold", "in-place"): 0.92,  # the crash journal's cost
}
CEILING = 0.92

Case = Callable[[], object]


def shared_array(num_elements: int, dtype: type[np.generic]) -> NDArray[Any]:
    """Returns a zeroed array in /dev/shm, its pages touched, without a name."""
    num_bytes = num_elements * np.dtype(dtype).itemsize
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        array: NDArray[Any] = np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=dtype)
    array.fill(0)
    return array


def fill_with_noise(array: NDArray[Any], seed: int) -> None:
    """Fills an array with random numbers of the size of scaled gradients; uint16 holds bf16."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, array.size, 1 << 24):
        part = array[start : start + (1 << 24)]
        values = torch.randn(part.size, generator=generator)
        if array.dtype == np.uint16:
            part[:] = values.to(torch.bfloat16).view(torch.uint16).numpy()
        else:
            part[:] = values.numpy()


def block_layout(num_params: int, kind: str) -> NodeLayout:
    """Returns the layout of a node with one block."""
    block = BlockSpec(
        index=0,
        name="block",
        kind="block",
        layer_index=None,
        tensors=(
            TensorSpec(name="weight", shape=(num_params,), trainable=True, decay=True, offset=0),
        ),
        borrows=(),
        trainable_elements=num_params,
        frozen_elements=0,
        contributions=1,
        forward_flops=0.0,
        activation_bytes=0.0,
        output_bytes=0.0,
    )
    table = BlockTable(
        blocks=(block,),
        weight_dtype=DType.BF16,
        grad_dtype=DType(kind),
        state_arrays=("exp_avg", "exp_avg_sq"),
        vocab_size=1,
        num_parameters=num_params,
    )
    return NodeLayout.compute(table, Ownership.from_backward_nodes(table, [0]), node=0)


class OurState:
    """One block in shared memory, half of it with weight decay."""

    def __init__(self, num_params: int, kind: str) -> None:
        layout = block_layout(num_params, kind)
        segments = {
            segment: shared_array(size, np.uint8) for segment, size in layout.sizes.items() if size
        }

        def array(name: str, copy: int, dtype: type[np.generic]) -> NDArray[Any]:
            place = layout.arrays[0, name, copy, 0]
            part = segments[place.segment][place.offset : place.offset + place.num_bytes]
            found: NDArray[Any] = part.view(dtype)
            return found

        half = num_params // 32 * 16
        self.arrays: dict[str, Any] = {
            "master": array("master", 0, np.float32),
            "arrays": [array(name, 0, np.float32) for name in ("exp_avg", "exp_avg_sq")],
            "ranges": [(0, half, WEIGHT_DECAY, 1.0), (half, num_params, 0.0, 1.0)],
        }
        self.weights = array("weights", 0, np.uint16)
        grad_dtype = np.float32 if kind == "fp32" else np.uint16
        self.pending, self.grads = ([array("grads", copy, grad_dtype)] for copy in range(2))
        for seed, grads in enumerate(self.pending + self.grads):
            fill_with_noise(grads, seed)

    def cases(self, native: Any, pool: Any) -> dict[str, Case]:
        """Returns the sweeps of ``native`` (or a module with its functions) on ``pool``, by
        name.
        """
        hyper = native.Hyper(
            lr=LR,
            beta1=BETA1,
            beta2=BETA2,
            eps=EPS,
            step=1000,
            coefficient=INVERSE_LOSS_SCALE,
        )
        undo = shared_array(native.undo_bytes(pool.num_threads), np.uint8)
        new = {"grads": self.grads, "hyper": hyper, **self.arrays}
        out = {"weights": self.weights, "weights_dtype": native.WeightsDtype.BFLOAT16}
        return {
            "preview": lambda: native.preview(pool, **new, **out),
            "settle": lambda: native.settle(pool, **new, undo=undo),
            "advance": lambda: native.advance(
                pool,
                pending_grads=self.pending,
                pending_hyper=hyper,
                undo=undo,
                **new,
                **out,
            ),
            "in-place": lambda: native.step_in_place(pool, **new, **out),
            "hold": lambda: native.hold(pool, **new, **out, undo=undo),
        }


class Theirs:
    """What a PyTorch user would write, on one flat parameter (the best case for torch)."""

    def __init__(self, num_params: int) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(num_params))
        self.gradient = torch.randn(num_params)
        self.parameter.grad = self.gradient
        self.weights = torch.empty(num_params, dtype=torch.bfloat16)
        self.published = torch.randn(num_params).to(torch.bfloat16)

    def cases(self) -> Iterator[tuple[str, Case]]:
        """Yields the optimizers of installed libraries. Each has its own moments."""
        options: dict[str, Any] = {
            "lr": LR,
            "betas": (BETA1, BETA2),
            "eps": EPS,
            "weight_decay": WEIGHT_DECAY,
        }
        fused_copy = self._stepped(torch.optim.AdamW([self.parameter], fused=True, **options))

        def full_chain() -> None:
            self.gradient.copy_(self.published)
            self.gradient.mul_(INVERSE_LOSS_SCALE)
            norm = torch.nn.utils.clip_grad_norm_([self.parameter], 1.0)
            if torch.isfinite(norm).item():
                fused_copy()

        yield "torch fused + bf16 copy", fused_copy
        yield "torch full chain", full_chain
        if importlib.util.find_spec("deepspeed") is not None:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            adam = DeepSpeedCPUAdam([self.parameter], adamw_mode=True, **options)
            yield "deepspeed+bf16 copy", self._stepped(adam)
        if importlib.util.find_spec("roundpipe") is not None and torch.cuda.is_available():
            from roundpipe.optim import Adam

            adam = Adam([self.parameter], decoupled_weight_decay=True, **options)
            yield "roundpipe+bf16 copy", self._stepped(adam)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> Case:
        def step_and_copy() -> None:
            optimizer.step()
            self.weights.copy_(self.parameter.detach())

        return step_and_copy


def measure(cases: dict[str, Case], rounds: int) -> dict[str, list[float]]:
    """Returns seconds of every run, per case, after one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for round_index in range(rounds + 1):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            elapsed = time.perf_counter() - start
            if round_index > 0:
                seconds[name].append(elapsed)
    return seconds


def rows_of(seconds: dict[str, list[float]], what: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each case with a distinct speed."""
    grad_bytes = 4 if what["grads"] == "fp32" else 2
    rows = []
    for name, runs in seconds.items():
        if name.startswith("ceiling "):
            continue
        speed = what["params"] / statistics.median(runs) / 1e6
        row = {**what, "name": name, "mparams_per_s": round(speed, 1)}
        if name in SWEEPS:
            fixed, copies = BYTES[name]
            per_param = fixed + copies * grad_bytes
            pairs = zip(runs, seconds[f"ceiling {name}"], strict=True)
            row |= {
                "gb_per_s": round(speed * per_param / 1e3, 2),
                "of_ceiling": round(statistics.median(top / run for run, top in pairs), 3),
                "bytes_per_param": per_param,
            }
        else:
            row |= {"gb_per_s": None, "of_ceiling": None, "bytes_per_param": None}
        rows.append(row)
    return rows


def run(num_params: int, cores: list[int], kind: str, rounds: int) -> list[dict[str, Any]]:
    """Returns all cases of one size, number of threads and type of gradients."""
    torch.set_num_threads(len(cores))
    what = {"params": num_params, "threads": len(cores), "grads": kind}
    ours, theirs = OurState(num_params, kind), Theirs(num_params)
    with _native.Pool(cores) as pool, _ceiling.Pool(cores) as ceiling_pool:
        real, ceiling = ours.cases(_native, pool), ours.cases(_ceiling, ceiling_pool)
        cases: dict[str, Case] = {}
        for name in SWEEPS:
            cases |= {name: real[name], f"ceiling {name}": ceiling[name]}
        return rows_of(measure(cases | dict(theirs.cases()), rounds), what)


def verdicts(rows: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Returns the goals as (name, measured, goal), with the worst of all settings for each."""
    speed = {(r["params"], r["threads"], r["grads"], r["name"]): r["mparams_per_s"] for r in rows}
    found: dict[str, list[float]] = {}
    wanted = {}
    for (ours, other), bound in RATIOS.items():
        for (params, threads, grads, name), value in speed.items():
            base = speed.get((params, threads, grads, other))
            if name == ours and grads == "bf16" and base is not None:
                found.setdefault(f"{ours} / {other}", []).append(value / base)
                wanted[f"{ours} / {other}"] = bound
    for name in SWEEPS:
        found[f"{name} of its ceiling"] = [r["of_ceiling"] for r in rows if r["name"] == name]
        wanted[f"{name} of its ceiling"] = CEILING
    return [(name, min(values), wanted[name]) for name, values in found.items()]


def count(text: str) -> int:
    """``64M`` (2**20 each) or a number; rounded up to a multiple of 16."""
    number = int(text[:-1]) << 20 if text.endswith("M") else int(text)
    return -(-number // 16) * 16


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", default="64M,256M", help="sizes, such as 64M,256M")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, one a core")
    parser.add_argument("--grads", default="bf16,fp32")
    parser.add_argument("--rounds", type=int, default=9, help="after one to warm up")
    parser.add_argument("--json", action="store_true", help='{"rows": […]} instead of the table')
    return parser.parse_args()


def show(rows: list[dict[str, Any]]) -> None:
    """One line a row, then what is wanted."""
    heads = "params thr grads row                         M params/s    GB/s  of ceiling  B/param"
    print(heads)
    for row in rows:
        line = f"{row['params'] >> 20:5d}M{row['threads']:4d} {row['grads']:<5} {row['name']:<26}"
        line += f"{row['mparams_per_s']:12.0f}"
        if row["of_ceiling"] is not None:
            line += f"{row['gb_per_s']:8.1f}{row['of_ceiling']:12.3f}{row['bytes_per_param']:9d}"
        print(line)
    for name, found, bound in verdicts(rows):
        print(f"{name:<36}{found:8.3f} (wanted: {bound:.2f})")


def main() -> int:
    """Measures and prints; returns 1 if a goal is missed."""
    options = parse_arguments()
    cores = sorted(os.sched_getaffinity(0))
    rows = []
    for params in map(count, options.params.split(",")):
        for kind in options.grads.split(","):
            for threads in map(int, options.threads.split(",")):
                if threads > len(cores):
                    sys.exit(f"--threads {threads}: this process may use {len(cores)} cores")
                rows += run(params, cores[:threads], kind, options.rounds)
    if options.json:
        print(json.dumps({"rows": rows}))
    else:
        show(rows)
    return int(any(found < bound for _, found, bound in verdicts(rows)))


if __name__ == "__main__":
    sys.exit(main())
