"""Settings given without ``--set``: what was meant is said, instead of "unexpected argument"."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand

_SETTING = re.compile(r"(?:--)?([a-z_]+(?:\.\w+)*)(=.*)?", re.DOTALL)


class Command(TyperCommand):
    """A command that knows words such as ``train.steps=5`` where it takes ``--set``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse.

        Raises:
            BadParameter: a key of the configuration is given bare; says what would do.
        """
        if any("--set" in option.opts for option in self.params):
            settings = bare_settings(args)
            if settings:
                raise typer.BadParameter(
                    f"keys of the configuration are changed with --set; write {' '.join(settings)}",
                    ctx=ctx,
                )
        return super().parse_args(ctx, args)


def bare_settings(words: list[str]) -> list[str]:
    """The options that were meant by ``train.steps=5``, ``--train.steps=5``, ``--train.steps 5`` or
    ``steps=5``; none for other words.
    """
    found = []
    for before, word, after in zip(["", *words], words, [*words[1:], "VALUE"], strict=False):
        match = _SETTING.fullmatch(word)
        if match is None or before == "--set":
            continue
        key, value = match.groups()
        if value is None and word.startswith("--") and "." in key:
            value = f"={after}"
        if value is not None and (key := _configuration_key(key)):
            found.append(f"--set {key}{value}")
    return found


def _configuration_key(word: str) -> str:
    """``train.steps`` for itself or for ``steps``; empty for what is no key."""
    # Imported here: pydantic takes a while, and most command lines have no such word.
    from penstock.protocol.config import Config
    from penstock.protocol.config_words import keys_of

    known = keys_of(Config)
    section = word.partition(".")[0]
    if "." in word:
        return word if section in Config.model_fields else ""
    return next((key for key, last in known.items() if last == word), "")
