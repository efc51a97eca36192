"""A remedy of an error about data works: its follower trains, and meets no other refusal."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.host.errors import ConfigError
from tests.models.test_rows import made, samples, written

Record = dict[str, Any]
Keys = dict[str, Any]
USER, BOT = ({"role": role, "content": "Hi there"} for role in ("user", "assistant"))
TALK = [USER, BOT]
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
NO_MARKS = PLAIN.replace("m.content", "m.content ~ ''")
OTHER = "{% generation %}{% endgeneration %}" + PLAIN
TWICE = PLAIN.replace("m.content + ", "'' }}{% generation %}{{ m.content }}{% endgeneration %}{{ ")
PARTS = PLAIN.replace("m.content", "(m.content | map(attribute='text') | join)")


def follow(words: str, keys: Keys) -> Keys:
    """The keys with the first ``set data.KEY: VALUE`` of an error."""
    remedy = re.search(r"set data\.(\w+)(?::| to) (\w+)", words)
    assert remedy is not None, words
    return {**keys, remedy[1]: remedy[2]}


def change(**changes: Any) -> Callable[[Record], Record]:
    """A change of the columns of a record; None removes a column."""
    return lambda record: {k: v for k, v in {**record, **changes}.items() if v is not None}


def messages(*turns: Record) -> Record:
    """A record with messages."""
    return {"messages": list(turns)}


IN_FILE: list[tuple[Record, Keys, str, Callable[[Record], Record]]] = [
    (messages(USER | {"train": 1}, BOT), {}, "remove its train", lambda r: messages(*TALK)),
    (messages(BOT | {"train": 1}, *TALK), {}, "remove its train", lambda r: messages(BOT, *TALK)),
    (messages(BOT), {}, "remove the record", lambda r: messages(*TALK)),
    (
        {"prompt": [USER | {"train": 1}], "completion": [BOT]},
        {"train_on": "completion"},
        "is a part of the prompt; remove its train",
        change(prompt=[USER]),
    ),
    (
        messages(USER | {"train": 1}, BOT | {"weight": 0}, *TALK),
        {"chat_template": TWICE, "turns": "all"},
        "remove train and weight from the messages",
        lambda r: messages(*TALK),
    ),
    (
        messages(*TALK),
        {"chat_template": PARTS},
        "as parts; write",
        lambda r: messages(*(t | {"content": [{"type": "text", "text": "Hi"}]} for t in TALK)),
    ),
    (
        {"input_ids": [1, 2], "labels": [-100, -100]},
        {},
        "remove labels of -100",
        change(labels=None),
    ),
    (
        messages(USER | {"train": 0}, BOT | {"train": 0}),
        {"train_on": "all", "packing": "none"},
        "train and weight of messages",
        lambda r: messages(*TALK),
    ),
]


@pytest.mark.parametrize(("record", "keys", "words", "mended"), IN_FILE)
def test_a_changed_record_trains(
    tmp_path: Path, record: Record, keys: Keys, words: str, mended: Callable[[Record], Record]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        prepared(tmp_path / "first", [record], keys)
    prepared(tmp_path / "second", [mended(record)], keys)


IN_KEYS: list[tuple[Record, Keys, str]] = [
    (messages(*TALK), {"turns": "all"}, "set data.turns: each"),
    (messages(*TALK), {"turns": "all", "chat_template": OTHER}, "set data.turns: each"),
    (
        messages(USER, BOT | {"train": 0}, *TALK),
        {"turns": "all", "chat_template": TWICE},
        "set data.turns: each",
    ),
    (messages(USER), {}, "set data.train_on: all"),
    (messages(*TALK), {"chat_template": "model"}, "set data.chat_template"),
    (messages(*TALK), {"too_long": "refuse", "sequence_length": 32}, "set data.too_long to"),
    (
        {"prompt": "Hi", "chosen": " a", "rejected": " b" * 20},
        {"objective": "dpo", "too_long": "refuse", "sequence_length": 32},
        "set data.too_long to truncate or drop",
    ),
]


@pytest.mark.parametrize(("record", "keys", "words"), IN_KEYS)
def test_a_key_that_an_error_sets_trains(
    tmp_path: Path, record: Record, keys: Keys, words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        prepared(tmp_path / "first", [record], keys)
    if words == "set data.chat_template":
        other = {**keys, "chat_template": "chatml"}
    else:
        other = follow(str(error.value), keys)
    prepared(tmp_path / "second", [record], other)


PAIRS = [
    {"prompt": "Hi", "chosen": " a", "rejected": " b"},
    {"chosen": "Hi a", "rejected": "Hi b"},
    {"chosen": TALK, "rejected": [USER, BOT | {"content": "No"}]},
    {"prompt": [USER], "chosen": [BOT], "rejected": [BOT | {"content": "No"}]},
]


@pytest.mark.parametrize("record", PAIRS)
def test_the_chosen_answers_train_in_the_column_that_an_error_names(
    tmp_path: Path, record: Record
) -> None:
    with pytest.raises(ConfigError, match="set columns") as error:
        prepared(tmp_path / "first", [record], {})
    remedy = re.search(r"set columns: \{(\w+): (\w+)\}", str(error.value))
    assert remedy is not None
    prepared(tmp_path / "second", [record], {"source": {"columns": {remedy[1]: remedy[2]}}})
    prepared(tmp_path / "third", [record], {"objective": "dpo"})
    with pytest.raises(ConfigError, match="leave out the format and name the chosen answers"):
        prepared(tmp_path / "fourth", [record], {"source": {"format": "preference"}})


def test_tools_without_a_form_train_by_the_columns_that_the_error_names(tmp_path: Path) -> None:
    record = {**messages(*TALK), "tools": [{"name": "mill"}]}
    with pytest.raises(ConfigError, match=r"columns: \{tools: null\}"):
        prepared(tmp_path / "first", [record], {})
    prepared(tmp_path / "second", [record], {"source": {"columns": {"tools": None}}})


def prepared(folder: Path, records: list[Record], keys: Keys) -> None:
    """Prepares a run on records, and sees that tokens count."""
    folder.mkdir()
    keys = {"chat_template": PLAIN, "sequence_length": 192, "cache_limit": 0, **keys}
    text = keys["chat_template"]
    if text not in ("model", "chatml"):
        (folder / "a.jinja").write_text(text)
        keys["chat_template"] = str(folder / "a.jinja")
    source = {"path": str(written(folder, records)), **keys.pop("source", {})}
    batch = {"global_batch": 2} if keys.get("objective") == "dpo" else {}
    made(folder / "run", {"sources": [source], **keys}, train=batch)
    labels = [label for _, _, _, labels in samples(folder / "run") for label in labels]
    assert any(label != -100 for label in labels)
