"""Configurations that are no good as files or as YAML: refused with line and key, within bounds."""

from __future__ import annotations

import os
import socket
import tracemalloc
from pathlib import Path

import pytest

from penstock.config.schema import Config, load_config
from penstock.config.words import apply_overrides
from penstock.host import inputs
from penstock.host.errors import ConfigError, ProtocolError
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.profile import load_profile

MINIMAL = "model: {hf: {model_type: llama}}\ndata: {path: '@stdlib'}\n"
"""Lines 1 and 2 of most files below."""

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
"""Stands for 9^10 texts."""


def load(folder: Path, text: str | bytes, *overrides: str) -> Config:
    """Loads a configuration of this text."""
    path = folder / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(path, overrides)


def refusal(folder: Path, text: str | bytes, *overrides: str) -> str:
    """Returns why a text is refused, without the name of the file."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value).replace(f"configuration {folder}/c.yaml: ", "", 1)


@pytest.mark.parametrize(
    ("text", "key", "second", "first"),
    [
        ("train: {steps: 2}\ntrain: {steps: 200}\n", "train", 4, 3),
        ("train:\n steps: 2\n clip_grad_norm: 1\n steps: 3\n", "train.steps", 6, 4),
        ("train: {steps: 2, 'steps': 3}\n", "train.steps", 3, 3),
        ("cluster:\n nodes:\n - name: a\n   name: b\n", "cluster.nodes.0.name", 6, 5),
        ("x: &x {a: 1}\ny:\n <<: *x\n <<: *x\n", "y.<<", 6, 5),
        ("x: {1: a, 0x1: b}\n", "x.0x1", 3, 3),
        ("train: {no: 1, off: 1}\n", "train.off", 3, 3),
    ],
)  # fmt: skip
def test_a_key_given_twice_is_refused_with_both_lines(
    tmp_path: Path, text: str, key: str, second: int, first: int
) -> None:
    said = refusal(tmp_path, MINIMAL + text)
    assert said.startswith(f"line {second}: {key}: is given twice, first on line {first}")


def test_a_key_given_twice_inside_a_model_is_refused(tmp_path: Path) -> None:
    text = "model:\n hf:\n  model_type: llama\n  rope:\n   a: 1\n   a: 2\ndata: {path: x}\n"
    assert refusal(tmp_path, text) == "line 6: model.hf.rope.a: is given twice, first on line 5"


def test_keys_beside_a_merge_replace_what_is_merged(tmp_path: Path) -> None:
    text = f"{MINIMAL}run: {{name: x}}\ntrain: &t {{steps: 2}}\n"
    assert load(tmp_path, text).train.steps == 2
    text = (
        "model: {hf: {model_type: llama, a: &a {x: 1, y: 2}, b: {<<: *a, x: 3}}}\ndata: {path: x}\n"
    )
    hf = load(tmp_path, text).model.hf
    assert hf is not None and hf["b"] == {"x": 3, "y": 2}


def test_an_override_changes_no_other_key_that_shares_its_value(tmp_path: Path) -> None:
    text = "model: {hf: {model_type: llama, a: &a {x: 1}, b: *a}}\ndata: {path: x}\n"
    hf = load(tmp_path, text, "model.hf.a.x=2").model.hf
    assert hf is not None and (hf["a"], hf["b"]) == ({"x": 2}, {"x": 1})


@pytest.mark.parametrize("first", ["train.steps=2", "train.steps=3"])
@pytest.mark.parametrize("second", ["train.steps=3", "train={steps: 3}"])
def test_an_override_that_takes_back_another_is_refused(first: str, second: str) -> None:
    with pytest.raises(ConfigError, match=r"--set train.*given twice"):
        apply_overrides({}, (first, second))
    changed = apply_overrides({}, ("train={micro_batch: 1}", first))
    assert changed["train"] == {"micro_batch": 1, "steps": int(first[-1])}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("!!int abc", "line 4: train.steps: 'abc' is no !!int"),
        ("!!int ''", "line 4: train.steps: '' is no !!int"),
        ("!!float 1.x", "line 4: train.steps: '1.x' is no !!float"),
        ("!!bool abc", "line 4: train.steps: 'abc' is no !!bool"),
        ("!!timestamp 2026-13-45", "line 4: train.steps: the tag !!timestamp is not taken here"),
        ("2026-13-45", "line 4: train.steps = '2026-13-45': accepted is a whole number"),
        ("!!binary aGk=", "line 4: train.steps: the tag !!binary is not taken here"),
        ("!!set {a}", "line 4: train.steps: the tag !!set is not taken here"),
        ("!!seq 3", "line 4: train.steps: the tag !!seq is not taken here"),
        ("!!python/object/apply:os.system [id]", "line 4: train.steps: the tag !!python/object"),
        ("!mine 3", "line 4: train.steps: the tag !mine is not taken here"),
        ("1" * 5000, "line 4: train.steps: a number of 5,000 characters"),
        (f"0x{'f' * 5000}", "line 4: train.steps: a number of 5,002 characters"),
        ("1" + ":59" * 2000, "line 4: train.steps: a number of 6,001 characters"),
        (f"'{'1' * 5000}'", "line 4: train.steps = '1111"),
        ("1" * 40, f"line 4: train.steps: {'1' * 40}: a whole number beyond 64 bits"),
        (".nan", "line 4: train.steps: not a number"),
        ("-.inf", "line 4: train.steps = -inf: accepted is a whole number"),
        ("1.0e+999", "line 4: train.steps: 1.0e+999: a number too large"),
        ('"a\\0b"', "line 4: train.steps: a text with a NUL character"),
        ('"\\ud800"', "line 4: train.steps: U+D800 is half a character"),
        ("[" * 5000, "line 4: train.steps.0.0.0"),
        ("{a: " * 5000, "line 4: train.steps.a.a.a"),
        ("&a [*a]", "line 4: train.steps.0: *a stands inside of what &a names"),
        ("&a {<<: *a}", "line 4: train.steps.<<: *a stands inside of what &a names"),
        ("{? [a, b] : 3}", "line 4: train.steps: a key is a list or a mapping"),
        ("*a", "not valid YAML: line 4: found undefined alias 'a'"),
        ("\x01", "line 4: the character U+0001 is not allowed"),
        ("{a: 1", "not valid YAML: line 5: expected ',' or '}'"),
    ],
)  # fmt: skip
def test_values_that_are_none_are_refused_with_line_and_key(
    tmp_path: Path, value: str, words: str
) -> None:
    said = refusal(tmp_path, f"{MINIMAL}train:\n  steps: {value}\n")
    assert said.removeprefix(f"{tmp_path}/c.yaml: ").startswith(words)
    assert len(said) < 500


@pytest.mark.parametrize("size", ["1" * 400 + "G", "9" * 20])
def test_sizes_without_measure_are_refused(tmp_path: Path, size: str) -> None:
    said = refusal(tmp_path, f"{MINIMAL}memory:\n  host_limit: '{size}'\n")
    assert "line 4: memory.host_limit" in said and "below 2^63" in said


def test_dates_are_texts(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL + "run: {name: 2026-01-31}\n").run.name == "2026-01-31"


def test_a_mistake_names_its_line_unless_it_comes_from_the_command_line(tmp_path: Path) -> None:
    text = f"{MINIMAL}train:\n  steps: 0\n  stepz: 1\n"
    said = refusal(tmp_path, text)
    assert "line 4: train.steps = 0" in said and "line 5: train.stepz: unknown key" in said
    assert "c.yaml: train.steps = 0" in refusal(
        tmp_path, f"{MINIMAL}train: {{steps: 1}}\n", "train.steps=0"
    )


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        f"a: &a {'x' * 500_000}\nb: [{', '.join(['*a'] * 9_000)}]\n",
        "a:\n" + "- 1\n" * 200_000,
        f"a: &a {{b: 1}}\nc: &c [{', '.join(['*a'] * 300)}]\nd: [{', '.join(['*c'] * 300)}]\n",
    ],
    ids=["aliases", "texts", "values", "mappings"],
)
def test_values_without_measure_take_little_memory(tmp_path: Path, text: str) -> None:
    tracemalloc.start()
    try:
        said = refusal(tmp_path, text)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "too many values: more than 20,000, with aliases written out" in said
    assert said.startswith("line ")
    assert peak_bytes < 200 << 20


def test_many_mistakes_are_counted_and_the_first_ones_listed(tmp_path: Path) -> None:
    said = refusal(tmp_path, MINIMAL + "".join(f"k{number}: 1\n" for number in range(5000)))
    assert "line 22: k19: unknown key" in said and said.endswith("; and 4,980 mistakes more")
    assert "k20" not in said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (MINIMAL.encode("utf-16"), "its text is UTF-16; save it as UTF-8"),
        (MINIMAL.encode("utf-16-be"), "line 1: the character U+0000 is not allowed"),
        (f"{MINIMAL}run: {{name: é}}".encode("latin-1"), "line 3: byte 0xe9 at offset 69"),
        (bytes(range(256)) * 100, "line 2: byte 0x80 at offset 128 is no UTF-8"),
        (b"a: 1\n" * (1 << 20), "it has 5,242,880 bytes, and at most 1,048,576 are read"),
        (b"", "expected sections (run, model, data, …), got nothing"),
    ],
)  # fmt: skip
def test_files_of_other_kinds_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in refusal(tmp_path, content)


def test_a_byte_order_mark_is_no_part_of_a_configuration(tmp_path: Path) -> None:
    assert load(tmp_path, b"\xef\xbb\xbf" + MINIMAL.encode()) == load(tmp_path, MINIMAL)


@pytest.fixture
def silent_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a pipe that nobody writes to."""
    monkeypatch.setattr(inputs, "PIPE_S", 0.01)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_what_is_no_file_is_refused(tmp_path: Path, silent_pipe: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    for path, words in (
        (tmp_path, "it is a folder"),
        (Path("/dev/zero"), "it is a character device"),
        (tmp_path / "socket", "it is a socket"),
        (silent_pipe, "a pipe without an end"),
        (tmp_path / "missing", "No such file"),
    ):
        for read in (load_config, load_profile):
            with pytest.raises(ConfigError, match=words) as caught:
                read(path)
            assert str(path) in str(caught.value)


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, MINIMAL.encode())
    os.close(writing)
    try:
        assert load_config(Path(f"/dev/fd/{reading}")) == load(tmp_path, MINIMAL)
    finally:
        os.close(reading)


