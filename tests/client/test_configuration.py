"""``penstock config``, the reference page and the JSON schema say what the types say."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from penstock.client.configuration import Key, describe, json_schema, keys_in, page
from penstock.client.main import app
from penstock.config.schema import Config, parse_config
from penstock.config.words import keys_of

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
KEYS = [key for section in Config.model_fields for key in keys_in(section)]


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """What a JSON schema says of a value: the part of the standard that ours is written in."""
    if "anyOf" in schema and not any(accepts(one, value) for one in schema["anyOf"]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    kind = schema.get("type")
    if kind is not None and not isinstance(value, kinds[kind]):
        return False
    if isinstance(value, bool):
        return kind in (None, "boolean")
    if isinstance(value, (int, float)):
        return (
            value >= schema.get("minimum", value)
            and value <= schema.get("maximum", value)
            and not ("exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"])
            and not ("exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"])
        )
    if isinstance(value, str):
        return "pattern" not in schema or re.search(schema["pattern"], value) is not None
    if isinstance(value, list):
        return all(accepts(schema.get("items", {}), item) for item in value)
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        missing = set(schema.get("required", ())) - set(value)
        unknown = set(value) - set(known) if others is False else set()
        return not (missing or unknown) and all(
            accepts(known.get(name, others if isinstance(others, dict) else {}), item)
            for name, item in value.items()
        )
    return True


def shown(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``penstock config``."""
    done = CliRunner().invoke(app, ["config", *arguments], env={"COLUMNS": "100"})
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("name", "generated"), [("CONFIGURATION.md", page), ("penstock.schema.json", json_schema)]
)
def test_the_documents_are_current(name: str, generated: Any) -> None:
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written.rstrip("\n") == generated().rstrip("\n"), f"docs/{name} is old: make docs"


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_every_key_is_explained_and_its_default_is_one(key: Key) -> None:
    assert re.fullmatch(r"[`A-Za-z0-9].*\.", key.explanation, re.DOTALL), key.explanation
    assert key.accepts
    section, name = key.name.split(".", 1)
    if key.default is None or "[]" in name:
        return
    given = {"model": {"hf": {"model_type": "llama"}}, "data": {"path": "@stdlib"}}
    given[section] = {**given.get(section, {}), name: yaml.safe_load(key.default)}
    if section not in ("model", "data"):
        assert parse_config(given) == parse_config({**given, section: {}})


def test_every_key_is_there_once() -> None:
    names = [key.name for key in KEYS]
    assert len(set(names)) == len(names)
    of_sections = {name for name in names if "[]" not in name and name.count(".") == 1}
    assert set(keys_of(Config)) == of_sections


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_editors_accept_the_examples_and_see_mistakes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    line = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert line is not None
    schema = json.loads((path.parent / line[1]).read_text(encoding="utf-8"))
    example = yaml.safe_load(text)
    assert accepts(schema, example)
    for section, key, value in (
        ("train", "steps", 0),
        ("train", "stepz", 3),
        ("model", "dtype", "int8"),
        ("schedule", "scheme", "zb"),
        ("memory", "host_limit", "much"),
        ("optimizer", "cores", "0-"),
        ("emulation", "scale", 2),
        ("cluster", "nodes", [{"host": "b"}]),
    ):
        wrong = copy.deepcopy(example)
        wrong[section] = {**(wrong.get(section) or {}), key: value}
        assert not accepts(schema, wrong), (section, key, value)


@pytest.mark.parametrize(
    "section",
    [
        {"train": None},
        {"schedule": "auto"},
        {"memory": {"host_limit": "1.5G"}},
        {"memory": {"host_limit": 1024}},
        {"optimizer": {"cores": "0-3,8", "leave_cores": "auto"}},
        {"optimizer": {"cores": [0, 1]}},
        {"optimizer": {"leave_cores": "1/4"}},
        {"schedule": {"reduce_gradients": True, "passes": ["mario"]}},
    ],
)
def test_editors_accept_what_loading_accepts(section: dict[str, Any]) -> None:
    whole = {"model": {"hf": {"model_type": "llama"}}, "data": {"path": "@stdlib"}, **section}
    parse_config(whole)
    assert accepts(json.loads(json_schema()), whole)


def test_a_key_a_section_and_everything() -> None:
    code, out, err = shown("train.steps")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "train.steps",
        "  a whole number, 1 or more (steps); default 200",
        "  Committed steps after which the run ends. Give `steps` or `epochs`.",
        "  On a resume: may change: the learning rate follows the new curve from the next step on.",
    ]
    assert shown("steps") == shown("train.steps")
    assert shown("cluster.nodes.host")[1].startswith("cluster.nodes[].host\n")
    _, section, _ = shown("train")
    assert "train.max_skips" in section and "optimizer.lr" not in section
    _, everything, _ = shown()
    assert all(f"  {key.name}\n" in everything for key in KEYS) and section.strip() in everything
    assert max(map(len, describe(None, 80).splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("optimizer.lrr",), "optimizer.lrr: unknown key; did you mean optimizer.lr?"),
        (("stepz",), "stepz: unknown key; did you mean train.steps?"),
        (("train.steps.x",), "train.steps.x: unknown key; train.steps is a whole number"),
        (("train", "--markdown"), "give a name, --json-schema or --markdown"),
    ],
)
def test_what_there_is_not(arguments: tuple[str, ...], words: str) -> None:
    code, out, err = shown(*arguments)
    assert (code, out) == (2, "") and words in err


def test_the_command_prints_both_documents() -> None:
    assert shown("--markdown")[1] == page()
    assert shown("--json-schema")[1] == json_schema() + "\n"
