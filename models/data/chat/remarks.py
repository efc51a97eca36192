"""Remarks about samples: what a chat template did with a record that its user should know. No
torch.

Preparation counts remarks by kind, and reports a line for each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

from penstock.models.data.chat.templates import Template


class Remark(Enum):
    """Kinds of remarks. Values are names in ``meta.json``."""

    OPEN = "open_answers"
    """No end of the sample's answer counts."""
    THOUGHTS = "cut_thoughts"
    """The template leaves out thoughts: of earlier turns, or in a field that it does not read."""
    FIRST = "first_turns"
    """The assistant's first turn has no prompt, and does not count."""


def lines_of(counts: Mapping[str, int], lost: int, template: Template | None) -> Iterator[str]:
    """Yields the lines about samples with remarks, by their number. ``lost`` are tokens at the ends
    of prompts that samples do not have.
    """
    name = "" if template is None else f"data.chat_template = {template.name!r}"
    if template is not None and (number := counts.get(Remark.OPEN.value)):
        yield (
            f"data: {number:,} samples have an answer of which no end counts, so the model may not"
            f" learn to stop: {name}, {template.endings.line}; name a template that ends the"
            " assistant's turns with a token inside of {% generation %}"
        )
    if number := counts.get(Remark.THOUGHTS.value):
        yield (
            f"data: {number:,} samples lack thoughts of their records: {name} leaves out those of"
            " earlier turns, or does not read reasoning_content"
        )
    if number := counts.get(Remark.FIRST.value):
        yield (
            f"data: {number:,} conversations begin with a turn of the assistant, which has no"
            " prompt and does not count"
        )
    if lost:
        yield (
            f"data: {lost:,} tokens at the ends of prompts are other tokens in the samples, since"
            " they merge with the answers; the answers count from the first other token on"
        )
