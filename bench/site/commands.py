"""The reference page docs/COMMANDS.md: ``python -m bench.site.commands``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import typer
from typer.testing import CliRunner

from penstock.client.main import app

WIDTH = 80
HEAD = """# Commands

Written by `make docs`: the help of every command. Exit codes and signals are in
[OPERATION.md](OPERATION.md).
"""


def markdown() -> str:
    """Returns the page."""
    parts = [HEAD]
    for words in ((), *names(typer.main.get_command(app))):
        title = " ".join(("penstock", *words))
        parts.append(f"\n## {title}\n\n```text\n{help_of(words)}\n```\n")
    return "".join(parts)


def names(group: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the words of every command that help shows, those of a group after the group."""
    for name, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        yield (*before, name)
        if hasattr(command, "commands"):
            yield from names(command, (*before, name))


def help_of(words: tuple[str, ...]) -> str:
    """Returns the help of a command on a terminal of :data:`WIDTH` columns.

    Raises:
        RuntimeError: the command has no help.
    """
    environment = {"COLUMNS": str(WIDTH), "TERM": "dumb", "NO_COLOR": "1"}
    shown = CliRunner().invoke(app, [*words, "--help"], env=environment, prog_name="penstock")
    if shown.exit_code:
        raise RuntimeError(f"penstock {' '.join(words)} --help: {shown.output}")
    return "\n".join(line.rstrip() for line in shown.output.strip().splitlines())


if __name__ == "__main__":
    sys.stdout.write(markdown())
