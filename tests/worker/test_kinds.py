"""Kinds of models without causal attention through real workers, in one process: the plain loop's
gradients, and the same bits split or not.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from tests.worker.cluster import TOLERANCE, build_cluster, make_config, relative_error

_COMMON = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 3}
KINDS: dict[str, dict[str, Any]] = {
    "mamba": {"model": {"hf": {"model_type": "mamba", "state_size": 4, **_COMMON}}},
    "bert": {
        "model": {
            "hf": {
                "model_type": "bert",
                "intermediate_size": 24,
                "num_attention_heads": 2,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
                **_COMMON,
            }
        },
        "objective": "masked",
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_split_or_not_it_is_the_plain_loop(kind: str) -> None:
    found = []
    for passes in ([], ["split-backward"]):
        with ExitStack() as stack:
            cluster = build_cluster(stack, make_config(schedule={"passes": passes}, **KINDS[kind]))
            job = cluster.job()
            loss, counted = cluster.train(job)
            wanted_loss, wanted = cluster.reference(job)
            assert counted == job.counted_tokens and loss == pytest.approx(wanted_loss, rel=1e-6)
            assert relative_error(cluster.gradients(), wanted) < TOLERANCE
            found.append(cluster.gradient_bytes())
    assert found[0] == found[1]
