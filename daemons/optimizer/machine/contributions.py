"""Tracks the gradients that a node's blocks need, and the arrivals of other nodes' gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.daemons.optimizer.machine.events import (
    CancelPulls,
    Effect,
    OwnedBlock,
    Pull,
    Pulled,
    UpdatePolicy,
)


class OwnedBlocks:
    """The blocks of this node, in forward order.

    ``active`` have trainable elements, ``empty`` have none. ``local`` and ``remote`` are pairs
    (block, contribution) that this node or another node computes. ``settled_early`` are the active
    blocks that are settled before new gradients arrive. ``on_devices`` are those of
    ``settled_early`` that workers preview. ``flushed`` are those of ``on_devices`` that also have
    their next state written by workers. ``in_place``: all blocks step in place.

    ``together``: no block's update begins before all gradients of the node have arrived, as in the
    synchronous optimizer of Mobius and Megatron.
    """

    def __init__(self, blocks: Iterable[OwnedBlock], *, together: bool = False) -> None:
        self._together = together
        self.all = tuple(sorted(blocks, key=lambda b: b.index))
        self.active = tuple(b.index for b in self.all if b.contributions)
        self.empty = tuple(b.index for b in self.all if not b.contributions)
        pairs = [(b, contribution) for b in self.all for contribution in range(b.contributions)]
        self.local = tuple((b.index, k) for b, k in pairs if k not in b.remote)
        self.remote = tuple((b.index, k) for b, k in pairs if k in b.remote)
        # Last blocks first: their gradients are the first to come.
        self.on_devices = self._with(UpdatePolicy.DEVICE, UpdatePolicy.FLUSH)
        early = UpdatePolicy.SETTLE_EARLY, UpdatePolicy.DEVICE, UpdatePolicy.FLUSH
        self.settled_early = self._with(*early)[::-1]
        self.flushed = frozenset(self._with(UpdatePolicy.FLUSH))
        self.in_place = any(b.policy is UpdatePolicy.IN_PLACE for b in self.all)
        self.num_contributions = {b.index: b.contributions for b in self.all}

    def startable(self, block: int, ready: Mapping[int, set[int]]) -> tuple[int, ...]:
        """Returns the blocks that can begin their update after a new contribution to ``block``."""
        if len(ready[block]) < self.num_contributions[block]:
            return ()
        if not self._together:
            return (block,)
        complete = all(len(ready.get(b, ())) == self.num_contributions[b] for b in self.active)
        # Last blocks first, as backwards make them.
        return self.active[::-1] if complete else ()

    def _with(self, *policies: UpdatePolicy) -> tuple[int, ...]:
        return tuple(b.index for b in self.all if b.contributions and b.policy in policies)


class Pulls:
    """Orders pulls, and knows which attempt's gradients each private buffer holds.

    It outlives epochs, as the buffers do: what was pulled need not be pulled again.
    """

    def __init__(self, blocks: OwnedBlocks, effects: list[Effect]) -> None:
        self._remote = blocks.remote
        self._effects = effects
        self._held: dict[tuple[int, int, int], int] = {}  # (block, contribution, copy) -> attempt

    def order(
        self,
        pairs: Iterable[tuple[int, int]],
        *,
        epoch: int,
        since_epoch: int,
        attempt: int,
        version: int,
    ) -> None:
        """Pulls these contributions; their buffers are empty until the contributions arrive.

        The last blocks come first, in the order of backward passes. Pulls run one by one, so a pull
        that waits for its gradient would delay the others.
        """
        for block, contribution in sorted(pairs, key=lambda pair: -pair[0]):
            self._held.pop((block, contribution, version % 2), None)
            self._effects.append(
                Pull(
                    epoch=epoch,
                    since_epoch=since_epoch,
                    attempt=attempt,
                    version=version,
                    block=block,
                    contribution=contribution,
                )
            )

    def arrived(self, event: Pulled) -> None:
        """Records the attempt of the gradients that the buffer holds now."""
        self._held[(event.block, event.contribution, event.version % 2)] = event.attempt

    def missing(self, block: int, *, version: int, attempt: int) -> list[tuple[int, int]]:
        """Returns the contributions to ``attempt``, towards ``version``, that are not at hand."""
        return [
            pair
            for pair in self._remote
            if pair[0] == block and self._held.get((*pair, version % 2)) != attempt
        ]

    def cancel(self) -> None:
        """Cancels all outstanding pulls."""
        if self._remote:
            self._effects.append(CancelPulls())
