"""Recomputed layers without their last product: the same gradients, and one product fewer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.models.split_backward import products as product_operators
from penstock.models.split_backward.layer_products import ProductWatch

FOUND = {
    "llama": ["down_proj"],
    "qwen2": ["down_proj"],
    "qwen3": ["down_proj"],
    "mistral": ["down_proj"],
    "phi3": ["down_proj"],
    "granite": ["down_proj"],  # times a constant
    "starcoder2": ["c_proj"],
    "opt": ["fc2"],
    "gpt_neox": ["dense", "dense_4h_to_h"],  # attention and MLP beside each other
    "gpt2": [],  # a Conv1D of transformers
    "gemma2": [],  # a norm reads it
    "gemma3_text": [],
    "bert": [],
    "mamba": ["out_proj"],
    "mixtral": [],
    "qwen3_moe": [],
}
"""Kinds of models, and the modules of a layer whose products only make its output."""


@pytest.fixture(name="poisoned")
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that somebody reads after all makes its gradients NaN."""

    def poison(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows.new_full((*rows.shape[:-1], weight.shape[0]), torch.nan)

    monkeypatch.setattr(product_operators, "_unwritten", poison)


class Products(TorchDispatchMode):
    """Counts matrix products, and sees which reach the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> int:
        return sum(self.counts[name] for name in ("aten.mm", "aten.addmm", "aten.bmm"))


def recompute(case: Any, batch: Any, *, output_read: bool) -> torch.Tensor:
    """Each block a stage: its forward from a checkpoint, and its backward; the last hidden state
    before the head.
    """
    blocks = range(len(case.table.blocks))
    first = case.forward(blocks, {}, batch, autograd=False, checkpoints_at=blocks[1:])
    gradients: dict[str, torch.Tensor] = {}
    output = None
    for block in reversed(blocks):
        output = case.forward(
            [block],
            first.checkpoints.get(block, {}),
            batch,
            autograd=True,
            output_read=output_read,
        )
        hidden = output.tensors.get("hidden")
        gradients = case.runtime.backward(output, gradients)
        if block == blocks[-2]:
            last = hidden.detach().clone()
    return last


@pytest.mark.parametrize("kind", FOUND)
def test_gradients_are_those_of_a_whole_recomputation(
    kind: str, make_case: Any, make_batch: Any, poisoned: None
) -> None:
    whole, short = make_case(kind), make_case(kind)
    for seed in (1, 2):
        batch = make_batch(seed=seed)
        kept = recompute(whole, batch, output_read=True)
        left = recompute(short, batch, output_read=False)
    for name in whole.trainable_names():
        assert torch.equal(short.gradient(name), whole.gradient(name)), name
    assert not kept.isnan().any()
    assert left.isnan().any().item() == bool(FOUND[kind])


@pytest.mark.parametrize("kind", FOUND)
def test_which_products_end_a_layer(kind: str, make_case: Any, make_batch: Any) -> None:
    case = make_case(kind)
    recompute(case, make_batch(), output_read=False)
    for name, products in case.runtime._products.items():
        layer = case.runtime._modules.layers[name]
        names = {module: path.split(".")[-1] for path, module in layer.named_modules()}
        found = sorted(names[module] for module in products.last)
        assert found == FOUND[kind]
        assert all("forward" not in vars(module) for module in names)


def test_one_product_fewer_reaches_the_device(make_case: Any, make_batch: Any) -> None:
    case, batch = make_case("llama"), make_batch()
    recompute(case, batch, output_read=False)
    hidden = {"hidden": torch.randn(2, 12, 32)}
    counts = {}
    for output_read in (True, False):
        with Products() as products:
            case.forward([1], hidden, batch, autograd=True, output_read=output_read)
        counts[output_read] = products.count
    assert counts[False] == counts[True] - 1


def test_a_product_that_somebody_reads_is_made() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.third = nn.Linear(4, 4)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            first = self.first(hidden)
            return first + self.second(hidden) + self.third(torch.tanh(first)) * 0.5

    layer = Layer()
    watch = ProductWatch(layer)
    with watch.watching():
        output = layer(torch.randn(2, 4, requires_grad=True))
    found = watch.products(output).last
    assert found == [layer.third, layer.second] or found == [layer.second, layer.third]


def test_products_whose_weight_is_read_elsewhere_keep_their_gradient() -> None:
    """Gradients of several uses are added up in autograd's order."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alone, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
            self.read, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
            self.other.weight = self.tied.weight

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden = self.other(self.tied(self.alone(hidden)))
            return self.read(hidden) + hidden @ self.read.weight

    watch = ProductWatch(layer := Layer())
    with watch.watching():
        output = layer(torch.randn(2, 4, requires_grad=True))
    assert watch.products(output).handing_over == [layer.alone]


def test_a_module_that_runs_twice_or_is_no_plain_linear_is_left_alone() -> None:
    class Special(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows) * 2.0

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.special = nn.Linear(4, 4), Special(4, 4)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.twice(hidden) + self.twice(hidden * 2.0) + self.special(hidden)

    watch = ProductWatch(layer := Layer())
    with watch.watching():
        output = layer(torch.randn(2, 4, requires_grad=True))
    assert watch.products(output).last == []
