"""Transfers as NCCL makes them, between checked devices of this process.

A group has a stream of its own per device. A transfer starts behind what its device's current
stream was given when it was posted, and runs once both ends are posted.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from penstock.workers.channels import nccl, opening
from penstock.workers.channels.group import Store
from tests.streams.checker import Checker, extent
from tests.streams.gpu import CheckedGpu, gpu_of
from tests.streams.operators import quietly, raw
from tests.streams.streams import CheckedEvent, Work

_TIMEOUT_S = 30.0


class _Half:
    """One end of a transfer; ``ready``: behind what its device was given before."""

    def __init__(self, gpu: CheckedGpu, stream: Any, buffer: torch.Tensor) -> None:
        self.gpu, self.stream, self.buffer = gpu, stream, buffer
        stream.wait_stream(gpu.current_stream())
        self.ready = gpu.event()
        self.ready.record(stream)
        self.over: CheckedEvent = gpu.event()
        self.matched = threading.Event()

    def wait(self, timeout: object = None) -> bool:
        """The current stream waits. The host does, too, till the other end is posted: what it
        gives to the stream next would have to wait for that anyway.
        """
        assert self.matched.wait(_TIMEOUT_S), "the other end of a transfer was never posted"
        self.gpu.current_stream().wait_event(self.over)
        return True

    def is_completed(self) -> bool:
        """Returns whether the bytes are there."""
        return self.matched.is_set() and self.over.query()


class _Ways:
    """Transfers of all devices that wait for their other end, by group and way."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self._lock = threading.Lock()
        self._waiting: defaultdict[tuple[str, int, int], tuple[deque[_Half], deque[_Half]]]
        self._waiting = defaultdict(lambda: (deque(), deque()))

    def post(self, way: tuple[str, int, int], half: _Half, *, sends: bool) -> None:
        """Match in order."""
        with self._lock:
            self._waiting[way][0 if sends else 1].append(half)
            sent, received = self._waiting[way]
            if sent and received:
                self._transfer(sent.popleft(), received.popleft())

    def _transfer(self, sent: _Half, received: _Half) -> None:
        sent.stream.wait_event(received.ready)
        received.stream.wait_event(sent.ready)
        self._copy(sent, received)
        # Whoever asks a transfer last whether it is over may know less than who used its memory.
        del sent.buffer, received.buffer
        sent.over.record(sent.stream)
        received.stream.wait_event(sent.over)
        received.over.record(received.stream)
        sent.matched.set()
        received.matched.set()

    def _copy(self, sent: _Half, received: _Half) -> None:
        checker = self._checker
        with checker.lock:
            source, target = raw(sent.buffer), raw(received.buffer)
            for half, writes in ((sent, False), (received, True)):
                address, size = extent(half.buffer)
                checker.access(half.stream.name, address, size, writes=writes, what="transfer")
            sent.stream.issue(Work(run=quietly(lambda: target.copy_(source))))


class _Group:
    """One direction's, of one device."""

    def __init__(self, ways: _Ways, gpu: CheckedGpu, name: str, rank: int, size: int) -> None:
        self._ways, self._gpu, self._name = ways, gpu, name
        self._rank, self._size = rank, size
        self._stream = gpu.stream()
        self.store: Store | None = None

    def rank(self) -> int:
        """As it was made."""
        return self._rank

    def size(self) -> int:
        """As it was made."""
        return self._size

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Half:
        """Starts when the other end receives."""
        half = _Half(self._gpu, self._stream, tensors[0])
        self._ways.post((self._name, self._rank, rank), half, sends=True)
        return half

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Half:
        """Starts when the other end sends."""
        half = _Half(self._gpu, self._stream, tensors[0])
        self._ways.post((self._name, rank, self._rank), half, sends=False)
        return half

    def abort(self) -> None:
        """Behind it no transfer is under way."""
        self._gpu.checker.host_waits(self._stream)


@contextmanager
def transfers(checker: Checker) -> Iterator[None]:
    """``cluster.transport: nccl`` of checked devices is this."""
    ways = _Ways(checker)

    def make(
        store: Store, rank: int, size: int, device: torch.device, pairs: Iterable[object]
    ) -> tuple[_Group, _Group]:
        store.add("here", 1)
        while store.add("here", 0) < size:
            time.sleep(0.01)
        gpu = gpu_of(checker, device.index - 1)
        up, down = (_Group(ways, gpu, name, rank, size) for name in ("up", "down"))
        up.store = store  # as in NCCL: others may ask the leader's for a while
        return up, down

    with (
        patch.object(nccl, "make_groups", make),
        patch.object(nccl, "is_built", lambda: True),
        patch.object(opening.torch.cuda, "device_count", lambda: 8),
    ):
        yield
