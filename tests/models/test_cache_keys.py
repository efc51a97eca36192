"""Caches know all inputs of their results.

Each test changes an input under its name, with its size and times. A second preparation and another
run then have the result of a run without a cache.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config.schema import Config, parse_config
from penstock.host import world
from penstock.host.errors import ConfigError
from penstock.models.data import cache
from penstock.models.data.rows.sources import RowSources
from penstock.models.data.token_sources import TokenSources
from penstock.models.inference import references
from penstock.models.inference.references import write_references
from penstock.models.prepare import prepare
from tests.data.dpo.make import pairs
from tests.folders import TEXT, save_model

TALK = [{"role": "user", "content": "J"}, {"role": "assistant", "content": "Q"}]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 320}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 96}
WEIGHTS = "adapter_model.safetensors"


class Later(world.World):
    """A world in which every file is two minutes old."""

    def wall(self) -> float:
        """Returns a time in the future."""
        return super().wall() + 120.0


@dataclass(frozen=True, kw_only=True)
class Project:
    """A folder with a model, an adapter and data; the sections ``data`` and others of its runs."""

    folder: Path
    sections: dict[str, Any]

    def config(self) -> Config:
        """Returns the configuration of a run."""
        return parse_config({"train": {"global_batch": 2}, **self.sections})

    def made(self, name: str) -> dict[str, bytes]:
        """Prepares a run; returns all of its files that training reads."""
        config, run_dir = self.config(), self.folder / name
        run_dir.mkdir(exist_ok=True)
        (run_dir / "resolved.yaml").write_text(config.to_yaml())
        prepare(config, run_dir)
        if config.trains_on_pairs:
            write_references(run_dir, lambda line: None)
        known = ["table.json", "model/config.json", "model/adapter.json", "model/constants.*"]
        paths = [
            path
            for pattern in (*known, "data/**/*.bin", "data/*.sums")
            for path in run_dir.glob(pattern)
        ]
        return {str(path.relative_to(run_dir)): path.read_bytes() for path in paths}


@pytest.fixture(autouse=True, params=["new", "settled"])
def _age(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Files count by their content if they are new, and otherwise by the times of the kernel."""
    if request.param == "settled":
        world.enter(Later())
    yield
    world.enter(world.REAL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all inputs, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_model(tmp_path / "m", "llama", **SIZES)
    save_adapter(tmp_path / "a")
    for name in ("text.txt", "other.txt"):
        (tmp_path / name).write_text(TEXT + "J Q " * 20)
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 4)
    (tmp_path / "template.jinja").write_text((tmp_path / "m/chat_template.jinja").read_text())
    records = (json.dumps(record) + "\n" for record in pairs("text", 3))
    (tmp_path / "pairs.jsonl").write_text("".join(records))
    (np.arange(400, dtype=np.uint16) % 300).tofile(tmp_path / "tokens.bin")
    return tmp_path