def test_plans_and_profiles_with_a_key_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="the key 'format' is given twice"):
        Plan.from_json('{"format": 1, "format": 2}')
    path = tmp_path / "profile.json"
    path.write_text('{"device": "cpu", "machine": {"a": 1, "a": 2}}')
    with pytest.raises(ConfigError, match="the key 'a' is given twice"):
        load_profile(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adapter:\n", "line 3: adapter: is empty; write a value or remove the key; accepted is a"),
        ("adapter: {path: }\n", "line 3: adapter.path: is empty; write"),
        ("train:\n  stop_early:\n", "line 4: train.stop_early: is empty; write"),
        ("train: {clip_grad_norm: , steps: 3}\n", "line 3: train.clip_grad_norm: is empty; write"),
        ("train: {steps: }\n", "line 3: train.steps: is empty; write"),
        ("cluster: {grace_seconds: }\n", "line 3: cluster.stop_grace_s: is empty; write"),
        ("eval: {sets: [{name: a, path: }]}\n", "line 3: eval.sets.0.path: is empty; write"),
    ],
)
def test_a_key_without_a_value_is_refused(tmp_path: Path, text: str, message: str) -> None:
    refused = refusal(tmp_path, MINIMAL + text)
    assert refused.removeprefix(f"{tmp_path}/c.yaml: ").startswith(message)
    assert refused.count("is empty") == 1


