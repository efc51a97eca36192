"""Stages bound to memory: their blocks, the weights below them, the gradients that they sum."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from penstock.models.binding import Borrowed, BoundBlock
from penstock.models.saved_activations import BoundWeights
from penstock.protocol.plan.instructions import Phase
from penstock.protocol.plan.layout import StageLayout
from penstock.shm.table import BlockTable
from penstock.workers.device import Runtime
from penstock.workers.state.gradients import GradientBook, Sum
from penstock.workers.state.scope import AttemptScope
from penstock.workers.state.weights import (
    LoadedStage,
    StageKey,
    WeightLoader,
    tied_owner,
)
from penstock.workers.telemetry.account import IdleCause


class Stages:
    """The stages of one attempt on this device, from FETCH_WEIGHTS to RELEASE_WEIGHTS."""

    def __init__(
        self,
        *,
        layout: StageLayout,
        table: BlockTable,
        runtime: Runtime,
        weights: WeightLoader,
        gradients: GradientBook,
        scope: AttemptScope,
    ) -> None:
        self._layout = layout
        self._table = table
        self._runtime = runtime
        self._weights = weights
        self._gradients = gradients
        self._scope = scope
        self._bound: dict[tuple[StageKey, bool], tuple[BoundBlock, ...]] = {}
        self._locations: dict[int, BoundWeights] = {}
        self._begun: set[int] = set()
        self._without_sums: dict[int, list[BoundBlock]] = {}
        """Blocks bound by forwards before their sums exist, by backward stage."""

    def blocks(self, key: StageKey) -> range:
        """Returns the blocks of a stage."""
        forward = key.phase is Phase.FORWARD
        stages = self._layout.forward if forward else self._layout.backward
        return stages[key.stage].blocks

    def fetch(self, key: StageKey) -> None:
        """Starts to fetch a stage's weights."""
        self._weights.fetch(key, self.blocks(key), self._scope)

    def release(self, key: StageKey) -> None:
        """Releases a stage's weights."""
        self._bound.pop((key, False), None)
        if self._bound.pop((key, True), None) is not None:
            self._bind_locations(key.stage)
        self._weights.release(key)

    def weight_locations(self, stage: int) -> BoundWeights:
        """Returns the current locations of the weights that a backward of the stage reads. The
        object follows them from buffer to buffer.
        """
        if stage not in self._locations:
            self._locations[stage] = BoundWeights()
            self._bind_locations(stage)
        return self._locations[stage]

    def begin_backward(self, stage: int) -> None:
        """Begins the sums of a stage in its first backward. This backward and all later ones add to
        them.
        """
        if stage not in self._begun:
            self._gradients.begin(stage)
            self._begun.add(stage)
            for block in self._without_sums.pop(stage, ()):
                self._bind_sums(block, stage)

    def backward_key(self, stage: int) -> StageKey:
        """Returns the key of the buffer that RECOMPUTE and BACKWARD of a stage use."""
        key = StageKey(stage, Phase.BACKWARD)
        return key if self._weights.has(key) else StageKey(stage, Phase.FORWARD)

    def bound(self, key: StageKey, *, grads: bool) -> tuple[BoundBlock, ...]:
        """Returns the stage's blocks over its weights, after the weights have arrived.

        ``grads``: True for a backward. Its sums are bound when the stage's first backward begins.
        """
        blocks = self._bound.get((key, grads))
        if blocks is None:
            awaited = f"weights of version {self._scope.base_version}"
            with self._scope.awaiting(awaited, IdleCause.WEIGHTS):
                loaded = self._weights.use(key)
            # A stage with a forward that keeps its graph is the same in both lists.
            blocks = tuple(self._bind(block, loaded, grads) for block in self.blocks(key))
            self._bound[key, grads] = blocks
            if grads:
                self._bind_locations(key.stage)
                self._bind_sums_in_time(blocks, key.stage)
        return blocks

    @property
    def in_use(self) -> tuple[StageKey, ...]:
        """Stages fetched and not released."""
        return self._weights.in_use

    def drop(self) -> None:
        """Releases everything; graphs made with the bound blocks must be gone."""
        self._bound.clear()
        self._locations.clear()
        self._without_sums.clear()
        self._weights.drop()

    def _bind_locations(self, stage: int) -> None:
        """Updates the locations of the stage's weights; backwards prefer their own buffer."""
        weight_locations = self._locations.get(stage)
        if weight_locations is not None:
            both = ((StageKey(stage, phase), True) for phase in (Phase.BACKWARD, Phase.FORWARD))
            weight_locations.bind(
                next((self._bound[key] for key in both if key in self._bound), ())
            )

    def _bind(self, block: int, loaded: LoadedStage, grads: bool) -> BoundBlock:
        """Binds a block to its arrays. ``grads``: True if the block will sum gradients; otherwise
        it serves inference.
        """
        spec = self._table.blocks[block]
        borrowed: dict[str, Borrowed] = {}
        for tied in spec.borrows:
            array = tied_owner(self._table, tied)
            flat = loaded.array(array.block, array.name)
            assert flat is not None, f"{array} is read by block {block} and was not loaded"
            borrowed[tied.local_name] = flat, None
        bound: BoundBlock = self._runtime.bind(
            block,
            weights=loaded.array(block, "weights"),
            frozen=loaded.array(block, "frozen"),
            borrowed=borrowed,
            sums=torch.float32 if grads else None,
        )
        return bound

    def _bind_sums_in_time(self, bound: Iterable[BoundBlock], stage: int) -> None:
        """Binds the sums now if the stage's backwards have begun, otherwise when they begin."""
        if stage not in self._begun:
            self._without_sums.setdefault(stage, []).extend(bound)
            return
        for block in bound:
            self._bind_sums(block, stage)

    def _bind_sums(self, bound: BoundBlock, stage: int) -> None:
        spec, sums = self._table.blocks[bound.index], self._gradients
        self._runtime.bind_gradients(
            bound,
            grads=sums.flat(Sum(stage, bound.index, 0)) if spec.trainable_elements else None,
            borrowed={
                tied.local_name: sums.flat(Sum(stage, tied.owner, tied.contribution))
                for tied in spec.borrows
                if tied_owner(self._table, tied).name == "weights"
            },
        )
