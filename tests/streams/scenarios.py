"""What the device code does in a run, each time small and whole: one function per kind of work.

Each raises if a race was found, or if bytes differ from those of a device that computes in order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch

from penstock.planner.schedule.schedule import lower, schedule_of
from penstock.protocol.plan.instructions import OffloadGradients
from penstock.workers.data import job_number
from penstock.workers.interpreter import JobResult
from penstock.workers.platforms.cuda import update
from penstock.workers.state.updates import BlockUpdates
from penstock.workers.waiting import Abort, Interrupted
from tests.streams.checker import Checker, Order
from tests.streams.nccl import transfers
from tests.streams.platform import checked
from tests.worker.cluster import Cluster, build_cluster, make_config
from tests.worker.test_parity_matrix import SMALL, swapped
from tests.worker.test_update import (
    FLUSHED,
    STEP,
    Home,
    check_flushes,
    check_residents,
    expected_weights,
    fill_state,
    scope_of,
    with_updates,
)

Settings = Mapping[str, Any]
Adapt = Callable[[Cluster], None]
Bytes = list[list[bytes]]

ATTEMPTS = 2
"""The second one uses memory of the first again."""

TIED = {**SMALL, "num_hidden_layers": 4}


def settings_of(scheme: str, workers: int = 2, **others: Any) -> dict[str, Any]:
    """Of a cluster of small models with tied embeddings."""
    return {"scheme": scheme, "workers": workers, "transport": "zmq", "hf": TIED, **others}


def swap(cluster: Cluster) -> None:
    """Half of what forwards keep goes to the host."""
    cluster.adopt(lower(swapped(schedule_of(cluster.plan), 0.5)))


def keep(cluster: Cluster) -> None:
    """As it is."""


def gradients(cluster: Cluster, adapt: Adapt, after: Callable[[], None]) -> Bytes:
    """Returns those of each attempt; nothing of one can pass for a gradient of the next."""
    adapt(cluster)
    found = []
    for attempt in range(1, ATTEMPTS + 1):
        cluster.spoil_gradients()
        job = cluster.job(attempt=attempt, seed=attempt)
        cluster.train(job)
        cluster.check_finished(job)
        found.append(cluster.gradient_bytes())
        after()
    cluster.train(cluster.job(attempt=job_number(1, 0), phase="eval"))
    return found


def on_cpu(settings: Settings, adapt: Adapt) -> Bytes:
    """Returns the gradients of the CPU's device."""
    with ExitStack() as stack:
        cluster = build_cluster(stack, make_config(**{**settings, "transport": "zmq"}))
        return gradients(cluster, adapt, lambda: None)


def on_gpu(order: Order, settings: Settings, adapt: Adapt) -> Bytes:
    """Returns the gradients of checked devices."""
    checker = Checker(order)
    with checked(checker), transfers(checker), ExitStack() as stack:
        cluster = build_cluster(stack, make_config(**settings, device="cuda"))
        after = partial(checker.host_writes_all, "what follows an attempt")
        found = gradients(cluster, adapt, after)
    checker.check()
    return found


_IN_ORDER: dict[tuple[str, str], Bytes] = {}


def in_order(settings: Settings, adapt: Adapt) -> Bytes:
    """Returns what the gradients must be; computed once."""
    key = json.dumps(dict(settings), sort_keys=True), adapt.__name__
    if key not in _IN_ORDER:
        narrow = "model" in settings
        _IN_ORDER[key] = on_gpu("at once", settings, adapt) if narrow else on_cpu(settings, adapt)
    return _IN_ORDER[key]


def trains(settings: Settings, adapt: Adapt, order: Order) -> None:
    """The gradients are those of the CPU; in 16 bits, where the CPU computes in fp32, those of the
    same code on streams without delays.
    """
    assert on_gpu(order, settings, adapt) == in_order(settings, adapt), "other gradients"


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    """As on GPUs, whose square root is correctly rounded; that of torch on CPUs is not."""
    return tensor.copy_(tensor.double().sqrt())


@contextmanager
def small_pieces() -> Iterator[None]:
    """Blocks are updated in several pieces, with the GPU's arithmetic."""
    with (
        patch.object(update, "PIECE_ELEMENTS", 256),
        patch.object(torch.Tensor, "sqrt_", _rounded),
    ):
        yield


def updates(settings: Settings, order: Order) -> None:
    """Blocks are previewed with the bits of the optimizer's kernel, while others are computed."""
    checker = Checker(order)
    with small_pieces(), checked(checker), ExitStack() as stack:
        cluster = build_cluster(stack, make_config(**settings, device="cuda"))
        memory = cluster.memories[0]
        fill_state(memory)
        cluster.adopt(with_updates(cluster.plan))
        for worker in cluster.workers:
            previewer = worker.platform.previewer(memory, cluster.plan)
            made = BlockUpdates(memory, previewer)
            stack.callback(made.close)
            worker.context = replace(worker.context, updates=made)
        for attempt in range(1, ATTEMPTS + 1):
            cluster.spoil_gradients()
            cluster.train(replace(cluster.job(attempt=attempt, seed=attempt), step=STEP))
            for block in cluster.plan.updates:
                weights, _ = expected_weights(memory, block)
                assert memory.weights(block, 1).tobytes() == weights, f"block {block}"
            checker.host_writes_all("what follows an attempt")
    checker.check()


