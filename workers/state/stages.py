"""Stages bound to memory: which blocks, over which weights, summing into which gradients."""

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
from penstock.workers.state.weights import FetchScope, LoadedStage, StageKey, WeightLoader, lender
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
        scope: FetchScope,
    ) -> None:
        self._layout = layout
        self._table = table
        self._runtime = runtime
        self._weights = weights
        self._gradients = gradients
        self._scope = scope
        self._bound: dict[tuple[StageKey, bool], tuple[BoundBlock, ...]] = {}
        self._places: dict[int, BoundWeights] = {}
        self._begun: set[int] = set()
        self._without_sums: dict[int, list[BoundBlock]] = {}
        """By backward stage: bound by forwards, before there is anything to sum."""

    def blocks(self, key: StageKey) -> range:
        """The blocks of a stage."""
        forward = key.phase is Phase.FORWARD
        stages = self._layout.forward if forward else self._layout.backward
        return stages[key.stage].blocks

    def fetch(self, key: StageKey) -> None:
        """Start to bring in a stage's weights."""
        self._weights.fetch(key, self.blocks(key), self._scope)

    def release(self, key: StageKey) -> None:
        """Gives a stage's weights back."""
        self._bound.pop((key, False), None)
        if self._bound.pop((key, True), None) is not None:
            self._bind_places(key.stage)
        self._weights.release(key)

    def places(self, stage: int) -> BoundWeights:
        """Where the weights are that a backward of the stage reads, followed from buffer to
        buffer.
        """
        if stage not in self._places:
            self._places[stage] = BoundWeights()
            self._bind_places(stage)
        return self._places[stage]

    def begin_backward(self, stage: int) -> None:
        """The first backward of a stage makes the sums that it, and all after it, add to."""
        if stage not in self._begun:
            self._gradients.begin(stage)
            self._begun.add(stage)
            for block in self._without_sums.pop(stage, ()):
                self._bind_sums(block, stage)

    def backward_key(self, stage: int) -> StageKey:
        """The buffer that RECOMPUTE and BACKWARD of a stage use."""
        key = StageKey(stage, Phase.BACKWARD)
        return key if self._weights.has(key) else StageKey(stage, Phase.FORWARD)

    def bound(self, key: StageKey, *, grads: bool) -> tuple[BoundBlock, ...]:
        """The stage's blocks over its weights; ``grads``: for a backward, whose sums are bound to
        them when its first begins.

        Waits until the weights are there.
        """
        found = self._bound.get((key, grads))
        if found is None:
            awaited = f"weights of version {self._scope.version}"
            with self._scope.awaiting(awaited, IdleCause.WEIGHTS):
                loaded = self._weights.use(key)
            # A forward that keeps its graph is of a stage that is the same in both lists.
            found = tuple(self._bind(block, loaded, grads) for block in self.blocks(key))
            self._bound[key, grads] = found
            if grads:
                self._bind_places(key.stage)
                self._bind_sums_in_time(found, key.stage)
        return found

    @property
    def in_use(self) -> tuple[StageKey, ...]:
        """Stages fetched and not released."""
        return self._weights.in_use

    def drop(self) -> None:
        """Release everything; graphs made with the bound blocks must be gone."""
        self._bound.clear()
        self._places.clear()
        self._without_sums.clear()
        self._weights.drop()

    def _bind_places(self, stage: int) -> None:
        """Say where the stage's weights are; backwards prefer the buffer that is theirs."""
        places = self._places.get(stage)
        if places is not None:
            both = ((StageKey(stage, phase), True) for phase in (Phase.BACKWARD, Phase.FORWARD))
            places.bind(next((self._bound[key] for key in both if key in self._bound), ()))

    def _bind(self, block: int, loaded: LoadedStage, grads: bool) -> BoundBlock:
        """``grads``: whether it will sum gradients; otherwise for inference."""
        spec = self._table.blocks[block]
        borrowed: dict[str, Borrowed] = {}
        for lent in spec.borrows:
            array = lender(self._table, lent)
            flat = loaded.array(array.block, array.name)
            assert flat is not None, f"{array} is read by block {block} and was not loaded"
            borrowed[lent.local_name] = flat, None
        bound: BoundBlock = self._runtime.bind(
            block,
            weights=loaded.array(block, "weights"),
            frozen=loaded.array(block, "frozen"),
            borrowed=borrowed,
            sums=torch.float32 if grads else None,
        )
        return bound

    def _bind_sums_in_time(self, bound: Iterable[BoundBlock], stage: int) -> None:
        """Now, if the stage's backwards have begun."""
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
                lent.local_name: sums.flat(Sum(stage, lent.owner, lent.contribution))
                for lent in spec.borrows
                if lender(self._table, lent).name == "weights"
            },
        )
