"""What devices promise: no copies where none are needed, sums in fp32, and the same results on a
GPU.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from penstock.host.errors import ConfigError
from penstock.models.torch_device import repeat_bits
from penstock.planner.schedule.schedule import lower, schedule_of
from penstock.protocol.run.trace import TraceLane, TraceLog
from penstock.protocol.run.trace_reading import read_traces
from penstock.protocol.wire.sockets import OPEN
from penstock.shm.table import DType
from penstock.workers.channels.inbox import Inbox
from penstock.workers.device import BufferPool
from penstock.workers.epoch_builder import bind_transport
from penstock.workers.interpreter import JobResult
from penstock.workers.platforms.cpu.device import CpuDevice
from penstock.workers.platforms.cuda.device import CudaDevice, gpu_of
from penstock.workers.telemetry.metrics import WorkerMetrics
from penstock.workers.telemetry.trace import TraceRing
from penstock.workers.waiting import Interrupted
from tests.worker.cluster import relative_error
from tests.worker.test_parity_matrix import swapped

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_fp32_on_a_cpu_copies_nothing() -> None:
    device = CpuDevice(weight_dtype=DType.FP32, grad_dtype=DType.FP32)
    weights, grads = np.ones(32, np.float32), np.ones(32, np.float32)
    buffer = device.load([weights])
    assert buffer.tensors[0].data_ptr() == address(weights)
    total = device.gradients(grads)
    assert total.data_ptr() == address(grads)
    assert not grads.any()
    done: list[str] = []
    total += 2.0
    device.offload(total, grads, lambda: done.append("complete"))
    assert (done, grads[5]) == (["complete"], 2.0)


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_16_bit_weights_are_widened_into_reused_memory(
    dtype: str, torch_dtype: torch.dtype
) -> None:
    device = CpuDevice(weight_dtype=DType(dtype), grad_dtype=DType.FP32)
    values = torch.randn(32).to(torch_dtype)
    stored = values.view(torch.uint8).numpy()
    buffer = device.load([stored])
    assert torch.equal(buffer.tensors[0], values.float())
    place = buffer.tensors[0].data_ptr()
    buffer.release()
    assert device.load([stored]).tensors[0].data_ptr() == place


def test_16_bit_gradients_are_summed_in_fp32_and_rounded_once() -> None:
    device = CpuDevice(weight_dtype=DType.FP32, grad_dtype=DType.BF16)
    target = np.zeros(16, np.uint16)
    total = device.gradients(target)
    for _ in range(512):
        total += 1.0  # a bf16 sum would stop at 256
    device.offload(total, target, lambda: None)
    assert torch.from_numpy(target.view(np.uint8)).view(torch.bfloat16)[0] == 512.0


def test_pooled_buffers_are_told_apart_by_type_and_length() -> None:
    pool = BufferPool()
    first, second = pool.take(16, torch.float32), pool.take(16, torch.float32)
    assert first.data_ptr() != second.data_ptr()
    pool.give(first)
    assert pool.take(32, torch.float32).numel() == 32
    assert pool.take(16, torch.uint8).dtype == torch.uint8
    assert pool.take(16, torch.float32) is first


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_missing_gpu_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"worker 1 of this node needs a GPU, there are 0: torch"):
        gpu_of(1)


def test_a_cluster_of_several_nodes_listens_on_tcp(make_run_files: Any) -> None:
    def listen(hosts: list[str]) -> str:
        nodes = [{"name": "ab"[i], "host": host} for i, host in enumerate(hosts)]
        files = make_run_files({"workers": 1, "nodes": nodes})
        transport = bind_transport(files, 0, WorkerMetrics(CollectorRegistry()), Inbox(), OPEN)
        transport.close()
        return transport.address

    assert listen(["127.0.0.1"]).startswith("ipc:///dev/shm/.penstock-0123456789ab-a/worker.0-")
    assert listen(["localhost"] * 2).startswith(f"tcp://{socket.gethostbyname('localhost')}:")
    with pytest.raises(ConfigError, match=r"node a: a worker cannot listen on host '192\.0\.2\.1'"):
        listen(["192.0.2.1"] * 2)


PLANS = [
    ("1f1b", 1, {"recompute": "none"}, "fp32"),
    ("mobius", 1, {"forward_stages": 4}, "fp32"),
    ("spipe", 1, {"forward_stages": 3, "backward_stages": 6}, "bf16"),
    ("1f1b", 2, {"recompute": "selective", "drop": ["core", "mlp"]}, "fp32"),
    ("spipe", 2, {"forward_stages": 4, "backward_stages": 6}, "bf16"),
    ("chimera", 2, {"recompute": "none"}, "fp32"),
    ("zb-h1", 2, {}, "fp32"),
]
"""Scheme, workers (which share a GPU where there are fewer), schedule, storage type."""


@pytest.fixture(scope="module")
def gpu() -> Iterator[None]:
    """CUDA is up before a leak check looks around: its files stay for the life of the process."""
    ones = torch.ones(64, 64, device="cuda", requires_grad=True)
    (ones @ ones).sum().backward()
    torch.cuda.synchronize()
    yield


def check_against_a_plain_loop(cluster: Any, tolerance: float, attempts: int = 2) -> None:
    """Loss and gradients, and again with buffers that were used before."""
    wanted = None
    for attempt in range(1, attempts + 1):
        job = cluster.job(attempt=cluster.epoch * 10 + attempt)
        wanted = wanted or cluster.reference(job)
        cluster.spoil_gradients()
        loss_sum, tokens = cluster.train(job)
        assert tokens == job.counted_tokens
        assert loss_sum == pytest.approx(wanted[0], rel=tolerance)
        assert relative_error(cluster.gradients(), wanted[1]) <= tolerance


@pytest.mark.gpu
@needs_gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("scheme", "workers", "schedule", "dtype"), PLANS)
def test_a_gpu_matches_a_plain_loop(
    make_cluster: Any, scheme: str, workers: int, schedule: Any, dtype: str
) -> None:
    cluster = make_cluster(
        scheme=scheme,
        workers=workers,
        schedule=schedule,
        device="cuda",
        transport="zmq",
        model={"dtype": dtype},
        hf={"tie_word_embeddings": True},
    )
    check_against_a_plain_loop(cluster, 1e-4 if dtype == "fp32" else 0.05)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_activations_of_a_gpu_are_swapped(make_cluster: Any, recompute: str) -> None:
    drop = {"drop": ["core", "mlp"]} if recompute == "selective" else {}
    cluster = make_cluster(
        workers=1, schedule={"recompute": recompute, **drop}, device="cuda", transport="zmq"
    )
    cluster.adopt(lower(swapped(schedule_of(cluster.plan), 0.5)))
    check_against_a_plain_loop(cluster, 1e-4)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.usefixtures("gpu")
def test_an_aborted_attempt_leaves_a_gpu_usable(make_cluster: Any) -> None:
    """As when a peer is killed: the attempt ends, and the next epoch computes the same."""
    cluster = make_cluster(scheme="spipe", workers=2, device="cuda", transport="zmq")
    timer = threading.Timer(0.02, cluster.abort_all)
    timer.start()
    results = cluster.run(cluster.job())
    timer.join()
    assert all(isinstance(result, Interrupted | JobResult) for result in results), results
    cluster.begin(2)
    check_against_a_plain_loop(cluster, 1e-4)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.usefixtures("gpu")
def test_the_trace_of_a_gpu_is_of_what_it_did(make_cluster: Any, tmp_path: Path) -> None:
    """Not of when that was issued: nothing overlaps on a stream, weights are there before use."""
    cluster = make_cluster(
        scheme="mobius",
        workers=1,
        device="cuda",
        transport="zmq",
        schedule={"forward_stages": 4},  # six fetches
    )
    (worker,) = cluster.workers
    ring = TraceRing(TraceLog.of_run(tmp_path, "worker.0", 1))
    worker.context = replace(worker.context, trace=ring)
    (tmp_path / "run.json").write_text("{}")
    cluster.train(cluster.job(attempt=1))
    (result,) = cluster.run(cluster.job(attempt=2))
    ring.flush()
    assert isinstance(result, JobResult)
    assert 0.0 < result.tally.busy_s <= result.wall_s
    events = [e for e in read_traces(tmp_path).members[0].events if e.attempt == 2]
    for lane in (TraceLane.COMPUTE, TraceLane.FETCH):
        spans = sorted((e.start_s + e.waited_s, e.end_s) for e in events if e.lane is lane)
        assert len(spans) > 3 and all(start < end for start, end in spans)
        assert all(a[1] <= b[0] + 5e-6 for a, b in pairwise(spans)), lane
    first_copy = min(e.end_s for e in events if e.lane is TraceLane.FETCH)
    first_work = min(e.start_s + e.waited_s for e in events if e.lane is TraceLane.COMPUTE)
    assert first_copy <= first_work + 5e-6


@pytest.mark.gpu
@needs_gpu
@pytest.mark.usefixtures("gpu")
def test_gradients_from_a_gpu_are_complete_when_announced() -> None:
    device = CudaDevice(gpu_of(0), weight_dtype=DType.BF16, grad_dtype=DType.BF16)
    target = np.zeros(1 << 20, np.uint16)
    seen: list[bool] = []
    for _ in range(4):
        total = device.gradients(target)
        total += 3.0
        device.offload(total, target, lambda: seen.append(bool((target == 0x4040).all())))
    device.finish()
    assert seen == [True] * 4
    device.detach()


@pytest.mark.gpu
@needs_gpu
def test_attention_on_a_gpu_repeats_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward adds up in any order unless it is told otherwise."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    repeat_bits()
    try:
        torch.manual_seed(1)
        q, k, v = (
            torch.randn(2, 8, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        found = set()
        for _ in range(8):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            grads = torch.autograd.grad(out.square().sum(), (q, k, v))
            found.add(tuple(g.view(torch.uint8).cpu().numpy().tobytes() for g in grads))
        assert len(found) == 1
    finally:
        torch.use_deterministic_algorithms(False)
