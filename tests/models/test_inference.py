"""Tools of generation and evaluation give the results of transformers' own loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, BertConfig

from penstock.models.checkpoints.carried import read_carried, write_files
from penstock.models.data.batch import MicroBatch
from penstock.models.data.chat.conversation import request_of
from penstock.models.data.chat.encoder import Encoder, Passage
from penstock.models.data.chat.masks import Choices, TrainOn, prompt_of, samples_of
from penstock.models.data.chat.requests import ChatRequest
from penstock.models.data.chat.templates import CHATML, MODEL, chosen_template
from penstock.models.inference import evaluate, generate
from tests.folders import END, TEMPLATE, save_model, trained_tokenizer
from tests.models.test_apart import LONGROPE
from tests.models.test_rows import TALK, made, written

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
TASKS = [
    {"prompt": "Pumps push:" * n, "completion": " water up the hill." * (1 + n % 3)}
    for n in range(1, 12)
]


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaMA in a folder, with a tokenizer and large weights, so that predictions differ
    from token to token.
    """
    folder = tmp_path_factory.mktemp("hub") / "model"
    save_model(folder, "llama", initializer_range=0.2, **LLAMA)
    return folder


def ran(
    main: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: Any
) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, lines of JSON and stderr of a tool with an empty scratch folder."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    place, *options = map(str, words)
    code = main([place, str(scratch), *options])
    streams = capsys.readouterr()
    return code, [json.loads(line) for line in streams.out.splitlines()], streams.err


def test_greedy_text_is_that_of_transformers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "Pumps push water"
    code, lines, _ = ran(
        generate.main, capsys, tmp_path, folder, f"--prompt={prompt}", "--max-new=20"
    )
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    made_ids = model.generate(**inputs, do_sample=False, max_new_tokens=20)
    expected = made_ids[0, inputs["input_ids"].shape[1] :].tolist()
    text = tokenizer.decode(expected, skip_special_tokens=True)
    assert code == 0 and len(set(expected)) > 3
    assert lines[-1]["result"] == {
        "prompt_tokens": inputs["input_ids"].shape[1],
        "ids": expected,
        "text": text,
    }
    pieces = "".join(line["text"] for line in lines if "text" in line)
    assert pieces.replace("\ufffd", "") == text.replace("\ufffd", "")


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a folder."""
    return AutoTokenizer.from_pretrained(folder)


def test_a_prompt_of_messages_is_that_of_the_training_samples() -> None:
    encoder = Encoder(trained_tokenizer())
    template_text = TEMPLATE + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    for template in (
        chosen_template(MODEL, template_text, {}),
        chosen_template(CHATML, None, {}),
    ):
        whole = request_of("record", {"messages": [*TALK, TALK[0], TALK[1]]})
        start = request_of("record", {"messages": [*TALK, TALK[0]]})
        assert isinstance(start, ChatRequest)
        sample = samples_of([whole], encoder, template)[-1]
        passage = prompt_of(start, encoder, template, Choices())
        ids = encoder.encode([passage])[0].ids
        counted = [n for n, label in enumerate(sample.labels) if label != -100]
        assert sample.ids[: len(ids)] == ids
        assert len(ids) in counted and len(ids) - 1 not in counted, "the answer comes next"


def plain_losses(folder: Path, tasks: list[dict[str, str]]) -> tuple[float, float, int]:
    """Mean loss, accuracy and counted tokens of completions, one sample after the other."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    loss, right, counted = 0.0, 0, 0
    for task in tasks:
        prompt = tokenizer(task["prompt"])["input_ids"]
        ids = torch.tensor([tokenizer(task["prompt"] + task["completion"] + END)["input_ids"]])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        number = int((labels != -100).sum())
        with torch.no_grad():
            outcome = model(input_ids=ids, labels=labels)
        loss += float(outcome.loss) * number
        guesses = outcome.logits[0, len(prompt) - 1 : -1].argmax(-1)
        right += int((guesses == ids[0, len(prompt) :]).sum())
        counted += number
    return loss / counted, right / counted, counted


