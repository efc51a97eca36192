"""Chat templates: a sandbox, a choice by exact text, and refusals with reasons."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.host.errors import ConfigError
from penstock.models.data.chat.conversation import request_of
from penstock.models.data.chat.encoder import Encoder, Passage
from penstock.models.data.chat.masks import Choices, Sample, TrainOn, Turns, samples_of
from penstock.models.data.chat.published.defaults import split_defaults, with_defaults
from penstock.models.data.chat.published.variants import (
    Edit,
    is_marked,
    keeps_rendering,
    training_text,
)
from penstock.models.data.chat.templates import CHATML, MODEL, Template, chosen_template

DATA = Path(__file__).parents[1] / "data" / "chat"
TEXTS: dict[str, str] = json.loads((DATA / "templates.json").read_text(encoding="utf-8"))
ENCODER = Encoder(Tokenizer.from_file(str(DATA / "tokenizer.json")))
TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]
PLACE = "chat.jsonl, line 7"


def of(fields: dict[str, Any], text: str | None, choices: Choices | None = None) -> list[Sample]:
    """The samples of a record with a template."""
    variables = {"eos_token": "<|endoftext|>"}
    template = None if text is None else Template(name=MODEL, text=text, variables=variables)
    return samples_of([request_of(PLACE, fields)], ENCODER, template, choices)


def refusal(fields: dict[str, Any], text: str | None, choices: Choices | None = None) -> str:
    """The error for a record."""
    with pytest.raises(ConfigError) as error:
        of(fields, text, choices)
    assert str(error.value).startswith(f"{PLACE}: ") and "\n" not in str(error.value)
    return str(error.value)


def test_a_variant_belongs_to_the_exact_text_of_a_published_template() -> None:
    for name, text in TEXTS.items():
        training = training_text(text)
        assert training is not None and is_marked(training), name
        assert (training == text) == (name == "simple")
        assert keeps_rendering(text) == (name != "qwen3")
        if name != "simple":
            assert training_text(text + "\n") is None and training_text(text[:-1]) is None


def test_an_edit_has_one_place() -> None:
    edit = Edit(start="b", end="d", new="x")
    assert edit.apply("abcde") == "axe"
    for text in ("aaa", "abbd"):
        with pytest.raises(ValueError, match="places for 'b'"):
            edit.apply(text)


ODD = {
    "line first": "\n{% for message in messages %}{{ message.content }}{% endfor %} {{ mood }}",
    "spaces first": "  {% if mood %}\n{{ messages[0].content }}{{ mood }}{% endif %}",
    "loop": "{% for message in messages %}{{ message.content ~ mood ~ loop.index }}{% endfor %}",
    "macro": "{% macro say(text) %}{{ text ~ mood }}{% endmacro %}{{ say('a') }} ",
    "text first": " \u00e9 {{- mood }}",
}
VARIABLES: dict[str, Any] = {
    "enable_thinking": False,
    "mood": 'a "calm"\n\u00fcber \U0001f600 \\ {{ x }} #}',
    "numbers": [1, 2.5, None, {"a": True}],
    "not a name": 1,
    "none": 2,
}


def rendered(text: str, **variables: Any) -> str:
    """The text that transformers makes of a conversation."""
    (made,), _ = render_jinja_template(
        [TALK], chat_template=text, add_generation_prompt=True, **variables
    )
    return str(made)


@pytest.mark.parametrize("name", [*TEXTS, *ODD])
def test_defaults_in_a_template_render_as_the_variables_do(name: str) -> None:
    text = {**TEXTS, **ODD}[name]
    exported = with_defaults(text, VARIABLES)
    assert rendered(exported) == rendered(text, **VARIABLES)
    others = {"mood": "wild", "enable_thinking": True}
    assert rendered(exported, **others) == rendered(text, **{**VARIABLES, **others})
    again = with_defaults(exported, {"mood": "new"})
    assert rendered(again) == rendered(text, **{**VARIABLES, "mood": "new"})
    head, rest = split_defaults(again)
    assert (head + rest, rest) == (again, text)
    assert with_defaults(text, {}) == text and split_defaults(text) == ("", text)


def test_values_of_all_kinds_are_written_as_defaults() -> None:
    exported = with_defaults("{{ mood }}|{{ numbers | tojson }}|{{ enable_thinking }}", VARIABLES)
    assert rendered(exported) == f'{VARIABLES["mood"]}|[1, 2.5, null, {{"a": true}}]|False'


@pytest.mark.parametrize("name", TEXTS)
def test_an_exported_template_keeps_its_training_variant(name: str) -> None:
    exported = with_defaults(TEXTS[name], {"enable_thinking": False})
    head, rest = split_defaults(exported)
    assert training_text(exported) == head + str(training_text(rest))
    assert keeps_rendering(exported) == keeps_rendering(TEXTS[name])


def test_templates_that_write_the_date_of_the_day() -> None:
    """The start of Llama 3.2's template, and a template without a variable for the date."""
    llama = (
        "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
        "{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}{%- endif %}{{ date_string }}"
    )
    template = Template(name=MODEL, text=llama)
    assert template.writes_date and 'date_string: "26 Jul 2024"' in template.remedy_of_date
    fixed = Template(name=MODEL, text=llama, variables={"date_string": "26 Jul 2024"})
    assert not fixed.writes_date and rendered(llama, **fixed.variables) == "26 Jul 2024"
    other = Template(name=MODEL, text="{{ strftime_now('%Y') }}", variables={"date_string": "x"})
    assert other.writes_date and "a copy of the template" in other.remedy_of_date
    assert not any(Template(name=MODEL, text=text).writes_date for text in TEXTS.values())


