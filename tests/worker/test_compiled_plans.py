"""Compiled layers have the same bits in every plan: what they save is kept, made again, swapped or
bound anew, and their backward is whole or split, in stages of any size.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol.plan.plan import StageRange
from tests.compiler import QUIET, fresh_compiler, graphs
from tests.worker.cluster import relative_error
from tests.worker.test_store import NONE, _poisoned, round_trip, with_program

__all__ = ["_poisoned", "fresh_compiler"]
pytestmark = QUIET

ALL, INPUT = "keep=all", "keep=input"
WAYS = {
    "kept": (ALL, "", "", "B", ""),
    "recomputed": (INPUT, "", "R {}", "B", ""),
    "swapped": (ALL, "SO {} fraction=0.5", "SI {} fraction=0.5", "B", ""),
    "swapped whole": (ALL, "SO {} fraction=1.0", "SI {} fraction=1.0", "B", ""),
    "split": (ALL, "", "", "BI", "BW {s} 0,1"),
    "split, recomputed": (INPUT, "", "R {}", "BI", "BW {s} 0; BW {s} 1"),
    "split, swapped": (ALL, "SO {} fraction=1.0", "SI {} fraction=1.0", "BI", "BW {s} 0,1"),
}


def test_the_same_bits_in_every_way(make_cluster: Any, poisoned: None) -> None:
    """Weights are bound anew for all backwards. A second attempt, in the same process, repeats the
    bits; layers that are not compiled come near.
    """
    settings: dict[str, Any] = {
        "scheme": "gpipe",
        "workers": 1,
        "micro_batches": 2,
        "schedule": NONE,
        "hf": {"tie_word_embeddings": True, "num_hidden_layers": 3},
    }
    eager = make_cluster(**settings, model={"dtype": "bf16"})
    near = eager.train(eager.job())
    cluster = make_cluster(**settings, model={"dtype": "bf16", "compile": True})
    wanted = cluster.train(cluster.job()), cluster.gradient_bytes()
    assert wanted[0] == pytest.approx(near, rel=1e-5)
    assert relative_error(cluster.gradients(), eager.gradients()) < 1e-4
    assert (cluster.train(cluster.job(attempt=2)), cluster.gradient_bytes()) == wanted
    attempt = 3
    for cut in (1, 3):
        stages = (
            StageRange(start=0, stop=cut, device=0),
            StageRange(start=cut, stop=5, device=0),
        )
        for way, words in WAYS.items():
            worker = with_program(
                cluster,
                round_trip(*words),
                forward_stages=stages,
                backward_stages=stages,
                rebinds_weights=words[0] == ALL,
            )
            result = worker.run(cluster.job(attempt=attempt))
            found = (result.loss_sum, result.loss_tokens), cluster.gradient_bytes()
            assert found == wanted, (way, cut)
            attempt += 1
    assert graphs() == 1
