"""Gradients of one attempt: summed on the device from zero, published once they are final.

Publishing is: the last byte in the contribution's range of shared memory, then its ready word, then
a message to the optimizerd of the node that owns the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from penstock.shm.layout import GRADIENT_COPIES
from penstock.shm.memory import NodeMemory
from penstock.shm.table import BlockTable
from penstock.workers.devices.base import Device
from penstock.workers.weights import lender

Notify = Callable[[int, int], None]
"""Called with (block, contribution) when it is complete and its ready word is set."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One writer's gradients of one block; ``index`` as in :mod:`penstock.shm.layout`."""

    block: int
    index: int

    @classmethod
    def of_use(cls, table: BlockTable, block: int, use: int, route: int) -> Contribution:
        """That of one use of a block's parameters in one route; use 0 is the block's own."""
        return cls(block, route * table.blocks[block].contributions + use)


def contributions_of(
    table: BlockTable, blocks: Sequence[int], route: int
) -> tuple[Contribution, ...]:
    """What the backward of ``blocks`` contributes: to themselves, and to the owners of tied
    tensors.
    """
    found = []
    for block in (table.blocks[index] for index in blocks):
        if block.trainable_elements:
            found.append(Contribution.of_use(table, block.index, 0, route))
        found += [
            Contribution.of_use(table, lent.owner, lent.contribution, route)
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
        memory: NodeMemory,
        device: Device,
        target: int,
        epoch: int,
        attempt: int,
        notify: Notify,
    ) -> None:
        self._table = table
        self._memory = memory
        self._device = device
        self._copy = target % GRADIENT_COPIES
        self._epoch = epoch
        self._attempt = attempt
        self._notify = notify
        self._open: dict[Contribution, torch.Tensor] = {}
        self._published: set[Contribution] = set()

    def flat(self, contribution: Contribution) -> torch.Tensor:
        """The sum so far, flat fp32; zeros when asked for the first time."""
        found = self._open.get(contribution)
        if found is None:
            assert contribution not in self._published, f"{contribution} is published already"
            found = self._device.gradients(
                self._memory.grads(contribution.block, self._copy, contribution.index)
            )
            self._open[contribution] = found
        return found

    def publish(self, blocks: Sequence[int], route: int) -> None:
        """The gradients of ``blocks`` in ``route`` are final. Those never asked for are zeros, and
        published too.
        """
        for contribution in contributions_of(self._table, blocks, route):
            gradients = self.flat(contribution)
            del self._open[contribution]
            self._published.add(contribution)
            self._device.offload(
                gradients,
                self._memory.grads(contribution.block, self._copy, contribution.index),
                lambda contribution=contribution: self._complete(contribution),  # type: ignore[misc]
            )

    @property
    def unpublished(self) -> tuple[Contribution, ...]:
        """Sums that were begun and not published."""
        return tuple(self._open)

    def drop(self) -> None:
        """Forget the sums; the device writes nothing more when this returns."""
        self._device.drop()
        self._open.clear()

    def _complete(self, contribution: Contribution) -> None:
        # Only after the last byte: whoever reads the ready word reads the gradients next.
        self._memory.control.set_ready(
            contribution.block, contribution.index, epoch=self._epoch, attempt=self._attempt
        )
        self._notify(contribution.block, contribution.index)