def test_templates_by_name() -> None:
    assert chosen_template(MODEL, {"default": "x", "tool_use": "y"}, {}).text == "x"
    assert chosen_template("chat.jinja", "x", {}).text == "x"
    assert is_marked(chosen_template(CHATML, None, {}).text)
    for published in (None, "", {"tool_use": "y"}):
        with pytest.raises(
            ConfigError, match=r"data.chat_template = 'model': there is no template"
        ):
            chosen_template(MODEL, published, {})


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ASKS = PLAIN + "{% if add_generation_prompt %}assistant: {% endif %}"
COUNTS = "{{ messages | length }} turns\n" + ASKS
ESCAPES = "{{ ''.__class__.__mro__ }}"
CHATML_TEXT = chosen_template(CHATML, None, {}).text
TWICE = ASKS.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}.")
EMPTY = "{% generation %}{% endgeneration %}" + ASKS


@pytest.mark.parametrize(
    ("messages", "text", "choices", "words"),
    [
        (TALK, None, Choices(), "there is no chat template; set data.chat_template"),
        (TALK, COUNTS, Choices(), "turn 1 (role assistant): data.chat_template = 'model' renders"),
        (TALK, COUNTS, Choices(), "'1 turns"),
        (TALK, ASKS, Choices(turns=Turns.ALL), "no {% generation %}"),
        (TALK[1:2], ASKS, Choices(), "turn 0 (role assistant): is the first turn"),
        (TALK[:1], ASKS, Choices(), "has no turn of the role assistant"),
        (TALK, EMPTY, Choices(), "marks no text of the conversation"),
        (TALK, ASKS, Choices(train_on=TrainOn.COMPLETION), "data.train_on = 'completion'"),
        (TALK, ESCAPES, Choices(train_on=TrainOn.ALL), "cannot render the conversation"),
        (TALK, "{% for %}", Choices(), "cannot render the conversation"),
        (TALK, "{{ raise_exception('no system') }}", Choices(), "conversation: no system; change"),
        ([TALK[0] | {"train": 1}, TALK[1]], ASKS, Choices(), "turn 0 (role user): only the"),
        ([TALK[0], TALK[1] | {"train": 0}, *TALK[2:]], TWICE, Choices(), "marks 4 parts of 2"),
        (
            [TALK[0], TALK[1] | {"train": 0}],
            COUNTS,
            Choices(train_on=TrainOn.ALL),
            "so the turn's own mark has no place",
        ),
        (
            [TALK[0], {"role": "assistant", "tool_calls": [{"function": {}}]}],
            CHATML_TEXT,
            Choices(),
            "chatml has no form for tool calls",
        ),
    ],
)
def test_a_conversation_is_refused_with_the_reason(
    messages: list[dict[str, Any]], text: str | None, choices: Choices, words: str
) -> None:
    assert words in refusal({"messages": messages}, text, choices)


