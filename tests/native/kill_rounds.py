"""Kills processes in the middle of settle or advance and repairs what they leave; prints JSON.

Run by test_kill.py in an interpreter without other threads, because every victim is a fork.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import _native

NUM_ELEMENTS = 1 << 18
NUM_THREADS = 2
GUARDED_PAGE = 37
PATIENCE_S = 30.0
Arrays = dict[str, Any]  # name -> array


def state_of(arrays: Arrays) -> dict[str, Any]:
    """Arguments of every sweep over model state."""
    return {"master": arrays["master"], "arrays": [arrays["exp_avg"], arrays["exp_avg_sq"]]}


class Shared:
    """Page-aligned arrays in an unlinked file of /dev/shm, inherited by forks."""

    def __init__(self) -> None:
        self.arrays: Arrays = {
            name: self._array(NUM_ELEMENTS, np.float32)
            for name in ("master", "exp_avg", "exp_avg_sq")
        }
        self.undo = self._array(_native.undo_bytes(NUM_THREADS), np.uint8)
        self.weights = self._array(NUM_ELEMENTS, np.uint16)
        self.started = self._array(1, np.uint64)

    @staticmethod
    def _array(num_elements: int, dtype: type[np.generic]) -> NDArray[Any]:
        num_bytes = num_elements * np.dtype(dtype).itemsize
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.truncate(num_bytes)
            return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype)

    def reset(self, initial: Arrays) -> None:
        """Back to the initial state, an idle undo area, nothing started."""
        for name, values in initial.items():
            self.arrays[name][:] = values
        self.undo[:] = 0
        self.started[0] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Which sweep is repeated, on which path, with which gradients."""

    mode: str
    vector_path: str
    cores: list[int]
    grads: list[NDArray[np.uint16]]
    ranges: list[tuple[int, int, float, float]]

    def pool(self) -> _native.Pool:
        """A new pool for the process that asks."""
        return _native.Pool(self.cores, vector_path=self.vector_path)

    def inputs(self, step: int) -> dict[str, Any]:
        """Gradients and hyper-parameters of a step."""
        grads = [self.grads[step % len(self.grads)]]
        return {"grads": grads, "hyper": self.hyper(step)}

    @staticmethod
    def hyper(step: int) -> _native.Hyper:
        """Something different in each step."""
        lr = 1e-3 * (1 + step % 3)
        return _native.Hyper(lr=lr, beta1=0.9, beta2=0.95, eps=1e-8, step=step, coefficient=0.5)

    def settle(self, pool: _native.Pool, arrays: Arrays, undo: Any, step: int, **more: Any) -> None:
        """Settle one step."""
        _native.settle(
            pool,
            undo=undo,
            tag=step,
            ranges=self.ranges,
            **state_of(arrays),
            **self.inputs(step),
            **more,
        )

    def run_sweep(self, pool: _native.Pool, shared: Shared, step: int) -> None:
        """What the victims repeat."""
        if self.mode == "settle":
            self.settle(pool, shared.arrays, shared.undo, step)
            return
        pending, new = self.inputs(step), self.inputs(step + 1)
        _native.advance(
            pool,
            pending_grads=pending["grads"],
            pending_hyper=pending["hyper"],
            weights=shared.weights,
            weights_dtype=_native.WeightsDtype.BFLOAT16,
            undo=shared.undo,
            tag=step,
            ranges=self.ranges,
            **new,
            **state_of(shared.arrays),
        )


