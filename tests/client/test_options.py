"""Options that texts name: helps, examples, errors and pages name only those that commands have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock.client.main import app

ROOT = Path(__file__).parents[2]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![a-z0-9_-]|\.\w)")
"""An option; ``--train.steps`` is none."""
LINE = re.compile(r"\bpenstock((?: (?!and\b|then\b)[a-z]+)*)((?:(?!, |: |\. )[^`\n|;&#)])*)")
"""A command line in a text: words of the command, and what follows up to its end."""

OTHERS = {
    *("--ntasks-per-node", "--ntasks", "--cpus-per-task", "--mem", "--signal"),
    *("--partition", "--nproc-per-node", "--no-python"),
    *("--repo-type", "--revision", "--dataset"),
    *("--mount-proc", "--local-dir", "--cpuset-cpus", "--cpus", "--shm-size", "--ulimit"),
}
"""Options of srun, sbatch, torchrun, unshare, hf, modelscope and docker that texts name."""


def commands(group: Any = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each command of ``penstock`` with its words; the program itself has none."""
    group = typer.main.get_command(app) if group is None else group
    yield prefix.strip(), group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{prefix} {name}")


COMMANDS: Mapping[str, Any] = dict(commands())


@cache
def options_of(name: str) -> set[str]:
    """Returns all options of a command. A group of commands has those of its commands too."""
    found = {"--help"}
    for words, command in COMMANDS.items():
        if words == name or (name and words.startswith(f"{name} ")):
            found |= {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    return found


ALL = {option for name in COMMANDS for option in options_of(name)}


def wrong(text: str, names: set[str]) -> list[str]:
    """Returns the options of a text that do not exist: in a line such as ``penstock train``, of
    that command; elsewhere, of each of the commands ``names``.
    """
    found = []

    def line(match: re.Match[str]) -> str:
        words = match[1].split()
        while words and " ".join(words) not in COMMANDS:
            words.pop()
        name = " ".join(words)
        # A sentence that only mentions the program gives options of other commands.
        known = options_of(name) if name else ALL
        given = [option for option in OPTION.findall(match[2]) if option not in known]
        found.extend(f"penstock {name}: {option}" for option in given)
        return ""

    rest = LINE.sub(line, re.sub(r"--[^\n>]*-->", "", text))  # without arrows of diagrams
    known = set().union(*map(options_of, names)) | OTHERS
    return found + [option for option in OPTION.findall(rest) if option not in known]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_helps_name_options_of_their_command(name: str) -> None:
    command = COMMANDS[name]
    texts = [command.help, command.epilog, command.short_help]
    texts += [getattr(parameter, "help", None) for parameter in command.params]
    assert [
        w for text in texts if text for w in wrong(text, {name} if name else set(COMMANDS))
    ] == []


FILES = sorted(
    path
    for folder in ("client", "daemons", "models", "planner", "protocol", "shm", "workers")
    for path in (ROOT / folder).rglob("*.py")
    if "generated" not in path.parts
)
PLACES = {
    "client/planning/tuning.py": {"tune"},
    "client/planning/plan_command.py": {"plan", "simulate"},
    "client/planning/profiling.py": {"profile"},
    "client/export.py": {"export"},
    "client/doctor.py": {"doctor", "train"},
    "client/commands/keys.py": {"keys"},
    "client/commands/deploy.py": {"deploy", "node"},
    "client/views/trace/comparison.py": {"trace", "train"},
    "client/views/trace/trace_report.py": {"trace"},
    "client/views/trace/step_report.py": {"trace"},
    "client/views/report/": {"report", "train"},
    "chaos/": {"chaos", "train"},
}
"""Modules whose texts are of some commands; options of others' texts exist for some command."""


def texts_of(path: Path) -> Iterator[str]:
    """Yields the texts of a module, docstrings among them; values are left out of f-strings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(value) for value in node.values}
            values = node.values
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in values)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner
        ):
            yield node.value


def test_texts_of_modules_name_options_that_exist() -> None:
    mistakes = []
    for path in FILES:
        place = path.relative_to(ROOT).as_posix()
        names = next((names for start, names in PLACES.items() if place.startswith(start)), None)
        for text in texts_of(path):
            if text.startswith("--") and " " not in text:
                continue  # an argument for another program, or a declaration
            mistakes += [f"{place}: {word}" for word in wrong(text, names or set(COMMANDS))]
    assert mistakes == []


PAGES = sorted((ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md"))


def lines_of(text: str) -> Iterator[str]:
    """Yields the command lines of a page: of its code blocks, and of code inside its sentences."""
    blocks = re.compile(r"^( *)```.*?\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
    for block in blocks.finditer(text):
        for line in block[2].replace("\\\n", " ").splitlines():
            if re.match(r"\s*(?:[\w@.-]+)?\$? ?penstock ", line):
                yield line.partition(" #")[0]
    for code in re.findall(r"`([^`]+)`", blocks.sub("", text)):
        if code.startswith("penstock "):
            yield " ".join(code.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_give_commands_that_exist(page: Path) -> None:
    mistakes = []
    for line in lines_of(page.read_text(encoding="utf-8")):
        words = line[line.index("penstock ") :].split()
        if not words[1].startswith("-") and words[1].isalpha() and words[1].islower():
            mistakes += [line] if words[1] not in COMMANDS else []
        mistakes += [f"{line}: {word}" for word in wrong(line, set(COMMANDS))]
    assert mistakes == []


def test_wrong_options_are_noticed() -> None:
    assert wrong("see --scheme", {"tune"}) == ["--scheme"]
    assert wrong("see --schemes", {"tune"}) == []
    text = "penstock tune run.yaml --scheme spipe, or penstock plan --scheme spipe --nonsense"
    assert wrong(text, {"plan"})[:1] == ["penstock tune: --scheme"]
    assert "penstock plan: --nonsense" in wrong(
        "`penstock plan` penstock plan --nonsense", {"plan"}
    )
    assert wrong("penstock keys make keys --days 3 --weeks 2", {"keys"}) == [
        "penstock keys make: --weeks"
    ]
    assert list(
        lines_of("text `penstock\nlist --json` and\n```\nhost$ penstock train x  # --no\n```\n")
    ) == [
        "host$ penstock train x ",
    ]
