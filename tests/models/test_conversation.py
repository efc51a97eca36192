"""Records of all forms as requests, and one sentence for each that has no known form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.host.errors import ConfigError
from penstock.models.data.chat.conversation import request_of
from penstock.models.data.chat.requests import (
    ChatRequest,
    CompletionRequest,
    Format,
    IdsRequest,
    RecordForm,
    TextRequest,
)

PLACE = "chat.jsonl, line 7"
USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def chat(fields: Mapping[str, Any], reading: RecordForm | None = None) -> ChatRequest:
    """The conversation of a record."""
    request = request_of(PLACE, fields, reading)
    assert isinstance(request, ChatRequest)
    return request


def messages(fields: Mapping[str, Any], reading: RecordForm | None = None) -> list[dict[str, Any]]:
    """The messages that a chat template reads."""
    return [dict(turn.fields) for turn in chat(fields, reading).turns]


def test_columns_decide_as_in_trl() -> None:
    everything = {"text": "t", "messages": [USER, ANSWER], "prompt": "p", "completion": "c"}
    assert request_of(PLACE, everything) == CompletionRequest(
        place=PLACE, prompt="p", completion="c"
    )
    ids = everything | {"input_ids": [1, 2]}
    assert request_of(PLACE, ids) == IdsRequest(place=PLACE, ids=(1, 2))
    assert messages(everything | {"prompt": None}) == [USER, ANSWER]
    assert request_of(PLACE, {"text": "t", "messages": None}) == TextRequest(place=PLACE, text="t")


def test_names_and_roles_of_sharegpt_become_those_of_templates() -> None:
    call = json.dumps({"name": "f", "arguments": {"x": 1}})
    fields = {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "a"},
            {"from": "function_call", "value": call},
            {"from": "observation", "value": "1"},
            {"from": "gpt", "value": "b", "weight": 0},
            {"from": "moderator", "value": "c"},
        ],
        "tools": '[{"name": "f"}]',
    }
    request = chat(fields, RecordForm(roles={"moderator": "user"}))
    assert [dict(turn.fields) for turn in request.turns] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": CALLS},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert [turn.counts for turn in request.turns] == [None, None, None, None, False, None]
    assert request.tools == ({"name": "f"},)


def test_parts_of_text_stay_a_list_and_nulls_are_dropped() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    message = {"role": "user", "content": parts, "tool_calls": None, "name": None}
    called = {"role": "assistant", "content": None, "tool_calls": CALLS, "id": "x"}
    assert messages({"messages": [message, called]}) == [
        {"role": "user", "content": parts},
        {"role": "assistant", "id": "x", "tool_calls": CALLS},
    ]


def test_prompt_and_completion_may_be_messages() -> None:
    fields = {"prompt": [USER], "completion": [ANSWER], "chat_template_kwargs": {"think": False}}
    request = chat(fields)
    assert request.prompt_turns == 1 and len(request.turns) == 2
    assert request.variables == {"think": False}


ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "s", "history": None}


def test_the_two_meanings_of_alpaca() -> None:
    assert messages(ALPACA | {"history": [["q", "r"]]}) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "r"},
        {"role": "user", "content": "Add.\n1 2"},
        {"role": "assistant", "content": "3"},
    ]
    assert messages({"instruction": "Add {x}.", "input": "", "output": "3"})[0] == {
        "role": "user",
        "content": "Add {x}.",
    }
    stanford = RecordForm(format=Format.STANFORD)
    request = request_of(PLACE, ALPACA | {"system": ""}, stanford)
    assert isinstance(request, CompletionRequest) and request.completion == "3"
    assert request.prompt.endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n")
    request = request_of(PLACE, {"instruction": "{prompt}", "output": "3"}, stanford)
    assert isinstance(request, CompletionRequest)
    assert request.prompt.endswith("request.\n\n### Instruction:\n{prompt}\n\n### Response:\n")


def test_columns_may_have_other_names_or_none() -> None:
    reading = RecordForm(
        format=Format.ALPACA, columns={"prompt": "q", "response": "a", "query": None}
    )
    assert messages({"q": "x", "a": "y", "input": "z"}, reading)[0]["content"] == "x"
    reading = RecordForm(columns={"messages": "dialog", "system": "rule"})
    fields = {"dialog": [USER, ANSWER], "rule": "Be kind."}
    assert messages(fields, reading)[0] == {"role": "system", "content": "Be kind."}
    request = request_of(PLACE, {"body": "t"}, RecordForm(columns={"text": "body"}))
    assert request == TextRequest(place=PLACE, text="t")


def message(**fields: Any) -> dict[str, Any]:
    """A record with one message of the user's role."""
    return {"messages": [{"role": "user", "content": "a"} | fields]}


