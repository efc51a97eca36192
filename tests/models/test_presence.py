"""Each text of a record is in its rendering, or the record is refused, or a remark counts it."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.host.errors import ConfigError
from penstock.models.data.chat.conversation import pair_of, request_of
from penstock.models.data.chat.encoder import Encoder
from penstock.models.data.chat.masks import Choices, Sample, TrainOn, samples_of
from penstock.models.data.chat.remarks import Remark
from penstock.models.data.chat.requests import RecordForm
from penstock.models.data.chat.templates import MODEL, chosen_template
from tests.models.test_chat_forms import (
    ADDS,
    HEAD,
    JSON_ONLY,
    PRINTS,
    TAIL,
    TOOLS,
    WALKS,
    called,
    opened,
    parts,
)
from tests.models.test_chat_labels import DATA, SPECIAL, TEXTS

PLACE = "chat.jsonl, line 7"
ENCODER = Encoder(Tokenizer.from_file(str(DATA / "tokenizer.json")))
QUESTION = {"role": "user", "content": "What are two and three together?"}
THOUGHT = "Two is one less than three, and their sum is five."
ANSWER = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\nThey are five."}
BARE = {"role": "assistant", "content": "They are five."}
R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.content }}{% else %}"
    "{% set content = m.content %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_end|>' + content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_end|>' + HEADER }}{% endif %}"
)
"""The form of DeepSeek R1's template. It cuts thoughts from all answers."""
WITH_HEADER = R1.replace("HEADER", r"'<think>\n'")
WITHOUT_HEADER = R1.replace("HEADER", "''")


def of(fields: dict[str, Any], text: Any, choices: Choices | None = None) -> list[Sample]:
    """The samples of a record with a template."""
    template = chosen_template(MODEL, text, SPECIAL)
    read = pair_of if "rejected" in fields else request_of
    return samples_of([read(PLACE, fields, RecordForm())], ENCODER, template, choices)


def refusal(fields: dict[str, Any], text: Any, choices: Choices | None = None) -> str:
    """The sentence that refuses a record."""
    with pytest.raises(ConfigError) as error:
        of(fields, text, choices)
    assert str(error.value).startswith(f"{PLACE}: ") and "\n" not in str(error.value)
    return str(error.value)


