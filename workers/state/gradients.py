"""Gradients of one attempt: summed on the device from zero, published once they are final.

A publication stores the last byte in the partial's range of shared memory, then its ready word. A
message to the optimizerd of the block's owner follows. A plan may reduce gradients
(:mod:`penstock.protocol.plan.reduction`). Then the sums of a stage go to its root instead. The root
adds them to its own sums and publishes the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from penstock.protocol.plan.reduction import Reduction
from penstock.shm.memory import NodeMemory
from penstock.shm.table import BlockTable, DType
from penstock.workers.device import Device, HostArray
from penstock.workers.state.scope import AttemptScope
from penstock.workers.state.weights import tied_owner


@dataclass(frozen=True, slots=True)
class GradientPartial:
    """One writer's gradients of one block; ``index`` counts as in :mod:`penstock.shm.layout`."""

    block: int
    index: int


@dataclass(frozen=True, slots=True)
class Sum:
    """The gradients that a backward stage computes for one use of a block; use 0 is the block's
    own.
    """

    stage: int
    block: int
    use: int


def sums_of(table: BlockTable, blocks: range, stage: int) -> tuple[Sum, ...]:
    """Returns the sums of a backward stage of ``blocks``: for its own blocks, and for the owners of
    tied tensors.
    """
    sums = []
    for block in (table.blocks[index] for index in blocks):
        if block.trainable_elements:
            sums.append(Sum(stage, block.index, 0))
        sums += [
            Sum(stage, tied.owner, tied.contribution)
            for tied in block.borrows
            if tied_owner(table, tied).name == "weights"
        ]
    return tuple(sums)


class GradientBook:
    """The gradient sums of one attempt, which aims at the version after ``scope.base_version``."""

    def __init__(
        self,
        *,
        table: BlockTable,
        reduction: Reduction,
        memory: NodeMemory,
        device: Device,
        scope: AttemptScope,
    ) -> None:
        self._table = table
        self._reduction = reduction
        self._memory = memory
        self._device = device
        self._scope = scope
        self._target_version = scope.base_version + 1
        # Only a device that sums in fp32, on a CPU, may sum in the memory of publication.
        self._may_sum_in_place = table.grad_dtype is DType.FP32
        self._open: dict[Sum, torch.Tensor] = {}
        self._closed: set[Sum] = set()
        self._leaving = 0
        """Sums of the stage that was published last."""

    def begin(self, stage: int) -> None:
        """Starts the first backward of a stage: allocates its sums.

        Waits until only the sums published last are still on their way to the host. So the device
        holds outgoing sums of one stage at most, at any bandwidth of its links.
        """
        self._device.await_offloads(self._leaving)
        for gradient_sum in self._sums(stage):
            self.flat(gradient_sum)

    def flat(self, gradient_sum: Sum) -> torch.Tensor:
        """Returns the sum up to now, flat fp32; zeros at the first call."""
        gradients = self._open.get(gradient_sum)
        if gradients is None:
            assert gradient_sum not in self._closed, f"{gradient_sum} is published or sent already"
            if self._may_sum_in_place:
                self._await_copy(gradient_sum)
                self._begin_writing(gradient_sum)
            gradients = self._device.gradients(self._target(gradient_sum))
            self._open[gradient_sum] = gradients
        return gradients

    def take(self, stage: int) -> dict[str, torch.Tensor]:
        """Returns the final sums of a backward stage by name, flat fp32, and removes them from the
        book. Another stage's device adds them up.
        """
        return {
            _name(gradient_sum): self._close(gradient_sum) for gradient_sum in self._sums(stage)
        }

    def add(self, stage: int, other: Mapping[str, torch.Tensor]) -> None:
        """Adds the result of :meth:`take` for the same blocks in another pipeline replica."""
        for gradient_sum in self._sums(stage):
            self.flat(gradient_sum).add_(other[_name(gradient_sum)])

    def publish(self, stage: int) -> None:
        """Publishes the gradients of a backward stage, which are final. Sums never begun are
        published as zeros.
        """
        leaving = self._sums(stage)
        self._leaving = len(leaving)
        for gradient_sum in leaving:
            partial = self._partial(gradient_sum)
            self._await_copy(gradient_sum)
            self._begin_writing(gradient_sum)
            copied = self._device.offload(
                self._close(gradient_sum),
                self._target(gradient_sum),
                lambda partial=partial: self._complete(partial),  # type: ignore[misc]
            )
            if copied is not None:
                self._scope.copied("d2h", "gradients", copied)

    @property
    def sums(self) -> tuple[torch.Tensor, ...]:
        """Flat sums that were begun and not published."""
        return tuple(self._open.values())

    @property
    def unpublished(self) -> tuple[Sum, ...]:
        """Sums that were begun, and neither published nor sent."""
        return tuple(self._open)

    def drop(self) -> None:
        """Forgets the sums; the device writes nothing more after the return."""
        self._device.drop()
        self._open.clear()

    def _sums(self, stage: int) -> tuple[Sum, ...]:
        return sums_of(self._table, self._reduction.layout.backward[stage].blocks, stage)

    def _close(self, final: Sum) -> torch.Tensor:
        gradients = self.flat(final)
        del self._open[final]
        self._closed.add(final)
        return gradients

    def _partial(self, published: Sum) -> GradientPartial:
        uses = self._table.blocks[published.block].contributions
        replica = self._reduction.published_route(published.stage)
        return GradientPartial(published.block, replica * uses + published.use)

    def _await_copy(self, wanted: Sum) -> None:
        """Waits until a block's state has taken in the committed gradients in its only copy."""
        copies = self._memory.spec.layout.gradient_copies[wanted.block]
        if copies == 1 and self._reduction.publishes(wanted.stage):
            self._scope.await_settled(wanted.block)

    def _begin_writing(self, wanted: Sum) -> None:
        if self._reduction.publishes(wanted.stage):
            partial = self._partial(wanted)
            self._memory.control.begin_gradients(partial.block, self._copy(partial), partial.index)

    def _copy(self, partial: GradientPartial) -> int:
        copies = self._memory.spec.layout.gradient_copies[partial.block]
        return self._target_version % copies

    def _target(self, wanted: Sum) -> HostArray:
        """Returns the memory that a sum is published in. A sum that is sent to its root gets
        private memory.
        """
        if self._reduction.publishes(wanted.stage):
            partial = self._partial(wanted)
            return self._memory.grads(partial.block, self._copy(partial), partial.index)
        elements = self._table.blocks[wanted.block].trainable_elements
        return np.empty(elements, dtype=np.float32)

    def _complete(self, partial: GradientPartial) -> None:
        control = self._memory.control
        # Before the ready word: gradients that it names are committed, and a kill in between would
        # leave their sequence odd for ever.
        control.end_gradients(partial.block, self._copy(partial), partial.index)
        # Set the ready word only after the last byte: a reader of the word reads the gradients
        # next.
        control.set_ready(
            partial.block, partial.index, epoch=self._scope.epoch, attempt=self._scope.attempt
        )
        self._scope.published(partial.block, partial.index)


def _name(one: Sum) -> str:
    """Returns the key of a sum, equal in all pipeline replicas."""
    return f"{one.block}.{one.use}"
