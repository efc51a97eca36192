"""Runs within a limit of device memory: planned with a measured profile, accepted, and never above
it as workers measure (``observability.memory``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

from penstock.planner.memory.footprint import device_peaks
from penstock.planner.planning.pricing import config_prices
from penstock.protocol.run.rundir import RunDirectory
from tests.system.conftest import Runner

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 128, "n_layer": 8, "n_head": 4, "n_positions": 256},
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    },
}
SELECTIVE = {"recompute": "selective", "drop": ["cmb"]}
OBSCURA = {"recompute": "none", "passes": ["obscura"]}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Bytes of the fullest device, planned and measured; the median step after the first."""

    planned: int
    measured: int
    step_s: float


@dataclass(kw_only=True)
class Limited:
    """One model on four workers, with its profile."""

    runner: Runner
    model: str
    profile: Path

    @classmethod
    def measured(cls, runner: Runner, model: str) -> Limited:
        """Run ``penstock profile``."""
        made = cls(runner=runner, model=model, profile=runner.root / f"{model}.json")
        command = [sys.executable, "-m", "penstock.client.main", "profile"]
        arguments = [str(made.configure({}, None)), "--out", str(made.profile)]
        subprocess.run([*command, *arguments], check=True, capture_output=True, timeout=300)
        return made

    def configure(self, schedule: dict[str, Any], limit: int | None, name: str = "") -> Path:
        """Its configuration: after :meth:`measured` with the profile."""
        profile = {"profile": str(self.profile)} if self.profile.exists() else {}
        changes: dict[str, Any] = {
            "data": {"sequence_length": 128},
            "train": {"steps": 3, "global_batch": 16},
            "optimizer": {"threads": 1},
            "schedule": {"scheme": "1f1b", **profile, **schedule},
            "cluster": {"workers": 4},
            "memory": {"device_limit": limit},
            "observability": {"memory": True},
        }
        path = self.runner.configure(name or self.model, changes)
        config = yaml.safe_load(path.read_text())
        config["model"]["hf"] = MODELS[self.model]
        path.write_text(yaml.safe_dump(config))
        return path

    def train(self, schedule: dict[str, Any], limit: int | None) -> Outcome:
        """A whole run in a directory of its own."""
        name = f"{self.model}-{'-'.join(schedule.get('passes', [schedule['recompute']]))}-{limit}"
        path = self.runner.train(self.configure(schedule, limit, name))
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        run = RunDirectory(path)
        peaks = device_peaks(run.plan, config_prices(run.config, run.table).costs)
        return Outcome(
            planned=int(max(peak.total_bytes for peak in peaks)),
            measured=max(line["peak_device_bytes"] for line in lines),
            step_s=median(line["seconds"] for line in lines[1:]),
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "limit"),
    [
        pytest.param(OBSCURA, 18_000_000, id="obscura"),
        pytest.param(SELECTIVE, 19_500_000, id="selective"),
    ],
)
def test_a_run_stays_within_its_limit(runner: Runner, schedule: dict[str, Any], limit: int) -> None:
    """Limits between what full recomputation and none would need; Obscura swaps and recomputes."""
    outcome = Limited.measured(runner, "llama").train(schedule, limit)
    assert outcome.measured <= limit, outcome
    assert outcome.planned <= limit
    assert 0.9 * outcome.measured <= outcome.planned, "the model is not far below"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", MODELS)
def test_three_limits_each(runner: Runner, model: str) -> None:
    """Prints what README and reports show: model, limit, peaks planned and measured, step."""
    limited = Limited.measured(runner, model)
    most = limited.train({"recompute": "none"}, None)
    least = limited.train({"recompute": "full"}, None)
    for share in (0.75, 0.5, 0.3):
        limit = int(least.planned + share * (most.planned - least.planned))
        outcome = limited.train(OBSCURA, limit)
        error = outcome.planned / outcome.measured - 1.0
        print(
            f"{model:<6} limit {limit / 1e6:6.2f} MB  planned {outcome.planned / 1e6:6.2f}"
            f"  measured {outcome.measured / 1e6:6.2f}  ({error:+.1%})  step {outcome.step_s:.3f} s"
        )
        assert outcome.measured <= limit, outcome
