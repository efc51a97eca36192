"""Meters for platforms whose memory nobody counts for them: none, or one that watches storages.

Others have statistics or an account of their own, in :mod:`penstock.workers.platforms`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from penstock.host import world
from penstock.models.profiling.storages import StorageLedger, StorageMode
from penstock.models.torch_internals import key_of
from penstock.protocol.plan.instructions import Instruction
from penstock.workers.attempt import Attempt
from penstock.workers.telemetry.usage import MemoryPeak, Usage, Use


def named_tensors(attempt: Attempt) -> Iterator[tuple[Use, torch.Tensor]]:
    """What an attempt holds apart from the graphs of its forwards."""
    held = attempt.held_tensors
    yield from ((Use.WEIGHTS, tensor) for tensor in attempt.context.weights.tensors)
    yield from ((Use.GRADIENTS, tensor) for tensor in attempt.gradients.sums)
    for deferred in held.deferred.values():
        yield from ((Use.DEFERRED, tensor) for tensor in deferred.held())
    for batch in attempt.job.batches[:1]:
        called_with = attempt.context.runtime.called_with(batch)
        yield from ((Use.CONSTANTS, tensor) for tensor in called_with)
    # What came before its receive was posted waits in host memory, as before any device.
    job = attempt.job
    arrived = [
        tensors
        for key, tensors in attempt.context.transport.inbox.held().items()
        if (key.phase, key.attempt) == (job.phase, job.number)
        and (key.kind, key.stage, key.micro_batch) in held.posted
    ]
    for tensors in (*held.tensors.values(), *arrived):
        yield from ((Use.TRANSFERS, tensor) for tensor in tensors.values())


def usage_of_named(attempt: Attempt, device: torch.device) -> dict[Use, float]:
    """Returns the bytes on a device of what an attempt knows by name, by use."""
    found: defaultdict[Use, float] = defaultdict(float)
    for use, tensor in named_tensors(attempt):
        if tensor.device.type == device.type:
            found[use] += tensor.nbytes
    return dict(found)


_OUTLIVE = frozenset({Use.WEIGHTS, Use.GRADIENTS, Use.CONSTANTS})
"""Whoever holds these holds them on, though the attempt does not."""


class NoMeter:
    """Measures nothing."""

    limit_bytes: float | None = None
    peak: MemoryPeak | None = None

    def attempt(self) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()

    def received(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Nothing to do."""

    def executed(self, instruction: Instruction, attempt: Attempt) -> None:
        """Nothing to do."""

    def usage(self, attempt: Attempt) -> Usage:
        """What the attempt knows of; not what graphs keep."""
        return Usage(usage_of_named(attempt, attempt.context.device.torch_device))


class StorageMeter:
    """Counts storages on the CPU: :mod:`penstock.models.profiling.storages`.

    Weights and gradient sums count wherever they lie, as a plan counts them, though in fp32 they
    are in shared memory and nothing is copied; weights from their fetching on, though a CPU widens
    them when they are used first.
    """

    limit_bytes: float | None = None

    def __init__(self) -> None:
        self.peak: MemoryPeak | None = None
        self._ledger = StorageLedger()
        self._named: dict[int, tuple[Use, torch.UntypedStorage | None]] = {}

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Operators of this thread are watched."""
        self.peak, self._ledger, self._named = None, StorageLedger(), {}
        try:
            with StorageMode(self._ledger, Use.ACTIVATIONS):
                yield
        finally:
            self._named.clear()  # shared memory could not be unmapped

    def received(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Count tensors that another thread made: a graph may have them before the instruction
        ends.
        """
        for tensor in tensors.values():
            storage = tensor.untyped_storage()
            if not self._ledger.knows(storage):
                self._ledger.made(storage, Use.TRANSFERS)
                self._named[key_of(storage)] = Use.TRANSFERS, None

    def executed(self, instruction: Instruction, attempt: Attempt) -> None:
        """Take in what operators do not show, and see what the instruction needed at most."""
        ledger, named = self._ledger, dict(_storages(attempt))
        for use, storage in named.values():
            ledger.adopt(storage, use)
        for key in self._named.keys() - named.keys():
            _, given_back = self._named.pop(key)
            if given_back is not None:
                ledger.release(given_back)  # a pool, or the module's parameters, may refer to it
            else:
                ledger.count_for(key, Use.ACTIVATIONS)  # a graph may have saved it
        # Tensors are not kept alive by being counted; weights and sums are given back by name.
        self._named = {
            key: (use, storage if use in _OUTLIVE else None)
            for key, (use, storage) in named.items()
        }
        usage = _with_coming(ledger.at_peak, attempt)
        if self.peak is None or usage.total_bytes > self.peak.num_bytes:
            self.peak = MemoryPeak(
                num_bytes=usage.total_bytes,
                usage=usage,
                during=instruction,
                at_s=world.perf_counter(),
            )
        ledger.restart()

    def usage(self, attempt: Attempt) -> Usage:
        """What lives now."""
        return _with_coming(self._ledger.by_use, attempt)


def _with_coming(by_use: Mapping[str, float], attempt: Attempt) -> Usage:
    """With weights that were fetched and not touched."""
    context = attempt.context
    found = {Use(use): float(num_bytes) for use, num_bytes in by_use.items()}
    coming = context.weights.coming_elements * context.device.compute_dtype.itemsize
    return Usage({**found, Use.WEIGHTS: found.get(Use.WEIGHTS, 0.0) + coming})


def _storages(attempt: Attempt) -> Iterator[tuple[int, tuple[Use, torch.UntypedStorage]]]:
    for use, tensor in named_tensors(attempt):
        storage = tensor.untyped_storage()
        yield key_of(storage), (use, storage)
