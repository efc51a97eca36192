"""Ends of answers count, or a line says that none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from penstock.models.data.chat.conversation import request_of
from penstock.models.data.chat.encoder import Encoder
from penstock.models.data.chat.endings import Endings
from penstock.models.data.chat.masks import Choices, Sample, Turns, samples_of
from penstock.models.data.chat.published.variants import training_text
from penstock.models.data.chat.remarks import Remark, lines_of
from penstock.models.data.chat.templates import CHATML, MODEL, Template, chosen_template
from tests.models.test_chat_labels import DATA, SPECIAL, TEXTS
from tests.models.test_rows import made, written

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|observation|>\n' + m.content }}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}{% for t in m.tool_calls or [] %}"
    "{{ '\n' + t.function.name + (t.function.arguments | tojson) }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""The form of GLM 4's template: the next role's mark ends a turn."""
TRL_GLM = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if loop.first or messages[loop.index0 - 1].role == 'assistant' %}{% endif %}"
    "{{ '<|assistant|>\n' }}{% generation %}{{ m.content }}{% for t in m.tool_calls or [] %}"
    "{{ '\n' + t.function.name + (t.function.arguments | tojson) }}{% endfor %}"
    "{% if m.tool_calls %}{{ '<|observation|>' }}"
    "{% elif not loop.last and messages[loop.index0 + 1].role == 'system' %}{{ '<|system|>' }}"
    "{% else %}{{ '<|user|>' }}{% endif %}{% endgeneration %}{% else %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'assistant' %}"
    "{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}{% endif %}"
    "{{ '\n' + m.content }}{% endif %}{% endfor %}"
)
"""The form of TRL's training template of GLM 4."""
PLACE = "chat.jsonl, line 7"


def library() -> Tokenizer:
    """The test's tokenizer with the marks of roles."""
    tokenizer = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(role, special=True) for role in ROLES])
    return tokenizer


def of(fields: dict[str, Any], text: str, choices: Choices | None = None) -> list[Sample]:
    """The samples of a record."""
    template = chosen_template(MODEL, text, SPECIAL)
    return samples_of([request_of(PLACE, fields)], Encoder(library()), template, choices)


def theirs(messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Ids and mask that transformers makes with the training template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library(), chat_template=TRL_GLM)
    row = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(row["input_ids"]), list(row["assistant_masks"])


CALL = {"type": "function", "function": {"name": "mill", "arguments": {"sacks": 2}}}
TALK = [
    {"role": "user", "content": "two and three"},
    {"role": "assistant", "content": "I ask.", "tool_calls": [CALL]},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "five"},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "and four?"},
    {"role": "assistant", "content": "nine"},
]


@pytest.mark.parametrize("stop", [2, 4, 5, 7])
def test_the_next_roles_mark_counts_as_in_trl(stop: int) -> None:
    """Each answer is a sample up to its end; its labels are those of TRL's last answer."""
    messages = TALK[:stop]
    samples = of({"messages": messages}, GLM)
    answers = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
    assert len(samples) == len(answers)
    for number, sample in zip(answers, samples, strict=True):
        ids, mask = theirs(messages[: number + 2])
        end = len(mask) - mask[::-1].index(1)
        if number + 1 < len(messages) and messages[number + 1]["role"] == "assistant":
            raise AssertionError("the talk has no such turns")
        assert sample.ids == ids[:end]
        first = max(n for n in range(1, end) if mask[n] and not mask[n - 1])
        assert sample.counted == ((first, end),) and sample.remarks == ()


OPEN_MARKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}\n"
    "{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}\n"
    "{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_marks_without_the_end_are_a_remark_with_the_templates_line() -> None:
    (sample,) = of({"messages": [TALK[0], TALK[3]]}, OPEN_MARKS)
    assert sample.remarks == (Remark.OPEN,)
    (each,) = of({"messages": [TALK[0], TALK[3]]}, OPEN_MARKS, Choices(turns=Turns.EACH))
    assert each.remarks == () and len(each.ids) == len(sample.ids)
    template = chosen_template(MODEL, OPEN_MARKS, {})
    (line,) = lines_of({"open_answers": 3}, 0, template)
    assert line.startswith("data: 3 samples have an answer of which no end counts")
    assert "line 3: \"{%- if m.role == 'assistant' %}{% generation %}" in line


def test_a_completion_without_an_end_is_a_remark() -> None:
    pair = {"prompt": [TALK[0]], "completion": [TALK[3]]}
    (sample,) = of(pair, GLM)
    assert sample.remarks == (Remark.OPEN,)
    (sample,) = of(pair, TEXTS["phi3"])
    assert sample.remarks == ()


@pytest.mark.parametrize("name", [*TEXTS, CHATML])
def test_published_templates_end_their_turns(name: str) -> None:
    text = TEXTS.get(name) or chosen_template(CHATML, None, {}).text
    endings = Endings(text, training_text(text), SPECIAL)
    assert endings.is_closed(training=False) and endings.is_closed(training=True)


def test_a_template_that_refuses_all_probes_is_not_accused() -> None:
    endings = Template(name=MODEL, text="{{ raise_exception('no') }}").endings
    assert endings.is_closed(training=False) and endings.mark("user", ROLES) == ""


def test_the_preparation_reports_remarks_also_of_rows_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    template = tmp_path / "open.jinja"
    template.write_text(OPEN_MARKS)
    greeting = [{"role": "assistant", "content": "Hello!"}]
    path = written(tmp_path, [{"messages": TALK[:1] + TALK[3:4]}] * 3)
    plain = tmp_path / "plain.jinja"
    plain.write_text(OPEN_MARKS.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    greeted = written(tmp_path, [{"messages": greeting + TALK[:1] + TALK[3:4]}] * 2, "b.jsonl")
    for number in range(2):
        lines: list[str] = []
        keys = {"path": str(path), "chat_template": str(template), "sequence_length": 256}
        made(tmp_path / f"a{number}", keys, lines.append)
        assert sum("3 samples have an answer of which no end counts" in line for line in lines) == 1
        keys = {"path": str(greeted), "chat_template": str(plain), "sequence_length": 256}
        lines.clear()
        made(tmp_path / f"b{number}", keys, lines.append)
        reports = [line for line in lines if "begin with a turn of the assistant" in line]
        assert reports == [
            "data: 2 conversations begin with a turn of the assistant, which has no prompt and does"
            " not count"
        ]
