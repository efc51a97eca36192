"""Names of the Hugging Face Hub where a path is expected, and the commands that fetch them."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = frozenset(
    (
        *(".txt", ".md", ".py", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz"),
        *(".zst", ".bin", ".npy", ".yaml", ".yml", ".jinja"),
    )
)
"""Ends of paths that name a file of this machine."""

_REMOTE = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>refs/pr/\d+|refs/convert/[\w.-]+|[\w.-]+)(?:/(?P<inside>.+))?)?",
    re.ASCII,
)
_MOST = 96
"""Most characters of a repository's name on the Hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A repository of the Hub, such as ``org/name`` or ``org/name@revision``.

    ``revision`` is a branch, a tag or a commit; None: the default branch. ``inside`` is a folder, a
    file or a glob of a data set, as in ``org/name@main/data/train-*.parquet``.
    """

    repository: str
    revision: str | None = None
    inside: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Returns the repository that a text names; None for a text of another form."""
        form = _REMOTE.fullmatch(text)
        if form is None:
            return None
        repository, inside = form["repository"], form["inside"]
        parts = repository.split("/")
        if len(repository) > _MOST or any(
            part[-1] in ".-" or part.endswith(".git") or "--" in part or ".." in part
            for part in parts
        ):
            return None
        if form["revision"] is None and Path(repository).suffix.lower() in _FILES:
            return None
        if form["revision"] in (".", "..") or ".." in Path(inside or "").parts:
            return None
        return cls(repository=repository, revision=form["revision"], inside=inside)

    def __str__(self) -> str:
        """Returns the name as a user writes it."""
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.repository}{revision}" + ("" if self.inside is None else f"/{self.inside}")


def remote_name(path: str | Path, *, inside: bool = False) -> HubName | None:
    """Returns the repository of the Hub that a path names; None for a path that exists, or that
    cannot be a name. ``inside``: a folder, a file or a glob may follow the revision.
    """
    text = str(path)
    name = HubName.parse(text)
    if name is None or (name.inside is not None and not inside):
        return None
    return None if Path(text).exists() else name


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