def residents(order: Order) -> None:
    """State stays on the device over commits, skips and holds."""
    checker = Checker(order)
    with small_pieces(), checked(checker), ExitStack() as stack:
        settings = settings_of("1f1b", 1, device="cuda")
        cluster = build_cluster(stack, make_config(**settings))
        memory, plan = cluster.memories[0], with_updates(cluster.plan)
        worker = cluster.workers[0]
        with patch("penstock.workers.platforms.cuda.platform.residents_of", lambda program: [0]):
            previewer = worker.platform.previewer(memory, plan)
        check_residents(Home(memory, previewer))
        previewer.close()
    checker.check()


def flushes(order: Order) -> None:
    """State goes back, while other pieces come, beside what it was read from."""
    checker = Checker(order)
    with small_pieces(), checked(checker), ExitStack() as stack:
        settings = settings_of("1f1b", 1, device="cuda")
        cluster = build_cluster(stack, make_config(**{**settings, "schedule": FLUSHED}))
        previewer = cluster.workers[0].platform.previewer(cluster.memories[0], cluster.plan)
        check_flushes(cluster.memories[0], previewer)
        previewer.close()
    checker.check()


class _Ends(Abort):
    """Set when it has been asked a number of times."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._left = after

    def check(self) -> None:
        """Count."""
        self._left -= 1
        if self._left < 0:
            self.set("drained")
        super().check()


def broken_updates(order: Order) -> None:
    """An update ends after any of its pieces: behind that nothing reads or writes the block."""
    checker = Checker(order)
    with small_pieces(), checked(checker), ExitStack() as stack:
        cluster = build_cluster(stack, make_config(**settings_of("1f1b", 1, device="cuda")))
        memory, worker = cluster.memories[0], cluster.workers[0]
        previewer = worker.platform.previewer(memory, with_updates(cluster.plan))
        fill_state(memory)
        cluster.train(cluster.job())
        for pieces in range(3):
            broken = replace(scope_of(STEP), abort=_Ends(pieces))
            try:
                previewer.preview(0, broken)
            except Interrupted:
                memory.weights(0, 1).view("u1")[:] = 0xFF
                continue
            raise AssertionError(f"not interrupted after {pieces} pieces")
        previewer.preview(0, scope_of(STEP))
        assert memory.weights(0, 1).tobytes() == expected_weights(memory, 0)[0]
        previewer.close()
    checker.check()


def behind_an_offload(settings: Settings) -> int:
    """Returns the number of the instruction behind the first offload of device 0."""
    with ExitStack() as stack:
        program = build_cluster(stack, make_config(**settings)).plan.programs[0]
    return 1 + next(n for n, i in enumerate(program) if isinstance(i, OffloadGradients))


def aborts(settings: Settings, at: int | None, order: Order, *, dies: bool = False) -> None:
    """An attempt ends before instruction ``at`` of any device, by default when gradients are on
    their way; the next epoch computes the same.

    ``dies``: what was under way is lost with it, instead of running to its end.
    """
    at = behind_an_offload(settings) if at is None else at
    wanted = on_cpu(settings, keep)
    checker = Checker(order)
    clusters: list[Cluster] = []

    def before(device: int, number: int) -> None:
        if number == at and clusters:
            if dies:
                checker.drop_queues()
            clusters[0].abort_all()

    with checked(checker, before), ExitStack() as stack:
        cluster = build_cluster(stack, make_config(**settings, device="cuda"))
        clusters.append(cluster)
        results = cluster.run(cluster.job())
        assert all(isinstance(result, Interrupted | JobResult) for result in results), results
        checker.host_writes_all("what follows an aborted attempt")
        clusters.clear()
        for socket in cluster.optimizers:
            while socket.poll(10):
                socket.recv()
        cluster.spoil_gradients()
        cluster.begin(2)
        after = partial(checker.host_writes_all, "what follows an attempt")
        assert gradients(cluster, keep, after) == wanted
    checker.check()


BF16 = {"model": {"dtype": "bf16"}, "grad_dtype": "bf16"}
SELECTIVE = {"schedule": {"recompute": "selective", "drop": ["core", "mlp"]}}

SCENARIOS: Mapping[str, Callable[[Order], None]] = MappingProxyType(
    {
        "streamed": partial(trains, settings_of("mobius"), keep),
        "streamed in 16 bits": partial(trains, settings_of("spipe", **BF16), keep),
        "swapped": partial(trains, settings_of("1f1b", **SELECTIVE), swap),
        "split backward": partial(trains, settings_of("zb-h1"), keep),
        "nccl": partial(trains, {**settings_of("1f1b"), "transport": "nccl"}, keep),
        "nccl, streamed": partial(trains, {**settings_of("spipe"), "transport": "nccl"}, keep),
        "from another node": partial(trains, settings_of("mobius", nodes=2), keep),
        "to a peer": partial(trains, settings_of("bpipe", 4, hf=SMALL), keep),
        "not pinned": partial(trains, settings_of("mobius", pin_memory=False), keep),
        "updates": partial(updates, settings_of("1f1b")),
        "updates in 16 bits": partial(updates, settings_of("1f1b", **BF16)),
        "residents": residents,
        "flushes": flushes,
        "broken updates": broken_updates,
        "aborted early": partial(aborts, settings_of("mobius"), 9),
        "aborted": partial(aborts, settings_of("mobius"), None),
    }
)
