"""Tensors between two worker processes on CPUs: Gloo beside ZeroMQ.

    python -m bench.transport

Both go through the channels that attempts use. Two patterns: *streams* of transfers, first of one
direction, then of the other, for bandwidth; a *ping-pong*, for latency. The same two processes take
turns between all of it, so that what else runs on the machine disturbs both alike. Medians.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
import uuid
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from penstock.config.platforms import TransportName
from penstock.config.schema import parse_config
from penstock.protocol.plan.instructions import parse_program
from penstock.protocol.plan.plan import Plan, StageRange
from penstock.shm.table import DType
from penstock.workers.channels.base import Channel
from penstock.workers.channels.inbox import Expected, Inbox, TransferKey
from penstock.workers.channels.opening import open_channel
from penstock.workers.channels.transport import Transport
from penstock.workers.platforms.cpu.device import CpuDevice
from penstock.workers.telemetry.metrics import WorkerMetrics
from penstock.workers.waiting import Abort

TRANSFERS = 16
"""Of each direction in an attempt."""
ROUNDS = 15
TIMEOUT_S = 60.0
TRANSPORT_NAMES: tuple[TransportName, ...] = ("zmq", "gloo")
CONFIG = {"model": {"hf": {"model_type": "llama"}}, "data": {"path": "@stdlib"}}
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)


def two_devices() -> Plan:
    """Returns a plan in which device 0 sends activations of stage 0, device 1 gradients of stage
    1.
    """
    there = "\n".join(f"  SA 0 {m} peer=1; RG 1 {m} peer=1" for m in range(TRANSFERS))
    back = "\n".join(f"  RA 0 {m} peer=0; SG 1 {m} peer=0" for m in range(TRANSFERS))
    stages = (StageRange(start=0, stop=1, device=0), StageRange(start=1, stop=2, device=1))
    return Plan(
        scheme="1f1b",
        num_devices=2,
        num_microbatches=TRANSFERS,
        forward_stages=stages,
        backward_stages=stages,
        programs=parse_program(f"device 0:\n{there}\ndevice 1:\n{back}"),
        evaluation=((), ()),
    )


def opened(
    name: TransportName, run_id: str, own: int, pipe: Connection
) -> tuple[Channel, Transport]:
    """Returns one way to the other process, which opens the same way."""
    transport = Transport(
        f"ipc://@penstock-{run_id}-{name}-{own}", Inbox(), WorkerMetrics(CollectorRegistry())
    )
    plan = two_devices()
    transport.inbox.open(run_id=run_id, epoch=1, expected=Expected.of(plan.programs[own], (), 0))
    transport.notices.open(run_id=run_id, epoch=1)
    pipe.send(transport.address)
    transport.connect({1 - own: pipe.recv()}, {})
    channel = open_channel(
        config=parse_config(CONFIG),
        plan=plan,
        run_id=run_id,
        epoch=1,
        device_index=own,
        device=CpuDevice(weight_dtype=DType.FP32, grad_dtype=DType.FP32),
        transport=transport,
        name=name,
        abort=Abort(),
        timeout_s=TIMEOUT_S,
    )
    return channel, transport


def transfer(number: int, sender: int, index: int) -> TransferKey:
    """Returns the tensor that ``sender`` sends as transfer ``index`` of an attempt."""
    key = partial(TransferKey, phase="train", attempt=number, micro_batch=index)
    return key(kind="activation", stage=0) if sender == 0 else key(kind="gradient", stage=1)


def attempt(channel: Channel, own: int, number: int, num_bytes: int, *, stream: bool) -> float:
    """Returns the seconds until the last transfer arrives: in bursts, or one by one."""
    turns = [(sender, index) for index in range(TRANSFERS) for sender in (0, 1)]
    abort, tensors = Abort(), {"hidden": torch.ones(num_bytes // 4)}
    channel.post(transfer(number, 1 - own, TRANSFERS - 1))
    start = time.perf_counter()
    for sender, index in sorted(turns) if stream else turns:
        key = transfer(number, sender, index)
        if sender == own:
            channel.send(1 - own, key, tensors, abort, TIMEOUT_S)
        else:
            channel.take(key, abort, TIMEOUT_S)
    return time.perf_counter() - start


def side(own: int, run_id: str, num_bytes: int, pipe: Connection, results: Any) -> None:
    """Runs one process. Device 0 receives last, and puts median seconds by (way, stream)."""
    torch.set_num_threads(1)
    ways = {name: opened(name, run_id, own, pipe) for name in TRANSPORT_NAMES}
    patterns = [(name, stream) for stream in (True, False) for name in TRANSPORT_NAMES]
    seconds: dict[tuple[str, bool], list[float]] = {pattern: [] for pattern in patterns}
    for number, (name, stream) in enumerate(patterns * (1 + ROUNDS)):
        taken_s = attempt(ways[name][0], own, number, num_bytes, stream=stream)
        seconds[name, stream].append(taken_s)
    if own == 0:
        results.put({p: statistics.median(found[1:]) for p, found in seconds.items()})
    pipe.send("done")
    pipe.recv()  # nothing of the other is under way any more
    for channel, transport in ways.values():
        channel.close()
        transport.close()


def measure(num_bytes: int) -> dict[tuple[str, bool], float]:
    """Returns median seconds of an attempt by (way, stream)."""
    context = multiprocessing.get_context("spawn")
    results, run_id = context.Queue(), uuid.uuid4().hex[:12]
    processes = [
        context.Process(target=side, args=(own, run_id, num_bytes, end, results))
        for own, end in enumerate(context.Pipe())
    ]
    for process in processes:
        process.start()
    found: dict[tuple[str, bool], float] = results.get(timeout=4 * TIMEOUT_S)
    for process in processes:
        process.join()
    return found


if __name__ == "__main__":
    print("bytes      zmq us  gloo us  gloo/zmq | zmq MB/s  gloo MB/s  gloo/zmq")
    for size in SIZES:
        measured, transfers = measure(size), 2 * TRANSFERS
        zmq_us, gloo_us = (1e6 * measured[name, False] / transfers for name in TRANSPORT_NAMES)
        zmq_mb, gloo_mb = (
            size * transfers / measured[name, True] / 1e6 for name in TRANSPORT_NAMES
        )
        print(
            f"{size:9} {zmq_us:8.0f} {gloo_us:8.0f} {gloo_us / zmq_us:9.2f} |"
            f" {zmq_mb:8.0f} {gloo_mb:10.0f} {gloo_mb / zmq_mb:9.2f}"
        )