def fork(body: Callable[[], None]) -> int:
    """Run the body in a child that does nothing else."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def kill_after(pid: int, delay_s: float) -> bool:
    """Kill a child after a delay; whether it was still running. Any other end is an error."""
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"the child ended with {code}")
    return code != 0


def run_until_killed(job: Job, shared: Shared, rng: random.Random) -> None:
    """A victim that runs sweep after sweep until it is killed at a random instant."""

    def repeat() -> None:
        pool = job.pool()
        for step in range(1, 1 << 30):
            shared.started[0] = step
            job.run_sweep(pool, shared, step)

    pid = fork(repeat)
    deadline = time.monotonic() + PATIENCE_S
    while shared.started[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError(f"the child started no sweep within {PATIENCE_S} s")
        time.sleep(0.0002)
    if not kill_after(pid, rng.uniform(0, 0.012)):
        raise RuntimeError("the child ended by itself")


def complete(job: Job, shared: Shared) -> None:
    """Repair and settle what is left, if a sweep was cut short."""
    with job.pool() as pool:
        step = _native.undo_state(shared.undo).tag
        spans = _native.repair(shared.undo, **state_of(shared.arrays))
        if spans:
            job.settle(pool, shared.arrays, shared.undo, step, spans=spans)


def complete_without_restoring(job: Job, shared: Shared, pool: _native.Pool) -> Arrays:
    """What came out if repair only said where to go on, without putting vectors back."""
    step = _native.undo_state(shared.undo).tag
    naive = {name: aligned_copy(array) for name, array in shared.arrays.items()}
    scratch = {name: aligned_copy(array) for name, array in shared.arrays.items()}
    spans = _native.repair(aligned_copy(shared.undo), **state_of(scratch))
    idle = aligned_copy(np.zeros_like(shared.undo))
    job.settle(pool, naive, idle, step, spans=spans)
    return naive


def aligned_copy(values: NDArray[Any]) -> NDArray[Any]:
    """The same values at a multiple of 64 bytes."""
    raw = np.empty(values.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copy = raw[start : start + values.nbytes].view(values.dtype)
    copy[:] = values
    return copy


def same(left: Arrays, right: Arrays) -> bool:
    """Byte for byte."""
    return all(left[name].tobytes() == right[name].tobytes() for name in left)


def undisturbed(job: Job, pool: _native.Pool, initial: Arrays, num_steps: int) -> Arrays:
    """The state after so many sweeps that nobody killed."""
    arrays = {name: aligned_copy(values) for name, values in initial.items()}
    undo = aligned_copy(np.zeros(_native.undo_bytes(NUM_THREADS), np.uint8))
    for step in range(1, num_steps + 1):
        job.settle(pool, arrays, undo, step)
    return arrays


def run_into_guard(job: Job, shared: Shared, name: str) -> None:
    """A victim that dies exactly at its first store to one page of one array, in the second sweep.

    What it leaves shows whether undo values and index are in place before any array is written.
    """

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pool = job.pool()
        job.run_sweep(pool, shared, 1)
        page = shared.arrays[name].ctypes.data + GUARDED_PAGE * mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
        job.run_sweep(pool, shared, 2)

    _, status = os.waitpid(fork(run), 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGSEGV:
        raise RuntimeError(f"the guarded child ended with {os.waitstatus_to_exitcode(status)}")


def recover(job: Job, shared: Shared, initial: Arrays, rng: random.Random) -> dict[str, int]:
    """Repair and complete what a victim left, killed up to twice on the way; what was seen."""
    seen = {"killed_in_sweep": 0, "needed_restoring": 0, "killed_in_repair": 0}
    state = _native.undo_state(shared.undo)
    num_steps = state.tag if state.armed else state.completed
    with job.pool() as pool:
        expected = undisturbed(job, pool, initial, num_steps)
        if state.armed:
            naive = complete_without_restoring(job, shared, pool)
            seen |= {"killed_in_sweep": 1, "needed_restoring": int(not same(naive, expected))}
    for _ in range(rng.randrange(3)):
        child = fork(lambda: complete(job, shared))
        seen["killed_in_repair"] += kill_after(child, rng.uniform(0, 0.002))
    complete(job, shared)
    finished = _native.undo_state(shared.undo)
    right = same(shared.arrays, expected) and finished.completed == num_steps
    return seen | {"wrong": int(not right or finished.armed)}


def run_rounds(job: Job, initial: Arrays, rounds: int, rng: random.Random) -> Counter[str]:
    """Counts over all rounds and guards; the caller judges."""
    counts: Counter[str] = Counter()
    shared = Shared()
    for _ in range(rounds):
        shared.reset(initial)
        run_until_killed(job, shared, rng)
        counts.update(recover(job, shared, initial, rng))
    for name in shared.arrays:
        shared.reset(initial)
        run_into_guard(job, shared, name)
        seen = recover(job, shared, initial, rng)
        counts.update({"guarded": seen["killed_in_sweep"], "wrong": seen["wrong"]})
    return counts


def main() -> int:
    """Command line of test_kill.py."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["settle", "advance"])
    parser.add_argument("vector_path")
    parser.add_argument("rounds", type=int)
    parser.add_argument("seed", type=int)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    allowed = sorted(os.sched_getaffinity(0))
    initial = {
        name: rng.standard_normal(NUM_ELEMENTS, np.float32) for name in ("master", "exp_avg")
    }
    initial["exp_avg_sq"] = rng.random(NUM_ELEMENTS, np.float32)
    job = Job(
        mode=options.mode,
        vector_path=options.vector_path,
        cores=[allowed[i % len(allowed)] for i in range(NUM_THREADS)],
        grads=[
            aligned_copy(
                (rng.standard_normal(NUM_ELEMENTS, np.float32).view(np.uint32) >> 16).astype(
                    np.uint16
                )
            )
            for _ in range(3)
        ],
        ranges=[(0, 4096 * 5 + 32, 0.1, 1.0), (4096 * 5 + 32, NUM_ELEMENTS, 0.0, 0.5)],
    )
    counts = run_rounds(job, initial, options.rounds, random.Random(options.seed))
    sys.stdout.write(json.dumps(counts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
