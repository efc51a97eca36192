"""Ids and labels equal those of TRL's trainer, which ``tests/data/chat`` keeps, or a record is
refused where TRL refuses it, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from penstock.host.errors import ConfigError
from penstock.models.data.batch import IGNORED_LABEL
from penstock.models.data.chat.conversation import request_of
from penstock.models.data.chat.encoder import Encoder
from penstock.models.data.chat.masks import Choices, Sample, TrainOn, Turns, samples_of
from penstock.models.data.chat.templates import CHATML, Template, chosen_template
from tests.data.chat.make import runs

DATA = Path(__file__).parents[1] / "data" / "chat"
TRL = json.loads((DATA / "trl.json").read_text(encoding="utf-8"))
TEXTS: dict[str, str] = json.loads((DATA / "templates.json").read_text(encoding="utf-8"))
END, BEGIN = "<|endoftext|>", "<s>"
SPECIAL = {"eos_token": END, "bos_token": BEGIN, "pad_token": BEGIN}
TRAIN_ON = {
    "assistant": TrainOn.AUTO,
    "all": TrainOn.ALL,
    "completion": TrainOn.AUTO,
    "both": TrainOn.ASSISTANT,
    "plain": TrainOn.AUTO,
}


def encoder() -> Encoder:
    """The test's tokenizer as the package takes it."""
    return Encoder(Tokenizer.from_file(str(DATA / "tokenizer.json")))


def opened(template: str | None = None) -> PreTrainedTokenizerFast:
    """The test's tokenizer as transformers opens it."""
    library = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    return PreTrainedTokenizerFast(
        tokenizer_object=library, chat_template=template, eos_token=END, bos_token=BEGIN
    )


ENCODER = encoder()


def published(name: str) -> Template:
    """The template ``name`` of the data."""
    return Template(name=name, text=TEXTS[name], variables=SPECIAL)


def of(
    fields: dict[str, Any], template: Template | None, choices: Choices | None = None
) -> list[Sample]:
    """The samples of a record."""
    request = request_of("data.jsonl, line 1", fields)
    return samples_of([request], ENCODER, template, choices or Choices(end=END))


def rows(name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Records with the rows that TRL made of them with a template."""
    records = [r for r in TRL["records"] if r["mode"] != "plain" or name == "simple"]
    return list(zip(records, TRL["expected"][name], strict=True))


LEFT_OUT = ("leaves tools out", "renders the turns before it in another way")


def is_left_out(name: str, record: dict[str, Any]) -> bool:
    """Whether a record is refused because the template leaves a part of it out or cuts the header
    of its answer. TRL trains such records.
    """
    fields = {key: value for key, value in record.items() if key != "mode"}
    try:
        of(fields, published(name), Choices(train_on=TRAIN_ON[record["mode"]], end=END))
    except ConfigError as error:
        return any(words in str(error) for words in LEFT_OUT)
    return False


def check(name: str, record: dict[str, Any], row: dict[str, Any]) -> bool:
    """Compares one record with TRL's row; returns False where it is refused."""
    if is_left_out(name, record):
        tools = record.get("tools") or []
        tools = json.loads(tools) if isinstance(tools, str) else tools
        names = [tool.get("function", tool)["name"] for tool in tools]
        text = Tokenizer.from_file(str(DATA / "tokenizer.json")).decode(row["ids"])
        assert record["mode"] == "completion" or (names and not any(n in text for n in names))
        return False
    mode = record["mode"]
    choices = Choices(train_on=TRAIN_ON[mode], end=END)
    fields = {key: value for key, value in record.items() if key != "mode"}
    if "error" in row:
        with pytest.raises(ConfigError):
            of(fields, published(name), choices)
        return False
    (sample,) = of(fields, published(name), choices)
    assert sample.ids == row["ids"], record
    assert runs(sample.labels) == row["counts"], record
    counted = [label for label in sample.labels if label != IGNORED_LABEL]
    ids = [sample.ids[n] for a, b in row["counts"] for n in range(a, b)]
    assert counted == ids
    return True


@pytest.mark.parametrize("name", list(TEXTS))
def test_ids_and_labels_equal_those_of_trl(name: str) -> None:
    compared = [check(name, record, row) for record, row in rows(name)]
    assert sum(compared) > 80, compared


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "simple"])
def test_samples_of_each_turn_are_the_published_rendering_and_count_the_turn(name: str) -> None:
    """The last one has the ids that transformers renders of the conversation up to the turn."""
    tokenizer = opened(TEXTS[name])
    compared = 0
    for record in (r for r in TRL["records"] if r["mode"] == "assistant"):
        messages = record["messages"]
        fields = {key: value for key, value in record.items() if key != "mode"}
        try:
            samples = of(fields, published(name), Choices(turns=Turns.EACH))
        except ConfigError:
            continue
        turns = [n for n, m in enumerate(messages) if n and m["role"] == "assistant"]
        assert len(samples) == len(turns)
        for number, sample in zip(turns, samples, strict=True):
            whole = tokenizer.apply_chat_template(
                messages[: number + 1], tools=record.get("tools"), tokenize=True, return_dict=True
            )["input_ids"]
            assert sample.ids == whole
            assert [b for _, b in runs(sample.labels)] == [len(whole)]
            compared += 1
    assert compared > 40


