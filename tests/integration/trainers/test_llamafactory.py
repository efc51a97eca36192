"""LLaMA-Factory in an environment of its own: ids and labels of data sets of its registry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.config.data import SourceConfig
from penstock.models.data.batch import IGNORED_LABEL
from penstock.models.data.chat.conversation import pair_of, request_of
from penstock.models.data.chat.encoder import Encoder
from penstock.models.data.chat.masks import Choices, TrainOn, samples_of
from penstock.models.data.chat.requests import Format, RecordForm
from penstock.models.data.chat.templates import chosen_template
from penstock.models.data.reading.records import records
from penstock.models.data.rows.registry import registered
from penstock.models.data.sources import find_source
from tests.data.sft.make import save
from tests.integration.trainers.environments import LLAMA_FACTORY, answer, environment
from tests.models.test_masks import DATA, END, SPECIAL, TEXTS

pytestmark = pytest.mark.integration

ALPACA = [
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {
        "instruction": "Say it.",
        "input": "",
        "output": "日本 👩‍👧\n\n ",
        "system": "Be brief.",
        "history": [["a", "b"], ["c", ""]],
    },
    {"instruction": " spaces ", "input": "\n", "output": "e\u0301 <b>x</b>"},
]
SHAREGPT = [
    {
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b\n"},
            {"from": "human", "value": "日本"},
            {"from": "gpt", "value": "d"},
        ],
        "system": "sys",
    },
    {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
]
TAGGED = [
    {
        "dialog": [
            {"who": "rule", "says": "Be kind."},
            {"who": "person", "says": "a"},
            {"who": "machine", "says": "b"},
            {"who": "person", "says": "c"},
            {"who": "machine", "says": "d"},
        ]
    }
]
OPENAI = [{"messages": [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"))]}]
REGISTRY: dict[str, Any] = {
    "alpaca": {
        "file_name": "alpaca.json",
        "columns": {
            **{"prompt": "instruction", "query": "input", "response": "output"},
            **{"system": "system", "history": "history"},
        },
    },
    "plain": {"file_name": "alpaca.json"},
    "sharegpt": {
        "file_name": "sharegpt.json",
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "system": "system"},
    },
    "tagged": {
        "file_name": "tagged.json",
        "formatting": "sharegpt",
        "columns": {"messages": "dialog"},
        "tags": {
            **{"role_tag": "who", "content_tag": "says", "system_tag": "rule"},
            **{"user_tag": "person", "assistant_tag": "machine"},
        },
    },
    "alpaca-pairs": {
        "file_name": "alpaca-pairs.json",
        "ranking": True,
        "columns": {
            **{"prompt": "instruction", "query": "input", "chosen": "good", "rejected": "bad"},
            **{"system": "system", "history": "history"},
        },
    },
    "sharegpt-pairs": {
        "file_name": "sharegpt-pairs.json",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": {
            **{"messages": "conversations", "system": "system"},
            **{"chosen": "chosen", "rejected": "rejected"},
        },
    },
    "openai": {
        "file_name": "openai.json",
        "formatting": "openai",
        "columns": {"messages": "messages"},
        "tags": {
            **{"role_tag": "role", "content_tag": "content", "system_tag": "system"},
            **{"user_tag": "user", "assistant_tag": "assistant"},
        },
    },
}
ALPACA_PAIRS = [
    {**record, "good": record["output"], "bad": f"no {number}"}
    for number, record in enumerate(ALPACA)
]
SHAREGPT_PAIRS = [
    {
        **record,
        "conversations": record["conversations"][:-1],
        "chosen": record["conversations"][-1],
        "rejected": {"from": "gpt", "value": "nothing\n"},
    }
    for record in SHAREGPT
]
FILES: dict[str, list[dict[str, Any]]] = {
    **{"alpaca": ALPACA, "sharegpt": SHAREGPT, "tagged": TAGGED, "openai": OPENAI},
    **{"alpaca-pairs": ALPACA_PAIRS, "sharegpt-pairs": SHAREGPT_PAIRS},
}
TEMPLATES = {"chatml": "chatml", "qwen": "qwen2_5", "qwen3_nothink": "qwen3_instruct_2507"}
"""LLaMA-Factory's names of templates, and those of the tests with the same text."""

