"""Meters for platforms without memory statistics: none, or one that watches storages.

Other platforms have statistics or an account of their own, in :mod:`penstock.workers.platforms`.
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
    """Yields the tensors that an attempt holds apart from the graphs of its forwards."""
    held = attempt.held_tensors
    yield from ((Use.WEIGHTS, tensor) for tensor in attempt.context.weights.tensors)
    yield from ((Use.GRADIENTS, tensor) for tensor in attempt.gradients.sums)
    for deferred in held.deferred.values():
        yield from ((Use.DEFERRED, tensor) for tensor in deferred.held())
    for batch in attempt.job.batches[:1]:
        called_with = attempt.context.runtime.called_with(batch)
        yield from ((Use.CONSTANTS, tensor) for tensor in called_with)
    # Tensors that came before their receive was posted wait in host memory, as for any device.
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
    """Returns the bytes on a device of the attempt's named tensors, by use."""
    by_use: defaultdict[Use, float] = defaultdict(float)
    for use, tensor in named_tensors(attempt):
        if tensor.device.type == device.type:
            by_use[use] += tensor.nbytes
    return dict(by_use)


_OUTLIVE = frozenset({Use.WEIGHTS, Use.GRADIENTS, Use.CONSTANTS})
"""Uses of tensors that live on after the attempt releases them."""


class NoMeter:
    """Measures nothing."""

    limit_bytes: float | None = None
    peak: MemoryPeak | None = None

    def attempt(self) -> AbstractContextManager[None]:
        """Measures nothing."""
        return nullcontext()

    def received(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Does nothing."""

    def executed(self, instruction: Instruction, attempt: Attempt) -> None:
        """Does nothing."""

    def usage(self, attempt: Attempt) -> Usage:
        """Returns the bytes of named tensors, without those of graphs."""
        return Usage(usage_of_named(attempt, attempt.context.device.torch_device))


class StorageMeter:
    """Counts storages on the CPU: :mod:`penstock.models.profiling.storages`.

    Weights and gradient sums count in any memory, as a plan counts them, though in fp32 they are in
    shared memory and never copied. Weights count from their fetch on, though a CPU widens them at
    their first use.
    """

    limit_bytes: float | None = None

    def __init__(self) -> None:
        self.peak: MemoryPeak | None = None
        self._ledger = StorageLedger()
        self._named: dict[int, tuple[Use, torch.UntypedStorage | None]] = {}

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Watches the operators of this thread."""
        self.peak, self._ledger, self._named = None, StorageLedger(), {}
        try:
            with StorageMode(self._ledger, Use.ACTIVATIONS):
                yield
        finally:
            self._named.clear()  # shared memory could not be unmapped

    def received(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Counts tensors that another thread made: a graph may have them before the instruction
        ends.
        """
        for tensor in tensors.values():
            storage = tensor.untyped_storage()
            if not self._ledger.knows(storage):
                self._ledger.made(storage, Use.TRANSFERS)
                self._named[key_of(storage)] = Use.TRANSFERS, None

    def executed(self, instruction: Instruction, attempt: Attempt) -> None:
        """Adds storages that operators do not show, and updates the peak of the instruction."""
        ledger, named = self._ledger, dict(_storages(attempt))
        for use, storage in named.values():
            ledger.adopt(storage, use)
        for key in self._named.keys() - named.keys():
            _, given_back = self._named.pop(key)
            if given_back is not None:
                ledger.release(given_back)  # a pool, or the module's parameters, may refer to it
            else:
                ledger.count_for(key, Use.ACTIVATIONS)  # a graph may have saved it
        # Counted tensors are not kept alive; weights and sums are released by name.
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
        """Returns the uses of live storages."""
        return _with_coming(self._ledger.by_use, attempt)


def _with_coming(by_use: Mapping[str, float], attempt: Attempt) -> Usage:
    """Adds weights that were fetched and not used yet."""
    context = attempt.context
    uses = {Use(use): float(num_bytes) for use, num_bytes in by_use.items()}
    coming = context.weights.coming_elements * context.device.compute_dtype.itemsize
    return Usage({**uses, Use.WEIGHTS: uses.get(Use.WEIGHTS, 0.0) + coming})


def _storages(attempt: Attempt) -> Iterator[tuple[int, tuple[Use, torch.UntypedStorage]]]:
    for use, tensor in named_tensors(attempt):
        storage = tensor.untyped_storage()
        yield key_of(storage), (use, storage)