def test_a_merged_or_nested_key_without_a_value_is_refused(tmp_path: Path) -> None:
    text = "model: &m {hf: {model_type: llama, layers: }}\ndata: {path: '@stdlib'}\n"
    assert "model.hf.layers: is empty; write" in refusal(tmp_path, text)
    text = "data: {path: x, sources: &s [{path: a, split: }]}\nmodel: {hf: {model_type: llama}}\n"
    assert "data.sources.0.split: is empty" in refusal(tmp_path, text)
    text = f"{MINIMAL}cluster: {{nodes: [&n {{name: a, cores: }}, {{<<: *n, name: b}}]}}\n"
    assert "cluster.nodes.1.cores: " in refusal(tmp_path, text)


def test_a_null_that_is_written_is_a_value(tmp_path: Path) -> None:
    text = f"{MINIMAL}adapter: null\ntrain: {{clip_grad_norm: ~, stop_early: null}}\neval:\n"
    config = load(tmp_path, text)
    assert config.adapter is None and config.train.clip_grad_norm is None
    assert load(tmp_path, config.to_yaml()) == config


def test_the_command_line_fills_in_an_empty_key(tmp_path: Path) -> None:
    config = load(tmp_path, f"{MINIMAL}adapter:\ntrain: {{epochs: }}\n", "adapter.r=4", "train={}")
    assert config.adapter is not None and config.adapter.r == 4
    refused = refusal(tmp_path, MINIMAL, "adapter=")
    assert refused == "--set adapter: adapter is empty; write a value or null"
    refused = refusal(tmp_path, MINIMAL, "adapter={path: }")
    assert refused == "--set adapter: adapter.path is empty; write a value or null"
