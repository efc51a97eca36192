"""One loss and its gradients of a tiny model, through the runtime of workers, in fp64.

Models widen to fp32 in many places, such as norms and softmax. A trial widens to fp64 there, too:
otherwise rounding would hide a small influence of one sample on another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from penstock.config.schema import Config
from penstock.models.apart.tiny import FIRST_TOKEN, VOCABULARY
from penstock.models.data.batch import IGNORED_LABEL, MicroBatch
from penstock.models.data.rows.row_file import batch_of, marked
from penstock.models.runtime import BoundBlock, ModelRuntime
from penstock.models.surgery.skeleton import build_skeleton
from penstock.models.surgery.table import build_table

_WIDTH = 1.5
"""Standard deviation of a matrix's results, for inputs of 1: attention is far from uniform."""

_MOST_PARAMETERS = 4_000_000

_VECTORS = 0.3
"""Standard deviation that is added to norms and biases."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """Tokens and labels, (tokens,) int64, and the weight of the sample's labels."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    weight: float


def samples_of(lengths: Sequence[int]) -> list[Sample]:
    """Returns samples of random tokens; each token has a random label."""
    random = np.random.default_rng(5)
    return [
        Sample(
            tokens=random.integers(FIRST_TOKEN, VOCABULARY, length),
            labels=random.integers(FIRST_TOKEN, VOCABULARY, length),
            weight=1.0 + number / 4,
        )
        for number, length in enumerate(lengths)
    ]


def micro_batch(
    rows: Sequence[Sequence[Sample]], length: int, *, lone_padding: bool = False
) -> MicroBatch:
    """Returns the micro-batch of rows of samples, as workers make it, with the samples' labels."""
    tokens = [
        np.concatenate([marked(sample.tokens.tolist(), ()) for sample in row]) for row in rows
    ]
    batch = batch_of(tokens, length, 0, lone_padding=lone_padding)
    labels = np.full(batch.shape, IGNORED_LABEL, dtype=np.int64)
    weights = np.zeros(batch.shape, dtype=np.float32)
    for number, row in enumerate(rows):
        end = sum(len(sample.labels) for sample in row)
        labels[number, :end] = np.concatenate([sample.labels for sample in row])
        weights[number, :end] = np.concatenate(
            [np.full(len(sample.labels), sample.weight) for sample in row]
        )
    return replace(batch, labels=labels, label_weights=weights)


@dataclass(frozen=True, slots=True)
class Result:
    """The summed loss of a micro-batch in nats, and the gradients of each block, all fp64."""

    loss: float
    gradients: tuple[torch.Tensor, ...]

    def __add__(self, other: Result) -> Result:
        pairs = zip(self.gradients, other.gradients, strict=True)
        return Result(self.loss + other.loss, tuple(one + two for one, two in pairs))

    def distance(self, other: Result) -> float:
        """Returns the largest relative difference of the losses, and of the gradients by block.
        Infinite if a number is not finite.
        """
        total = sum(float(gradient.norm()) for gradient in other.gradients)
        distances = [abs(self.loss - other.loss) / abs(other.loss)]
        for one, two in zip(self.gradients, other.gradients, strict=True):
            scale = max(float(two.norm()), 1e-6 * total)
            distances.append(float((one - two).norm()) / scale)
        return max(distances) if np.isfinite(distances).all() else float("inf")


class Trial:
    """A tiny model with random weights. A trial is used inside :func:`in_double`."""

    def __init__(self, hf_config: PretrainedConfig, config: Config) -> None:
        """Makes the model; ``config`` has the key of its objective.

        Raises:
            Exception: the type takes no such sizes.
        """
        self.skeleton = build_skeleton(hf_config)
        count = sum(parameter.numel() for parameter in self.skeleton.model.parameters())
        if count > _MOST_PARAMETERS:
            raise ValueError(f"the reduced model has {count:,} parameters")
        self._table = build_table(config, hf_config, self.skeleton)
        model: Any = type(self.skeleton.model)(hf_config)
        self._weights = _weights(model)
        self._runtime = ModelRuntime(
            hf_config,
            self._table,
            device="cpu",
            compute_dtype=torch.float64,
            seed=0,
            constants=dict(model.named_buffers()),
        )

    def run(self, batch: MicroBatch) -> Result:
        """Returns loss and gradients of a micro-batch."""
        flat, grads = [], []
        for block in self._table.blocks:
            values = torch.zeros(block.trainable_elements, dtype=torch.float64)
            for spec in block.tensors:
                end = spec.offset + spec.num_elements
                values[spec.offset : end] = self._weights[spec.name].reshape(-1)
            flat.append(values)
            grads.append([torch.zeros_like(values) for _ in range(block.contributions)])
        bound = [self._bound(index, flat, grads) for index in range(len(flat))]
        output = self._runtime.forward(
            bound,
            {},
            batch,
            data_position=0,
            micro_batch_index=0,
            training=True,
            loss_weight=1.0,
        )
        self._runtime.backward(output, {})
        assert output.loss_sum is not None
        return Result(float(output.loss_sum), tuple(sum(each[1:], each[0]) for each in grads))

    def _bound(
        self, index: int, flat: Sequence[torch.Tensor], grads: Sequence[Sequence[torch.Tensor]]
    ) -> BoundBlock:
        borrowed = {
            tied.local_name: (flat[tied.owner], grads[tied.owner][tied.contribution])
            for tied in self._table.blocks[index].borrows
        }
        return self._runtime.bind(
            index,
            weights=flat[index],
            frozen=torch.zeros(0, dtype=torch.float64),
            grads=grads[index][0],
            borrowed=borrowed,
        )


def _weights(model: Any) -> Mapping[str, torch.Tensor]:
    """Returns a value for each parameter: that of a new model, and much noise."""
    generator = torch.Generator().manual_seed(0)
    values = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = parameter.detach().double()
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        if value.ndim < 2:
            values[name] = value + _VECTORS * noise
        else:
            values[name] = value + _WIDTH * noise / value.shape[-1] ** 0.5
    return values


class _Doubled(TorchFunctionMode):
    """Puts fp64 in place of fp32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        elif getattr(func, "__name__", "") in _GROUPED:
            func = _grouped_products
        named = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **named)


_GROUPED = ("grouped_mm", "_grouped_mm")
"""Names of products of experts, which torch has in narrower types alone."""


def _grouped_products(
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Multiplies the rows of each group by the group's matrix. ``left`` is (rows, in), ``right``
    (groups, in, out); ``offs`` are the ends of the groups. Rows behind the last end become 0.
    """
    starts = [0, *offs.tolist()]
    parts = [left[a:b] @ right[group] for group, (a, b) in enumerate(pairwise(starts))]
    rest = left.new_zeros(len(left) - starts[-1], right.shape[-1])
    products = torch.cat([*parts, rest])
    return products if bias is None else products + bias


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_double() -> Iterator[None]:
    """Lets all code of models inside compute in fp64, also where it asks for fp32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubled():
            yield
    finally:
        torch.set_default_dtype(before)