REFUSED: list[tuple[dict[str, Any], RecordForm, str]] = [
    ({}, RecordForm(), "its columns with values (none)"),
    ({"chosen": "a", "rejected": "b"}, RecordForm(), "Pairs of chosen and rejected"),
    ({"prompt": "a"}, RecordForm(), "(prompt) are of no known format"),
    ({"prompt": "a"}, RecordForm(format=Format.COMPLETION), "in the column completion"),
    (
        {"a": 1},
        RecordForm(format=Format.TEXT),
        "has no value in the column text; its columns are a",
    ),
    ({"text": 5}, RecordForm(), "text = 5: needs a text"),
    ({"messages": []}, RecordForm(), "messages = []: needs a list"),
    ({"messages": "hi"}, RecordForm(), "messages = 'hi': needs a list"),
    ({"messages": ["hi"]}, RecordForm(), "messages[0] = 'hi': needs an object"),
    ({"messages": [{"content": "a"}]}, RecordForm(), "has no role"),
    (message(role="usr"), RecordForm(), "messages[0].role = 'usr': is no known role"),
    (message(role=1), RecordForm(), "messages[0].role = 1"),
    (message(content=None), RecordForm(), "needs content"),
    (message(content={"a": 1}), RecordForm(), "messages[0].content = {'a': 1}: needs a text"),
    (message(content=[{"type": "image"}]), RecordForm(), "messages[0].content[0]"),
    (message(tool_calls="f"), RecordForm(), "messages[0].tool_calls = 'f': needs a list"),
    (message(train=2), RecordForm(), "messages[0].train = 2: needs 0, 1"),
    (message(weight="1"), RecordForm(), "messages[0].weight = '1'"),
    (message(train=1, weight=0), RecordForm(), "weight says the opposite"),
    (message(role="function_call"), RecordForm(), "needs the JSON of calls"),
    (message() | {"tools": "{"}, RecordForm(), "tools = '{': needs a list of JSON schemas"),
    (message() | {"chat_template_kwargs": 1}, RecordForm(), "chat_template_kwargs = 1"),
    (
        message() | {"chat_template_kwargs": {"tools": 1}},
        RecordForm(),
        "kwargs.tools = 1: is set by",
    ),
    ({"prompt": [USER], "completion": "b"}, RecordForm(), "completion = 'b': is a text, but"),
    ({"prompt": 1, "completion": "b"}, RecordForm(), "prompt = 1: needs a text"),
    (ALPACA | {"history": [["q"]]}, RecordForm(), "history[0] = ['q']: needs a pair"),
    (ALPACA | {"history": "q"}, RecordForm(), "history[0] = 'q': needs a pair"),
    (ALPACA | {"output": None}, RecordForm(format=Format.ALPACA), "in the column output"),
    (ALPACA, RecordForm(format=Format.STANFORD), "system = 's': the form has no place"),
    ({"input_ids": "12"}, RecordForm(), "input_ids = '12': needs a list of integers"),
    ({"input_ids": [1, -1]}, RecordForm(), "input_ids[1] = -1: needs an integer of at least 0"),
    ({"input_ids": [True]}, RecordForm(), "input_ids[0] = True"),
    ({"input_ids": [1], "labels": [1, 2]}, RecordForm(), "labels has 2 values and input_ids 1"),
    ({"input_ids": [1], "labels": [-5]}, RecordForm(), "labels[0] = -5: needs an id, or -100"),
    ({"input_ids": [1, 2], "labels": [-100, 3]}, RecordForm(), "labels[1] = 3: needs 2, the id"),
    ({"input_ids": None}, RecordForm(format=Format.TOKENS), "in the column input_ids"),
    ({"text": "a"}, RecordForm(format=Format.CHAT), "in the column messages"),
]


@pytest.mark.parametrize(("fields", "reading", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_record_of_no_known_form_is_refused(
    fields: dict[str, Any], reading: RecordForm, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        request_of(PLACE, fields, reading)
    assert str(error.value).startswith(f"{PLACE}: ") and words in str(error.value)
    assert "\n" not in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "from", "content", "value", "train", "tool_calls", "text"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)
COLUMNS = st.sampled_from(
    [
        *("text", "messages", "conversations", "prompt", "completion", "input_ids", "labels"),
        *("tools", "instruction", "output", "history", "chat_template_kwargs"),
    ]
)


@given(fields=st.dictionaries(COLUMNS, JSON, max_size=4), kind=st.sampled_from(Format))
def test_any_record_is_a_request_or_refused(fields: dict[str, Any], kind: Format) -> None:
    try:
        request = request_of(PLACE, fields, RecordForm(format=kind))
    except ConfigError as error:
        assert str(error).startswith(PLACE)
    else:
        assert request.place == PLACE
