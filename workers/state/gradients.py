"""Gradients of one attempt: summed on the device from zero, published once they are final.

Publishing is: the last byte in the contribution's range of shared memory, then its ready word, then
a message to the optimizerd of the node that owns the block. Where the plan reduces gradients
(:mod:`penstock.protocol.plan.reduction`), the sums of a stage are taken out instead and sent to its
root, which adds them to its own before it publishes those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from penstock.protocol.plan.reduction import Reduction
from penstock.shm.memory import NodeMemory
from penstock.shm.table import BlockTable, DType
from penstock.workers.device import Copied, Device, HostArray
from penstock.workers.state.weights import lender

Notify = Callable[[int, int], None]
"""Called with (block, contribution) when it is complete and its ready word is set."""

AwaitSettled = Callable[[int], None]
"""Waits until a block's state contains the step that its last committed gradients are of."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One writer's gradients of one block; ``index`` as in :mod:`penstock.shm.layout`."""

    block: int
    index: int


@dataclass(frozen=True, slots=True)
class Sum:
    """The gradients that a backward stage makes of one use of a block; use 0 is the block's own."""

    stage: int
    block: int
    use: int


def sums_of(table: BlockTable, blocks: range, stage: int) -> tuple[Sum, ...]:
    """What a backward stage of ``blocks`` sums: for themselves, and for the owners of tied
    tensors.
    """
    found = []
    for block in (table.blocks[index] for index in blocks):
        if block.trainable_elements:
            found.append(Sum(stage, block.index, 0))
        found += [
            Sum(stage, lent.owner, lent.contribution)
            for lent in block.borrows
            if lender(table, lent).name == "weights"
        ]
    return tuple(found)


class GradientBook:
    """The gradient sums of one attempt that aims at version ``target``."""

    def __init__(
        self,
        *,
        table: BlockTable,
        reduction: Reduction,
        memory: NodeMemory,
        device: Device,
        target: int,
        epoch: int,
        attempt: int,
        notify: Notify,
        await_settled: AwaitSettled,
        copied: Callable[[Copied], None],
    ) -> None:
        self._table = table
        self._reduction = reduction
        self._memory = memory
        self._device = device
        self._target_version = target
        self._epoch = epoch
        self._attempt = attempt
        self._notify = notify
        self._await_settled = await_settled
        self._copied = copied
        # Only a device that sums in fp32, on a CPU, may do so where they are published.
        self._may_sum_in_place = table.grad_dtype is DType.FP32
        self._open: dict[Sum, torch.Tensor] = {}
        self._closed: set[Sum] = set()
        self._leaving = 0
        """Sums of the stage that was published last."""

    def begin(self, stage: int) -> None:
        """The first backward of a stage starts: make its sums.

        It waits until no others are on their way to the host but those published last, so that the
        device holds those of one stage that leaves, whatever its links can do.
        """
        self._device.await_offloads(self._leaving)
        for wanted in self._sums(stage):
            self.flat(wanted)

    def flat(self, wanted: Sum) -> torch.Tensor:
        """The sum so far, flat fp32; zeros when asked for the first time."""
        found = self._open.get(wanted)
        if found is None:
            assert wanted not in self._closed, f"{wanted} is published or sent already"
            if self._may_sum_in_place:
                self._await_copy(wanted)
                self._begin_writing(wanted)
            found = self._device.gradients(self._target(wanted))
            self._open[wanted] = found
        return found

    def take(self, stage: int) -> dict[str, torch.Tensor]:
        """The final sums of a backward stage that another stage's device adds up, by name: flat
        fp32. They are no longer here.
        """
        return {_name(found): self._close(found) for found in self._sums(stage)}

    def add(self, stage: int, other: Mapping[str, torch.Tensor]) -> None:
        """Add what :meth:`take` gave for the same blocks in another route."""
        for found in self._sums(stage):
            self.flat(found).add_(other[_name(found)])

    def publish(self, stage: int) -> None:
        """The gradients of a backward stage are final. Those never asked for are zeros, and
        published too.
        """
        leaving = self._sums(stage)
        self._leaving = len(leaving)
        for found in leaving:
            contribution = self._contribution(found)
            self._await_copy(found)
            self._begin_writing(found)
            copied = self._device.offload(
                self._close(found),
                self._target(found),
                lambda contribution=contribution: self._complete(contribution),  # type: ignore[misc]
            )
            if copied is not None:
                self._copied(copied)

    @property
    def sums(self) -> tuple[torch.Tensor, ...]:
        """Flat sums that were begun and not published."""
        return tuple(self._open.values())

    @property
    def unpublished(self) -> tuple[Sum, ...]:
        """Sums that were begun, and neither published nor sent."""
        return tuple(self._open)

    def drop(self) -> None:
        """Forget the sums; the device writes nothing more when this returns."""
        self._device.drop()
        self._open.clear()

    def _sums(self, stage: int) -> tuple[Sum, ...]:
        return sums_of(self._table, self._reduction.layout.backward[stage].blocks, stage)

    def _close(self, final: Sum) -> torch.Tensor:
        gradients = self.flat(final)
        del self._open[final]
        self._closed.add(final)
        return gradients

    def _contribution(self, published: Sum) -> Contribution:
        uses = self._table.blocks[published.block].contributions
        route = self._reduction.published_route(published.stage)
        return Contribution(published.block, route * uses + published.use)

    def _await_copy(self, wanted: Sum) -> None:
        """A block's only copy holds committed gradients until its state has taken them in."""
        copies = self._memory.spec.layout.gradient_copies[wanted.block]
        if copies == 1 and self._reduction.publishes(wanted.stage):
            self._await_settled(wanted.block)

    def _begin_writing(self, wanted: Sum) -> None:
        if self._reduction.publishes(wanted.stage):
            contribution = self._contribution(wanted)
            self._memory.control.begin_gradients(
                contribution.block, self._copy(contribution), contribution.index
            )

    def _copy(self, contribution: Contribution) -> int:
        copies = self._memory.spec.layout.gradient_copies[contribution.block]
        return self._target_version % copies

    def _target(self, wanted: Sum) -> HostArray:
        """Where a sum is published; for one that is sent, memory of its own, which a device that
        sums elsewhere never touches.
        """
        if self._reduction.publishes(wanted.stage):
            contribution = self._contribution(wanted)
            return self._memory.grads(
                contribution.block, self._copy(contribution), contribution.index
            )
        elements = self._table.blocks[wanted.block].trainable_elements
        return np.empty(elements, dtype=np.float32)

    def _complete(self, contribution: Contribution) -> None:
        control = self._memory.control
        # Before the ready word: gradients that it names are committed, and a kill in between would
        # leave their sequence odd for ever.
        control.end_gradients(contribution.block, self._copy(contribution), contribution.index)
        # Only after the last byte: whoever reads the ready word reads the gradients next.
        control.set_ready(
            contribution.block, contribution.index, epoch=self._epoch, attempt=self._attempt
        )
        self._notify(contribution.block, contribution.index)


def _name(one: Sum) -> str:
    """The same in all routes."""
    return f"{one.block}.{one.use}"
