"""The task graph: what the event core (``native/simulate.h``) runs, built chunk by chunk.

A chunk is tasks of one kind, as arrays. Queues are named by numbers (:class:`Queues`) and serve
their tasks in the order of the rows that the tasks come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock import _native
from penstock.planner.simulate.columns import Ints, bytes_of
from penstock.planner.simulate.network import Network
from penstock.protocol.plan.semantics import Lane

Floats: TypeAlias = NDArray[np.float64]

_LANES = {lane: index for index, lane in enumerate(Lane)}


class Label(IntEnum):
    """Says how the label of a span is made from the instruction that its task comes from."""

    INSTRUCTION = 0
    TENSOR = 1
    OPTIMIZER = 2
    SETTLE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """Numbers of queues: each serves one task at a time."""

    num_devices: int
    num_optimizers: int

    def compute(self, device: Any) -> Any:
        """Returns the queue of a device's compute stream."""
        return device

    def fetch(self, device: Any) -> Any:
        """Returns the queue of a device's host-to-device stream."""
        return self.num_devices + device

    def offload(self, device: Any) -> Any:
        """Returns the queue of a device's device-to-host stream."""
        return 2 * self.num_devices + device

    def collective(self, device: Any) -> Any:
        """Returns the queue of what a device sends to its neighbour in rings."""
        return 3 * self.num_devices + device

    def optimizer(self, index: Any) -> Any:
        """Returns the queue of optimizer cores: of a NUMA domain, or behind these of a stage."""
        return 4 * self.num_devices + index

    @property
    def barriers(self) -> int:
        """The queue of tasks that take no time."""
        return 4 * self.num_devices + self.num_optimizers

    def link(self, source: Any, target: Any) -> Any:
        """Returns the queue of the ordered channel from one device to another."""
        return self.barriers + 1 + source * self.num_devices + target

    def peer_swap(self, device: int, *, out: bool) -> int:
        """Returns the queue of a device's swaps to peers, or back: in its own order, not theirs."""
        first: int = self.link(self.num_devices, 0)
        return first + (device if out else self.num_devices + device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Tasks:
    """All tasks. The first ``num_compute`` are the compute instructions, in the order of rows.

    ``lanes``: index of the :class:`Lane`, -1 for invisible tasks. ``origins``: rows.
    """

    num_compute: int
    seconds: Floats
    amounts: Floats
    delays: Floats
    routes: NDArray[np.int32]
    unordered: NDArray[np.uint8]
    queues: Ints
    origins: Ints
    lanes: NDArray[np.int8]
    labels: NDArray[np.int8]
    places: Ints
    peers: Ints
    edge_tasks: NDArray[np.int32]
    edge_needs: NDArray[np.int32]

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays."""
        return bytes_of(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Times:
    """``starts[t]`` and ``ends[t]`` of every task; NaN where it never does."""

    starts: Floats
    ends: Floats

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays."""
        return bytes_of(self)


_TYPES: dict[str, Any] = {
    "seconds": np.float64,
    "amounts": np.float64,
    "delays": np.float64,
    "routes": np.int32,
    "unordered": np.uint8,
    "queues": np.int64,
    "origins": np.int64,
    "lanes": np.int8,
    "labels": np.int8,
    "places": np.int64,
    "peers": np.int64,
}


@dataclass(slots=True, kw_only=True)
class GraphBuilder:
    """Collects chunks of tasks and edges between them."""

    num_tasks: int = 0
    num_compute: int = 0
    _chunks: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _TYPES})
    _edges: list[tuple[Any, Any]] = field(default_factory=list)

    def add(
        self,
        count: int,
        *,
        lane: Lane | None,
        queues: Any,
        origins: Any,
        places: Any,
        label: Label = Label.INSTRUCTION,
        peers: Any = -1,
        seconds: Any = 0.0,
        amounts: Any = 0.0,
        routes: Any = -1,
        delays: Any = 0.0,
        unordered: bool = False,
    ) -> Ints:
        """Adds ``count`` tasks; returns their numbers. A value is one for all, or one for each."""
        values = {
            "seconds": seconds,
            "amounts": amounts,
            "delays": delays,
            "routes": routes,
            "unordered": unordered,
            "queues": queues,
            "origins": origins,
            "lanes": -1 if lane is None else _LANES[lane],
            "labels": label,
            "places": places,
            "peers": peers,
        }
        for name, value in values.items():
            chunk = np.empty(count, dtype=_TYPES[name])
            chunk[:] = value
            self._chunks[name].append(chunk)
        self.num_tasks += count
        return np.arange(self.num_tasks - count, self.num_tasks)

    def need(self, tasks: Any, needs: Any) -> None:
        """Makes ``tasks[i]`` start after ``needs[i]`` has ended; -1 means no need."""
        tasks, needs = np.broadcast_arrays(tasks, needs)
        present = needs >= 0
        self._edges.append((tasks[present], needs[present]))

    def build(self) -> Tasks:
        """Returns everything that was added."""
        columns = {
            name: np.concatenate(chunks).astype(_TYPES[name], copy=False)
            if chunks
            else np.empty(0, dtype=_TYPES[name])
            for name, chunks in self._chunks.items()
        }
        tasks, needs = zip(*self._edges, strict=True) if self._edges else ((), ())
        empty = np.empty(0, dtype=np.int32)
        return Tasks(
            num_compute=self.num_compute,
            edge_tasks=np.concatenate([empty, *tasks]).astype(np.int32),
            edge_needs=np.concatenate([empty, *needs]).astype(np.int32),
            **columns,
        )


def run_tasks(tasks: Tasks, network: Network) -> Times:
    """Lets the event core run the tasks; returns when each started and ended, in seconds."""
    offsets, queued = _served(tasks)
    starts, ends, _ = _native.simulate_tasks(
        seconds=tasks.seconds,
        amounts=tasks.amounts,
        delays=tasks.delays,
        routes=tasks.routes,
        unordered=tasks.unordered,
        edge_tasks=tasks.edge_tasks,
        edge_needs=tasks.edge_needs,
        queue_offsets=offsets,
        queue_tasks=queued,
        **network.arrays(),
    )
    return Times(starts=starts, ends=ends)


def _served(tasks: Tasks) -> tuple[Ints, NDArray[np.int32]]:
    """Returns where each queue begins, and the tasks in the order of queues, then of rows."""
    num_rows = int(tasks.origins.max(initial=0)) + 1
    queued = np.argsort(tasks.queues * num_rows + tasks.origins, kind="stable")
    queues = tasks.queues[queued]
    changes = np.flatnonzero(queues[1:] != queues[:-1]) + 1
    ends = [len(queued)] if len(queued) else []
    return np.concatenate(([0], changes, ends)).astype(np.int64), queued.astype(np.int32)
