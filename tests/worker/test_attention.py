"""Layers with a named attention have the same bits, kept, recomputed and repeated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.models.attention import choose_attention
from penstock.protocol.plan.plan import StageRange
from tests.worker.cluster import relative_error
from tests.worker.test_store import NONE, round_trip, with_program

WAYS = {
    "kept": ("keep=all", "", "", "B", ""),
    "recomputed": ("keep=input", "", "R {}", "B", ""),
    "swapped": ("keep=all", "SO {} fraction=0.5", "SI {} fraction=0.5", "B", ""),
}
STAGES = (StageRange(start=0, stop=2, device=0), StageRange(start=2, stop=5, device=0))


@pytest.fixture
def torchs_choice() -> Iterator[None]:
    """Gives the process back to torch's choice."""
    yield
    choose_attention("sdpa")


def test_the_same_bits_in_every_way(make_cluster: Any, torchs_choice: None) -> None:
    """``flash`` has the bits of torch's choice on a CPU; ``math`` comes near."""
    settings: dict[str, Any] = {
        "scheme": "gpipe",
        "workers": 1,
        "micro_batches": 2,
        "schedule": NONE,
        "hf": {"num_hidden_layers": 3},
    }
    plain = make_cluster(**settings)
    loss, expected = plain.train(plain.job()), plain.gradient_bytes()
    for name in ("flash", "math"):
        choose_attention(name)
        cluster = make_cluster(**settings, model={"attention": name})
        first = cluster.train(cluster.job()), cluster.gradient_bytes()
        assert (first == (loss, expected)) == (name == "flash")
        assert relative_error(cluster.gradients(), plain.gradients()) < 1e-4
        for attempt, (way, words) in enumerate(WAYS.items(), start=2):
            worker = with_program(
                cluster, round_trip(*words), forward_stages=STAGES, backward_stages=STAGES
            )
            result = worker.run(cluster.job(attempt=attempt))
            bits = (result.loss_sum, result.loss_tokens), cluster.gradient_bytes()
            assert bits == first, (name, way)
        choose_attention("sdpa")
