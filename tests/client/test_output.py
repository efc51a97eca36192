"""No text of a stranger gives a command to the terminal: every command is driven with names that
would.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from rich.text import Text
from safetensors.torch import save_file

from penstock.client.main import app, main
from penstock.client.views.console import Console
from penstock.client.views.output import Door
from penstock.host.trust import printable
from tests.hostile import configuration, record, template

NASTY = "a\x1b[31mred\x1b]0;title\x07\r\b\u202eb\x9b2J"
"""A name that a terminal would obey, without a line end."""
FORGED = f"{NASTY}\npenstock: all is well"
CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs a command of the command line; returns its exit code, and all that it has written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")

    def of(*words: str) -> tuple[int, str]:
        written = [io.TextIOWrapper(io.BytesIO(), "utf-8", "surrogatepass") for _ in range(2)]
        monkeypatch.setattr(sys, "argv", ["penstock", *words])
        monkeypatch.setattr(sys, "stdout", written[0])
        monkeypatch.setattr(sys, "stderr", written[1])
        with pytest.raises(SystemExit) as ended:
            main()
        for each in written:
            each.flush()
        text = "".join(each.buffer.getvalue().decode("utf-8", "surrogatepass") for each in written)  # type: ignore[attr-defined]
        return int(ended.value.code or 0), text

    return of


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields each command with its words."""
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, inner in command.commands.items():
        yield from leaves(inner, (*words, name))


COMMANDS = dict(leaves(typer.main.get_command(app)))


def texts_of(command: Any) -> Iterator[list[str]]:
    """Yields words after a command: each argument, and each option that takes a text, is nasty."""
    needed = [NASTY for each in command.params if each.param_type_name == "argument"]
    yield needed
    yield [*needed, f"--{NASTY}"]
    yield [*needed, NASTY, NASTY, NASTY]
    for option in command.params:
        if option.param_type_name == "option" and not option.is_flag:
            yield [*needed, option.opts[0], NASTY]
            yield [*needed, option.opts[0], f"{NASTY}={NASTY}"]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_prints_nasty_words_as_text(
    words: tuple[str, ...], run: Callable[..., tuple[int, str]]
) -> None:
    for others in texts_of(COMMANDS[words]):
        code, text = run(*words, *others)
        assert not CONTROL.search(text), (others, text)
        assert "penstock: internal error" not in text, (others, text)
        assert code != 1, (others, text)


def _tensors(folder: Path) -> list[str]:
    (folder / FORGED).mkdir()
    tensors = {FORGED: torch.zeros(2), f"{NASTY}.weight": torch.zeros(2, dtype=torch.int32)}
    save_file(tensors, folder / FORGED / "model.safetensors")
    return ["inspect", str(folder / FORGED)]


def _imported(folder: Path) -> list[str]:
    (folder / "text.txt").write_text("some text " * 100)
    config = configuration(folder, folder / "text.txt")
    return ["import", _tensors(folder)[1], "--config", str(config), "--run-dir", "a", "--dry-run"]


def _refused_by_template(folder: Path) -> list[str]:
    text = "{{ raise_exception(messages[0].content) }}"
    turns = [{"role": "user", "content": FORGED}, {"role": "assistant", "content": "b"}]
    return ["data", str(template(folder / FORGED, text, {"messages": turns}))]


def _columns(folder: Path) -> list[str]:
    return ["data", str(record(folder, json.dumps({FORGED: 1, f"{NASTY}2": 2})))]


def _shown_rows(folder: Path) -> list[str]:
    lines = "\n".join(json.dumps({"text": f"{NASTY} {n} " * 9}) for n in range(9))
    return ["data", str(record(folder / NASTY, lines))]


def _model(folder: Path) -> list[str]:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": FORGED}))
    return ["estimate", str(folder / "model")]


def _converted(folder: Path) -> list[str]:
    fields = {"model_name_or_path": NASTY, FORGED: FORGED, "dataset_name": NASTY}
    (folder / "given.yaml").write_text(yaml.safe_dump(fields))
    return ["convert", "trl", str(folder / "given.yaml"), "--force"]


def _keys(folder: Path) -> list[str]:
    config = configuration(folder, folder / "text.txt", **{FORGED: {}, "run": {"dir": NASTY}})
    return ["train", str(config)]


@pytest.mark.parametrize(
    "make",
    [
        _tensors,
        _imported,
        _refused_by_template,
        _columns,
        _shown_rows,
        _model,
        _converted,
        _keys,
    ],
)
def test_names_in_files_are_text(
    make: Callable[[Path], list[str]], run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    words = make(tmp_path)
    code, text = run(*words)
    assert not CONTROL.search(text), text
    assert not re.search(r"^penstock: all is well", text, re.MULTILINE), text
    assert r"a\x1b[31mred\x1b]0;title\x07" in text
    assert code in (0, 2) and "penstock: internal error" not in text, text


def test_own_colours_pass_and_those_of_a_text_do_not() -> None:
    stream = io.StringIO()
    door = Door(stream)
    console = Console(file=door, force_terminal=True, color_system="standard", width=200)
    console.print(Text(NASTY, style="green"))
    door.write(f"{NASTY}\n")
    shown = printable(NASTY)
    removed = shown.replace(r"\x07\r\x08", "")  # rich leaves these out
    assert stream.getvalue() == f"\x1b[32m{removed}\x1b[0m\n{shown}\n"
