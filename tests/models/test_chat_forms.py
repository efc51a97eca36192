"""Values of records reach a chat template in a form that it takes: the right renderings are those
of ``apply_chat_template`` of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from penstock.models.data.chat.conversation import request_of
from penstock.models.data.chat.encoder import Encoder
from penstock.models.data.chat.forms import Arguments, Forms
from penstock.models.data.chat.masks import Choices, TrainOn, samples_of
from penstock.models.data.chat.templates import MODEL, Template, chosen_template
from penstock.models.data.reading.columns import arrow_rows, parquet_rows
from penstock.models.data.tokenizer import JsonTokenizer
from tests.models.test_chat_labels import DATA, SPECIAL, TEXTS, opened

PLACE = "chat.jsonl, line 7"
ENCODER = Encoder(Tokenizer.from_file(str(DATA / "tokenizer.json")))
ALL = Choices(train_on=TrainOn.ALL)


def template(text: str | Mapping[str, str]) -> Template:
    """The tokenizer's own template, or several by name."""
    return chosen_template(MODEL, text, SPECIAL)


def rendered(fields: Mapping[str, Any], text: str | Mapping[str, str]) -> str:
    """The text of a record's row of which all counts."""
    (sample,) = samples_of([request_of(PLACE, fields)], ENCODER, template(text), ALL)
    decoder = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    return str(decoder.decode(sample.ids, skip_special_tokens=False))


def theirs(fields: Mapping[str, Any], text: Any) -> str:
    """The text that transformers renders of a record."""
    made = opened(text).apply_chat_template(
        fields["messages"], tools=fields.get("tools"), tokenize=False
    )
    return str(made)


def parts(*texts: str) -> list[dict[str, str]]:
    """A content as a list of texts."""
    return [{"type": "text", "text": text} for text in texts]


HEAD = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
TAIL = "{{ '<|im_end|>\n' }}{% endfor %}"
WALKS = (
    HEAD + "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}"
    "{% endfor %}" + TAIL
)
JOINS = HEAD + "{{ m['content'] | map(attribute='text') | join('\n') }}" + TAIL
EITHER = (
    HEAD + "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "[{{ p['text'] | trim }}]{% endfor %}{% endif %}" + TAIL
)
USERS = (
    HEAD + "{% if m['role'] == 'user' %}{% for p in m['content'] %}({{ p['text'] }}){% endfor %}"
    "{% else %}{{ m['content'] + '' }}{% endif %}" + TAIL
)
PRINTS = HEAD + "{{ m['content'] }}" + TAIL
ADDS = HEAD + "{{ m['content'] + '' }}" + TAIL


@pytest.mark.parametrize("text", [WALKS, JOINS, EITHER])
def test_parts_go_to_a_template_that_walks_over_them(text: str) -> None:
    contents = [parts("what are two", " and three "), parts("five", "six")]
    messages = [
        {"role": role, "content": content}
        for role, content in zip(("user", "assistant"), contents, strict=True)
    ]
    fields = {"messages": messages}
    assert rendered(fields, text) == theirs(fields, text)
    assert "six" in rendered(fields, text)


def test_each_role_has_its_own_form() -> None:
    question, answer = parts("one", "two"), parts("five", "six")
    fields = {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }
    right = {"messages": [fields["messages"][0], {"role": "assistant", "content": "fivesix"}]}
    assert rendered(fields, USERS) == theirs(right, USERS)


@pytest.mark.parametrize("text", [PRINTS, ADDS, TEXTS["qwen2_5"], TEXTS["qwen3"]])
def test_parts_are_one_text_for_a_template_that_takes_texts(text: str) -> None:
    fields = {"messages": [{"role": "user", "content": parts("one", " two")}]}
    right = {"messages": [{"role": "user", "content": "one two"}]}
    assert rendered(fields, text) == theirs(right, text)


OBJECT = {"sacks": 2, "city": "Köln"}
CALL_HEAD = HEAD + "{{ m['content'] or '' }}{% for t in m.tool_calls or [] %}"
JSON_ONLY = CALL_HEAD + "{{ t.function.name + (t.function.arguments | tojson) }}{% endfor %}" + TAIL
TEXT_ONLY = CALL_HEAD + "{{ t.function.name + t.function.arguments }}{% endfor %}" + TAIL
ITEMS = (
    CALL_HEAD + "{{ t.function.name }}{% for k, v in t.function.arguments.items() %}"
    "<{{ k }}>{{ v }}{% endfor %}{% endfor %}" + TAIL
)
BOTH = (
    CALL_HEAD + "{{ t.function.name }}{% if t.function.arguments is string %}"
    "{{ t.function.arguments }}{% else %}{{ t.function.arguments | tojson }}{% endif %}"
    "{% endfor %}" + TAIL
)


