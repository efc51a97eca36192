"""The machine's rates other than computing: copies between host and device, messages between
workers, updates of the optimizer.

Messages go through ZeroMQ's ipc transport between two sockets, as between workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import zmq

from penstock.config.optimizers import OptimizerName
from penstock.config.schema import Config
from penstock.host.limits.scratch import scratch_folder
from penstock.models.binding import TORCH_DTYPES
from penstock.models.step import Piece, StepScalars, apply, sum_squares
from penstock.models.torch_device import TorchDevice, torch_device
from penstock.protocol.plan.groups import StepRange
from penstock.protocol.plan.resources import PIECE_ELEMENTS
from penstock.protocol.plan.step import OptimizerStep
from penstock.protocol.run.hardware.sweep_rates import OptimizerRates, median_seconds
from penstock.shm.table import DType

_COPY_BYTES = 64 << 20
_MESSAGE_BYTES = 4 << 20
_TIMEOUT_MS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Bytes/s of weights to the device and of gradients back; ``inf`` if nothing is copied."""

    fetch: float
    offload: float


def measure_copies(config: Config, device: torch.device, *, num_bytes: int = _COPY_BYTES) -> Copies:
    """Measures copies as the worker's device makes them, in bytes of the stored types.

    On a GPU copies go from and to pinned memory. On a CPU 16-bit weights are widened and 16-bit
    gradients rounded; fp32 arrays are not copied.
    """
    weights, grads = config.model.dtype, config.optimizer.grad_dtype
    torch_device_ = torch_device(device)
    if torch_device_.own_memory:
        # Pinned, as workers' arrays are: copies of other memory go through the driver's buffer.
        host = torch_device_.host_memory(num_bytes)
        on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        fetch, offload = (
            _copy_rate(torch_device_, on_device, host),
            _copy_rate(torch_device_, host, on_device),
        )
        return Copies(fetch=fetch, offload=offload)
    wide = torch.zeros(num_bytes // 2, dtype=torch.float32)
    stored = wide.to(TORCH_DTYPES[weights])
    rounded = wide.to(TORCH_DTYPES[grads])
    return Copies(
        fetch=inf
        if weights is DType.FP32
        else num_bytes / median_seconds(lambda: wide.copy_(stored)),
        offload=inf
        if grads is DType.FP32
        else num_bytes / median_seconds(lambda: rounded.copy_(wide)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Rates between two workers of a node: bytes/s of a large message, seconds of a small one."""

    bandwidth: float
    latency_s: float


def measure_messages(*, num_bytes: int = _MESSAGE_BYTES) -> Messages:
    """Measures messages of 8 and of ``num_bytes`` bytes, there and back over ipc; times are halved.

    Raises:
        zmq.Again: no answer within 10 s.
    """
    context = zmq.Context()
    try:
        with scratch_folder("profile") as directory:
            out, back = _pair(context, str(directory))
            small, large = bytes(8), bytes(num_bytes)

            def exchange(payload: bytes) -> None:
                for sender, receiver in ((out, back), (back, out)):
                    sender.send(payload, copy=False)
                    receiver.recv(copy=False)

            latency_s = median_seconds(lambda: exchange(small)) / 2
            seconds = median_seconds(lambda: exchange(large)) / 2
    finally:
        context.destroy(linger=0)
    return Messages(bandwidth=num_bytes / max(seconds - latency_s, 1e-9), latency_s=latency_s)


def _pair(context: zmq.Context[Any], directory: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    sockets = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in sockets:
        socket.set(zmq.RCVTIMEO, _TIMEOUT_MS)
        socket.set(zmq.SNDTIMEO, _TIMEOUT_MS)
    sockets[0].bind(f"ipc://{directory}/messages")
    sockets[1].connect(f"ipc://{directory}/messages")
    return sockets


def measure_update(config: Config, device: torch.device, host: OptimizerRates) -> float:
    """Measures the parameters/s of an UPDATE on one device, without its copies.

    On a GPU this is the arithmetic of a piece with AdamW. Adam's differs little; GPUs execute no
    others. On a CPU an UPDATE is a preview, on a worker's share of the cores.
    """
    measured_device = torch_device(device)
    if not measured_device.own_memory:
        return host.preview / config.cluster.workers
    step = OptimizerStep(version=1000, coefficient=1.0, learning_rate=1e-4, bias_step=1000)
    adamw = config.optimizer.model_copy(update={"name": OptimizerName.ADAMW})
    scalars = StepScalars.of(step, adamw)
    names = ("master", "exp_avg", "exp_avg_sq", "gradients", "scratch")
    arrays = {name: torch.zeros(PIECE_ELEMENTS, device=device) for name in names}
    piece = Piece(**arrays, ranges=[StepRange(0, PIECE_ELEMENTS, 0.1)])
    squares = torch.empty(PIECE_ELEMENTS, dtype=torch.float64, device=device)

    def update() -> None:
        sum_squares(piece.gradients, squares)
        apply(piece, scalars)
        # The calls above only queue kernels.
        measured_device.synchronize()

    return PIECE_ELEMENTS / median_seconds(update)


def _copy_rate(device: TorchDevice, target: torch.Tensor, source: torch.Tensor) -> float:
    def copy() -> None:
        target.copy_(source, non_blocking=True)
        device.synchronize()

    return source.nbytes / median_seconds(copy)
