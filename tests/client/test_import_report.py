"""Imports without a process: places that are refused, and learning rates in the report."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from penstock.client.exchange import imports
from penstock.client.exchange.imports import Import, compare_rates, import_run
from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError, PenstockError

STEPS, WARMUP, DONE = 40, 4, 20
PEAK = 1e-2


def config(**optimizer: Any) -> Config:
    settings = {"lr": PEAK, "schedule": "linear", "curve": "transformers", "warmup_steps": WARMUP}
    return parse_config(
        {
            "model": {"hf": {"model_type": "llama"}},
            "data": {"path": "a", "sequence_length": 8},
            "train": {"steps": STEPS, "global_batch": 4},
            "optimizer": {**settings, **optimizer},
        },
        source="test",
    )


def report(name: str = "linear") -> dict[str, Any]:
    """Returns a report with the rates that transformers' schedule has after 20 steps."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=PEAK)
    schedule = get_scheduler(name, optimizer, WARMUP, STEPS)
    for _ in range(DONE):
        optimizer.step()
        schedule.step()
    fields = schedule.state_dict()
    same = {"factor": 1.0, "tensors": "lm_head.weight"}
    rates = [
        {"field": "_last_lr", "checkpoint": fields["_last_lr"][0], "is_peak": False, **same},
        {"field": "base_lrs", "checkpoint": fields["base_lrs"][0], "is_peak": True, **same},
    ]
    return {"step": DONE, "notes": [], "rates": rates}


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_same_curve_needs_no_note(name: str) -> None:
    fields = report(name)
    compare_rates(fields, config(schedule=name))
    assert fields["notes"] == []
    assert [rate["configuration"] for rate in fields["rates"]] == pytest.approx(
        [rate["checkpoint"] for rate in fields["rates"]], rel=1e-12
    )


@pytest.mark.parametrize(
    ("changes", "notes"),
    [
        ({"curve": "penstock"}, ["_last_lr is 0.0055555556, the configuration gives step 21"]),
        ({"warmup_steps": 0}, ["_last_lr is 0.0055555556, the configuration gives step 21"]),
        (
            {"lr": 3e-4},
            ["_last_lr is 0.0055555556, the configuration", "base_lrs is 0.01, optimizer.lr gives"],
        ),
    ],
)
def test_another_rate_is_a_note_with_both(changes: dict[str, Any], notes: list[str]) -> None:
    fields = report()
    compare_rates(fields, config(**changes))
    assert len(fields["notes"]) == len(notes)
    for note, beginning, rate in zip(fields["notes"], notes, fields["rates"], strict=False):
        assert note.startswith(beginning)
        assert f"{rate['configuration']:.8g}" in note


def test_a_groups_factor_counts() -> None:
    fields = report()
    fields["rates"] = [
        {**rate, "factor": factor, "tensors": name}
        for rate in fields["rates"]
        for factor, name in ((1.0, "lm_head.weight"), (0.5, "norm.weight"))
    ]
    compare_rates(fields, config())
    assert [note.partition(",")[0] for note in fields["notes"]] == [
        "_last_lr is 0.0055555556 for norm.weight",
        "base_lrs is 0.01 for norm.weight",
    ]


def test_epochs_are_compared_once_they_are_steps() -> None:
    fields, later = report(), config().with_steps(0)
    compare_rates(fields, later)
    assert "learning rates are not compared" in fields["notes"][0]
    assert "configuration" not in fields["rates"][0]


@pytest.mark.parametrize(
    ("source", "run_dir"),
    [("a/checkpoint", "a/checkpoint/run"), ("a/checkpoint", "a"), ("a/checkpoint", "link/b/run")],
)
def test_run_and_checkpoint_lie_apart(source: str, run_dir: str, tmp_path: Path) -> None:
    """A repeated import removes the files of an interrupted one."""
    (tmp_path / source).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / source)
    request = Import(source=tmp_path / source)
    if run_dir == "a":
        (tmp_path / run_dir / "importing.json").write_text("{}")
    with pytest.raises(ConfigError, match=r".*: lies in the checkpoint .* or contains"):
        import_run(config(), tmp_path / run_dir, request, lambda line: None, None)
    assert (tmp_path / source).is_dir() and not list((tmp_path / source).iterdir())


def test_the_log_of_an_unforeseen_error_stays(monkeypatch: Any, tmp_path: Path) -> None:
    """The folder in which the checkpoint was compared does not."""
    monkeypatch.setattr(imports, "run_models_prepare", lambda *args, **kwargs: None)
    monkeypatch.setattr(imports, "_TOOL", "penstock.no_such_tool")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(PenstockError, match=r"No module named penstock\.no_such_tool") as caught:
        imports.check(config(), Import(source=tmp_path), lambda line: None, None)
    (left,) = tmp_path.iterdir()
    assert f"(see {left})" in str(caught.value)
    assert "No module named" in left.read_text()


def test_the_next_command_has_the_overrides_and_quotes_names() -> None:
    fields = {**report(), "source": "a", "kind": "dcp", "samples_seen": 80}
    lines = imports.to_text(
        {**fields, "tensors": [], "unused": []},
        Path("runs/my run"),
        Path("a.yaml"),
        ["train.steps=40"],
        dry=False,
    ).splitlines()
    assert lines[-1] == ("next: penstock train a.yaml --run-dir 'runs/my run' --set train.steps=40")
