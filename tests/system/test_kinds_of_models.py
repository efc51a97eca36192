"""Models of other kinds than decoders of attention layers through real daemons: the plain loop's
losses and weights, and the same bytes whether the backward is split or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.system import conftest as H
from tests.system.test_parity import check_parity_of

KINDS: dict[str, dict[str, Any]] = {
    "mamba": {
        "model": {"hf": {"model_type": "mamba", "hidden_size": 32, "state_size": 4}},
    },
    "bert": {
        "model": {
            "hf": {
                "model_type": "bert",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_attention_heads": 4,
                "max_position_embeddings": 32,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            }
        },
        "data": {"objective": "masked"},
    },
}
"""Layers of each kind are in a run's own number; without dropout, since a plain loop draws other
numbers.
"""


def configured(runner: H.Runner, name: str, kind: str, changes: dict[str, Any]) -> Path:
    """The configuration of a run of one kind."""
    path = runner.configure(name, H.merge(KINDS[kind], changes))
    fields = yaml.safe_load(path.read_text())
    # Instead of the model that all other tests have, not merged with it.
    fields["model"]["hf"] = KINDS[kind]["model"]["hf"] | {"num_hidden_layers": changes["layers"]}
    del fields["layers"]
    path.write_text(yaml.safe_dump(fields))
    return path


def trained(runner: H.Runner, kind: str, passes: list[str], steps: int, layers: int) -> Path:
    """The directory of a finished run."""
    schedule = {"scheme": "1f1b", "passes": passes}
    changes = {"train": {"steps": steps}, "schedule": schedule, "layers": layers}
    name = f"{kind}-{'-'.join(passes) or 'unsplit'}"
    return runner.train(configured(runner, name, kind, changes))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_a_split_run_is_the_plain_loop(runner: H.Runner, kind: str) -> None:
    split = trained(runner, kind, ["split-backward"], steps=6, layers=2)
    assert "BW" in (split / "plan.json").read_text()
    check_parity_of(split, clip=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_split_or_not_the_bytes_are_the_same(runner: H.Runner, kind: str) -> None:
    unsplit, split = (
        trained(runner, kind, passes, steps=100, layers=6) for passes in ([], ["split-backward"])
    )
    assert H.state_bytes(split) == H.state_bytes(unsplit)
    check_parity_of(unsplit, clip=False)