def forms(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """A question and its answer as messages, as prompt and completion, and as a pair."""
    return [
        {"messages": [QUESTION, answer]},
        {"prompt": [QUESTION], "completion": [answer]},
        {"prompt": [QUESTION], "chosen": [answer], "rejected": [BARE]},
        {"prompt": [QUESTION], "chosen": [BARE], "rejected": [answer]},
    ]


@pytest.mark.parametrize("text", [WITH_HEADER, WITHOUT_HEADER])
@pytest.mark.parametrize("number", range(4))
def test_thoughts_that_a_template_cuts_are_refused_in_every_form(number: int, text: str) -> None:
    theirs = opened(text).apply_chat_template([QUESTION, ANSWER], tokenize=False)
    assert THOUGHT not in theirs and "They are five." in theirs
    words = refusal(forms(ANSWER)[number], text)
    assert "turn 1 (role assistant): " in words
    cause = "renders the turns before it in another way" if text == WITH_HEADER else "cuts these"
    assert cause in words


@pytest.mark.parametrize("number", range(4))
def test_a_header_that_the_answer_does_not_have_is_refused_in_every_form(number: int) -> None:
    words = refusal(forms(BARE)[number], WITH_HEADER)
    assert r"'<think>\n' becomes 'They are five." in words


@pytest.mark.parametrize("number", range(4))
def test_thoughts_that_a_template_keeps_train(number: int) -> None:
    samples = of(forms(ANSWER)[number], TEXTS["qwen3"])
    texts = [ENCODER._tokenizer.decode(sample.ids) for sample in samples]
    assert sum(THOUGHT in text for text in texts) == 1


def test_thoughts_of_earlier_turns_are_a_remark() -> None:
    """Qwen 3 cuts them from the prompt of the next answer, and so does transformers."""
    last = {**ANSWER, "content": "<think>As before, I think.</think>Five again."}
    messages = [QUESTION, ANSWER, QUESTION, last]
    theirs = opened(TEXTS["qwen3"]).apply_chat_template(messages, tokenize=False)
    assert THOUGHT not in theirs and "As before, I think." in theirs
    (sample,) = of({"messages": messages}, TEXTS["qwen3"], Choices(train_on=TrainOn.LAST))
    assert sample.remarks == (Remark.THOUGHTS,)
    (sample,) = of({"messages": messages}, TEXTS["qwen3"], Choices(train_on=TrainOn.ALL))
    assert sample.remarks == (Remark.THOUGHTS,)
    (sample,) = of({"messages": messages}, TEXTS["qwen3"])
    assert sample.remarks == ()
    field = {**BARE, "reasoning_content": THOUGHT}
    (sample,) = of({"messages": [QUESTION, field]}, TEXTS["qwen2_5"])
    assert sample.remarks == (Remark.THOUGHTS,)


SYSTEM = {"role": "developer", "content": "Be brief."}
IGNORES_CALLS = HEAD + "{{ m['content'] }}" + TAIL
NEEDS_SYSTEM = "{{ raise_exception('no') if messages[0].role != 'system' }}" + JSON_ONLY
CONTENT_OR_CALLS = (
    HEAD + "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}"
) + TAIL


@pytest.mark.parametrize(
    ("fields", "text", "words"),
    [
        (
            {"messages": [QUESTION, BARE], "tools": TOOLS},
            ADDS,
            "tools[0].function.name = 'mill': data.chat_template = 'model' leaves tools out",
        ),
        (called({"sacks": 2}), IGNORES_CALLS, "tool_calls[0].function.name = 'mill'"),
        (called({"sacks": 2}), CONTENT_OR_CALLS, "content = 'I ask.': data.chat_template"),
        ({"messages": [SYSTEM, QUESTION, BARE]}, TEXTS["phi3"], "(role developer): content"),
        ({"messages": [QUESTION, BARE]}, WALKS, 'write [{"type": "text", "text": "…"}]'),
        (
            {"messages": [QUESTION, {"role": "assistant", "content": "a"}]},
            WALKS,
            "reads contents as parts",
        ),
        (
            {
                "messages": [
                    QUESTION,
                    {**BARE, "function_call": {"name": "mill", "arguments": "{}"}},
                ]
            },
            PRINTS,
            "function_call.name = 'mill'",
        ),
        (
            {"messages": [{"role": "system", "content": "x"}, *called('{"a": "b"}')["messages"]]},
            NEEDS_SYSTEM,
            "give an object in place of its text",
        ),
    ],
)
def test_a_text_that_a_template_leaves_out_is_refused(
    fields: dict[str, Any], text: str, words: str
) -> None:
    assert words in refusal(fields, text, Choices(train_on=TrainOn.ALL))


CHANGES = (
    "{{ m['content'] | upper }}",
    "{{ m['content'] | e }}",
    "{{ m['content'] | tojson }}",
    "{{ m['content'] | replace('\n', ' ') | trim }}",
    "{{ m['content'].split() | join('_') }}",
    "{{ m['content'][::-1] }}",
)


@pytest.mark.parametrize("content", ["a", "Is 2 < 3 & so on?\nYes \"it\" is, 'so' I <b>think</b>."])
@pytest.mark.parametrize("change", CHANGES)
def test_a_text_that_a_template_changes_is_no_text_that_is_left_out(
    change: str, content: str
) -> None:
    messages = [QUESTION, {"role": "assistant", "content": content}]
    text = HEAD + change + TAIL
    (sample,) = of({"messages": messages}, text, Choices(train_on=TrainOn.ALL))
    theirs = opened(text).apply_chat_template(messages, tokenize=True, return_dict=True)
    assert sample.ids == theirs["input_ids"]


def test_the_remedy_for_tools_works() -> None:
    form = RecordForm(columns={"tools": None})
    request = request_of(PLACE, {"messages": [QUESTION, BARE], "tools": TOOLS}, form)
    assert samples_of([request], ENCODER, chosen_template(MODEL, ADDS, SPECIAL))


def test_the_remedy_for_a_template_of_parts_works() -> None:
    messages = [{**turn, "content": parts(turn["content"])} for turn in (QUESTION, BARE)]
    assert of({"messages": messages}, WALKS)
