"""What the checker finds: planted faults of each kind, and none where the order is enough."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from penstock.models.split_backward.products import product, ticket_for
from tests.streams.checker import Checker
from tests.streams.gpu import CheckedGpu, gpu_of
from tests.streams.threads import watching


@pytest.fixture
def gpu() -> Iterator[CheckedGpu]:
    """One device, whose streams are late."""
    checker = Checker()
    gpu = gpu_of(checker, 0)
    with watching(checker):
        checker.computes(gpu)
        yield gpu


def registered(gpu: CheckedGpu, count: int = 8) -> torch.Tensor:
    """Host memory of fp32 ones that the driver knows."""
    array = np.ones(count, np.float32)
    assert gpu.register(int(array.ctypes.data), array.nbytes) == 0
    return torch.from_numpy(array)


def races(gpu: CheckedGpu) -> list[str]:
    return [str(race) for race in gpu.checker.races.values()]


def copy_in(gpu: CheckedGpu, host: torch.Tensor) -> tuple[torch.Tensor, object]:
    """A copy on another stream, and that stream."""
    there, stream = torch.zeros(8, device=gpu.device), gpu.stream()
    stream.wait_stream(gpu.current_stream())
    with gpu.on(stream):
        there.copy_(host, non_blocking=True)
    return there, stream


@pytest.mark.parametrize("waits", [True, False])
def test_work_that_does_not_wait_for_a_copy(gpu: CheckedGpu, waits: bool) -> None:
    there, stream = copy_in(gpu, registered(gpu))
    if waits:
        gpu.current_stream().wait_stream(stream)
    total = (there * 2.0).sum()
    assert float(total) == (16.0 if waits else 0.0), "late streams show it in the bytes, too"
    assert bool(races(gpu)) != waits


@pytest.mark.parametrize("waits", [True, False])
def test_a_layer_product_reads_what_its_schema_says(gpu: CheckedGpu, waits: bool) -> None:
    """The operators of compiled layers, called as their graphs call them: a weight that is still
    being copied is found in the forward, and in the backward that makes the rows' gradient.
    """
    weight, stream = copy_in(gpu, registered(gpu))
    if waits:
        gpu.current_stream().wait_stream(stream)
    rows = torch.ones(3, 4, device=gpu.device, requires_grad=True)
    handed: list[torch.Size] = []
    leaf = weight.view(2, 4).requires_grad_()
    ticket = ticket_for(leaf, lambda gradient, kept: handed.extend((gradient.shape, kept.shape)))
    made = product(rows, leaf, None, ticket, False, False)
    assert made.sum().item() == (24.0 if waits else 0.0)
    made.sum().backward()
    assert handed == [(3, 2), (3, 4)] and leaf.grad is None and rows.grad is not None
    assert bool(races(gpu)) != waits
    operators = ("penstock::product", "aten::mm")
    assert waits or all(any(o in race for race in races(gpu)) for o in operators)


@pytest.mark.parametrize("waits", [True, False])
def test_a_host_that_reads_before_a_copy_has_arrived(gpu: CheckedGpu, waits: bool) -> None:
    host = registered(gpu)
    device = torch.full((8,), 3.0, device=gpu.device)
    host.copy_(device, non_blocking=True)
    if waits:
        gpu.current_stream().synchronize()
    gpu.checker.host_access(host, writes=False, what="test")
    assert bool(races(gpu)) != waits


@pytest.mark.parametrize("kept", [True, False])
def test_memory_that_is_let_go_of_while_another_stream_reads_it(
    gpu: CheckedGpu, kept: bool
) -> None:
    host, stream = registered(gpu), gpu.stream()
    source = torch.full((8,), 5.0, device=gpu.device)
    stream.wait_stream(gpu.current_stream())
    with gpu.on(stream):
        host.copy_(source, non_blocking=True)
    if kept:
        gpu.keep_for(source, stream)
    address = source.data_ptr()
    del source
    again = torch.full((8,), 7.0, device=gpu.device)
    assert (again.data_ptr() == address) != kept, "used again at once, unless it is kept"
    stream.synchronize()
    assert bool(races(gpu)) != kept
    assert host[0] == (5.0 if kept else 7.0)


def test_pinned_memory_is_kept_for_the_copies_it_takes_part_in(gpu: CheckedGpu) -> None:
    there, stream = torch.zeros(8, device=gpu.device), gpu.stream()
    stream.wait_stream(gpu.current_stream())
    pinned = gpu.pinned(32).view(torch.float32)
    pinned.fill_(2.0)
    with gpu.on(stream):
        there.copy_(pinned, non_blocking=True)
    address = pinned.data_ptr()
    del pinned
    other = gpu.pinned(32)
    assert other.data_ptr() != address
    stream.synchronize()
    assert gpu.pinned(32).data_ptr() == address and not races(gpu)


def test_pageable_memory_may_change_once_a_copy_was_issued(gpu: CheckedGpu) -> None:
    host = torch.from_numpy(np.ones(8, np.float32))
    there, stream = copy_in(gpu, host)
    host.zero_()
    gpu.current_stream().wait_stream(stream)
    assert float(there.sum()) == 8.0 and not races(gpu)


@pytest.mark.parametrize("joined", [True, False])
def test_a_thread_that_did_not_wait_for_another(gpu: CheckedGpu, joined: bool) -> None:
    """One waits for the copy, another one reads."""
    host, over = registered(gpu), gpu.event()
    host.copy_(torch.zeros(8, device=gpu.device), non_blocking=True)
    over.record(gpu.current_stream())
    thread = threading.Thread(target=over.synchronize)
    thread.start()
    if joined:
        thread.join()
    gpu.checker.host_access(host, writes=False, what="test")
    assert bool(races(gpu)) != joined
    thread.join()


def test_an_event_is_the_point_where_it_was_recorded_last(gpu: CheckedGpu) -> None:
    host, stream, event = registered(gpu), gpu.stream(), gpu.event()
    assert event.query(), "passed as long as it is not recorded"
    there, other = torch.zeros(8, device=gpu.device), torch.zeros(8, device=gpu.device)
    stream.wait_stream(gpu.current_stream())
    with gpu.on(stream):
        there.copy_(host, non_blocking=True)
        event.record(stream)
        other.copy_(host, non_blocking=True)
    gpu.current_stream().wait_event(event)
    assert float(there.sum()) == 8.0 and not races(gpu)
    assert float(other.sum()) == 0.0 and races(gpu)


def test_memory_is_unregistered_while_it_is_copied(gpu: CheckedGpu) -> None:
    host = registered(gpu)
    copy_in(gpu, host)
    gpu.unregister(host.data_ptr())
    assert gpu.checker.faults == [
        "memory is unregistered while work of stream 2 of GPU 0 is under way"
    ]
