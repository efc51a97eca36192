"""Gradients with dropped, swapped and rebound activations are those of a plain run, bit for bit."""

from __future__ import annotations

import collections
import functools

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.models.binding import BoundBlock
from penstock.models.saved_activations import (
    BoundWeights,
    OperatorTracker,
    SavedActivationError,
    SavedActivations,
    SavedTensorPolicy,
    release_values,
    saving_activations,
)
from tests.models.saved_runs import (
    MODELS,
    SETS,
    Kernels,
    Run,
    assert_same,
    built,
    kept_bytes,
    plain_gradients,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(name="make_run")
def _make_run(make_case, make_batch):
    return lambda name: Run(built(make_case, name), make_batch())


@pytest.fixture(name="plain")
def _plain(make_case, make_batch):
    return functools.partial(plain_gradients, make_case, make_batch)


@pytest.mark.parametrize("name", MODELS)
def test_everything_kept_and_freed_by_the_backward(name, make_run, plain) -> None:
    run = make_run(name)
    kept, outputs = run.forward(SavedTensorPolicy())
    assert kept.bytes > 0
    assert kept.recompute() == 0
    assert_same(run.backward(outputs), plain(name))
    assert kept.bytes == 0


@pytest.mark.parametrize("name", MODELS)
def test_full_recomputation_is_the_same_too(name, make_case, make_batch, plain) -> None:
    wanted = plain(name)
    case = built(make_case, name)
    case.train((1, 2, 3, 4), make_batch(), loss_weight=0.5)
    assert_same(Run(case, make_batch()).backward([]), wanted)


@pytest.mark.parametrize("drop", SETS)
@pytest.mark.parametrize("name", MODELS)
def test_dropped_operators(name, drop, make_run, plain) -> None:
    run, wanted = make_run(name), plain(name)
    whole = kept_bytes(run, SavedTensorPolicy())
    kept, outputs = run.forward(SavedTensorPolicy(drop=SETS[drop]))
    early, other = run.forward(SavedTensorPolicy(drop=SETS[drop]))
    assert kept.bytes == early.bytes < whole
    torch.rand(7)  # others use the generator in between
    state = torch.get_rng_state()
    assert early.recompute() > 0
    assert early.recompute() == 0
    # Besides, what the kernels in between would have left is there, and only that.
    assert kept.bytes < early.bytes <= whole
    assert_same(run.backward(outputs), wanted)
    assert_same(run.backward(other), wanted)
    assert torch.equal(torch.get_rng_state(), state)
    assert kept.bytes == early.bytes == 0


def test_micro_batches_interleave(make_run) -> None:
    run = make_run("gpt2")
    wanted = [run.backward(run.plain_forward(m)) for m in (0, 1)]
    assert not torch.equal(wanted[0][2], wanted[1][2]), "dropout differs by micro-batch"
    first, first_outputs = run.forward(SavedTensorPolicy(drop=SETS["everything"]), 0)
    _, second_outputs = run.forward(SavedTensorPolicy(drop=SETS["mlp"]), 1)
    first.recompute()
    assert_same(run.backward(second_outputs), wanted[1])
    assert_same(run.backward(first_outputs), wanted[0])


SAVED = {
    # Three layers and the last norm; shares of what is kept of two sequences of twelve tokens.
    ("llama", "cmb"): 0.460,
    ("llama", "mlp"): 0.356,
    ("gpt2", "cmb"): 0.509,
    ("gpt2", "mlp"): 0.615,
}


@pytest.mark.parametrize(("name", "drop"), SAVED)
def test_bytes_saved(name, drop, make_run) -> None:
    run = make_run(name)
    whole = kept_bytes(run, SavedTensorPolicy())
    kept = kept_bytes(run, SavedTensorPolicy(drop=SETS[drop]))
    assert 1 - kept / whole == pytest.approx(SAVED[name, drop], abs=0.005)


PRODUCTS = {
    # Of three layers. ``down`` and its sum are nobody's input but the next block's, which is kept.
    ("llama", "cmb"): 0,
    ("llama", "mlp"): 3 * 2,
    ("llama", "attention"): 3 * 4,
    ("llama", "core"): 0,
    ("llama", "up"): 3,
    ("gpt2", "cmb"): 0,
    ("gpt2", "mlp"): 3,
    ("gpt2", "core"): 3 * 2,  # with dropout scores and values are products of their own
    ("gpt2", "attention"): 3 * (1 + 2),  # the last dropout, not dropped, needs no product again
}


@pytest.mark.parametrize(("name", "drop"), PRODUCTS)
def test_only_dropped_operators_run_again(name, drop, make_run) -> None:
    run = make_run(name)
    kept, outputs = run.forward(SavedTensorPolicy(drop=SETS[drop]))
    with Kernels() as kernels:
        kept.recompute()
    assert kernels.products == PRODUCTS[name, drop]
    assert bool(outputs)


@pytest.mark.parametrize("fraction", [0.3, 1.0])
@pytest.mark.parametrize("drop", [None, "cmb", "mlp"])
@pytest.mark.parametrize("name", MODELS)
def test_all_at_once(name, drop, fraction, make_run, plain) -> None:
    run, wanted = make_run(name), plain(name)
    policy = SavedTensorPolicy(drop=SETS[drop] if drop else frozenset(), rebind=True)
    kept, outputs = run.forward(policy)
    before = kept.bytes
    moved = kept.swap_out(fraction)
    assert fraction * before <= moved
    assert (kept.bytes, kept.bytes_elsewhere) == (before - moved, moved)
    run.release_weights()
    run.fetch_weights()
    assert kept.swap_in() == moved
    assert (kept.bytes, kept.bytes_elsewhere) == (before, 0)
    assert (kept.recompute() > 0) == (drop is not None)
    assert_same(run.backward(outputs), wanted)


def test_swap_takes_the_largest_first_and_no_more_than_needed() -> None:
    weights = BoundWeights()
    with saving_activations(SavedTensorPolicy(), weights) as kept:
        leaves = [torch.ones(size, requires_grad=True) for size in (10, 40, 20, 30)]
        result = sum((leaf * leaf).sum() for leaf in leaves)
    assert kept.bytes == 4 * 100
    assert kept.swap_out(0.0) == 0
    assert kept.swap_out(0.5) == 4 * (40 + 10)
    assert kept.swap_out(1.0) == 4 * (20 + 30)
    assert kept.swap_in() == 4 * 100
    result.backward()
    assert all(torch.equal(leaf.grad, torch.full_like(leaf, 2.0)) for leaf in leaves)
    with pytest.raises(ValueError, match=r"fraction = 1.5: expected 0 to 1"):
        kept.swap_out(1.5)


def test_use_while_swapped_out_names_the_tensor() -> None:
    layer = torch.nn.Linear(3, 5)
    inputs = torch.ones(2, 3, requires_grad=True)
    with (
        saving_activations(SavedTensorPolicy(drop=frozenset({"dropout"})), BoundWeights()) as kept,
        kept.block(4),
    ):
        result = F.silu(layer(inputs)).sum()
    kept.swap_out(1.0)
    wanted = (
        r"saved tensor 2 of block 4, output of AddmmBackward0 \(2, 5\) float32 \(40 bytes\)"
        r" is swapped out; bring it back"
    )
    with pytest.raises(SavedActivationError, match=wanted):
        result.backward()
    kept.swap_in()
    result.backward()
    assert inputs.grad is not None


def test_recompute_of_what_is_swapped_out_runs_nothing(make_run, plain) -> None:
    run = make_run("llama")
    kept, outputs = run.forward(SavedTensorPolicy(drop=SETS["cmb"]))
    kept.swap_out(1.0)
    with Kernels() as kernels, pytest.raises(SavedActivationError, match="is swapped out"):
        kept.recompute()
    assert not kernels.counts
    kept.swap_in()
    assert_same(run.backward(outputs), plain("llama"))


class LateCopies:
    """Copies that happen as late as they may: when somebody waits for them."""

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def follow(self, arrival: LateCopies) -> None:
        self.pending = arrival.pending + self.pending

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.pending.append((target.fill_(255), source))

    def record(self) -> LateCopies:
        return self

    def wait(self) -> None:
        for target, source in self.pending:
            target.copy_(source)
        self.pending.clear()


def test_copies_are_waited_for_at_the_first_use(make_run, plain) -> None:
    run, wanted = make_run("gpt2"), plain("gpt2")
    kept, outputs = run.forward(SavedTensorPolicy(drop=SETS["cmb"]))
    out, back = LateCopies(), LateCopies()
    places: list[torch.Tensor] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        places.append(torch.empty(num_bytes + 64, dtype=torch.uint8))
        return places[-1]

    kept.swap_out(0.5, allocate=allocate, copies=out)
    kept.swap_in(copies=back)
    assert len(back.pending) == 2 * len(places) > 0
    assert_same(run.backward(outputs), wanted)
    assert not back.pending


def test_memory_is_free_after_a_swap(make_run) -> None:
    run = make_run("llama")
    hidden, constants = torch.randn(2, 12, 32), run.constants()
    with (
        Kernels() as kernels,
        saving_activations(SavedTensorPolicy(), run.weights, constants) as kept,
    ):
        output = run.case.runtime.forward(
            [run.bound[1]],
            {"hidden": hidden.clone()},
            run.batch,
            data_position=0,
            micro_batch_index=0,
            training=True,
            loss_weight=1.0,
        )
    assert kernels.live_bytes == kept.bytes + output.tensors["hidden"].nbytes
    release_values(output.inputs["hidden"])
    kept.swap_out(1.0)
    assert kernels.live_bytes == output.tensors["hidden"].nbytes
    kept.swap_in()
    gradient = run.case.runtime.backward(output, {"hidden": torch.ones(2, 12, 32)})["hidden"]
    run.backward([])
    assert gradient.shape == hidden.shape and gradient.is_contiguous() and gradient.any()


@pytest.mark.parametrize("drop", ["cmb", "mlp", "everything"])
def test_dropped_memory_is_free_during_the_forward(drop, make_run) -> None:
    run = make_run("llama")
    run.constants()  # so that rotary tables exist
    with Kernels() as kernels:
        kept, outputs = run.forward(SavedTensorPolicy(drop=SETS[drop]))
    hidden = outputs[0].tensors["hidden"].nbytes
    # The hidden states are kept as inputs of blocks; the loss and its weighted value are scalars.
    assert kept.bytes <= kernels.live_bytes <= kept.bytes + hidden + 16


def test_blocks_are_recomputed_one_by_one(make_run, plain) -> None:
    run, wanted = make_run("llama"), plain("llama")
    kept, outputs = run.forward(SavedTensorPolicy(drop=SETS["mlp"]))
    gradients = run.case.runtime.backward(outputs.pop(), {})
    for output in (outputs.pop(), outputs.pop()):  # of three layers
        gradients = run.case.runtime.backward(output, gradients)
    assert kept.recompute() == 4, "gate, SiLU, up and their product of the first layer"
    gradients = run.case.runtime.backward(outputs.pop(), gradients)
    run.case.runtime.backward(outputs.pop(), gradients)
    assert_same(run.backward([]), wanted)


def test_what_nobody_saved_is_let_go_during_the_forward() -> None:
    class MLP(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(300):
                unused = self.inner(x) * 2.0
            return unused

    model = torch.nn.Sequential(MLP())
    with (
        saving_activations(SavedTensorPolicy(drop=frozenset({"mul"})), BoundWeights()) as kept,
        torch.no_grad(),
    ):
        model(torch.ones(4, 8))
        assert kept.bytes < 100 * 4 * 8 * 4
    assert kept.bytes == 0


def test_tied_weights_are_found_in_the_block_that_uses_them() -> None:
    flat = torch.arange(24.0)
    first = BoundBlock(index=0, leaves={"embed": flat[4:16].view(3, 4)})
    last = BoundBlock(index=4, leaves={"head": flat[4:16].view(3, 4), "norm": flat[16:]})
    weights = BoundWeights([first, last])
    used = flat[4:16].view(3, 4).t()[1:]
    assert [weights.find(used, block).name for block in (0, 4)] == ["embed", "head"]
    assert weights.find(flat[:4], 0) is None
    view = weights.find(used, 4)
    weights.bind([BoundBlock(index=4, leaves={"head": flat.clone()[4:16].view(3, 4)})])
    flat.zero_()
    assert torch.equal(view.tensor(), torch.arange(4.0, 16.0).view(3, 4).t()[1:])


def test_unbound_weights_are_named(make_run) -> None:
    run = make_run("llama")
    kept, outputs = run.forward(SavedTensorPolicy(drop=SETS["mlp"], rebind=True))
    run.weights.release()
    wanted = r"weight 'model.layers.0.mlp.gate_proj.weight' of block 1 is needed and not bound"
    with pytest.raises(SavedActivationError, match=wanted):
        kept.recompute()
    with pytest.raises(SavedActivationError, match=r"weight 'lm_head.weight' of block 4 is needed"):
        run.backward(outputs)


def test_without_rebinding_the_old_memory_is_read(make_run, plain) -> None:
    run = make_run("llama")
    _, outputs = run.forward(SavedTensorPolicy())
    run.weights.release()
    assert_same(run.backward(outputs), plain("llama"))


def test_discarded_activations_are_freed_and_missed(make_run) -> None:
    run = make_run("llama")
    kept, outputs = run.forward(SavedTensorPolicy(drop=SETS["cmb"]))
    kept.swap_out(0.5)
    kept.discard()
    assert (kept.bytes, kept.bytes_elsewhere, kept.recompute()) == (0, 0, 0)
    with pytest.raises(SavedActivationError, match="was discarded"):
        run.backward(outputs)
    run.backward([])


class Named(TorchDispatchMode):
    """Kernels that make new memory or products, by operator."""

    def __init__(self, tracker: OperatorTracker) -> None:
        super().__init__()
        self.tracker, self.found = tracker, collections.defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        operator = self.tracker.operator_of(name)
        result = func(*args, **(kwargs or {}))
        views = ("view", "t", "transpose", "slice", "detach", "unsqueeze", "expand", "split")
        if name.strip("_") not in (*views, "unsafe_view", "alias"):
            self.found[operator].append(name)
        return result


def test_names_of_llamas_kernels(make_run) -> None:
    run = make_run("llama")
    run.plain_forward()
    tracker = OperatorTracker()
    with tracker.watching(), Named(tracker) as named:
        run.plain_forward()
    layers = {operator: names for operator, names in named.found.items()}
    assert layers == {
        "embedding": ["embedding"],
        "norm": ["pow", "mean", "add", "rsqrt", "mul", "mul"] * 7,
        "qkv": [*["mm"] * 3, *["mul", "neg", "cat", "mul", "add"] * 2] * 3,
        "attention_core": ["_scaled_dot_product_flash_attention_for_cpu"] * 3,
        "attention_output": ["mm", "add"] * 3,
        "gate": ["mm"] * 3,
        "silu": ["silu"] * 3,
        "up": ["mm"] * 3,
        "mul": ["mul"] * 3,
        "down": ["mm", "add"] * 3,
        "head": ["mm"],
        "loss": named.found["loss"],
    }


def test_names_of_gpt2s_kernels(make_run) -> None:
    run = make_run("gpt2")
    run.plain_forward()  # the first one finds out what layers are called with, through dropout
    tracker = OperatorTracker()
    with tracker.watching(), Named(tracker) as named:
        run.plain_forward()
    products = {
        operator: names.count("addmm") + names.count("mm") + names.count("bmm")
        for operator, names in named.found.items()
    }
    assert (
        products["qkv"] == products["attention_output"] == products["up"] == products["down"] == 3
    )
    assert products["attention_core"] == 6
    assert named.found["dropout"].count("bernoulli_") == 1 + 3 * 2
    assert named.found["attention_core"].count("bernoulli_") == 3
    assert named.found["norm"].count("native_layer_norm") == 7


def test_nests_inside_other_modes(make_run, plain) -> None:
    run, wanted = make_run("llama"), plain("llama")
    seen: list[str] = []

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Functions():
        kept, outputs = run.forward(SavedTensorPolicy(drop=SETS["mlp"]))
    assert "linear" in seen
    seen.clear()
    with Functions():
        kept.recompute()
    assert "linear" not in seen
    assert isinstance(kept, SavedActivations)
    assert_same(run.backward(outputs), wanted)