def called(arguments: Any) -> dict[str, Any]:
    """A record with a call of a tool."""
    call = {"id": "abcdefgh1", "type": "function"}
    return {
        "messages": [
            {"role": "user", "content": "two"},
            {
                "role": "assistant",
                "content": "I ask.",
                "tool_calls": [{**call, "function": {"name": "mill", "arguments": arguments}}],
            },
        ]
    }


AS_JSON = json.dumps(OBJECT, ensure_ascii=False)
LOOSE = '{"sacks":2,  "city": "Köln"}'


@pytest.mark.parametrize(
    ("text", "form", "given", "right"),
    [
        (JSON_ONLY, Arguments.OBJECT, LOOSE, OBJECT),
        (JSON_ONLY, Arguments.OBJECT, OBJECT, OBJECT),
        (JSON_ONLY, Arguments.OBJECT, "[1]", "[1]"),
        (ITEMS, Arguments.OBJECT, LOOSE, OBJECT),
        (TEXTS["qwen2_5"], Arguments.OBJECT, LOOSE, OBJECT),
        (TEXT_ONLY, Arguments.TEXT, LOOSE, LOOSE),
        (TEXT_ONLY, Arguments.TEXT, OBJECT, AS_JSON),
        (BOTH, Arguments.ANY, LOOSE, LOOSE),
        (BOTH, Arguments.ANY, OBJECT, OBJECT),
        (TEXTS["qwen3"], Arguments.ANY, LOOSE, LOOSE),
    ],
)
def test_arguments_have_the_form_of_the_template(
    text: str, form: Arguments, given: Any, right: Any
) -> None:
    assert Forms(text, SPECIAL).arguments is form
    assert rendered(called(given), text) == theirs(called(right), text)


def test_arguments_of_sharegpt_are_an_object_too() -> None:
    value = json.dumps({"name": "mill", "arguments": LOOSE})
    talk = [{"from": "human", "value": "two"}, {"from": "function_call", "value": value}]
    right = called(OBJECT)
    del right["messages"][1]["content"]
    assert rendered({"conversations": talk}, JSON_ONLY) == theirs(right, JSON_ONLY)


TOOLS = [{"type": "function", "function": {"name": "mill", "parameters": {"type": "object"}}}]
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}<|im_start|>" + ADDS


@pytest.mark.parametrize("tools", [TOOLS, None])
def test_records_with_tools_take_the_template_for_tools(tools: Any) -> None:
    named = {"default": ADDS, "tool_use": WITH_TOOLS}
    fields = {"messages": [{"role": "user", "content": "two"}], "tools": tools}
    assert rendered(fields, named) == theirs(fields, named)
    assert ("mill" in rendered(fields, named)) == (tools is not None)


def test_templates_of_a_folder_have_their_names(tmp_path: Path) -> None:
    """transformers saves the folder."""
    opened({"default": ADDS, "tool_use": WITH_TOOLS}).save_pretrained(tmp_path)
    parts_ = JsonTokenizer(tmp_path / "tokenizer.json").chat_parts()
    assert parts_.template == {"default": ADDS, "tool_use": WITH_TOOLS}
    opened(ADDS).save_pretrained(tmp_path / "one")
    assert JsonTokenizer(tmp_path / "one" / "tokenizer.json").chat_parts().template == ADDS


def test_parts_and_arguments_in_columns_are_those_of_the_json_lines(tmp_path: Path) -> None:
    """A column of objects gives each object the keys of all others, as null."""
    listed: list[dict[str, Any]] = [
        called({"sacks": 2, "deep": [{"a": 1}, {"b": [None, 3]}]}),
        called({"city": "x", "deep": [{"c": {"d": True}}]}),
        called({}),
        {"messages": [{"role": "user", "content": "a"}]},
    ]
    for number, record in enumerate(listed[:2]):
        schema = {"type": "object", "properties": {f"p{number}": {"type": "string"}}}
        record["tools"] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for record in listed[2:]:
        record["tools"] = None
    listed[3]["tools"] = []
    table = pyarrow.Table.from_pylist(listed)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as file:
        with pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    for reader, name in ((parquet_rows, "a.parquet"), (arrow_rows, "a.arrow")):
        read = reader(tmp_path / name, "utf-8", lambda count: None, None)
        assert [record.fields for record in read] == listed


def test_null_in_json_lines_stays() -> None:
    fields = called({"sacks": None})
    assert '{"sacks": null}' in rendered(fields, JSON_ONLY) == theirs(fields, JSON_ONLY)
