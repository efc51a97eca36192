"""Inputs that are kept: a file for each target, an input a line, as Python writes bytes."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")
MAX_BYTES = 300_000
"""Of all files together."""


def path_of(name: str) -> Path:
    """Returns where the inputs of a target are."""
    return CORPUS / f"{name}.txt"


def kept(name: str) -> list[bytes]:
    """Returns the inputs of a target."""
    path = path_of(name)
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    return [ast.literal_eval(line) for line in lines]


def keep(name: str, inputs: Iterable[bytes]) -> None:
    """Write the inputs of a target, each once, the shortest first."""
    texts = [repr(data) for data in sorted(set(inputs), key=lambda data: (len(data), data))]
    CORPUS.mkdir(exist_ok=True)
    path_of(name).write_text("".join(f"{text}\n" for text in texts), encoding="ascii")
