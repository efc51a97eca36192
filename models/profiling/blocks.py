"""Costs of a model's blocks on this machine: each kind runs alone, with random weights.

Every quantity is the median of repeated runs (:class:`Stopwatch`) for a few micro-batch sizes at
the configured sequence length, and a line through the medians. Layers run one and two at a time.
Seconds that do not double are the overhead of an instruction (Mario, section 5.2: y = a n + b for n
blocks).

BACKWARD_INPUT is measured as autograd's gradients of the inputs alone; in compiled layers as the
instruction itself. BACKWARD_WEIGHT is the rest of a whole backward. Operators are distinguished,
and workspaces counted, in uncompiled layers. :mod:`penstock.models.profiling.machine` measures the
machine itself.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch

from penstock.models.data.batch import MicroBatch
from penstock.models.data.objectives import Objective
from penstock.models.forward_storage import ForwardStorage
from penstock.models.profiling.drops import DropMeasure, NeededBy, measure_drops
from penstock.models.profiling.memory import MemoryMeasure, RunForward, measure_memory
from penstock.models.profiling.operators import OperatorProbe
from penstock.models.runtime import Borrowed, BoundBlock, ModelRuntime, StageOutput
from penstock.models.saved_activations import BoundWeights, SavedActivations, SavedTensorPolicy
from penstock.models.torch_device import torch_device
from penstock.protocol.plan.profile import (
    KindProfile,
    LinearFit,
    OperatorProfile,
    SourceProfile,
)
from penstock.shm.table import BlockTable

_T = TypeVar("_T")

Progress = Callable[[str], None]

_WEIGHT_SCALE = 0.02
_LEAST_REPEATS = 3
_MOST_REPEATS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Measures medians of seconds: after one run to warm up at least three runs and at most 25,
    until ``budget_s`` seconds are spent.
    """

    device: torch.device
    budget_s: float

    def median(self, run: Callable[[], object]) -> float:
        """Returns the seconds of one ``run``, until its work on the device is over."""
        return self.median_after(lambda: None, lambda _: run())

    def median_after(self, prepare: Callable[[], _T], run: Callable[[_T], object]) -> float:
        """Returns the seconds of ``run`` on the result of ``prepare``, without those of
        ``prepare``.
        """
        run(prepare())
        seconds: list[float] = []
        started = time.perf_counter()
        while len(seconds) < _LEAST_REPEATS or (
            len(seconds) < _MOST_REPEATS and time.perf_counter() - started < self.budget_s
        ):
            prepared = prepare()
            self._synchronize()  # work that was issued before must not count
            start = time.perf_counter()
            run(prepared)
            self._synchronize()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def _synchronize(self) -> None:
        torch_device(self.device).synchronize()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeasure:
    """The cost of consecutive blocks of one kind on one micro-batch of ``tokens``: seconds, and
    bytes.
    """

    num_blocks: int
    tokens: int
    forward_s: float
    recompute_s: float
    backward_input_s: float
    backward_s: float
    memory: MemoryMeasure


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorsMeasure:
    """The operators of a block for a micro-batch of ``tokens``: seconds of their forwards by name,
    and the bytes saved by dropping them.
    """

    tokens: int
    seconds: Mapping[str, float]
    drops: DropMeasure


_SECONDS = ("forward_s", "recompute_s", "backward_input_s", "backward_s")


