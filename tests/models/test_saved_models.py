"""Gradients of whole models with dropped, swapped and rebound activations are those of a plain run,
bit for bit: split backwards, changes in place and a GPU, too.
"""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig

from penstock.models.binding import BoundBlock
from penstock.models.saved_activations import (
    BoundWeights,
    SavedTensorPolicy,
    saving_activations,
)
from penstock.models.split_backward.split import DeferredWeights, backward_input, split_backward
from penstock.models.torch_device import torch_device
from tests.models.saved_runs import SETS, TINY_GPT2, assert_same

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("inner", ["eager", "grouped_mm"])
def test_experts(inner) -> None:
    config = MixtralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        experts_implementation=inner,
    )
    check_whole_model(config, ["cmb", "mlp", "everything"])


def test_eager_attention_with_dropout() -> None:
    config = GPT2Config(**TINY_GPT2, attn_implementation="eager")
    check_whole_model(config, ["cmb", "core", "attention", "everything"])


@pytest.mark.parametrize("drop", [None, "cmb", "mlp", "everything"])
def test_split_backward(drop) -> None:
    torch.manual_seed(1)
    config = GPT2Config(**TINY_GPT2)
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.randint(0, 61, (2, 12))
    parameters = list(model.parameters())

    def loss() -> torch.Tensor:
        torch.manual_seed(2)
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    wanted = torch.autograd.grad(loss(), parameters)
    leaves = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights = BoundWeights([BoundBlock(index=0, leaves=leaves)])
    policy = SavedTensorPolicy(drop=SETS[drop] if drop else frozenset(), rebind=True)
    store = DeferredWeights()
    with saving_activations(policy, weights, [ids]) as kept, split_backward(store, parameters):
        value = loss()
    kept.swap_out(0.5)
    weights.release()
    kept.swap_in()
    weights.bind([BoundBlock(index=0, leaves=leaves)])
    kept.recompute()
    backward_input(store, [value], [None])
    del value
    assert kept.bytes > 0, "what weight gradients need is still kept"
    weights.release()
    for leaf in leaves.values():
        leaf.fill_(float("nan"))
    store.run()
    assert kept.bytes == 0
    assert_same([parameter.grad for parameter in parameters], list(wanted))


def test_a_split_backward_reads_weights_where_they_are_then() -> None:
    """A convolution and a product with a part of a matrix, whose weights have moved meanwhile."""
    torch.manual_seed(1)
    convolution = torch.nn.Conv1d(4, 4, 3, padding=1)
    pair = torch.nn.Parameter(torch.randn(2, 6, 6))
    parameters = [*convolution.parameters(), pair]
    x = torch.randn(2, 4, 6, requires_grad=True)

    def loss() -> torch.Tensor:
        return torch.nn.functional.linear(convolution(x).tanh(), pair[1]).square().sum()

    wanted = torch.autograd.grad(loss(), [x, *parameters])
    leaves = {str(i): parameter.detach() for i, parameter in enumerate(parameters)}
    weights = BoundWeights([BoundBlock(index=0, leaves=leaves)])
    store = DeferredWeights()
    with (
        saving_activations(SavedTensorPolicy(rebind=True), weights, [x]),
        split_backward(store, parameters),
    ):
        value = loss()
    moved = {name: leaf.clone() for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.fill_(float("nan"))
    weights.bind([BoundBlock(index=0, leaves=moved)])
    backward_input(store, [value], [None])
    del value
    store.run()
    assert_same([x.grad, *(parameter.grad for parameter in parameters)], list(wanted))


def check_whole_model(config, drops: list[str]) -> None:
    """All of a model as one block, its weights moved before the backward."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.randint(0, 61, (2, 12))

    def loss() -> torch.Tensor:
        torch.manual_seed(2)
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    def gradients(value: torch.Tensor) -> list[torch.Tensor]:
        value.backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        return [gradient for gradient in found if gradient is not None]

    wanted, whole = gradients(loss()), None
    for drop in (frozenset(), *(SETS[name] for name in drops)):
        leaves = {name: p.detach() for name, p in model.named_parameters()}
        weights = BoundWeights([BoundBlock(index=0, leaves=leaves)])
        with saving_activations(SavedTensorPolicy(drop=drop, rebind=True), weights) as kept:
            value = loss()
        whole = whole or kept.bytes
        assert kept.bytes <= whole and (kept.bytes < whole) == bool(drop)
        copies = {name: leaf.clone() for name, leaf in leaves.items()}
        for leaf in leaves.values():
            leaf.fill_(float("nan"))
        weights.bind([BoundBlock(index=0, leaves=copies)])
        assert_same(gradients(value), wanted)
        for name, leaf in leaves.items():
            leaf.copy_(copies[name])


class InPlace(torch.nn.Module):
    """Reads a tensor, then changes it; ``mul`` is what an MLP itself computes."""

    class MLP(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            with torch.no_grad():
                early = y * 2.0  # what it read is changed by the next line
            y.add_(1.0)
            z = (x * 2.0).add_(y).mul_(0.5)  # a chain of changes to new memory
            return early * x + torch.sin(z) * y

    def __init__(self) -> None:
        super().__init__()
        self.mlp = self.MLP()
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.mlp(x))


@pytest.mark.parametrize("drop", [{"mul"}, {"inner"}, {"mul", "inner"}, {"mul", "inner", "norm"}])
def test_changes_in_place(drop) -> None:
    torch.manual_seed(3)
    module, inputs = InPlace(), torch.randn(5, 4, requires_grad=True)
    weight = module.mlp.inner.weight
    wanted = torch.autograd.grad(module(inputs).sin().sum(), [inputs, weight])
    with saving_activations(SavedTensorPolicy(drop=frozenset(drop)), BoundWeights()) as kept:
        result = module(inputs).sin().sum()
    kept.recompute()
    assert_same(list(torch.autograd.grad(result, [inputs, weight])), list(wanted))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("drop", [None, "cmb", "mlp", "everything"])
def test_on_a_gpu(drop) -> None:
    config = GPT2Config(**{**TINY_GPT2, "n_embd": 256})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16).train()
    ids = torch.randint(0, 61, (2, 128), device="cuda")

    def loss() -> torch.Tensor:
        torch.manual_seed(2)
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    parameters = list(model.parameters())
    wanted = torch.autograd.grad(loss(), parameters)
    streams = torch_device(torch.device("cuda")).swap_streams()
    policy = SavedTensorPolicy(drop=SETS[drop] if drop else frozenset())
    for fraction in (0.0, 0.3, 1.0):
        with saving_activations(policy, BoundWeights()) as kept:
            value = loss()
        torch.rand(9, device="cuda")
        moved = kept.swap_out(fraction, allocate=streams.allocate, copies=streams.out)
        torch.full((moved // 4 + 1,), float("nan"), device="cuda")  # takes the freed memory
        kept.swap_in(copies=streams.back)
        kept.recompute()
        assert_same(list(torch.autograd.grad(value, parameters)), list(wanted))
    gc.collect()
    assert kept.bytes == 0