MASKS: dict[str, tuple[dict[str, bool], TrainOn]] = {
    "assistant": ({}, TrainOn.ASSISTANT),
    "last": ({"mask_history": True}, TrainOn.LAST),
    "all": ({"train_on_prompt": True}, TrainOn.ALL),
    "pairs": ({}, TrainOn.COMPLETION),
}
OTHER_IDS = {("openai", name) for name in TEMPLATES}
"""Data sets with other ids: LLaMA-Factory adds a text that turns thoughts off to the system."""

PAIRS = [name for name, entry in REGISTRY.items() if "ranking" in entry]
JOBS = [
    (name, template, mask)
    for name in REGISTRY
    for template in TEMPLATES
    for mask in MASKS
    if (mask == "pairs") is (name in PAIRS)
]


def ours(folder: Path, name: str, template: str, train_on: TrainOn) -> list[list[list[int]]]:
    """Ids and labels of a data set, one pair for each sample."""
    registry = str(folder / "dataset_info.json")
    given, pairs = SourceConfig(registry=registry, name=name), name in PAIRS
    source = registered("data.sources[0]", given, pairs=pairs)
    form = RecordForm(format=Format(source.format), columns=source.columns, roles=source.roles)
    files = find_source(str(source.path), any_records=True)
    text = TEXTS.get(TEMPLATES[template])
    chosen = chosen_template("chatml" if text is None else "model", text, SPECIAL)
    read = pair_of if pairs else request_of
    requests = [read(record.place, record.fields, form) for record in records(files)]
    encoder = Encoder(Tokenizer.from_file(str(DATA / "tokenizer.json")))
    choices = Choices(train_on=train_on, end=END, special_in_text=True)
    made = samples_of(requests, encoder, chosen, choices)
    return [[sample.ids, sample.labels] for sample in made]


def without_break(ids: list[int], labels: list[int]) -> list[int]:
    """Labels of Qwen 2.5 without the line break behind the header of an answer, which TRL counts,
    and LLaMA-Factory does not.
    """
    library = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    line_break = library.encode("\n").ids[0]
    kept = list(labels)
    for place, label in enumerate(labels):
        if label != IGNORED_LABEL and labels[place - 1] == IGNORED_LABEL:
            assert label == ids[place] == line_break
            kept[place] = IGNORED_LABEL
    return kept


def test_ids_and_labels_equal_those_of_llamafactory(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    python = environment(tmp_path_factory.mktemp("llamafactory"), LLAMA_FACTORY)
    save(tmp_path / "model", "qwen2_5")
    for name, content in FILES.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "dataset_info.json").write_text(json.dumps(REGISTRY))
    stages = {name: "dpo" if name in PAIRS else "sft" for name in REGISTRY}
    jobs = [
        {"dataset": n, "template": t, "stage": stages[n], **MASKS[mask][0]} for n, t, mask in JOBS
    ]
    module = "tests.integration.trainers.llamafactory_rows"
    theirs = answer(python, module, str(tmp_path / "model"), str(tmp_path), json.dumps(jobs))
    differing = set()
    for (name, template, mask), rows in zip(JOBS, theirs, strict=True):
        made = ours(tmp_path, name, template, MASKS[mask][1])
        if [ids for ids, _ in made] != [ids for ids, _ in rows]:
            differing.add((name, template))
            continue
        if (template, mask) == ("qwen", "assistant"):
            made = [[ids, without_break(ids, labels)] for ids, labels in made]
        assert made == rows, (name, template, mask)
    assert differing == OTHER_IDS
