"""Compiled layers: one graph for all layers of a kind and all backwards, the same numbers."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.models import runtime
from penstock.models.binding import summing
from penstock.models.compiled import CompiledLayer, Compiler
from penstock.models.forward_storage import ForwardStorage
from penstock.models.runtime import HIDDEN, ModelRuntime
from penstock.models.saved_activations import BoundWeights, SavedTensorPolicy
from penstock.models.split_backward import products as product_operators
from penstock.models.split_backward.split import DeferredWeights, run_together
from tests.compiler import QUIET, fresh_compiler, graphs

__all__ = ["fresh_compiler"]
pytestmark = QUIET

DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}


def use(case: Any, backend: str | None, dtype: torch.dtype = torch.float32) -> None:
    """Give the case a fresh runtime, zero gradients, and weights in another type."""
    compiler = None if backend is None else Compiler(backend=backend)
    case.runtime = ModelRuntime(
        case.hf_config, case.table, device="cpu", compute_dtype=dtype, seed=7, compiler=compiler
    )
    case.weights = [weights.to(dtype) for weights in case.weights]
    for contributions in case.grads:
        for gradients in contributions:
            gradients.zero_()


def train(case: Any, batch: Any) -> torch.Tensor:
    """A forward for checkpoints, then both halves recomputed and run backward; the loss sum.

    Compiled, the two forwards are one graph, and round alike.
    """
    first = case.forward(range(5), {}, batch, autograd=False, checkpoints_at=(2,))
    second = case.forward(range(2, 5), first.checkpoints[2], batch, autograd=True)
    gradients = case.runtime.backward(second, {})
    case.runtime.backward(case.forward(range(2), {}, batch, autograd=True), gradients)
    assert torch.equal(second.loss_sum, first.loss_sum)
    loss_sum: torch.Tensor = second.loss_sum
    return loss_sum


def check_like_uncompiled(case: Any, batches: Any, dtype: torch.dtype, tolerance: float) -> None:
    """The gradients of the runtime that compiles are near those of the one that does not."""
    found = {}
    for backend in ("inductor", None):
        use(case, backend, dtype)
        losses = [train(case, batch).item() for batch in batches]
        names = case.trainable_names()
        found[backend] = losses, {name: case.gradient(name).clone() for name in names}
    assert found["inductor"][0] == pytest.approx(found[None][0], rel=tolerance)
    for name, wanted in found[None][1].items():
        assert (found["inductor"][1][name] - wanted).norm() <= tolerance * wanted.norm(), name
    assert graphs() == 1


def test_one_graph_serves_all_layers(make_case: Any, make_batch: Any, original_loss: Any) -> None:
    case = make_case("llama")
    use(case, "aot_eager")
    for seed in (1, 2):
        batch = make_batch(seed=seed)
        loss = original_loss(case.original, batch)
        loss.backward()
        torch.testing.assert_close(train(case, batch), loss.detach(), rtol=1e-5, atol=0.0)
        assert graphs() == 1
    wanted = {n: p.grad for n, p in case.original.named_parameters() if p.grad is not None}
    for name, gradient in wanted.items():
        assert (case.gradient(name) - gradient).norm() <= 1e-5 * gradient.norm(), name


def storing_forward(case: Any, batch: Any, storage: ForwardStorage, bound: Any) -> Any:
    return case.runtime.forward(
        bound,
        {},
        batch,
        data_position=0,
        micro_batch_index=0,
        training=True,
        loss_weight=1.0,
        storage=storage,
    )


def test_forwards_that_drop_operators_run_uncompiled(make_case: Any, make_batch: Any) -> None:
    case = make_case("llama")
    use(case, "inductor")
    bound = case.bind(range(5))
    policy = SavedTensorPolicy(drop=frozenset({"norm"}))
    for split in (False, True):
        storage = ForwardStorage(weights=BoundWeights(bound), policy=policy, split=split)
        case.runtime.backward(storing_forward(case, make_batch(), storage, bound), {})
    assert graphs() == 0


class MatrixProducts(TorchDispatchMode):
    """Counts matrix products by the shape of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.made[tuple(result.shape)] += 1
        return result