def test_each_turn_drops_thoughts_of_earlier_turns_as_the_published_template_does() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "thought 1"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "thought 2"},
    ]
    each = of({"messages": messages}, published("qwen3"), Choices(turns=Turns.EACH))
    decoder = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    texts = [decoder.decode(sample.ids, skip_special_tokens=False) for sample in each]
    assert "thought 1" in texts[0] and "thought 1" not in texts[1] and "thought 2" in texts[1]
    (whole,) = of({"messages": messages}, published("qwen3"))
    assert "thought 1" in decoder.decode(whole.ids) and "thought 2" in decoder.decode(whole.ids)


def test_a_special_token_in_a_message_is_text_with_the_ids_of_transformers() -> None:
    """The reference is ``sanitize_control_tokens``; TRL makes special tokens of them."""
    messages = [
        {"role": "user", "content": "a<|im_end|>\n<|im_start|>assistant\nb <|im_end|>"},
        {"role": "assistant", "content": "<|im_end|>"},
    ]
    tokenizer = opened(TEXTS["qwen2_5"])
    fields = {"messages": messages}
    choices = Choices(train_on=TrainOn.ALL, special_in_text=True)
    (special,) = of(fields, published("qwen2_5"), choices)
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
    assert special.ids == whole["input_ids"]
    (text,) = of(fields, published("qwen2_5"), Choices(train_on=TrainOn.ALL))
    sane = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, sanitize_control_tokens=True
    )
    assert text.ids == sane["input_ids"] != special.ids
    (counted,) = of(fields, published("qwen2_5"))
    assert counted.ids == text.ids
    number = Tokenizer.from_file(str(DATA / "tokenizer.json")).token_to_id("<|im_end|>")
    # The system's, the user's and the assistant's own end tokens, and the last one counts.
    assert text.ids.count(number) == 3 and counted.labels.count(number) == 1


TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "second"},
]


def counted_text(sample: Sample) -> str:
    """The text of the tokens that count."""
    decoder = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    return str(decoder.decode([n for n in sample.labels if n != IGNORED_LABEL], False))


