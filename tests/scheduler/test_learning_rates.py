"""Learning rates of steps: the own curve, and transformers' schedules bit by bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainingArguments, get_scheduler

from penstock.config.training import OptimizerConfig
from penstock.daemons.scheduler.machine.activities.learning_rates import learning_rate

STEPS = 400


def test_learning_rate_schedules() -> None:
    cosine = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4, schedule="cosine")
    rates = [learning_rate(cosine, 12, version) for version in (1, 4, 8, 12, 20)]
    assert rates == pytest.approx([0.25, 1.0, 0.55, 0.1, 0.1])
    linear = OptimizerConfig(lr=1.0, min_lr=0.2, schedule="linear")
    assert [learning_rate(linear, 4, v) for v in (1, 2, 4)] == pytest.approx([0.8, 0.6, 0.2])
    constant = OptimizerConfig(lr=1.0, schedule="constant", warmup_steps=2)
    assert [learning_rate(constant, 9, v) for v in (1, 2, 9)] == [0.5, 1.0, 1.0]
    short = OptimizerConfig(lr=1.0, min_lr=0.5, warmup_steps=10)
    assert learning_rate(short, 5, 5) == 0.5, "warmup longer than the run"


def test_wsd_is_stable_until_its_last_steps() -> None:
    wsd = OptimizerConfig(
        lr=1.0, min_lr=0.2, schedule="wsd", warmup_steps=2, decay_steps=4, decay_type="linear"
    )
    rates = [learning_rate(wsd, 10, version) for version in range(1, 12)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    share = wsd.model_copy(update={"decay_steps": 0.4})
    assert [learning_rate(share, 10, version) for version in range(1, 12)] == rates
    late = wsd.model_copy(update={"warmup_steps": 8})
    assert learning_rate(late, 10, 8) == 1.0, "warmup that reaches into the decay ends first"
    assert learning_rate(late, 10, 9) == pytest.approx(0.6)


def theirs(optimizer: OptimizerConfig, warmup: int, name: str, **options: Any) -> list[float]:
    """The rates that transformers' scheduler sets for steps 1 to STEPS."""
    stepper = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=optimizer.lr)
    scheduler = get_scheduler(name, stepper, warmup, STEPS, options or None)
    rates = []
    for _ in range(STEPS):
        rates.append(float(stepper.param_groups[0]["lr"]))
        stepper.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 37, 0.03, 0.0301])
@pytest.mark.parametrize(
    ("keys", "name", "options"),
    [
        ({"schedule": "constant"}, "constant_with_warmup", {}),
        ({"schedule": "linear"}, "linear", {}),
        ({"schedule": "cosine"}, "cosine", {}),
        ({"schedule": "cosine", "min_lr": 1.3e-5}, "cosine_with_min_lr", {"min_lr": 1.3e-5}),
        ({"schedule": "wsd"}, "warmup_stable_decay", {"num_decay_steps": 40}),
        *(
            (
                {"schedule": "wsd", "decay_steps": 93, "decay_type": shape, "min_lr": 1.3e-5},
                "warmup_stable_decay",
                {"num_decay_steps": 93, "decay_type": shape, "min_lr_ratio": 1.3e-5 / 2.3e-4},
            )
            for shape in ("cosine", "linear", "1-sqrt")
        ),
    ],
)
def test_rates_of_every_step_are_those_of_transformers(
    keys: dict[str, Any], name: str, options: dict[str, Any], warmup: float
) -> None:
    optimizer = OptimizerConfig(lr=2.3e-4, curve="transformers", warmup_steps=warmup, **keys)
    # A whole TrainingArguments needs accelerate.
    arguments: Any = SimpleNamespace(warmup_steps=warmup)
    steps = TrainingArguments.get_warmup_steps(arguments, STEPS)
    expected = theirs(optimizer, steps, name, **options)
    assert [learning_rate(optimizer, STEPS, k) for k in range(1, STEPS + 1)] == expected
    assert expected[0] == optimizer.lr if not warmup else expected[0] < optimizer.lr


def test_the_constant_schedule_without_warmup_has_the_full_rate() -> None:
    optimizer = OptimizerConfig(lr=2.3e-4, curve="transformers", schedule="constant")
    expected = theirs(optimizer, 0, "constant")
    assert [learning_rate(optimizer, STEPS, k) for k in range(1, STEPS + 1)] == expected