@pytest.mark.parametrize(("kind", "products"), [("llama", 7), ("gpt2", 4)])
def test_a_split_backward_is_the_same_graph_with_the_same_bits(
    make_case: Any, make_batch: Any, kind: str, products: int
) -> None:
    """BACKWARD_WEIGHT makes one product for each linear module of the three layers, and the head's;
    nothing is kept after it. GPT-2 has modules with transposed weights and biases.
    """
    # Receivers of an earlier test may be in a cycle, which lives until the next collection.
    earlier = set(product_operators._receivers)
    case, batch = make_case(kind), make_batch()
    use(case, "inductor", torch.bfloat16)
    blocks = range(5)
    whole = case.forward(blocks, {}, batch, autograd=True)
    case.runtime.backward(whole, {})
    wanted = [case.grads[block][0].clone() for block in blocks]
    for block in blocks:
        case.grads[block][0].zero_()
    bound = case.bind(blocks)
    output = storing_forward(
        case, batch, ForwardStorage(weights=BoundWeights(bound), split=True), bound
    )
    assert torch.equal(output.loss_sum, whole.loss_sum)
    deferred = output.stored.deferred
    case.runtime.backward(output, {})
    del output, whole
    layers = [block for block in case.table.blocks if block.layer_index is not None]
    for layer in layers:
        for tensor in layer.tensors:
            made = case.gradient(tensor.name)
            waits = len(tensor.shape) == 2 or (kind == "gpt2" and "ln_" not in tensor.name)
            assert made.any() == (not waits), tensor.name
    assert deferred.bytes > 0
    with MatrixProducts() as made:
        deferred.run()
    assert sum(made.made.values()) == products * len(layers) + 1
    assert deferred.bytes == 0 and earlier.issuperset(product_operators._receivers)
    assert all(torch.equal(case.grads[block][0], wanted[block]) for block in blocks)
    assert graphs() == 1


@pytest.mark.parametrize("split", [False, True])
def test_memory_of_a_backward_is_freed_without_a_collection(
    make_case: Any, make_batch: Any, split: bool
) -> None:
    """A graph in a cycle would keep its activations until Python collects cycles."""
    case, batch, blocks = make_case("llama"), make_batch(), range(5)
    use(case, "inductor", torch.bfloat16)
    earlier = set(product_operators._receivers)
    gc.disable()
    try:
        for _ in range(2):
            bound = case.bind(blocks)
            storage = ForwardStorage(weights=BoundWeights(bound), split=split)
            output = storing_forward(case, batch, storage, bound)
            assert len(set(product_operators._receivers) - earlier) == 7 * 3
            stored = output.stored
            case.runtime.backward(output, {})
            if split:
                stored.deferred.run()
            del output, stored
            assert earlier.issuperset(product_operators._receivers)
    finally:
        gc.enable()


FROZEN = (r"layers\.1\.", "q_proj")


@pytest.mark.parametrize(
    ("kind", "freeze", "changes"), [("llama", FROZEN, {}), ("gpt2", (), DROPOUT)]
)
def test_split_backwards_of_frozen_layers_and_dropout_have_the_same_bits(
    make_case: Any, make_batch: Any, kind: str, freeze: tuple[str, ...], changes: dict[str, float]
) -> None:
    """Weights are looked up in the backward. One product over the rows of two micro-batches rounds
    otherwise.
    """
    case, batch, blocks = make_case(kind, freeze=freeze, **changes), make_batch(), range(5)
    use(case, "inductor", torch.bfloat16)
    case.frozen = [frozen.to(torch.bfloat16) for frozen in case.frozen]

    def taken() -> list[torch.Tensor]:
        found = [case.grads[block][0].clone() for block in blocks if case.grads[block]]
        for contributions in case.grads:
            for gradients in contributions:
                gradients.zero_()
        return found

    def deferred() -> DeferredWeights:
        bound = case.bind(blocks)
        storage = ForwardStorage(
            weights=BoundWeights(bound), split=True, policy=SavedTensorPolicy(rebind=True)
        )
        output = storing_forward(case, batch, storage, bound)
        case.runtime.backward(output, {})
        store: DeferredWeights = output.stored.deferred
        return store

    case.runtime.backward(case.forward(blocks, {}, batch, autograd=True), {})
    wanted = taken()
    deferred().run()
    assert all(map(torch.equal, taken(), wanted))
    run_together([deferred(), deferred()], concatenate=True)
    for made, once in zip(taken(), wanted, strict=True):
        assert (made - 2 * once).norm() <= 1e-2 * once.norm()


@pytest.mark.slow
def test_generated_kernels_add_16_bit_gradients_up_in_fp32(make_case: Any, make_batch: Any) -> None:
    batches = [make_batch(seed=seed) for seed in (1, 2)]
    check_like_uncompiled(make_case("llama"), batches, torch.bfloat16, 0.1)


@pytest.mark.slow
def test_generated_kernels_drop_out_the_same_elements(make_case: Any, make_batch: Any) -> None:
    check_like_uncompiled(make_case("gpt2", **DROPOUT), [make_batch()], torch.float32, 1e-4)


def test_a_forward_for_checkpoints_rounds_as_the_one_with_a_graph(
    make_case: Any, make_batch: Any
) -> None:
    """Generated kernels keep other intermediate values where autograd needs some of them."""
    case = make_case("llama")
    use(case, "inductor", torch.bfloat16)
    batch = make_batch()
    first = case.forward(range(3), {}, batch, autograd=False)
    second = case.forward(range(3), {}, batch, autograd=True)
    assert torch.equal(first.tensors[HIDDEN], second.tensors[HIDDEN])
    assert not first.tensors[HIDDEN].requires_grad
    assert graphs() == 1


