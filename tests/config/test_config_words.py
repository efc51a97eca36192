"""What refusals of configurations say: key, value, what would do, and that in words of our own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le, Lt

from penstock.config.schema import Config, parse_config
from penstock.config.words import Form, Section, apply_overrides, keys_of
from penstock.host.errors import ConfigError
from penstock.shm.table import DType

MINIMAL: dict[str, Any] = {"model": {"hf": {"model_type": "llama"}}, "data": {"path": "@stdlib"}}
FOREIGN = (
    "Input should",
    "should match",
    "type=",
    "errors.pydantic.dev",
    "Value error",
    "validat",
    "instance of",
    "literal[",
    "function-",
    "pydantic",
)
NODE_KEYS = ("cluster.nodes.0.name", "cluster.nodes.0.host")


def with_value(key: str, value: Any) -> dict[str, Any]:
    """The minimal configuration with one value replaced."""
    section, *rest = key.split(".")
    inner: Any = value
    if rest[0] == "nodes" and len(rest) == 3:
        rest, inner = ["nodes"], [{"name": "a", rest[2]: value}]
    return {**MINIMAL, section: {**MINIMAL.get(section, {}), rest[0]: inner}}


def refusal(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    return str(caught.value)


def form_of(key: str) -> Form:
    form = Form.of(Config)
    for part in key.split("."):
        inner = form.inner(int(part) if part.isdigit() else part)
        assert inner is not None, key
        form = inner
    return form


def bad_values(key: str) -> Iterator[Any]:
    """Values that a key cannot have: of other types, beyond each limit, other words."""
    form = form_of(key)
    kinds = {member.annotation for member in form.members}
    yield 2j  # of no type that a configuration has
    if not form.accepts_booleans:
        yield True
    if str not in kinds and Path not in kinds and key != "data.eos":  # any text may be a token
        yield "plenty"
    sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    if dict not in {getattr(kind, "__origin__", kind) for kind in kinds} and not sections:
        yield {"a": 1}
    if kinds & {int, float}:
        yield float("nan")
    for limit in form.limits:
        for kind, name, beyond in ((Ge, "ge", -1), (Gt, "gt", 0), (Le, "le", 1), (Lt, "lt", 0)):
            if isinstance(limit, kind):
                yield getattr(limit, name) + beyond


@pytest.mark.parametrize("key", [*keys_of(Config), *NODE_KEYS])
def test_every_key_says_what_is_wrong_and_what_would_do(key: str) -> None:
    tried = 0
    for value in bad_values(key):
        message = refusal(with_value(key, value))
        assert [word for word in FOREIGN if word in message] == [], message
        assert message.count(key) == 1 and ";" not in message, message
        assert repr(value) in message, message
        assert len(message.split(": ", 2)[2]) > 5, message
        tried += 1
    assert tried >= 2


@pytest.mark.parametrize("section", Config.model_fields)
def test_sections_say_what_belongs_in_them(section: str) -> None:
    message = refusal({**MINIMAL, section: 7})
    accepted = "a mapping such as" if section == "adapter" else "a section with"
    assert f"{section} = 7: accepted is {accepted} " in message
    assert [word for word in FOREIGN if word in message] == []


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("train.steps", 0, "train.steps = 0: accepted is a whole number, 1 or more"),
        ("run.seed", -1, "accepted is a whole number, 0 or more and below 2^63"),
        ("train.clip_grad_norm", "x", "'x': accepted is a number, above 0, or null"),
        ("run.name", "a b", "accepted is a text of 1 to 64 letters, digits, dots, underscores"),
        ("run.name", 2024, "and hyphens, in quotes: '\"2024\"'"),
        ("optimizer.lr", float("inf"), "accepted is a number, above 0, and finite"),
        ("optimizer.betas", [0.9], "[0.9]: accepted is two numbers, 0 or more and below 1"),
        ("schedule.reduce_gradients", "perhaps", "'perhaps': accepted is true, false or auto"),
        ("schedule.scheme", "zbv", "or zero3-offload; did you mean zb-v?"),
        ("model.dtype", "int8", "'int8': accepted is fp32, bf16 or fp16"),
        ("memory.host_limit", -1, "accepted is a size such as 20G or 512M or null"),
    ],
)
def test_words(key: str, value: Any, words: str) -> None:
    assert words in refusal(with_value(key, value))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "train.stepz=3",
            "train.stepz: unknown key; did you mean train.steps? Known keys are steps",
        ),
        ("train.lr=3", "train.lr: unknown key; did you mean optimizer.lr?"),
        ("lr=3", "lr: unknown key; did you mean optimizer.lr? Known keys are run, model"),
        ("global_bach=3", "did you mean train.global_batch?"),
        ("optimiser.lr=3", "optimiser: unknown key; did you mean optimizer?"),
        ("cluster.nodes=[{nam: a}]", "cluster.nodes.0.nam: unknown key; did you mean cluster.no"),
        ("train.zzz=3", "train.zzz: unknown key; known keys are steps"),
        ("memory=20G", "memory = '20G': accepted is a section with host_limit, device_limit"),
    ],
)
def test_unknown_keys_suggest_what_was_meant(setting: str, words: str) -> None:
    assert words in refusal(apply_overrides(MINIMAL, (setting,)))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("schedule.scheme", "1F1B", "1f1b"),
        ("schedule.scheme", "ZB_V", "zb-v"),
        ("model.dtype", "bfloat16", DType.BF16),
        ("model.dtype", "torch.float16", DType.FP16),
        ("model.dtype", "half", DType.FP16),
        ("optimizer.grad_dtype", "float32", DType.FP32),
        ("optimizer.name", "AdamW", "adamw"),
        ("optimizer.settle", "Auto", "auto"),
    ],
)
def test_choices_in_other_spellings(key: str, value: str, expected: str) -> None:
    data = with_value(key, value)
    if expected is DType.FP16:
        data["optimizer"] = {"grad_dtype": "fp16"}
    section, name = key.split(".")
    config = parse_config(data)
    assert getattr(getattr(config, section), name) == expected


def test_all_mistakes_are_told_once_each() -> None:
    data = {**MINIMAL, "train": {"steps": 0, "stepz": 1}, "schedule": {"reduce_gradients": "x"}}
    message = refusal(data)
    assert message.count("train.steps = 0") == message.count("schedule.reduce_gradients") == 1
    assert message.count("; ") == 3  # three mistakes, one of them with a suggestion