class BlockBench:
    """Runs ranges of blocks of one model; arrays of a block are made when it is first used."""

    def __init__(
        self,
        runtime: ModelRuntime,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        sequence_length: int,
        budget_s: float,
        objective: Objective | None = None,
        plain: ModelRuntime | None = None,
    ) -> None:
        """Prepares the measurements.

        ``objective``: the user's function that makes micro-batches, None: next tokens. ``plain``: a
        runtime of the same model that compiles nothing, if ``runtime`` compiles.
        """
        self._objective = objective
        self._runtime = runtime
        self._plain = plain or runtime
        self._device = device
        self._dtype = compute_dtype
        self._sequence_length = sequence_length
        self._watch = Stopwatch(device=device, budget_s=budget_s)
        # Its own, because forwards seed torch's default generator.
        self._random = torch.Generator().manual_seed(0)
        self._bound: dict[int, BoundBlock] = {}
        self._arrays: dict[tuple[int, str], torch.Tensor] = {}

    def measure(self, blocks: range, micro_batch: int) -> StageMeasure:
        """Returns all measures of a stage of these blocks, for micro-batches of ``micro_batch``
        sequences.
        """
        batch, inputs = self._batch(micro_batch), self._inputs(blocks, micro_batch)
        bound = [self._bind(index) for index in blocks]

        def forward(*, autograd: bool = True) -> StageOutput:
            return self._forward(bound, inputs, batch, autograd=autograd)

        output = forward()
        seeds = {name: torch.ones_like(value) for name, value in output.tensors.items()}
        stored_output = self._storing_forward(bound, inputs, batch)
        compiled = self._runtime.compiles(blocks.start)
        backward_input_s = (
            self._split_input_s(stored_output, seeds)
            if compiled
            else self._backward_input_s(forward, seeds)
        )
        memory = self._memory(bound, inputs, batch)
        return StageMeasure(
            num_blocks=len(blocks),
            tokens=micro_batch * self._sequence_length,
            forward_s=self._watch.median(lambda: forward(autograd=False)),
            recompute_s=self._watch.median(forward),
            backward_input_s=backward_input_s,
            backward_s=self._watch.median_after(
                forward, lambda made: self._runtime.backward(made, seeds)
            ),
            memory=self._of_graph(memory, stored_output, seeds) if compiled else memory,
        )

    def _memory(
        self, bound: Sequence[BoundBlock], inputs: Mapping[str, torch.Tensor], batch: MicroBatch
    ) -> MemoryMeasure:
        """Returns the bytes of blocks that are not compiled."""
        self._forward(bound, inputs, batch, autograd=True, plain=True)  # fills the caches
        return measure_memory(
            self._storing_forward(bound, inputs, batch, plain=True),
            self._plain.backward,
            self._plain.called_with(batch) if bound[0].index else (),
        )

    def _of_graph(
        self, memory: MemoryMeasure, forward: RunForward, seeds: Mapping[str, torch.Tensor]
    ) -> MemoryMeasure:
        """Returns the measure with the tensors that a compiled graph saves, and those that
        BACKWARD_INPUT leaves.
        """
        output = forward(policy=SavedTensorPolicy(), split=True)
        stored = output.stored
        assert stored is not None and stored.activations is not None
        assert stored.deferred is not None
        saved_bytes = stored.activations.bytes
        self._runtime.backward(output, seeds)
        return dataclasses.replace(
            memory,
            activation_bytes=float(saved_bytes),
            deferred_bytes=float(stored.deferred.bytes),
        )

    def compile(self, micro_batch: int) -> None:
        """Compiles the layers: runs the first block of each kind forward and backward."""
        for stages in _representatives(self._runtime.table).values():
            blocks = stages[0]
            if self._runtime.compiles(blocks.start):
                bound = [self._bind(blocks.start)]
                batch, inputs = self._batch(micro_batch), self._inputs(blocks, micro_batch)
                output = self._forward(bound, inputs, batch, autograd=True)
                seeds = {name: torch.ones_like(t) for name, t in output.tensors.items()}
                self._runtime.backward(output, seeds)

    def operators(self, block: int, micro_batch: int) -> OperatorsMeasure:
        """Returns the operators of one block, see :mod:`penstock.models.profiling.operators`."""
        blocks = range(block, block + 1)
        batch, inputs = self._batch(micro_batch), self._inputs(blocks, micro_batch)
        bound = [self._bind(block)]
        probe = OperatorProbe(self._watch.device)
        for _ in range(1 + _LEAST_REPEATS):
            with probe.watching():
                self._forward(bound, inputs, batch, autograd=True, plain=True)
        given = [tensor.untyped_storage().data_ptr() for tensor in inputs.values()]
        with self._dropping(block, micro_batch, probe.seconds) as activations:
            drops = measure_drops(activations, given)
        return OperatorsMeasure(
            tokens=micro_batch * self._sequence_length, seconds=probe.seconds, drops=drops
        )

    def kept_bytes(self, block: int, micro_batch: int, drop: Iterable[str]) -> int:
        """Returns the activations that a forward of one block keeps without some operators'
        outputs.
        """
        with self._dropping(block, micro_batch, drop) as activations:
            return activations.bytes

    @contextmanager
    def _dropping(
        self, block: int, micro_batch: int, drop: Iterable[str]
    ) -> Iterator[SavedActivations]:
        """Runs a forward of one block; its kept tensors live as long as the context."""
        batch, inputs = (
            self._batch(micro_batch),
            self._inputs(range(block, block + 1), micro_batch),
        )
        run = self._storing_forward([self._bind(block)], inputs, batch)
        output = run(policy=SavedTensorPolicy(drop=frozenset(drop)))
        assert output.stored is not None and output.stored.activations is not None
        yield output.stored.activations

    def _forward(
        self,
        bound: Sequence[BoundBlock],
        inputs: Mapping[str, torch.Tensor],
        batch: MicroBatch,
        *,
        autograd: bool,
        storage: ForwardStorage | None = None,
        plain: bool = False,
    ) -> StageOutput:
        return (self._plain if plain else self._runtime).forward(
            bound,
            inputs,
            batch,
            data_position=0,
            micro_batch_index=0,
            training=True,
            loss_weight=1.0,
            autograd=autograd,
            storage=storage,
        )

    def _backward_input_s(
        self, forward: Callable[[], StageOutput], seeds: Mapping[str, torch.Tensor]
    ) -> float:
        if not forward().inputs:
            return 0.0  # the embedding: token ids have no gradient

        def run(output: StageOutput) -> None:
            roots = [output.loss] if output.loss is not None else list(output.tensors.values())
            gradients = None if output.loss is not None else [seeds[n] for n in output.tensors]
            torch.autograd.grad(roots, list(output.inputs.values()), gradients)

        return self._watch.median_after(forward, run)

    def _split_input_s(self, forward: RunForward, seeds: Mapping[str, torch.Tensor]) -> float:
        """Returns the seconds of BACKWARD_INPUT: a compiled graph always has its whole backward."""
        return self._watch.median_after(
            lambda: forward(split=True), lambda output: self._runtime.backward(output, seeds)
        )

    def _storing_forward(
        self,
        bound: Sequence[BoundBlock],
        inputs: Mapping[str, torch.Tensor],
        batch: MicroBatch,
        *,
        plain: bool = False,
    ) -> RunForward:
        weights = BoundWeights()
        weights.bind(bound)

        def forward(
            *, autograd: bool = True, split: bool = False, policy: SavedTensorPolicy | None = None
        ) -> StageOutput:
            storage = None
            if split or policy is not None:
                storage = ForwardStorage(weights=weights, policy=policy, split=split)
            return self._forward(
                bound, inputs, batch, autograd=autograd, storage=storage, plain=plain
            )

        return forward

    def _batch(self, micro_batch: int) -> MicroBatch:
        shape = (micro_batch, self._sequence_length)
        if self._objective is not None:
            # Zeros: this function cannot choose tokens that may be labels.
            return self._objective(np.zeros((shape[0], shape[1] + 1), dtype=np.int64), 0)
        random = np.random.default_rng(0)
        vocab_size = self._runtime.table.vocab_size
        return MicroBatch(
            input_ids=random.integers(0, vocab_size, shape),
            labels=random.integers(0, vocab_size, shape),
        )

    def _inputs(self, blocks: range, micro_batch: int) -> dict[str, torch.Tensor]:
        """Returns the output of the block before: (micro_batch, sequence, hidden), or other tensors
        of a user's model. The first block of each kind before ``blocks`` runs for it.
        """
        inputs: dict[str, torch.Tensor] = {}
        seen = {self._runtime.table.blocks[blocks.start].kind} if blocks.start else set()
        for block in self._runtime.table.blocks[: blocks.start]:
            if block.kind not in seen:
                seen.add(block.kind)
                bound, batch = [self._bind(block.index)], self._batch(micro_batch)
                inputs = dict(self._forward(bound, inputs, batch, autograd=False).tensors)
        return inputs

    def _bind(self, index: int) -> BoundBlock:
        if index not in self._bound:
            block = self._runtime.table.blocks[index]
            borrowed: dict[str, Borrowed] = {}
            for tied in block.borrows:
                name = "weights" if tied.contribution else "frozen"
                array = self._array(tied.owner, name)
                assert array is not None
                grads = self._array(tied.owner, "grads") if tied.contribution else None
                borrowed[tied.local_name] = (array, grads)
            self._bound[index] = self._runtime.bind(
                index,
                weights=self._array(index, "weights"),
                frozen=self._array(index, "frozen"),
                grads=self._array(index, "grads"),
                borrowed=borrowed,
            )
        return self._bound[index]

    def _array(self, index: int, name: str) -> torch.Tensor | None:
        """Returns random weights of (elements,) in the compute dtype, or fp32 zeros for gradients;
        None where the block has none.
        """
        block = self._runtime.table.blocks[index]
        size = block.frozen_elements if name == "frozen" else block.trainable_elements
        if not size:
            return None
        if (index, name) not in self._arrays:
            if name == "grads":
                made = torch.zeros(size, dtype=torch.float32, device=self._device)
            else:
                values = torch.randn(size, generator=self._random) * _WEIGHT_SCALE
                made = values.to(device=self._device, dtype=self._dtype)
            self._arrays[index, name] = made
        return self._arrays[index, name]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksMeasured:
    """All kinds of blocks, and the overhead of an instruction."""

    kinds: dict[str, KindProfile]
    instruction_s: float