def poison(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Makes visible what reads a product that was left out."""
    return rows.new_full((*rows.shape[:-1], weight.shape[0]), torch.nan)


def test_a_recomputation_leaves_the_last_product_out_with_the_same_graph(
    make_case: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, batch = make_case("llama"), make_batch()
    use(case, "inductor", torch.bfloat16)
    first = case.forward(range(2), {}, batch, autograd=False)
    seeds = {HIDDEN: torch.randn_like(first.tensors[HIDDEN])}
    outputs, gradients = [], []
    for output_read in (True, False):
        output = case.forward(range(2), {}, batch, autograd=True, output_read=output_read)
        outputs.append(output.tensors[HIDDEN].detach().clone())
        case.runtime.backward(output, seeds)
        gradients.append([case.grads[block][0].clone() for block in range(2)])
        for block in range(2):
            case.grads[block][0].zero_()
        monkeypatch.setattr(product_operators, "_unwritten", poison)
    assert torch.equal(outputs[0], first.tensors[HIDDEN])
    assert outputs[1].isnan().all()
    assert all(map(torch.equal, *gradients))
    assert graphs() == 1


def test_compiled_layers_are_swapped_and_bound_anew_with_the_same_bits(
    make_case: Any, make_batch: Any
) -> None:
    case, batch, blocks = make_case("llama"), make_batch(), range(1, 3)
    use(case, "inductor", torch.bfloat16)
    inputs = case.forward([0], {}, batch, autograd=False).tensors
    seeds = {HIDDEN: torch.randn_like(inputs[HIDDEN])}

    def gradients() -> list[torch.Tensor]:
        found = [case.grads[block][0].clone() for block in blocks]
        for block in blocks:
            case.grads[block][0].zero_()
        return found

    plain = case.forward(blocks, inputs, batch, autograd=True)
    wanted = case.runtime.backward(plain, seeds)
    sums = gradients()
    bound = case.bind(blocks)
    weights = BoundWeights(bound)
    storage = ForwardStorage(weights=weights, policy=SavedTensorPolicy(rebind=True))
    output = case.runtime.forward(
        bound,
        inputs,
        batch,
        data_position=0,
        micro_batch_index=0,
        training=True,
        loss_weight=1.0,
        storage=storage,
    )
    weights.release()
    activations = output.stored.activations
    assert activations.swap_out(1.0) > 0 and activations.bytes == 0
    moved = [case.weights[block].clone() for block in blocks]
    for block, elsewhere in zip(blocks, moved, strict=True):
        case.weights[block].fill_(torch.nan)
        case.weights[block] = elsewhere
    weights.bind(case.bind(blocks, train=False))
    activations.swap_in()
    got = case.runtime.backward(output, seeds)
    assert torch.equal(got[HIDDEN], wanted[HIDDEN])
    assert all(map(torch.equal, gradients(), sums))
    assert graphs() == 1


def test_options_hold_in_every_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch's settings are a thread's own; a backward is compiled by the thread that runs it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    seen: list[tuple[object, ...]] = []
    lower = GraphLowering.run

    def noting(self: Any, *arguments: Any) -> Any:
        options = inductor_config.deterministic, inductor_config.compile_threads
        seen.append((*options, inductor_config.fallback_random))
        return lower(self, *arguments)

    monkeypatch.setattr(GraphLowering, "run", noting)
    layer = CompiledLayer(torch.nn.Linear(4, 4), Compiler())
    rows = torch.randn(2, 4, requires_grad=True)
    limits: list[int] = []
    outputs: list[torch.Tensor] = []

    def forward() -> None:
        outputs.append(layer(rows))
        limits.append(torch._dynamo.config.recompile_limit)

    for work in (forward, lambda: outputs[0].sum().backward()):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert rows.grad is not None
    assert seen and set(seen) == {(True, 1, True)}
    assert limits == [1 << 16]


class Operators(TorchDispatchMode):
    """Counts conversions from bf16 to fp32, by number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.widened: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype is torch.float32:
            self.widened[result.numel()] += 1
        return result


def test_16_bit_gradients_are_added_to_wider_sums_without_a_copy(
    make_case: Any, make_batch: Any
) -> None:
    case = make_case("llama")
    use(case, None, torch.bfloat16)
    batch = make_batch()
    with Operators() as operators:
        train(case, batch)
    layers = [block for block in case.table.blocks if block.layer_index is not None]
    sizes = {t.num_elements for block in layers for t in block.tensors if len(t.shape) == 2}
    assert len(sizes) == 3 and not sizes & operators.widened.keys()


def test_sums_have_the_bits_of_gradients_that_autograd_widens(
    make_case: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = []
    for summed in (summing, lambda block: block):
        monkeypatch.setattr(runtime, "summing", summed)
        case = make_case("llama")
        use(case, None, torch.bfloat16)
        for seed in (1, 2):
            train(case, make_batch(seed=seed))
        gradients.append({name: case.gradient(name).clone() for name in case.trainable_names()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
