"""Tokens around documents: ids beside transformers' own calls, ends of token files, old runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError
from penstock.models.data.objectives import NextToken
from penstock.models.prepare import main, prepare
from penstock.workers.data import TokenDataset, micro_batches
from tests.folders import END, START, STOP, save_model, trained_tokenizer

TEXTS = ("Pumps push water up the hill;", "a penstock brings it down.")
TEMPLATES = {
    "none": {},
    "bos": {"single": f"{START} $A"},
    "both": {"single": f"{START} $A {STOP}"},
    "two": {"single": f"{START} {STOP} $A"},
}


def save_template(folder: Path, template: str, **settings: Any) -> Any:
    """Give a folder a tokenizer whose template is one of ``TEMPLATES``; returns transformers' own
    object of it.
    """
    tokenizer = trained_tokenizer()
    if TEMPLATES[template]:
        tokenizer.post_processor = processors.TemplateProcessing(
            **TEMPLATES[template], special_tokens=[(START, 300), (STOP, 301)]
        )
    settings = {"eos_token": END, **settings}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """A GPT-2 in a folder, and two documents beside it."""
    save_model(tmp_path / "m", "gpt2", n_embd=16, n_layer=1, n_head=2, n_positions=64)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "text.jsonl").write_text(lines)
    return tmp_path / "m"


def configured(folder: Path, **data: Any) -> Config:
    text = {} if "tokens" in data else {"path": str(folder.parent / "text.jsonl")}
    return parse_config(
        {
            "model": {"path": str(folder)},
            "data": {**text, "sequence_length": 8, "shuffle": False, **data},
            "train": {"global_batch": 1},
        }
    )


def prepared(folder: Path, name: str = "run", **data: Any) -> tuple[list[int], dict[str, Any]]:
    """Prepare a run; returns its tokens and the entry of its training split."""
    run_dir = folder.parent / name
    run_dir.mkdir(exist_ok=True)
    prepare(configured(folder, **data), run_dir)
    meta = json.loads((run_dir / "data/meta.json").read_text())["train"]
    return np.fromfile(run_dir / "data" / meta["path"], dtype="<u2").tolist(), meta


@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_documents_begin_as_transformers_begins_them(
    folder: Path, template: str, kind: str
) -> None:
    theirs = save_template(folder, template)
    tokenizer = str(folder)
    if kind == "file":
        (folder / "tokenizer.json").rename(folder.parent / "alone.json")
        (folder / "tokenizer_config.json").rename(folder.parent / "tokenizer_config.json")
        tokenizer = str(folder.parent / "alone.json")
    expected = []
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        expected += [*(ids[:-1] if template == "both" else ids), theirs.eos_token_id]
    assert prepared(folder, tokenizer=tokenizer)[0] == expected
    plain = [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    without = [token for ids in plain for token in (*ids, 0)]
    assert prepared(folder, "without", bos=False, tokenizer=tokenizer)[0] == without


@pytest.mark.parametrize("template", ["bos", "two"])
def test_marks_that_a_text_has_itself_stand_once(folder: Path, template: str) -> None:
    save_template(folder, template)
    plain = prepared(folder, "plain")[0]
    before = START if template == "bos" else START + STOP
    lines = "".join(json.dumps({"text": f"{before}{text}{END}"}) + "\n" for text in TEXTS)
    (folder.parent / "text.jsonl").write_text(lines)
    assert prepared(folder, "marked")[0] == plain


def test_a_bos_that_no_template_adds_is_added_on_demand(folder: Path) -> None:
    theirs = save_template(folder, "none", bos_token=START)
    expected = []
    for text in TEXTS:
        expected += [theirs.bos_token_id, *theirs(text)["input_ids"], 0]
    assert prepared(folder, bos=True)[0] == expected
    assert prepared(folder, "auto")[0] == [token for token in expected if token != 300]
    save_template(folder, "none")
    with pytest.raises(ConfigError, match=r"data.bos = true: tokenizer '.*m' has no bos token"):
        prepared(folder, "refused", bos=True)


@pytest.mark.parametrize(
    ("eos", "after", "recorded"),
    [
        (STOP, [301], 301),
        (301, [301], 301),
        ([STOP, END], [301], [301, 0]),
        ([301, STOP, 0], [301], [301, 0]),
        (False, [], None),
    ],
)
def test_end_tokens_are_those_of_the_key(folder: Path, eos: Any, after: list, recorded: Any):
    theirs = save_template(folder, "none")
    expected = []
    for text in TEXTS:
        expected += [*theirs(text)["input_ids"], *after]
    tokens, meta = prepared(folder, eos=eos)
    assert tokens == expected and meta["eos"] == recorded
    if recorded is None:
        return
    config = configured(folder, eos=eos, document_masks=True)
    dataset = TokenDataset.open(folder.parent / "run/data", "train", config)
    ends = recorded if isinstance(recorded, list) else [recorded]
    assert dataset.objective == NextToken(ends=tuple(ends))


def test_a_tokenizer_without_an_end_needs_a_key(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    for token in (END, STOP):
        text = text.replace(token, token.upper())
    (folder / "tokenizer.json").write_text(text)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"], settings["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    with pytest.raises(ConfigError, match=r"has no end token; name one .*, or as data.eos"):
        prepared(folder)
    assert prepared(folder, eos=STOP.upper())[1]["eos"] == 301
    assert prepared(folder, "without", eos=False)[1]["eos"] is None
    for tokenizer in (folder, folder / "tokenizer.json"):
        for unknown, words in (("<nothing>", "has no such token"), (302, "has 302 tokens")):
            with pytest.raises(ConfigError, match=rf"data.eos = .*{unknown}.*: .*{words}"):
                prepared(folder, "refused", eos=unknown, tokenizer=str(tokenizer))


def tokens_of_lists(folder: Path) -> Path:
    """A token file in which 1 and 5 end documents."""
    path = folder.parent / "tokens.bin"
    np.array([9, 8, 1, 7, 5, 6] * 40, dtype="<u2").tofile(path)
    return path


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def ids_of_documents(folder: Path, config: Config) -> list[int]:
    dataset = TokenDataset.open(folder.parent / "run/data", "train", config)
    (batch,), _ = micro_batches(dataset, 0, 1, 1)
    return batch.document_ids.tolist()[0]


def test_any_end_token_of_the_model_ends_a_document_of_a_token_file(folder: Path) -> None:
    edit_config(folder, eos_token_id=[1, 5])
    keys = {"tokens": str(tokens_of_lists(folder)), "document_masks": True}
    assert prepared(folder, **keys)[1]["eos"] == [1, 5]
    # 9 8 1 | 7 5 | 6 9 8
    assert ids_of_documents(folder, configured(folder, **keys)) == [0, 0, 0, 1, 1, 2, 2, 2]
    assert prepared(folder, **keys, eos=5)[1]["eos"] == 5
    assert ids_of_documents(folder, configured(folder, **keys, eos=5)) == [0] * 5 + [1] * 3


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({}, r"data.document_masks: true: .*config.json has no eos_token_id; give .* as data.eos"),
        ({"eos": False}, r"data.document_masks: true: .* data.eos is false; name the token"),
        ({"eos": 400}, r"data.eos = 400: the vocabulary has 320 tokens"),
    ],
)
def test_masks_without_ends_are_refused_while_preparing(
    folder: Path, keys: dict[str, Any], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_config(folder, eos_token_id=None)
    run_dir = folder.parent / "run"
    run_dir.mkdir()
    keys = {"tokens": str(tokens_of_lists(folder)), "document_masks": True, **keys}
    (run_dir / "resolved.yaml").write_text(configured(folder, **keys).to_yaml())
    assert main([str(run_dir)]) == 2
    assert re.search(complaint, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"eos": True}, "data.eos = True: accepted is auto, false, a token's text or number"),
        ({"eos": []}, "data.eos = \\[\\]: accepted is auto, false"),
        ({"eos": [True]}, "data.eos = \\[True\\]: accepted is auto, false"),
        ({"eos": -1}, "data.eos = -1: accepted is auto, false"),
        ({"eos": 1.5}, "data.eos = 1.5: accepted is auto, false"),
        ({"eos": [7, 7]}, "a token is named twice"),
        ({"bos": "always"}, "data.bos = 'always': accepted is"),
        ({"tokens": "t.bin", "eos": "</s>"}, "data.eos = '</s>': data.tokens holds numbers"),
        ({"tokens": "t.bin", "bos": True}, "data.bos = true: goes with data.path"),
    ],
)
def test_values_that_are_no_marks_are_refused(tmp_path: Path, keys: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        configured(tmp_path / "m", **keys)


@pytest.mark.parametrize("eos", ["auto", False, 13, "13", "</s>", [13, "</s>"]])
def test_marks_survive_being_written(tmp_path: Path, eos: Any) -> None:
    config = configured(tmp_path / "m", eos=eos)
    assert parse_config(yaml.safe_load(config.to_yaml())) == config


def test_tokens_of_a_prepared_run_stay_where_nothing_changes(folder: Path) -> None:
    """The fingerprint without marks is the one that older versions wrote."""
    save_template(folder, "bos")
    before, _ = prepared(folder, bos=False)
    meta = (folder.parent / "run/data/meta.json").read_bytes()
    assert prepared(folder, bos=False)[0] == before
    assert (folder.parent / "run/data/meta.json").read_bytes() == meta
    assert prepared(folder)[0] != before
