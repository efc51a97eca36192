"""Names of the Hugging Face Hub where a path is expected, and the commands that fetch them."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = frozenset(
    (
        *(".txt", ".md", ".py", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz"),
        *(".zst", ".bin", ".npy", ".yaml", ".yml", ".jinja"),
    )
)
"""Ends of paths that name a file of this machine."""


def hub_name(path: str | Path) -> str | None:
    """Returns the name of a repository of the Hub that a user may have given as a path; None for
    paths that exist, or cannot be a name. Paths below the current folder count from there.
    """
    text = str(path)
    with suppress(ValueError):
        text = str(Path(text).relative_to(Path.cwd()))
    known = Path(text).suffix.lower() in _FILES or Path(text).exists()
    return text if _NAME.fullmatch(text) and not known else None


def fetch_model(name: str) -> str:
    """Returns the command that fetches a model into the folder of the same name."""
    return f"hf download {name} --local-dir {name}"


def from_hub(path: str | Path) -> str:
    """Returns the remedy for a model folder that does not exist."""
    name = hub_name(path)
    if name is None:
        return "hf download NAME --local-dir FOLDER gets one from the Hub"
    return f"to get this model from the Hub: {fetch_model(name)}"


def fetch_data(name: str) -> str:
    """Returns the command that fetches a data set into the folder of the same name."""
    return f"hf download {name} --repo-type dataset --local-dir {name}"