def measure_kinds(
    bench: BlockBench, table: BlockTable, micro_batches: Sequence[int], progress: Progress
) -> BlocksMeasured:
    """Measures every kind of block for each micro-batch size in sequences; ``progress`` gets a
    message for each.
    """
    measures: dict[str, list[StageMeasure]] = {}
    operators: dict[str, list[OperatorsMeasure]] = {}
    for kind, stages in _representatives(table).items():
        for micro_batch in micro_batches:
            for blocks in stages:
                progress(
                    f"blocks of kind {kind}, {len(blocks)} at a time, micro-batch {micro_batch}"
                )
                measures.setdefault(kind, []).append(bench.measure(blocks, micro_batch))
            operator_measure = bench.operators(stages[0].start, micro_batch)
            operators.setdefault(kind, []).append(operator_measure)
    instruction_s = _overhead([m for of_kind in measures.values() for m in of_kind])
    kinds = {
        kind: _kind(of_kind, operators[kind], instruction_s) for kind, of_kind in measures.items()
    }
    return BlocksMeasured(kinds=kinds, instruction_s=instruction_s)


def _representatives(table: BlockTable) -> dict[str, tuple[range, ...]]:
    """Returns for each kind its first block, and the first two consecutive ones, if any."""
    blocks = table.blocks
    ranges: dict[str, tuple[range, ...]] = {}
    for block in blocks:
        ranges.setdefault(block.kind, (range(block.index, block.index + 1),))
    for first, second in pairwise(blocks):
        if first.kind == second.kind and len(ranges[first.kind]) == 1:
            ranges[first.kind] += (range(first.index, second.index + 1),)
    return ranges


