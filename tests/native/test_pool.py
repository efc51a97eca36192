"""The pool of pinned threads."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import _native


def pool_tasks(kit: Any) -> dict[str, Path]:
    """Status files of the test's pool threads, by thread name."""
    tasks = [Path("/proc/self/task") / thread for thread in kit.pool_threads() - kit.earlier]
    return {(task / "comm").read_text().strip(): task / "status" for task in tasks}


def field(status: Path, name: str) -> str:
    """One field of a /proc status file."""
    return next(
        line.split(":")[1].strip() for line in status.read_text().splitlines() if name in line
    )


def test_each_thread_is_pinned_to_its_core_and_blocks_signals(cores: list[int], kit: Any) -> None:
    with _native.Pool(cores[:2]) as pool:
        tasks = pool_tasks(kit)
        assert pool.num_threads == len(cores[:2])
        assert set(tasks) == {f"sweeps-core{core}" for core in cores[:2]}
        for core in cores[:2]:
            status = tasks[f"sweeps-core{core}"]
            assert field(status, "Cpus_allowed_list") == str(core)
            assert int(field(status, "SigBlk"), 16) & (1 << 14)  # SIGTERM


def test_threads_end_with_close_and_with_the_object(cores: list[int], kit: Any) -> None:
    pool = _native.Pool(cores[:1] * 3)
    assert kit.num_pool_threads() == 3
    pool.close()
    pool.close()
    assert kit.num_pool_threads() == 0
    dropped = _native.Pool(cores[:1])
    assert kit.num_pool_threads() == 1
    del dropped
    assert kit.num_pool_threads() == 0


def test_sweeps_on_a_closed_pool_are_refused(cores: list[int], kit: Any) -> None:
    block, pool = kit.block(64, 0), _native.Pool(cores[:1])
    grads = kit.gradients(64, 1, bf16=False)
    pool.close()
    with pytest.raises(RuntimeError, match="pool is closed"):
        _native.gradient_status(pool, grads=grads)
    with pytest.raises(RuntimeError, match="pool is closed"):
        _native.settle(pool, grads=grads, hyper=kit.hyper(), undo=block.undo, **block.state)
    assert not _native.undo_state(block.undo).armed


def test_impossible_cores_are_refused_and_leave_no_thread(cores: list[int], kit: Any) -> None:
    absent = next(core for core in range(1023, 0, -1) if core not in cores)
    with pytest.raises(ValueError, match="cores is empty"):
        _native.Pool([])
    with pytest.raises(ValueError, match=r"core -1 is not in 0\.\.1023"):
        _native.Pool([-1])
    with pytest.raises(RuntimeError, match=rf"pinned to core {absent}: .*may use cores {cores[0]}"):
        _native.Pool([cores[0], absent])
    assert kit.num_pool_threads() == 0


def test_unknown_vector_paths_are_refused(cores: list[int]) -> None:
    with pytest.raises(ValueError, match=r"vector_path 'mmx' .*portable"):
        _native.Pool(cores[:1], vector_path="mmx")


def test_the_fastest_path_is_used_unless_another_is_named(cores: list[int]) -> None:
    paths = _native.available_vector_paths()
    assert paths[-1] == "portable"
    assert _native.vector_path() == paths[0]
    for path in paths:
        with _native.Pool(cores[:1], vector_path=path) as pool:
            assert pool.vector_path == path


def share_of_longest_gap(pool: _native.Pool, grads: list[Any]) -> float:
    """How long this thread was kept from running, as a share of the sweep on another thread."""
    window: list[float] = []

    def run() -> None:
        start = time.perf_counter()
        _native.gradient_status(pool, grads=grads)
        window.extend((start, time.perf_counter()))

    thread = threading.Thread(target=run)
    thread.start()
    ticks = []
    while thread.is_alive():
        ticks.append(time.perf_counter())
    thread.join(timeout=600)
    start, end = window
    inside = [start, *(tick for tick in ticks if start < tick < end), end]
    return max(after - before for before, after in itertools.pairwise(inside)) / (end - start)


@pytest.mark.slow
def test_python_runs_during_a_sweep(cores: list[int], kit: Any) -> None:
    grads = kit.gradients(1 << 20, 1, bf16=False) * 12
    with _native.Pool(cores[:1], vector_path="portable") as pool:
        shares = [share_of_longest_gap(pool, grads) for _ in range(10)]
    assert min(shares) < 0.8  # holding the GIL makes it nearly 1 each time


def test_sweeps_from_several_threads_take_turns(cores: list[int], kit: Any) -> None:
    num_elements = 4096 * 4
    grads = kit.gradients(num_elements, 1, bf16=True)
    with _native.Pool([cores[0], cores[-1]]) as pool:
        expected = _native.gradient_status(pool, grads=grads).sum_squares
        found: list[float] = []

        def run() -> None:
            for _ in range(200):
                found.append(_native.gradient_status(pool, grads=grads).sum_squares)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=600)
    assert found == [expected] * 800


def test_results_do_not_depend_on_the_callers_float_mode(cores: list[int], kit: Any) -> None:
    block = kit.block(16, 0)
    block.master[:] = 1e-40  # a denormal number
    weights = kit.weights(16, _native.WeightsDtype.FLOAT32)
    assert torch.set_flush_denormal(True)
    try:
        with _native.Pool(cores[:1]) as pool:
            _native.preview(
                pool,
                grads=[kit.aligned(16, np.float32)],
                hyper=kit.hyper(lr=0.0),
                weights=weights,
                weights_dtype=_native.WeightsDtype.FLOAT32,
                **block.state,
            )
    finally:
        torch.set_flush_denormal(False)
    assert weights.tobytes() == block.master.tobytes()


def test_a_forked_child_is_told_to_make_its_own_pool(cores: list[int]) -> None:
    script = """
import os, sys
import numpy as np
from penstock import _native
pool = _native.Pool([CORE])
raw = np.zeros(64, np.float32)
start = -raw.ctypes.data % 64 // 4
pid = os.fork()
if pid == 0:
    try:
        _native.gradient_status(pool, grads=[raw[start : start + 16]])
    except RuntimeError as error:
        os._exit(7 if "make a new one" in str(error) else 8)
    os._exit(9)
_, status = os.waitpid(pid, 0)
pool.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script.replace("CORE", str(cores[0]))]
    assert subprocess.run(command, env=env, timeout=600, check=False).returncode == 7
