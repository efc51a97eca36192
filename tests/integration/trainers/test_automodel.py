"""NeMo Automodel's own checkpoints in each of their forms.

FSDP2 trains on two ranks, Automodel in an environment of its own saves, and Penstock goes on. The
losses are those of FSDP2 without a move.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainers.environments import AUTOMODEL, environment
from tests.models.exchange.fsdp2 import run
from tests.system import conftest as H
from tests.system.test_fsdp2 import STEPS, check, check_shards, imported, job, losses_of

pytestmark = pytest.mark.integration

FORMS: dict[str, dict[str, str]] = {
    "safetensors": {"model_save_format": "safetensors"},
    "consolidated": {"model_save_format": "safetensors", "save_consolidated": "every"},
    "dcp": {"model_save_format": "torch_save"},
}
"""Automodel's settings; the first are its defaults, which leave the weights with the ranks."""
TOLERANCE = 1e-6
runner = H.runner


def test_a_training_moves_here(runner: Any, tmp_path: Path) -> None:
    python = environment(tmp_path / "automodel", AUTOMODEL)
    root, saved = runner.root, runner.root / "checkpoint"
    training = job(root, range(2 * STEPS), save_after=STEPS, save=str(saved), automodel=FORMS)
    (stayed,) = run(root, training, python=python)
    for form in FORMS:
        check_shards(saved, root / f"checkpoint-{form}-automodel")
    moved = imported(runner, "moved", root / "checkpoint-safetensors-automodel", "fp32")
    check(losses_of(moved), stayed[STEPS:], TOLERANCE)