def _overhead(measures: Sequence[StageMeasure]) -> float:
    """Returns the seconds that do not double with the number of blocks (Mario, section 5.2). They
    are b of y = a n + b: the median over all pairs of 2 y(1) - y(2), or 0 without pairs.
    """
    single = {m.tokens: m for m in measures if m.num_blocks == 1}
    rests = [
        2 * getattr(single[pair.tokens], name) - getattr(pair, name)
        for pair in measures
        if pair.num_blocks == 2
        for name in _SECONDS
    ]
    return max(0.0, statistics.median(rests)) if rests else 0.0


def _kind(
    measures: Sequence[StageMeasure], operators: Sequence[OperatorsMeasure], instruction_s: float
) -> KindProfile:
    def seconds(name: str) -> LinearFit:
        return LinearFit.through(
            [(m.tokens, _per_block(getattr(m, name), m, instruction_s)) for m in measures]
        )

    def weight_s(measure: StageMeasure) -> float:
        """Returns the additional seconds of the whole backward, without the overhead of an
        instruction.
        """
        return max(0.0, measure.backward_s - measure.backward_input_s)

    single = [m for m in measures if m.num_blocks == 1]
    return KindProfile(
        forward_s=seconds("forward_s"),
        recompute_s=seconds("recompute_s"),
        backward_input_s=seconds("backward_input_s"),
        backward_weight_s=LinearFit.through(
            [(m.tokens, weight_s(m) / m.num_blocks) for m in measures]
        ),
        operators=_operators(operators),
        sources=_sources(operators),
        **{
            field.name: LinearFit.through(
                [(m.tokens, getattr(m.memory, field.name)) for m in single]
            )
            for field in fields(MemoryMeasure)
        },
    )


def _per_block(seconds: float, measure: StageMeasure, instruction_s: float) -> float:
    return max(0.0, seconds - instruction_s) / measure.num_blocks


def _operators(measures: Sequence[OperatorsMeasure]) -> tuple[OperatorProfile, ...]:
    """Returns lines, in tokens, through the measures of each operator."""
    names = dict.fromkeys(name for measure in measures for name in measure.seconds)
    return tuple(
        OperatorProfile(
            name=name,
            forward_s=LinearFit.through(
                [(m.tokens, m.seconds[name]) for m in measures if name in m.seconds]
            ),
            activation_bytes=LinearFit.through(
                [(m.tokens, m.drops.saved.get(name, 0.0)) for m in measures]
            ),
        )
        for name in names
    )


def _sources(measures: Sequence[OperatorsMeasure]) -> tuple[SourceProfile, ...]:
    """Returns lines, in tokens, through the bytes kept only to make dropped outputs again."""
    keys: dict[tuple[str, NeededBy], None] = {}
    for measure in measures:
        keys |= dict.fromkeys(measure.drops.sources)
    return tuple(
        SourceProfile(
            operator=operator,
            needed_by=needed_by,
            num_bytes=LinearFit.through(
                [(m.tokens, m.drops.sources.get((operator, needed_by), 0.0)) for m in measures]
            ),
        )
        for operator, needed_by in keys
    )
