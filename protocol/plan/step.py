"""One optimizer step, and the preview of a block: code that optimizerd and workers with UPDATE
share.

``native/sweeps.h`` defines how sweeps read and write memory; :mod:`penstock.config.optimizers`
lists the optimizers.

A commit record holds the values that differ from step to step. The keys in :data:`STEP_TERMS` also
decide the bits of a step, and are the same for all steps of a process. So memory that may hold a
committed step still to be settled is adopted only with the same values
(:class:`penstock.shm.memory.MemorySpec`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from penstock import _native
from penstock.config.optimizers import Hyperparameter
from penstock.config.schema import Config
from penstock.config.training import OptimizerConfig
from penstock.protocol.plan.groups import StepRange, step_ranges
from penstock.shm.control import CommitRecord
from penstock.shm.layout import WEIGHT_SLOTS
from penstock.shm.memory import Array, NodeMemory
from penstock.shm.table import DType

WEIGHTS_DTYPES = {
    DType.FP32: _native.WeightsDtype.FLOAT32,
    DType.BF16: _native.WeightsDtype.BFLOAT16,
    DType.FP16: _native.WeightsDtype.FLOAT16,
}
"""Storage type of weights -> what native sweeps call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """One optimizer step: everything but the gradients and the model state that decides its bits.

    The step leads to ``version``: its gradients are in copy ``version % 2``, its weights belong
    into slot ``version % 2``. ``coefficient`` multiplies the summed gradients (clipping times
    inverse loss scale), ``bias_step`` counts from 1.
    """

    version: int
    coefficient: float
    learning_rate: float
    bias_step: int

    @classmethod
    def of(cls, record: CommitRecord) -> OptimizerStep:
        """Returns the step that a commit record promises."""
        return cls(
            version=record.version,
            coefficient=record.coefficient * record.inverse_loss_scale,
            learning_rate=record.learning_rate,
            bias_step=record.bias_step,
        )

    @classmethod
    def speculative(cls, *, version: int, loss_scale: float, learning_rate: float) -> OptimizerStep:
        """Returns the step as it will be committed if the gradients need no clipping.

        Written so that it is equal, bit for bit, to :meth:`of` the record of such a commit.
        """
        return cls(
            version=version,
            coefficient=1.0 * (1.0 / loss_scale),
            learning_rate=learning_rate,
            bias_step=version,
        )

    def hyper(self, config: OptimizerConfig) -> _native.Hyper:
        """Returns the step's scalars, with those that all steps of a run have in common."""
        beta1, beta2 = config.betas
        if Hyperparameter.MOMENTUM in config.name.traits.hyperparameters:
            beta1 = config.momentum
        return _native.Hyper(
            lr=self.learning_rate,
            beta1=beta1,
            beta2=beta2,
            eps=config.eps,
            step=self.bias_step,
            coefficient=self.coefficient,
            optimizer=config.name.value,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatus:
    """Result of a sweep over new gradients. ``finite``: True if all sums of contributions are
    finite. ``sum_squares``: squares of these sums in fp64, before clipping and loss scale are
    applied.
    """

    finite: bool
    sum_squares: float


_PIECE = 1 << 22
"""Elements that a thread copies at a time; NumPy lets others run meanwhile."""


def _copy(target: Array, values: Array, piece: slice) -> None:
    target[piece] = values[piece]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateArrays:
    """One copy of a block's state, (elements,) each. ``master``: fp32, or of a split one the lower
    halves as uint16; ``arrays``: the optimizer's, fp32.
    """

    master: Array
    arrays: list[Array]

    @property
    def all(self) -> tuple[Array, ...]:
        """Master, then the optimizer's arrays."""
        return (self.master, *self.arrays)

    def fill(self, source: StateArrays, threads: ThreadPoolExecutor | None = None) -> None:
        """Copies another copy's content; with ``threads`` in pieces, one of each thread at a
        time.
        """
        for target, values in zip(self.all, source.all, strict=True):
            if threads is None:
                target[:] = values
                continue
            pieces = (slice(i, i + _PIECE) for i in range(0, len(target), _PIECE))
            deque(threads.map(partial(_copy, target, values), pieces), maxlen=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockArrays:
    """Views of what the sweeps over one block read and write, all flat, (elements,), and alive only
    as long as the memory is mapped.

    ``states``: one copy, or two, of which version v has ``v % 2``; ``split``: whether their masters
    are halves; ``weights`` by slot and ``grads`` by copy, contributions in order, in their storage
    types (16-bit weights and bf16 gradients as uint16).
    """

    states: tuple[StateArrays, ...]
    split: bool
    weights: tuple[Array, ...]
    weights_dtype: _native.WeightsDtype
    grads: tuple[list[Array], ...]
    ranges: list[StepRange]

    @classmethod
    def of(
        cls,
        memory: NodeMemory,
        block: int,
        config: OptimizerConfig,
        grads: Callable[[int, int, int], Array] | None = None,
    ) -> BlockArrays:
        """Returns the views of a block of ``memory``. ``grads`` returns the array of a (block,
        copy, contribution), if not all contributions are in this memory.
        """
        split = memory.split_master
        grads = grads or memory.grads
        contributions = range(memory.spec.layout.contributions[block])
        return cls(
            states=tuple(
                StateArrays(
                    master=(
                        memory.halves(block, copy).low
                        if split
                        else memory.state(block, "master", copy)
                    ),
                    arrays=[
                        memory.state(block, name, copy) for name in memory.spec.table.state_arrays
                    ],
                )
                for copy in range(memory.spec.layout.state_copies[block])
            ),
            split=split,
            weights=tuple(_bits(memory.weights(block, slot)) for slot in range(WEIGHT_SLOTS)),
            weights_dtype=WEIGHTS_DTYPES[memory.spec.table.weight_dtype],
            grads=tuple(
                [grads(block, copy, k) for k in contributions]
                for copy in range(memory.spec.layout.gradient_copies[block])
            ),
            ranges=step_ranges(config, memory.spec.table, block),
        )

    def copy_of(self, version: int) -> StateArrays:
        """Returns the copy with state of ``version``, or with room for it."""
        return self.states[version % len(self.states)]

    def state(self, version: int) -> dict[str, Any]:
        """Returns arguments that all native sweeps over the state have; it is at ``version``."""
        high, arrays = self.weights[version % WEIGHT_SLOTS], self.copy_of(version)
        return {
            "master": (high, arrays.master) if self.split else arrays.master,
            "arrays": arrays.arrays,
        }

    def gradients(self, version: int) -> list[Array]:
        """Returns the contributions that lead to ``version``."""
        return self.grads[version % len(self.grads)]

    def preview(
        self, pool: _native.Pool, step: OptimizerStep, config: OptimizerConfig
    ) -> SweepStatus:
        """Writes the weights that ``step`` leads to. Master and state stay at the version before
        it.

        Raises:
            ValueError, RuntimeError: arrays or hyper-parameters are not those that the sweep needs.
            Nothing was written.
        """
        status = _native.preview(
            pool,
            **self.state(step.version - 1),
            grads=self.gradients(step.version),
            weights=self.weights[step.version % WEIGHT_SLOTS],
            weights_dtype=self.weights_dtype,
            hyper=step.hyper(config),
            ranges=self.ranges,
        )
        return SweepStatus(finite=status.finite, sum_squares=status.sum_squares)


def _bits(array: Array) -> Array:
    return array if array.dtype == np.float32 else array.view(np.uint16)


STEP_TERMS = (
    "optimizer.betas",
    "optimizer.momentum",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.groups",
)


def step_terms(config: Config) -> str:
    """Returns the values of :data:`STEP_TERMS` as text; equal texts lead to equal bits."""
    values = config.optimizer.model_dump(mode="json")
    terms = {key: values[key.partition(".")[2]] for key in STEP_TERMS}
    if not config.optimizer.groups:
        del terms["optimizer.groups"]  # The memory of older runs has none.
    return json.dumps(terms)
