"""Copies between host and device: alone, both ways at once, and beside computation.

Three kinds of host memory: ``registered``, shared memory that the driver knows, as Penstock's;
``pinned``, of torch's allocator; ``pageable``. On a CPU a copy is one in its memory, and only
``pageable`` is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.measures.timing import Timer
from bench.gpu.memory import registered
from bench.gpu.running import Measurement, Task

KINDS = ("registered", "pinned", "pageable")
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class CopyPlace:
    """Two ranges of host memory and two of the device, of equal size, flat uint8."""

    host: list[torch.Tensor]
    device: list[torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Of one range."""
        return self.host[0].nbytes


class Copier:
    """Copies to the device and back, each on a stream of its own where there are streams."""

    def __init__(self, task: Task) -> None:
        self._streams: list[Any] = [None, None]
        if task.cuda:
            self._streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]

    def to_device(self, place: CopyPlace) -> None:
        """Issues one."""
        with self._on(0):
            place.device[0].copy_(place.host[0], non_blocking=True)

    def to_host(self, place: CopyPlace) -> None:
        """Issues one."""
        with self._on(1):
            place.host[1].copy_(place.device[1], non_blocking=True)

    def both(self, place: CopyPlace) -> None:
        """Issues one each way."""
        self.to_device(place)
        self.to_host(place)

    def _on(self, which: int) -> contextlib.AbstractContextManager[Any]:
        stream = self._streams[which]
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


@contextlib.contextmanager
def places(task: Task, kind: str, num_bytes: int) -> Iterator[CopyPlace]:
    """Yields memory of a kind, written once to fault its pages in."""
    there = [torch.zeros(num_bytes, dtype=torch.uint8, device=task.device) for _ in range(2)]
    if kind == "pageable":
        yield CopyPlace(
            host=[torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2)], device=there
        )
    elif kind == "pinned":
        yield CopyPlace(
            host=[torch.ones(num_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)],
            device=there,
        )
    else:
        with registered(2 * num_bytes) as memory:
            yield CopyPlace(host=[memory[:num_bytes], memory[num_bytes:]], device=there)


def alone(task: Task) -> None:
    """Measures GB/s of each kind, each way, and of both ways at once (the sum)."""
    copier, timer = Copier(task), Timer(task.device)
    for kind in KINDS if task.cuda else KINDS[-1:]:
        with places(task, kind, MIB if task.tiny else 256 * MIB) as place:
            seconds = {
                "to device": timer.median(lambda place=place: copier.to_device(place)),  # type: ignore[misc]
                "to host": timer.median(lambda place=place: copier.to_host(place)),  # type: ignore[misc]
                "both": timer.median(lambda place=place: copier.both(place)) / 2,  # type: ignore[misc]
            }
            task.say(**{kind: {way: place.num_bytes / s / 1e9 for way, s in seconds.items()}})


def sizes(task: Task) -> None:
    """Measures GB/s to the device of registered memory, by the size of a copy."""
    copier, timer = Copier(task), Timer(task.device)
    kind = "registered" if task.cuda else "pageable"
    found: dict[str, float] = {}
    for kib in (64, 1024) if task.tiny else (64, 256, 1024, 4096, 16_384, 65_536):
        with places(task, kind, kib << 10) as place:
            many = max(1, (64 << 10) // kib) if not task.tiny else 2
            run = _repeated(lambda place=place: copier.to_device(place), many)  # type: ignore[misc]
            found[f"{kib} KiB"] = many * place.num_bytes / timer.median(run) / 1e9
    task.say(gb_per_s=found)


def beside_compute(task: Task) -> None:
    """Measures matrix products alone, copies alone, and both together: the slowdown of each, and
    the share of the shorter that the longer hides.
    """
    copier, timer = Copier(task), Timer(task.device)
    size = 128 if task.tiny else 8192
    dtype = torch.bfloat16 if task.cuda else torch.float32
    left, right = (torch.randn(size, size, device=task.device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    kind = "registered" if task.cuda else "pageable"
    with places(task, kind, MIB if task.tiny else 256 * MIB) as place:
        compute = _repeated(lambda: torch.mm(left, right, out=out), 20)
        copy = _repeated(lambda: copier.both(place), 4)

        def together() -> None:
            copy()
            compute()

        compute_s, copy_s = timer.median(compute, 5), timer.median(copy, 5)
        both_s = timer.median(together, 5)
    task.say(
        compute_s=compute_s,
        copy_s=copy_s,
        together_s=both_s,
        hidden=(compute_s + copy_s - both_s) / min(compute_s, copy_s),
        tflops_alone=20 * 2.0 * size**3 / compute_s / 1e12,
    )


def _repeated(run: Callable[[], object], times: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(times):
            run()

    return repeated


MEASUREMENTS = (
    Measurement(name="alone", deadline_s=25, run=alone),
    Measurement(name="beside compute", deadline_s=20, run=beside_compute),
    Measurement(name="sizes", deadline_s=20, run=sizes),
)
