"""The functions of :mod:`penstock` on a run, and the notebook of the examples."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.client.views.summary import Reading, Summary
from tests.folders import save_model

NOTEBOOK = Path(__file__).parents[2] / "examples" / "python.ipynb"


def test_uses_a_run_as_the_commands_do(plain_run: Path, tmp_path: Path) -> None:
    run = penstock.load_run(plain_run)
    assert run.config.run_dir == plain_run or run.path == plain_run
    last = run.states[-1].version
    assert run.summary.step == last == max(line["step"] for line in run.metrics)
    for umask, mode in ((0o022, 0o644), (0o077, 0o600)):
        output = tmp_path / f"{umask:o}"
        before = os.umask(umask)
        try:
            exported = penstock.export(run, output)
        finally:
            os.umask(before)
        files = [path for path in output.rglob("*") if path.is_file()]
        assert {path.stat().st_mode & 0o777 for path in files} == {mode}
        sizes = sum(path.stat().st_size for path in files)
        assert (exported.path, exported.step, exported.num_bytes) == (output, last, sizes)
    pieces: list[str] = []
    made = penstock.generate(run, "def ", max_new=5, on_text=pieces.append)
    assert (made.prompt_tokens, len(made.ids), made.step) == (4, 5, last)
    assert made.text.startswith("".join(pieces))
    text = tmp_path / "text.txt"
    text.write_text("Water runs down the hill.\n" * 100)
    score = penstock.evaluate(plain_run, text)
    assert score.step == last and score.rows > 0 and score.counted_tokens > 0
    assert score.loss is not None and score.loss > 0.0


def test_estimates_a_folder(tmp_path: Path) -> None:
    save_model(
        tmp_path / "model", "llama", hidden_size=32, intermediate_size=48, num_hidden_layers=2
    )
    report = penstock.estimate(
        tmp_path / "model", {"optimizer.name": "sgd"}, workers=1, sequence_length=16, global_batch=2
    )
    figures = report.to_dict()
    assert (figures["workers"], figures["sequence_length"], figures["global_batch"]) == (1, 16, 2)
    assert report.run.config.optimizer.name == "sgd"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: penstock.load_run("none"), r"^run_dir = 'none': is no run directory"),
        (lambda: penstock.export("none", "out"), "none: no run directory"),
        (lambda: penstock.generate("none", "a"), "none: is no run directory"),
        (lambda: penstock.evaluate("none", "none.txt"), r"none\.txt: no such file"),
        (lambda: penstock.estimate("none"), "MODEL 'none': has no config.json"),
        (lambda: penstock.export(3, "out"), "^run = 3: expected a path"),  # type: ignore[arg-type]
        (lambda: penstock.generate(b"a", "a"), "^model = b'a': exp"),  # type: ignore[arg-type]
    ],
)
def test_names_a_bad_argument(call: Any, error: str) -> None:
    with pytest.raises(penstock.PenstockError, match=error):
        call()


def test_summary_prints_short() -> None:
    losses = tuple(Reading(step=step, value=9.0 / step) for step in range(1, 5001))
    summary = Summary(
        step=5000,
        losses=losses,
        evaluated=Reading(step=5000, value=2.5),
        best=Reading(step=4000, value=2.25),
        here=1200,
        training_s=60.0,
        tokens_per_second=12345.6,
    )
    assert repr(summary) == str(summary)
    assert repr(summary).splitlines() == [
        "step 5,000",
        "this start     1,200 steps at 12,346 tokens/s",
        "loss           0.0018 at step 5,000",
        "held-out loss  2.5000 at step 5,000",
        "best           2.2500 at step 4,000",
    ]


def test_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All cells of code run, in order, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells), "outputs are stripped"
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    assert names["result"].exit_code == 0
    assert (tmp_path / "tiny-hf" / "model.safetensors").is_file()
    assert "loss" in capsys.readouterr().out
