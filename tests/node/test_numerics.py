"""The numerics recipe that preparation writes, and when a tool process looks at kernels again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.daemons.node.preparing.layers import with_compile
from penstock.daemons.node.preparing.numerics import write_numerics
from penstock.daemons.node.preparing.prepare import prepare_run
from penstock.daemons.node.preparing.software import Software
from penstock.host.errors import StateError
from penstock.protocol.run.numerics import Numerics
from penstock.protocol.run.rundir import RunDirectory
from tests.node.test_prepare import config


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return f"data.path={text}"


def recipe_of(run_dir: Path) -> Numerics:
    """Returns the recipe of a run as every process reads it."""
    recipe = RunDirectory(run_dir).numerics
    assert recipe is not None
    return recipe


def test_preparation_writes_what_bits_follow_from(tmp_path: Path, corpus: str) -> None:
    run_dir = tmp_path / "run"
    run = prepare_run(config(corpus, "train.micro_batch=2", "data.document_masks=true"), run_dir)
    recipe = recipe_of(run_dir)
    assert recipe.plan == run.plan_digest and recipe.digest == run.numerics_digest
    assert (recipe.batch.micro_batch, recipe.batch.sequence_length) == (2, 16)
    assert recipe.batch.attention_mask == "documents"
    [layer] = recipe.layers
    assert layer.kind == "LlamaDecoderLayer"
    assert not layer.compiled_in_training and recipe.compiler is None
    assert layer.attention.backward == f"{layer.attention.forward}_backward"
    assert recipe.arithmetic is not None and recipe.arithmetic.deterministic
    assert recipe.arithmetic.instructions == torch.backends.cpu.get_cpu_capability()
    assert recipe.software["torch"] == torch.__version__
    assert recipe.sums.replicas == "none"
    assert recipe.sums.loss_rows == run.table.rows_of_loss
    replicas = ("schedule.scheme=1f1b", "schedule.replicas=2", "train.micro_batch=2")
    prepare_run(config(corpus, *replicas), run_dir)
    assert recipe_of(run_dir).sums.replicas == "optimizer, in the order of 2 routes"


def test_a_recipe_follows_the_plan_and_the_software_alone(
    tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    kernels = run_dir / "model" / "kernels.json"
    prepare_run(config(corpus), run_dir)
    (run_dir / "journal.sqlite").touch()
    first, made = recipe_of(run_dir), kernels.stat().st_mtime_ns
    prepare_run(config(corpus, "train.steps=9", "optimizer.lr=0.5"), run_dir)
    assert recipe_of(run_dir) == first
    prepare_run(config(corpus, "schedule.scheme=gpipe"), run_dir)
    assert recipe_of(run_dir) == replace(first, plan=RunDirectory(run_dir).plan_digest)
    assert kernels.stat().st_mtime_ns == made
    here = Software.here()
    newer = replace(here, packages={**here.packages, "torch": "9.9.9"})
    monkeypatch.setattr(Software, "here", lambda: newer)
    prepare_run(config(corpus), run_dir)
    assert recipe_of(run_dir).software["torch"] == "9.9.9"
    assert recipe_of(run_dir).digest != first.digest
    assert kernels.stat().st_mtime_ns > made, "another torch may choose other kernels"


def test_layers_are_compiled_in_plans_that_drop_no_operators(tmp_path: Path, corpus: str) -> None:
    """Written as after a trial of the compiler, which takes a minute."""
    evaluates = "train.eval_every=2"
    splits = ("schedule.scheme=zb-h1", evaluates)
    selective = ("schedule.recompute=selective", "schedule.drop=[norm]")
    drops = ("schedule.scheme=gpipe", *selective, evaluates)
    cases = [((), True, False), (splits, True, True), (drops, False, True)]
    for index, (overrides, training, evaluation) in enumerate(cases):
        run = prepare_run(config(corpus, *overrides), tmp_path / f"run-{index}")
        compiled, before = with_compile(run.config, compiled=True), run.numerics_digest
        recipe = write_numerics(run, compiled, run.plan, Software.here())
        [layer] = recipe.layers
        found = layer.compiled_in_training, layer.compiled_in_evaluation
        assert found == (training, evaluation), overrides
        assert recipe.compiler is not None
        assert recipe.compiler.options == {
            "allow_buffer_reuse": "False",
            "compile_threads": "1",
            "deterministic": "True",
            "fallback_random": "True",
            "inplace_buffers": "False",
        }
        assert recipe.digest != before
        assert recipe_of(run.path) == recipe


def test_a_run_of_before_there_were_recipes_gets_one(tmp_path: Path, corpus: str) -> None:
    run_dir = tmp_path / "run"
    prepare_run(config(corpus), run_dir)
    recipe = recipe_of(run_dir)
    for name in ("numerics.json", "model/kernels.json"):
        (run_dir / name).unlink()
    fields = json.loads((run_dir / "inputs.json").read_text())
    assert fields["files"].pop("numerics.json")
    assert RunDirectory(run_dir).numerics is None and RunDirectory(run_dir).numerics_digest == ""
    (run_dir / "journal.sqlite").touch()
    prepare_run(config(corpus), run_dir)
    assert recipe_of(run_dir) == recipe


def test_a_resume_keeps_compilation_and_recomputation_that_its_file_does_not_set(
    tmp_path: Path, corpus: str
) -> None:
    run_dir = tmp_path / "run"
    first = ("schedule.scheme=gpipe", "schedule.recompute=selective", "schedule.drop=[norm]")
    prepare_run(config(corpus, *first), run_dir)
    recipe = recipe_of(run_dir)
    (run_dir / "journal.sqlite").touch()
    said: list[str] = []
    prepare_run(config(corpus, "schedule.scheme=gpipe"), run_dir, said.append)
    schedule = RunDirectory(run_dir).config.schedule
    assert (schedule.recompute, schedule.drop) == ("selective", ("norm",))
    assert [line for line in said if not line.startswith("trains all ")] == []
    said.clear()
    assert recipe_of(run_dir) == recipe
    prepare_run(
        config(corpus, "schedule.scheme=gpipe", "schedule.recompute=none"), run_dir, said.append
    )
    note = "compiled layers may round differently from the next step on"
    assert [line for line in said if not line.startswith("trains all ")] == [
        f"changed: schedule.recompute: 'selective' -> 'none' ({note})",
        f"changed: schedule.drop: ['norm'] -> [] ({note})",
    ]
    assert recipe_of(run_dir).digest != recipe.digest
    prepare_run(config(corpus, "schedule.scheme=1f1b"), run_dir)
    assert RunDirectory(run_dir).config.schedule.recompute is None, "another scheme, its own rule"


def test_an_edited_recipe_is_refused_and_written_anew(tmp_path: Path, corpus: str) -> None:
    run_dir = tmp_path / "run"
    prepare_run(config(corpus), run_dir)
    recipe, path = recipe_of(run_dir), run_dir / "numerics.json"
    path.write_text(path.read_text().replace("AVX", "SSE").replace('"threads": ', '"threads": 1'))
    with pytest.raises(
        StateError, match=r"numerics\.json: .* next penstock train writes a new one"
    ):
        _ = RunDirectory(run_dir).numerics
    prepare_run(config(corpus), run_dir)
    assert recipe_of(run_dir) == recipe