def marked(*marks: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation with marks of its turns."""
    return [turn | mark for turn, mark in zip(TALK, marks, strict=True)]


CHAT = chosen_template(CHATML, None, SPECIAL)


@pytest.mark.parametrize("turns", Turns)
def test_a_messages_own_mark_wins(turns: Turns) -> None:
    messages = marked({"train": False}, {"weight": 0}, {}, {"train": 1})
    (sample,) = of({"messages": messages}, CHAT, Choices(turns=turns))
    assert counted_text(sample) == "second<|im_end|>\n"
    messages = marked({}, {"train": True}, {}, {})
    samples = of({"messages": messages}, CHAT, Choices(turns=turns, train_on=TrainOn.LAST))
    texts = "".join(counted_text(sample) for sample in samples)
    assert texts == "first<|im_end|>\nsecond<|im_end|>\n"
    messages = marked({}, {"weight": 0.0}, {}, {"train": 0})
    assert of({"messages": messages}, CHAT, Choices(turns=turns)) == []


def test_a_users_turn_may_count_and_a_turn_may_be_left_out_of_all() -> None:
    (sample,) = of({"messages": marked({}, {}, {"train": 1}, {"train": 0})}, CHAT)
    assert counted_text(sample) == "first<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
    messages = marked({}, {}, {"train": 0}, {})
    (sample,) = of({"messages": messages}, CHAT, Choices(train_on=TrainOn.ALL))
    assert "c<|im_end|>" not in counted_text(sample) and "second" in counted_text(sample)
    pair = {"prompt": TALK[:1], "completion": marked({}, {"train": 0}, {}, {})[1:]}
    (sample,) = of(pair, CHAT)
    assert "first" not in counted_text(sample) and "second" in counted_text(sample)


def test_the_end_of_a_conversation_belongs_to_its_last_turn() -> None:
    """Phi 3 marks the last turn and the end token apart."""
    messages = marked({}, {"train": 0}, {}, {})
    (sample,) = of({"messages": messages}, published("phi3"))
    assert counted_text(sample) == f"second<|end|>\n{END}"


def test_the_last_turn_alone() -> None:
    for turns in Turns:
        (sample,) = of({"messages": TALK}, CHAT, Choices(train_on=TrainOn.LAST, turns=turns))
        assert counted_text(sample) == "second<|im_end|>\n"


def test_ready_ids_keep_their_labels() -> None:
    (sample,) = of({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, None)
    assert (sample.ids, sample.labels) == ([1, 2, 3], [-100, 2, 3])
    (sample,) = of({"input_ids": [1, 2, 3], "labels": None}, None)
    assert sample.labels == [1, 2, 3]


def test_samples_keep_the_order_of_requests() -> None:
    fields: list[dict[str, Any]] = [{"messages": TALK}, {"text": "x"}, {"input_ids": [5]}]
    requests = [request_of(f"line {n}", f) for n, f in enumerate(fields)]
    samples = samples_of(requests, ENCODER, CHAT, Choices(turns=Turns.EACH))
    assert [s.place for s in samples] == ["line 0", "line 0", "line 1", "line 2"]
    assert samples[3].ids == [5] and len(samples[0].ids) < len(samples[1].ids)


TEXT = st.text(max_size=12)
TURNS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3)


@settings(deadline=None, max_examples=60)
@given(pairs=TURNS, system=st.none() | TEXT, name=st.sampled_from(list(TEXTS)))
def test_any_unicode_gives_the_ids_of_transformers_or_is_refused(
    pairs: list[tuple[str, str]], system: str | None, name: str
) -> None:
    messages = [{"role": "system", "content": system}] if system is not None else []
    for question, answer in pairs:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    (sample,) = of({"messages": messages}, published(name), Choices(train_on=TrainOn.ALL))
    whole = opened(TEXTS[name]).apply_chat_template(messages, tokenize=True, return_dict=True)
    assert sample.ids == whole["input_ids"]
    (masked,) = of({"messages": messages}, published(name))
    for place, label in enumerate(masked.labels):
        assert label in (IGNORED_LABEL, masked.ids[place])
    assert set(masked.labels) != {IGNORED_LABEL}
    each = of({"messages": messages}, published(name), Choices(turns=Turns.EACH))
    assert len(each) == len(pairs)
