"""Instead of a model: 64-bit numbers that depend on all inputs of a model's numbers.

Each block has an *activation*: a hash of the activation before it and of the block's weights. The
first one is a hash of the tokens. The *gradient* is a hash of the gradient after it, of the
activation and of the block. It picks a factor in [-1, 1) for a fixed pattern that is added to the
block's gradients. Errors such as weights of a wrong version, a tensor of another micro-batch, or
missing work change the bytes of every later state. Factors and patterns are multiples of 1/128, so
their sums are exact in any order of micro-batches: all schedules give the same bytes.

The loss is that of guessing among the tokens of the vocabulary, with a little noise.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from penstock.models.data.batch import MicroBatch
from penstock.models.forward_storage import ForwardStorage
from penstock.models.runtime import HIDDEN, Borrowed, StageOutput
from penstock.shm.table import BlockTable

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedBlock:
    """A block with memory: its number, a hash of its weights, and the arrays of its gradients once
    they are bound.
    """

    index: int
    weights: int
    gradients: list[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedOutput(StageOutput):
    """The inputs of a backward: every block with its input activation, and the last activation."""

    steps: tuple[tuple[EmulatedBlock, int], ...]
    end: int
    amplitude: float


Deferred = tuple[tuple[EmulatedBlock, float], ...]
"""Blocks, and the factors of their patterns."""


class EmulatedRuntime:
    """Takes the place of :class:`penstock.models.runtime.ModelRuntime` in a worker."""

    def __init__(self, table: BlockTable, *, seed: int) -> None:
        """Makes the runtime. ``table``: the stored one."""
        self.table = table
        self._seed = seed
        self._elements = sum(block.trainable_elements for block in table.blocks)

    def bind(
        self,
        block: int,
        *,
        weights: torch.Tensor | None,
        frozen: torch.Tensor | None = None,
        grads: torch.Tensor | None = None,
        borrowed: Mapping[str, Borrowed] | None = None,
        sums: torch.dtype | None = None,
    ) -> EmulatedBlock:
        """Hashes the weights; their bytes stay in place."""
        del sums
        tied = (borrowed or {}).values()
        arrays = (weights, frozen, *(array for array, _ in tied))
        gradients = (grads, *(partial for _, partial in tied))
        return EmulatedBlock(
            index=block,
            weights=_hash(*(_crc(array) for array in arrays if array is not None)),
            gradients=[gradient for gradient in gradients if gradient is not None],
        )

    def bind_gradients(
        self,
        bound: EmulatedBlock,
        *,
        grads: torch.Tensor | None,
        borrowed: Mapping[str, torch.Tensor],
    ) -> None:
        """Binds gradients as the model's runtime does."""
        bound.gradients.extend(g for g in (grads, *borrowed.values()) if g is not None)

    def called_with(self, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        """Returns no constants: blocks take only the outputs of other blocks."""
        return ()

    def forward(
        self,
        bound: Sequence[EmulatedBlock],
        inputs: Mapping[str, torch.Tensor],
        batch: MicroBatch,
        *,
        data_position: int,
        micro_batch_index: int,
        training: bool,
        loss_weight: float,
        checkpoints_at: Collection[int] = (),
        autograd: bool | None = None,
        storage: ForwardStorage | None = None,
        output_read: bool = True,
    ) -> EmulatedOutput:
        """Runs consecutive blocks; arguments as in the model's runtime. No tensors take memory, so
        ``storage`` has no effect.
        """
        del training, autograd, storage, output_read
        if inputs:
            activation = _number(inputs)
        else:
            tokens = zlib.crc32(np.ascontiguousarray(batch.input_ids).tobytes())
            activation = _hash(self._seed, data_position, micro_batch_index, tokens)
        steps: list[tuple[EmulatedBlock, int]] = []
        checkpoints = {}
        for block in bound:
            if block.index in checkpoints_at:
                # The input of the first block is the stage's input: one tensor, under two names.
                checkpoints[block.index] = _tensors(activation) if steps else dict(inputs)
            steps.append((block, activation))
            activation = _hash(activation, block.weights, block.index)
        ends = bool(steps) and steps[-1][0].index == len(self.table.blocks) - 1
        return EmulatedOutput(
            tensors={} if ends else _tensors(activation),
            checkpoints=checkpoints,
            loss_sum=self._loss(activation, batch) if ends else None,
            loss=None,
            inputs={},
            steps=tuple(steps),
            end=activation,
            # The norm of all gradients is then below the loss scale, for any size of the model.
            amplitude=_power_of_two(
                loss_weight * max(1, batch.num_losses) / math.sqrt(self._elements)
            ),
        )

    def backward(
        self, output: EmulatedOutput, gradients: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Adds to the gradients of every block; returns the gradient of the stage's input."""
        input_gradients, deferred = self.backward_input(output, gradients)
        self.backward_weight(deferred)
        return input_gradients

    def backward_input(
        self, output: EmulatedOutput, gradients: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], Deferred]:
        """Returns the gradient of the stage's input, and the deferred part for
        :meth:`backward_weight`.
        """
        gradient = _number(gradients) if gradients else _hash(output.end)
        deferred = []
        for block, activation in reversed(output.steps):
            gradient = _hash(gradient, activation, block.index)
            deferred.append((block, ((gradient & 255) - 128) / 128 * output.amplitude))
        return _tensors(gradient), tuple(deferred)

    def backward_weight(self, deferred: Deferred) -> None:
        """Adds to the gradients of every block."""
        for block, factor in deferred:
            for total in block.gradients:
                total.add_(_pattern(total.numel()), alpha=factor)

    def _loss(self, activation: int, batch: MicroBatch) -> torch.Tensor:
        noise = (activation & 1023) / 1024 - 0.5
        mean = math.log(self.table.vocab_size) + noise / 10
        return torch.tensor(mean * batch.num_losses, dtype=torch.float64)


def _hash(*numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}Q", *(number & _MASK for number in numbers))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def _crc(array: torch.Tensor) -> int:
    return zlib.crc32(array.view(torch.uint8).numpy().data)


def _tensors(number: int) -> dict[str, torch.Tensor]:
    return {HIDDEN: torch.frombuffer(bytearray(number.to_bytes(8, "little")), dtype=torch.int64)}


def _number(tensors: Mapping[str, torch.Tensor]) -> int:
    return int(tensors[HIDDEN][0]) & _MASK


def _power_of_two(value: float) -> float:
    """Returns a power of two, at most ``value``: products with it are exact."""
    return 2.0 ** math.floor(math.log2(value))


@lru_cache(maxsize=64)
def _pattern(count: int) -> torch.Tensor:
    """Returns the fixed pattern of a gradient with ``count`` elements."""
    numbers = np.random.Generator(np.random.Philox(count)).integers(-128, 128, count)
    return torch.from_numpy(numbers.astype(np.float32) / 128)