def test_a_template_without_a_header_for_answers_still_gives_a_sample_of_each_turn() -> None:
    first, second = of({"messages": TALK}, PLAIN)
    assert len(second.ids) > len(first.ids) and first.lost == 0
    words = refusal({"prompt": [TALK[0] | {"train": 1}], "completion": [TALK[1]]}, ASKS)
    assert "turn 0 (role user): is a part of the prompt" in words


def test_choices_must_fit_the_record() -> None:
    for fields, kind in (({"text": "a"}, "a text"), ({"input_ids": [1]}, "without labels")):
        words = refusal(fields, None, Choices(train_on=TrainOn.ASSISTANT))
        assert "data.train_on = 'assistant'" in words and kind in words and "auto or all" in words
    pair = {"prompt": "a", "completion": "b"}
    words = refusal(pair, None, Choices(train_on=TrainOn.LAST))
    assert "auto or completion or all" in words


def test_half_a_surrogate_pair_is_refused() -> None:
    assert "half of a surrogate pair" in refusal({"text": "a\ud800"}, None)
    messages = [TALK[0], {"role": "assistant", "content": "\udfff"}]
    assert "half of a surrogate pair" in refusal({"messages": messages}, CHATML_TEXT)


def test_merged_tokens_of_prompt_and_completion_are_reported() -> None:
    (sample,) = of({"prompt": "Be brie", "completion": "f."}, None)
    (apart,) = of({"prompt": "Be brief", "completion": "."}, None)
    assert sample.lost > 0 and apart.lost == 0


def test_deeply_nested_tools_are_refused() -> None:
    tools: Any = {}
    for _ in range(sys.getrecursionlimit()):
        tools = {"a": tools}
    assert "cannot render" in refusal({"messages": TALK, "tools": [tools]}, ASKS)


def spaced() -> Tokenizer:
    """A tokenizer that marks spaces and the start of a text, as SentencePiece does."""
    letters = ["<unk>", "\u2581", *"abcdefghijklmnopqrstuvwxyz<>/:\n_[]|"]
    vocabulary = {letter: number for number, letter in enumerate(dict.fromkeys(letters))}
    vocabulary["\u2581a"] = len(vocabulary)
    merges = [("\u2581", "a")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>")])
    return tokenizer


@pytest.mark.parametrize("content", ["a </s>a</s>", "</s>", "<s></s> a", "a\n</s>\na <s>"])
def test_special_tokens_in_texts_have_the_ids_of_transformers(content: str) -> None:
    text = "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=spaced(), chat_template=text, bos_token="<s>", eos_token="</s>"
    )
    expected = theirs.apply_chat_template(
        messages, tokenize=True, return_dict=True, sanitize_control_tokens=True
    )
    request = request_of(PLACE, {"messages": messages})
    template = Template(name=MODEL, text=text)
    choices = Choices(train_on=TrainOn.ALL)
    (sample,) = samples_of([request], Encoder(spaced()), template, choices)
    assert sample.ids == expected["input_ids"]
    (encoding,) = Encoder(spaced()).encode([Passage(place=PLACE, text="a</s>a", literal=((1, 5),))])
    spans = [encoding.span(number) for number in range(len(encoding.ids))]
    assert spans == sorted(spans) and spans[0][0] == 0 and spans[-1][1] == 6


def test_marks_of_the_assistants_turns_move_with_special_tokens_in_texts() -> None:
    messages = [TALK[0] | {"content": "<|im_end|>"}, TALK[1] | {"content": "b<|im_end|>c"}]
    (sample,) = of({"messages": messages}, CHATML_TEXT)
    (each,) = of({"messages": messages}, CHATML_TEXT, Choices(turns=Turns.EACH))
    assert (sample.ids, sample.labels) == (each.ids, each.labels)


LIGHT = f"""
import sys
from tokenizers import Tokenizer
from penstock.models.data.chat.conversation import request_of
from penstock.models.data.chat.encoder import Encoder
from penstock.models.data.chat.masks import samples_of
from penstock.models.data.chat.templates import chosen_template

encoder = Encoder(Tokenizer.from_file({str(DATA / "tokenizer.json")!r}))
request = request_of("a", {{"messages": {TALK!r}}})
(sample,) = samples_of([request], encoder, chosen_template("chatml", None, {{}}))
assert -100 in sample.labels
assert "torch" not in sys.modules
"""


def test_no_torch_is_loaded() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=600)
