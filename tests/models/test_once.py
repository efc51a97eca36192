"""Tokens at the beginning and the end of a text stand there once. Sources end as ``data.path``
does. The right ids are those of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.host.errors import ConfigError
from penstock.models.data.batch import IGNORED_LABEL
from penstock.models.data.chat.conversation import pair_of, request_of
from penstock.models.data.chat.encoder import Encoder
from penstock.models.data.chat.masks import Choices, Sample, samples_of
from penstock.models.data.chat.requests import RecordForm
from tests.models.test_chat_labels import DATA
from tests.models.test_prepare import LLAMA
from tests.models.test_rows import made, samples, written

END, BEGIN = "<|endoftext|>", "<s>"
FORMS = {
    "none": "$A",
    "front": "<s> $A",
    "both": "<s> $A <|endoftext|>",
    "back": "$A <|endoftext|>",
}


def library(form: str) -> Tokenizer:
    """The test's tokenizer, which adds special tokens by a form."""
    tokenizer = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(BEGIN, special=True)])
    named = [(token, tokenizer.token_to_id(token)) for token in (BEGIN, END)]
    used = [pair for pair in named if pair[0] in form]
    tokenizer.post_processor = processors.TemplateProcessing(single=form, special_tokens=used)
    return tokenizer


def of(form: str, fields: dict[str, Any]) -> list[Sample]:
    """The samples of a record."""
    read = pair_of if "rejected" in fields else request_of
    request = read("a.jsonl, line 1", fields, RecordForm())
    return samples_of([request], Encoder(library(form)), None, Choices(end=END))


def bare(text: str) -> list[int]:
    """The ids that transformers makes of a text without adding tokens."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library("$A"))
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def label_text(sample: Sample) -> list[int]:
    """The ids that count."""
    return [label for label in sample.labels if label != IGNORED_LABEL]


TEXTS = ("two and three", "<s>two", "two<|endoftext|>", "<s>two<|endoftext|>", "<s>", "")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", FORMS)
def test_a_text_has_its_first_and_last_token_once(name: str, text: str) -> None:
    (sample,) = of(FORMS[name], {"text": text})
    begins = name in ("front", "both") or text.startswith(BEGIN)
    content = text.removeprefix(BEGIN).removesuffix(END)
    right = BEGIN * begins + content + END
    assert sample.ids == bare(right)


@pytest.mark.parametrize("prompt", ["two and", "<s>two and"])
@pytest.mark.parametrize("name", FORMS)
def test_a_prompt_and_its_completion_have_them_once(name: str, prompt: str) -> None:
    begins = name in ("front", "both") or prompt.startswith(BEGIN)
    whole = bare(BEGIN * begins + prompt.removeprefix(BEGIN) + " three" + END)
    (sample,) = of(FORMS[name], {"prompt": prompt, "completion": " three"})
    assert (sample.ids, sample.lost) == (whole, 0)
    assert label_text(sample) == bare(" three" + END)
    pair = of(FORMS[name], {"prompt": prompt, "chosen": " three", "rejected": f" two{END}"})
    assert [label_text(sample) for sample in pair] == [bare(" three" + END), bare(" two" + END)]
    assert [sample.lost for sample in pair] == [0, 0]


def folder_without_end(path: Path, named: str = END) -> Path:
    """A model's folder: config.json names an end token, and the tokenizer names none."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library("$A"), pad_token=BEGIN)
    tokenizer.save_pretrained(path)
    number = tokenizer.convert_tokens_to_ids(named)
    config = {**LLAMA, "vocab_size": 512, "eos_token_id": number}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_sources_end_with_the_models_end_token_as_the_path_does(tmp_path: Path) -> None:
    folder = folder_without_end(tmp_path / "model")
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token is None
    path = written(tmp_path, [{"text": "two and three"}, {"text": "five"}])
    right = [theirs(text + END)["input_ids"] for text in ("two and three", "five")]
    keys = {"tokenizer": str(folder), "chat_template": "model", "shuffle": False}
    model = {"hf": {**LLAMA, "vocab_size": 512}}
    made(tmp_path / "a", {"sources": [{"path": str(path)}], **keys}, model=model)
    assert [ids for _, _, ids, _ in sorted(samples(tmp_path / "a"))] == right
    (tmp_path / "b").mkdir()
    made(tmp_path / "b", {"path": str(path), "sequence_length": 4, **keys}, model=model)
    tokens = np.fromfile(tmp_path / "b" / "data" / "train.bin", dtype=np.uint16)
    assert tokens.tolist() == right[0] + right[1]


def test_named_end_tokens_end_sources_too(tmp_path: Path) -> None:
    folder = folder_without_end(tmp_path / "model")
    path = written(tmp_path, [{"text": "two"}])
    theirs = AutoTokenizer.from_pretrained(folder)
    model = {"hf": {**LLAMA, "vocab_size": 512}}
    number = theirs.convert_tokens_to_ids("<|im_end|>")
    for eos, right in (("<|im_end|>", "two<|im_end|>"), (number, "two<|im_end|>"), (False, "two")):
        keys = {"tokenizer": str(folder), "chat_template": "model", "eos": eos}
        run = tmp_path / f"run-{eos}"
        made(run, {"sources": [{"path": str(path)}], **keys}, model=model)
        assert [ids for _, _, ids, _ in samples(run)] == [theirs(right)["input_ids"]]
    with pytest.raises(ConfigError, match="has no such token"):
        keys = {"tokenizer": str(folder), "chat_template": "model", "eos": "<none>"}
        made(tmp_path / "none", {"sources": [{"path": str(path)}], **keys}, model=model)


def test_an_end_token_that_is_no_token_of_its_text_is_refused_with_a_way_that_works(
    tmp_path: Path,
) -> None:
    """The model's end is a token of the plain vocabulary."""
    folder = folder_without_end(tmp_path / "model")
    vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    config = json.loads((folder / "config.json").read_text())
    text = "Ġt" if "Ġt" in vocabulary else next(t for t in vocabulary if t.startswith("Ġ"))
    config["eos_token_id"] = vocabulary[text]
    (folder / "config.json").write_text(json.dumps(config))
    path = written(tmp_path, [{"text": "two"}])
    keys = {"tokenizer": str(folder), "chat_template": "model"}
    model = {"hf": {**LLAMA, "vocab_size": 512}}
    with pytest.raises(ConfigError, match="name it as eos_token in"):
        made(tmp_path / "a", {"sources": [{"path": str(path)}], **keys}, model=model)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["eos_token"] = text
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    made(tmp_path / "b", {"sources": [{"path": str(path)}], **keys}, model=model)
    ((_, _, ids, _),) = samples(tmp_path / "b")
    assert ids == [*bare("two"), vocabulary[text]]