def test_loss_of_packed_rows_is_that_of_a_plain_loop_over_samples(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, TASKS)
    code, lines, _ = ran(evaluate.main, capsys, tmp_path, folder, f"--data={file}")
    loss, accuracy, counted = plain_losses(folder, TASKS)
    result = lines[-1]["result"]
    assert code == 0 and result["counted_tokens"] == counted
    assert result["rows"] < len(TASKS), "samples share rows"
    assert result["loss"] == pytest.approx(loss, rel=1e-6)
    assert result["token_accuracy"] == pytest.approx(accuracy)
    assert result["perplexity"] == pytest.approx(float(torch.tensor(loss).exp()), rel=1e-5)


def test_bad_models_and_prompts_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(name: str, main: Any, place: Path, *words: str) -> str:
        base = tmp_path / name
        base.mkdir()
        code, _, err = ran(main, capsys, base, place, *words)
        assert code == 2
        return err

    words = ("--prompt=" + "Pumps push " * 100, "--max-new=1")
    assert "positions; give a shorter prompt" in refusal("long", generate.main, folder, *words)
    assert "give at most" in refusal(
        "new", generate.main, folder, "--prompt=Pumps", "--max-new=999"
    )
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps(TALK))
    words = (f"--messages={messages}", "--max-new=1")
    assert "turn 1 (role assistant)" in refusal("answered", generate.main, folder, *words)
    messages.write_text("[")
    assert "as JSON" in refusal("broken", generate.main, folder, *words)
    bert = tmp_path / "bert"
    config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    AutoModelForMaskedLM.from_config(config).save_pretrained(bert)
    file = written(tmp_path, TASKS)
    for name, main, words in (
        ("masked", generate.main, ("--prompt=a", "--max-new=1")),
        ("masked eval", evaluate.main, (f"--data={file}",)),
    ):
        assert "is an encoder" in refusal(name, main, bert, *words)


@pytest.mark.parametrize("chosen", [CHATML, "file"])
def test_an_export_has_the_template_of_the_training(chosen: str, tmp_path: Path) -> None:
    text = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    path = tmp_path / "mine.jinja"
    path.write_text(text)
    name = chosen if chosen == CHATML else str(path)
    file = written(tmp_path, [{"messages": TALK}])
    data = {"sources": [{"path": str(file)}], "chat_template": name, "train_on": "all"}
    config = made(tmp_path, data)
    path.unlink()  # the export has the run's copy
    folder = tmp_path / "export"
    write_files(folder, read_carried(config, tmp_path))
    rendered = load_tokenizer(folder).apply_chat_template(TALK, tokenize=False)
    template = chosen_template(name, text, {"eos_token": END})
    request = request_of("record", {"messages": TALK})
    assert isinstance(request, ChatRequest)
    encoder = Encoder(trained_tokenizer())
    (sample,) = samples_of([request], encoder, template, Choices(train_on=TrainOn.ALL))
    assert encoder.encode([Passage(place="rendering", text=rendered)])[0].ids == sample.ids


def test_the_longest_document_of_a_group_decides_no_frequencies(tmp_path: Path) -> None:
    """A short document alone has the short factors of longrope."""
    model = save_model(tmp_path, **{**LONGROPE, "vocab_size": 320}).eval()
    lengths = (6, 30, 8, 28)
    batches = [
        MicroBatch(input_ids=ids, labels=ids)
        for ids in (np.arange(3, 3 + length, dtype=np.int64)[None] for length in lengths)
    ]
    expected = sum(
        evaluate.measured(model, evaluate.PreparedRows(count=1, batches=[batch])).loss
        for batch in batches
    )
    together = evaluate.measured(model, evaluate.PreparedRows(count=4, batches=batches))
    assert together.loss == pytest.approx(expected, rel=1e-6)
