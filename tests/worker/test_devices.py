"""What devices promise: no copies where none are needed, sums in fp32, and the same results on a
GPU.
"""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from penstock.protocol.errors import ConfigError
from penstock.shm.table import DType
from penstock.workers.devices.cpu import CpuDevice
from penstock.workers.devices.cuda import CudaDevice
from penstock.workers.devices.pool import BufferPool
from penstock.workers.inbox import Inbox
from penstock.workers.metrics import WorkerMetrics
from penstock.workers.workshop import bind_transport

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
        CudaDevice(1, weight_dtype=DType.BF16, grad_dtype=DType.BF16)


def test_a_cluster_of_several_nodes_listens_on_tcp(make_run_files: Any) -> None:
    def listen(hosts: list[str]) -> str:
        nodes = [{"name": "ab"[i], "host": host} for i, host in enumerate(hosts)]
        files = make_run_files({"workers": 1, "nodes": nodes})
        transport = bind_transport(files, 0, WorkerMetrics(CollectorRegistry()), Inbox())
        transport.close()
        return transport.address

    assert listen(["127.0.0.1"]).startswith("ipc://@penstock-0123456789ab-a-worker.0-")
    assert listen(["localhost"] * 2).startswith(f"tcp://{socket.gethostbyname('localhost')}:")
    with pytest.raises(ConfigError, match=r"node a: a worker cannot listen on host '192\.0\.2\.1'"):
        listen(["192.0.2.1"] * 2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("scheme", "schedule", "dtype"),
    [
        ("1f1b", {"recompute": "none"}, "fp32"),
        ("mobius", {"forward_stages": 4}, "fp32"),
        ("spipe", {"forward_stages": 3, "backward_stages": 6}, "bf16"),
    ],
)
def test_a_gpu_matches_a_plain_loop(
    make_cluster: Any, scheme: str, schedule: Any, dtype: str
) -> None:
    cluster = make_cluster(
        scheme=scheme,
        workers=1,
        schedule=schedule,
        device="cuda",
        model={"dtype": dtype},
        hf={"tie_word_embeddings": True},
    )
    first = cluster.job()
    loss_sum, _ = cluster.train(first)
    wanted_loss, wanted = cluster.reference(first)
    tolerance = 1e-4 if dtype == "fp32" else 0.05
    assert loss_sum == pytest.approx(wanted_loss, rel=tolerance)
    for name, gradient in cluster.gradients().items():
        assert (gradient - wanted[name]).norm() <= tolerance * wanted[name].norm()
    assert cluster.train(cluster.job(attempt=2))[0] == pytest.approx(loss_sum, rel=tolerance)


@pytest.mark.gpu
@needs_gpu
def test_gradients_from_a_gpu_are_complete_when_announced() -> None:
    device = CudaDevice(0, weight_dtype=DType.BF16, grad_dtype=DType.BF16)
    target = np.zeros(1 << 20, np.uint16)
    seen: list[bool] = []
    for _ in range(4):
        total = device.gradients(target)
        total += 3.0
        device.offload(total, target, lambda: seen.append(bool((target == 0x4040).all())))
    device.finish()
    assert seen == [True] * 4
    device.detach()
