"""Compiled layers: one graph for all layers of a kind, the same numbers, nothing while watched."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from tqdm import tqdm

from penstock.models.runtime import ModelRuntime
from penstock.models.saved_activations import BoundWeights
from penstock.models.storing import Storing

# The compiler itself asks, and hides the warning from users.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0"),
]

DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No graphs of other tests, before or after; no threads or processes that outlive the test."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    # Its own is also one between processes, for which Python 3.14 starts a process.
    tqdm.set_lock(threading.RLock())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with inductor_config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


def graphs() -> int:
    """Graphs compiled so far in this test."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def use(case: Any, backend: str | None, dtype: torch.dtype = torch.float32) -> None:
    """Give the case a fresh runtime, zero gradients, and weights in another type."""
    case.runtime = ModelRuntime(
        case.hf_config, case.table, device="cpu", compute_dtype=dtype, seed=7, compiler=backend
    )
    case.weights = [weights.to(dtype) for weights in case.weights]
    for contributions in case.grads:
        for gradients in contributions:
            gradients.zero_()


def train(case: Any, batch: Any) -> torch.Tensor:
    """A forward for checkpoints, then both halves recomputed and run backward; the loss sum.

    Compiled, the two forwards are two graphs, and may round differently.
    """
    first = case.forward(range(5), {}, batch, autograd=False, checkpoints_at=(2,))
    second = case.forward(range(2, 5), first.checkpoints[2], batch, autograd=True)
    gradients = case.runtime.backward(second, {})
    case.runtime.backward(case.forward(range(2), {}, batch, autograd=True), gradients)
    assert second.loss_sum == pytest.approx(first.loss_sum.item(), rel=1e-3)
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
    assert graphs() == 2, "one with autograd, one without"


def test_one_graph_serves_all_layers(make_case: Any, make_batch: Any, original_loss: Any) -> None:
    case = make_case("llama")
    use(case, "aot_eager")
    for seed in (1, 2):
        batch = make_batch(seed=seed)
        loss = original_loss(case.original, batch)
        loss.backward()
        torch.testing.assert_close(train(case, batch), loss.detach(), rtol=1e-5, atol=0.0)
        assert graphs() == 2, "one with autograd, one without"
    wanted = {n: p.grad for n, p in case.original.named_parameters() if p.grad is not None}
    for name, gradient in wanted.items():
        assert (case.gradient(name) - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_forwards_that_are_watched_run_uncompiled(make_case: Any, make_batch: Any) -> None:
    case = make_case("llama")
    use(case, "inductor")
    bound = case.bind(range(5))
    storing = Storing(weights=BoundWeights(bound), split=True)
    output = case.forward(range(5), {}, make_batch(), storing=storing)
    case.runtime.backward(output, {})
    output.stored.deferred.run()
    assert graphs() == 0


@pytest.mark.slow
def test_generated_kernels_add_16_bit_gradients_up_in_fp32(make_case: Any, make_batch: Any) -> None:
    batches = [make_batch(seed=seed) for seed in (1, 2)]
    check_like_uncompiled(make_case("llama"), batches, torch.bfloat16, 0.1)


@pytest.mark.slow
def test_generated_kernels_drop_out_the_same_elements(make_case: Any, make_batch: Any) -> None:
    check_like_uncompiled(make_case("gpt2", **DROPOUT), [make_batch()], torch.float32, 1e-4)
