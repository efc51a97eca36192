"""Commands for text and loss of a run give the results of transformers on the run's export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

TEXT = "import abc\n\n\nclass Penstock(abc.ABC):\n    pass\n" * 5
ROW = 32
"""Tokens of a row of the run."""


def answer(runner: Any, *words: str | Path) -> dict[str, Any]:
    """The JSON that a command prints, behind messages about its progress."""
    code, output = runner.call(*words, "--json")
    assert code == 0, output
    fields: dict[str, Any] = json.loads(output[output.index("{\n") :])
    return fields


@pytest.mark.slow
def test_a_run_answers_as_its_export(runner: Any, plain_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    code, output = runner.call("export", plain_run, out)
    assert code == 0, output
    disable_progress_bar()  # the first one starts a thread for the rest of the process
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)

    words = ("generate", plain_run, "--prompt", "import ", "--max-new", "24")
    generated = answer(runner, *words)
    inputs = tokenizer("import ", return_tensors="pt")
    made = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    assert generated["ids"] == made[0, 7:].tolist() and generated["prompt_tokens"] == 7
    assert generated["step"] == 40

    file = tmp_path / "text.py"
    file.write_text(TEXT)
    result = answer(runner, "eval", plain_run, "--data", file)
    tokens = torch.tensor(tokenizer(TEXT + "<|endoftext|>")["input_ids"])
    rows = (len(tokens) - 1) // ROW
    inputs = tokens[: rows * ROW].reshape(rows, ROW)
    labels = tokens[1 : rows * ROW + 1].reshape(rows, ROW)
    with torch.no_grad():
        logits = model(input_ids=inputs).logits.flatten(0, 1)
    loss = float(torch.nn.functional.cross_entropy(logits, labels.flatten()))
    assert result["loss"] == pytest.approx(loss, rel=1e-6) and loss < 5.0
    assert (result["rows"], result["counted_tokens"]) == (rows, rows * ROW)
    assert result["step"] == 40
    assert answer(runner, "eval", out, "--data", file)["step"] is None


def test_models_and_options_that_do_not_go_together(runner: Any, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    (tmp_path / "run.json").write_text("{}")
    prompt = ("--prompt", "a", "--max-new")
    for words, message in (
        (("generate", tmp_path / "none", *prompt, "1"), "no Hugging Face folder"),
        (("generate", tmp_path, *prompt, "1"), "no saved state"),
        (("generate", tmp_path, *prompt, "0"), "--max-new 0"),
        (("generate", tmp_path, "--max-new", "1"), "give --prompt or --messages"),
        (("eval", tmp_path, "--data", tmp_path / "no.jsonl"), "no such file"),
        (("eval", tmp_path, "--data", file, "--config", file), "has its own configuration"),
    ):
        code, output = runner.call(*words)
        assert code == 2 and message in output, output