def save_adapter(folder: Path) -> None:
    """Writes an adapter of the queries as PEFT does."""
    folder.mkdir()
    names = [f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_" for n in range(2)]
    parts = {"A": torch.randn(4, 16), "B": torch.randn(16, 4)}
    tensors = {
        f"{name}{part}.weight": value.clone() for name in names for part, value in parts.items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def swapped(one: bytes, other: bytes) -> Callable[[bytes], bytes]:
    """Exchanges all occurrences of two texts of one length."""
    return lambda content: content.replace(one, b"\0").replace(other, one).replace(b"\0", other)


def noisy(path: Path) -> None:
    """Changes the weights in a file."""
    tensors = {name: tensor * 1.5 for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def rewrite(path: Path, change: Callable[[bytes], bytes] | None) -> None:
    """Changes a file in place; its size stays, and its times are set back."""
    before, content = path.stat(), path.read_bytes()
    while True:  # The kernel's clock of files has ticks of some milliseconds.
        if change is None:
            noisy(path)
        else:
            path.write_bytes(change(content))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = path.stat()
        assert path.read_bytes() != content and after.st_size == before.st_size
        if after.st_ctime_ns != before.st_ctime_ns:
            return


TOKENIZER = swapped(b'"J":', b'"Q":')
DPO = {"objective": "dpo", "sequence_length": 96}
CASES: dict[str, tuple[dict[str, Any], str, Callable[[bytes], bytes] | None]] = {
    "text": ({"path": "text.txt"}, "text.txt", swapped(b"h", b"w")),
    "text's tokenizer": ({"path": "text.txt"}, "m/tokenizer.json", TOKENIZER),
    "evaluation": (
        {"path": "text.txt", "eval_path": "other.txt", "eval": True},
        "other.txt",
        swapped(b"h", b"w"),
    ),
    "tokens": ({"tokens": "tokens.bin"}, "tokens.bin", lambda content: content[::-1][1:] + b"\0"),
    "records": ({"path": "chat.jsonl"}, "chat.jsonl", swapped(b"J", b"Q")),
    "records' tokenizer": ({"path": "chat.jsonl"}, "m/tokenizer.json", TOKENIZER),
    "template": (
        {"path": "chat.jsonl", "chat_template": "template.jinja"},
        "template.jinja",
        swapped(b"{{ m['role'] }}", b"{{ m['ROLE'] }}"),
    ),
    "the model's template": (
        {"path": "chat.jsonl"},
        "m/chat_template.jinja",
        swapped(b"{{ m['role'] }}", b"{{ m['ROLE'] }}"),
    ),
    "reference of the model": ({"path": "pairs.jsonl", **DPO}, "m/model.safetensors", None),
    "reference of the adapter": ({"path": "pairs.jsonl", **DPO}, f"a/{WEIGHTS}", None),
    "settings of the adapter": (
        {"path": "pairs.jsonl", **DPO},
        "a/adapter_config.json",
        swapped(b'"lora_alpha": 12', b'"lora_alpha": 14'),
    ),
    "configuration of the model": (
        {"path": "text.txt"},
        "m/config.json",
        swapped(b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 1e-05'),
    ),
}


def project(folder: Path, data: dict[str, Any]) -> Project:
    """Returns the project of a case, with absolute paths."""
    data = {"sequence_length": 16, "shuffle": False, **data}
    sections: dict[str, Any] = {"model": {"path": str(folder / "m"), "dtype": "fp32"}}
    if data.pop("eval", False):
        sections["train"] = {"global_batch": 2, "eval_every": 1}
    for key in ("path", "eval_path", "tokens", "chat_template"):
        if key in data:
            data[key] = str(folder / data[key])
    if data.get("objective") == "dpo":
        sections["adapter"] = {"path": str(folder / "a")}
    return Project(folder=folder, sections={**sections, "data": data})


@pytest.mark.parametrize("case", CASES)
def test_a_changed_input_has_a_new_result(
    folder: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, name, change = CASES[case]
    runs = project(folder, data)
    first = runs.made("one")
    assert runs.made("two") == first
    rewrite(folder / name, change)
    again, other = runs.made("one"), runs.made("three")
    shutil.rmtree(folder / "cache", ignore_errors=True)
    expected = runs.made("fresh")
    assert expected != first, "the input changes the result"
    assert again == expected, "a run that has not started is prepared of what is there now"
    assert other == expected, "another run takes nothing that was made of another input"


@pytest.mark.parametrize("case", ["text", "records", "reference of the adapter"])
def test_a_result_of_an_input_that_changed_meanwhile_is_kept_for_no_other_run(
    folder: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input changes after its key was computed, and back again before the next run."""
    data, name, change = CASES[case]
    runs = project(folder, data)
    maker = {
        "text": (TokenSources, "_write_tokens"),
        "records": (RowSources, "_draw"),
        "reference of the adapter": (references._References, "_computed"),
    }[case]
    make, content = getattr(*maker), (folder / name).read_bytes()

    def made(*arguments: Any) -> Any:
        rewrite(folder / name, change)
        return make(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(*maker, made)
        first = runs.made("one")
    rewrite(folder / name, lambda _: content)
    other = runs.made("two")
    shutil.rmtree(folder / "cache", ignore_errors=True)
    assert other == runs.made("fresh") != first


def test_another_folder_with_the_same_adapter_has_the_same_references(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = project(folder, CASES["reference of the adapter"][0])
    first = runs.made("one")
    shutil.copytree(folder / "a", folder / "b")
    runs.sections["adapter"]["path"] = str(folder / "b")
    monkeypatch.setattr(references._References, "_computed", None)
    assert runs.made("two") == first


def test_references_of_a_run_that_has_started_are_of_one_model(folder: Path) -> None:
    """An evaluation set that is added later needs the model at the start of the run."""
    runs = project(folder, CASES["reference of the model"][0])
    first = runs.made("one")
    (folder / "one/state").mkdir()
    (folder / "more.jsonl").write_text((folder / "pairs.jsonl").read_text())
    sets = {"sets": [{"name": "more", "path": str(folder / "more.jsonl"), "every": 1}]}
    runs.sections["eval"] = sets
    made = runs.made("one")
    key = "data/references-train.bin"
    assert made["data/eval-more/references-train.bin"] == made[key] == first[key]
    rewrite(folder / f"a/{WEIGHTS}", None)
    sets["sets"][0]["name"] = "third"
    with pytest.raises(ConfigError, match=r"eval\.third needs .* the run's start, and its files"):
        runs.made("one")


def test_rows_with_the_date_of_the_day_are_of_that_day(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "{{ strftime_now('%Y-%m-%d') }}" + (folder / "template.jinja").read_text()
    (folder / "template.jinja").write_text(text)
    runs = project(folder, CASES["template"][0] | {"sequence_length": 64})
    first = runs.made("one")
    assert runs.made("one") == first
    monkeypatch.setattr("time.strftime", lambda *form: "2020-01-01")
    from transformers.utils import chat_template_utils

    chat_template_utils._compile_jinja_template.cache_clear()

    class Past(chat_template_utils.datetime):  # type: ignore[misc, name-defined]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            """Returns a day of the past."""
            return super().now(tz).replace(year=2020, month=1, day=1)

    monkeypatch.setattr(chat_template_utils, "datetime", Past)
    again, other = runs.made("one"), runs.made("two")
    assert again == other != first


def test_other_code_has_other_keys(tmp_path: Path) -> None:
    (tmp_path / "code/part").mkdir(parents=True)
    file = tmp_path / "code/part/one.py"
    file.write_text("a = 1\n")
    first = cache.made_by(tmp_path / "code")
    cache.made_by.cache_clear()
    assert cache.made_by(tmp_path / "code") == first
    cache.made_by.cache_clear()
    rewrite(file, swapped(b"1", b"2"))
    assert cache.made_by(tmp_path / "code") != first
    cache.made_by.cache_clear()
