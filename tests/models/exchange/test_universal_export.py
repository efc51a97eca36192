"""Exports for DeepSpeed: files that torch loads, in the form that DeepSpeed reads. DeepSpeed itself
loads such an export in ``make integration``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.client.export import to_text
from penstock.models.checkpoints import export
from penstock.models.exchange.readers import open_checkpoint
from tests.models.exchange.test_dcp_export import (
    EMBEDDING,
    LATER_RATE,
    STEP,
    numbers,
    run_of,
    state_of,
)

FILES = {"fp32": "", "exp_avg": "exp_avg.", "exp_avg_sq": "exp_avg_sq."}


def exported(run_dir: Path, state: Path, out: Path, *options: str) -> int:
    """Does the work of ``penstock export``; returns the exit code."""
    words = [str(run_dir), str(state), str(out), "--format", "universal", "--step", str(STEP)]
    return export.main([*words, "--rate", str(LATER_RATE), *options])


@pytest.mark.parametrize(
    ("changes", "tied", "frozen"),
    [
        ({}, False, ""),
        ({"hf": {"tie_word_embeddings": True}}, True, ""),
        ({"train": {"freeze": ["embed_tokens"]}}, False, EMBEDDING),
    ],
    ids=["plain", "tied", "frozen"],
)
def test_files_have_each_parameter_once(
    changes: dict[str, Any], tied: bool, frozen: str, tmp_path: Path
) -> None:
    run_dir, out = run_of(tmp_path / "root", **changes), tmp_path / "out"
    state = state_of(run_dir, "state")
    assert exported(run_dir, state, out, "--verify", "--samples", "52") == 0
    expected = numbers(run_dir, state)
    folder = out / (out / "latest_universal").read_text()
    for path in folder.glob("zero/*/*.pt"):
        content = torch.load(path, weights_only=True)
        if path.stem == "step":
            # torch's AdamW takes no number, and FusedAdam and CPUAdam take a tensor, too.
            assert (content, content.dtype, content.shape) == (STEP, torch.float32, ())
            continue
        key = f"{FILES[path.stem]}{path.parent.name}"
        assert torch.equal(content["param"], expected.pop(key))
        assert (content["param"].dtype, content["cat_dim"]) == (torch.float32, 0)
        assert path.stat().st_size < content["param"].nbytes + 4096
    assert not expected
    names = {path.name for path in (folder / "zero").iterdir() if path.is_dir()}
    assert EMBEDDING in names and ("lm_head.weight" in names) is not tied
    if frozen:
        assert {path.name for path in (folder / "zero" / frozen).iterdir()} == {"fp32.pt"}
    read = open_checkpoint(out)
    assert (read.step, read.samples_seen, read.problems) == (STEP, 52, ())
    assert {group.betas for group in read.groups} == {(0.9, 0.95)}


def test_settings_are_those_that_all_parameters_share(tmp_path: Path) -> None:
    """DeepSpeed copies them by number into groups of its own, which may have other parameters."""
    run_dir, out = run_of(tmp_path / "root", optimizer={"weight_decay": 0.1}), tmp_path / "out"
    assert exported(run_dir, state_of(run_dir, "state"), out) == 0
    content = torch.load(next(out.glob("*/zero/optimizer_state.pt")), weights_only=True)
    assert {group["lr"] for group in content["param_groups"]} == {LATER_RATE}
    assert not any("weight_decay" in group for group in content["param_groups"])
    states = torch.load(next(out.glob("*/mp_rank_00_model_states.pt")), weights_only=True)
    assert (states["global_steps"], states["lr_scheduler"]["last_epoch"]) == (STEP, STEP)
    (group,) = open_checkpoint(out).groups
    assert (group.lr, group.weight_decay, group.names) == (LATER_RATE, None, ())


def test_every_group_of_deepspeed_has_a_partner(tmp_path: Path) -> None:
    """DeepSpeed loads a group only if the file has a group of the same number. Losses differed by
    1e-3 when the file had one group and DeepSpeed two.
    """
    run_dir, out = run_of(tmp_path / "root", optimizer={"weight_decay": 0.0}), tmp_path / "out"
    assert exported(run_dir, state_of(run_dir, "state"), out) == 0
    content = torch.load(next(out.glob("*/zero/optimizer_state.pt")), weights_only=True)
    folders = [path for path in out.glob("*/zero/*") if path.is_dir()]
    assert len(content["param_groups"]) == len(folders) > 2
    assert {group["weight_decay"] for group in content["param_groups"]} == {0.0}


def test_the_report_names_the_page_with_the_lines_for_stage_3() -> None:
    report = {"run": "a", "step": 3, "out": "b", "adapted": False}
    report |= {"dry_run": False, "verified": False}
    for form, count in (("universal", 1), ("dcp", 0)):
        text = to_text({**report, "format": form, "notes": []})
        assert text.count("see penstock docs CHECKPOINTS") == count


def test_other_optimizers_and_damage_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out = run_of(tmp_path / "a", optimizer={"name": "sgd"}), tmp_path / "out"
    state = state_of(run_dir, "state")
    for options in ((), ("--list",)):
        assert exported(run_dir, state, out, *options) == 2
        assert "optimizer.name: sgd has no universal form" in capsys.readouterr().err
    run_dir = run_of(tmp_path / "b")
    state = state_of(run_dir, "state")
    block = sorted(state.iterdir())[-1]
    block.write_bytes(block.read_bytes()[:-9])
    assert exported(run_dir, state, out) == 2
    assert block.name in capsys.readouterr().err
    assert not out.exists() and not list(tmp_path.glob(".out*"))
