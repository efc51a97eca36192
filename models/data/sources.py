"""The files of a text source: ``@stdlib``, a file, a folder or a glob. No file is read.

A folder means the same as the glob ``FOLDER/**/*``. ``**`` enters links to folders, and leaves
hidden folders out. Each file is taken once, however many links lead to it. :attr:`Source.left_out`
counts the files that were not taken.
"""

from __future__ import annotations

import errno
import fnmatch
import itertools
import os
import re
import stat
import sysconfig
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.config.hub_names import fetch_data, hub_name
from penstock.config.values import UTF8
from penstock.host.errors import ConfigError, reason
from penstock.host.inputs import is_pointer
from penstock.models.data.reading.csv_files import csv_rows
from penstock.models.data.reading.json_files import json_objects
from penstock.models.data.reading.opening import COMPRESSED, ignore_bytes
from penstock.models.data.reading.record import TEXT, Reader
from penstock.models.data.reading.saved_datasets import (
    check_complete,
    kind_in_dataset,
    other_splits,
)
from penstock.models.data.reading.split_names import files_of_split

STDLIB = "@stdlib"
MAX_STDLIB_BYTES = 30 * 10**6
PLAIN_TEXT = (".txt", ".md", ".py")
"""Endings of files that are one text."""
FORMATS = (*PLAIN_TEXT, ".jsonl", ".json", ".csv", ".parquet", ".arrow")
"""Endings of the files that are read."""

_NEVER_COMPRESSED = (".parquet", ".arrow")
"""Formats that compress their own content."""

_OFTEN_OTHER: Mapping[str, Reader] = {".json": json_objects, ".csv": csv_rows}
"""Formats of files that hold anything: of a folder, those with a text in the first record count."""

_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_MAX_KINDS = 8
_PLURAL = {
    "broken link": "broken links",
    "folder": "folders",
    "device or pipe": "devices or pipes",
    "description of a dataset": "descriptions of datasets",
    "result kept by datasets": "results kept by datasets",
}
_MAGIC = re.compile(r"[*?[]")
_Parts = tuple[str, ...]
_Step = tuple[Path, str | None, _Parts]
"""A path, the same without links where it is known, and parts that are to match below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """``files`` in a fixed order; ``encoding`` is the Python codec of their text; ``left_out``
    counts files that match and are not read, by kind.
    """

    files: tuple[Path, ...]
    encoding: str = UTF8
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def omissions(self) -> str:
        """The counts of ``left_out`` in words, such as ``3 .gz, 1 hidden``; empty without any."""
        ordered = sorted(self.left_out.items(), key=lambda item: (-item[1], item[0]))
        shown = [
            f"{count:,} {_PLURAL.get(kind, kind) if count > 1 else kind}"
            for kind, count in ordered[:_MAX_KINDS]
        ]
        if rest := sum(count for _, count in ordered[_MAX_KINDS:]):
            shown.append(f"{rest:,} of other kinds")
        return ", ".join(shown)


def format_of(path: Path) -> str:
    """Returns the format of a file: its ending, or that below ``.gz`` or ``.zst``; empty for a
    file that is not read.
    """
    if path.suffix not in COMPRESSED:
        return path.suffix if path.suffix in FORMATS else ""
    inner = Path(path.stem).suffix
    return inner if inner in FORMATS and inner not in _NEVER_COMPRESSED else ""


def find_source(
    source: str,
    *,
    key: str = "data.path",
    encoding: str = UTF8,
    any_records: bool = False,
    split: str | None = None,
) -> Source:
    """Returns the files that ``source``, the value of ``key``, names.

    The standard library is UTF-8; ``encoding`` does not apply to it. ``any_records`` also takes
    those files of a folder that have no column of text. ``split`` takes the files of one split
    (:mod:`penstock.models.data.reading.split_names`).

    Raises:
        ConfigError: there is no file, its kind is not supported, a folder cannot be listed, or a
            file is a pointer of Git LFS.
    """
    matched = _find(source, key, encoding, any_records, split)
    for path in matched.files:
        if is_pointer(path):
            raise ConfigError(
                f"{key} = {source!r}: {path} is a Git LFS pointer, which stands for a file that is"
                " not there; get the files (git lfs pull)"
            )
    return matched


def _find(source: str, key: str, encoding: str, any_records: bool, split: str | None) -> Source:
    if "\0" in source:
        raise ConfigError(f"{key} = {source!r}: no such file or folder")
    if source == STDLIB:
        return Source(files=tuple(_stdlib_files()))
    if source.startswith("@"):
        raise ConfigError(f"{key} = {source!r}: unknown source; the only one is {STDLIB}")
    path, formats = Path(source), f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
    if os.path.isfile(source):
        if not format_of(path):
            raise ConfigError(
                f"{key} = {source!r}: the name does not end in {formats}, nor in one of them"
                " followed by .gz or .zst; rename the text file, or set data.tokens to a token file"
            )
        if split is not None:
            files_of_split([path], path, split, f"{key} = {source!r}, split = {split!r}")
        return Source(files=(path,), encoding=encoding)
    is_folder = os.path.isdir(source)
    # A saved dataset above the named folder does not count: the name decides on its split.
    top = path if is_folder else _fixed(path)
    walk = _Walk(
        f"{key} = {source!r}",
        top,
        encoding if is_folder and not any_records else None,
        any_split=split is not None,
    )
    if is_folder:
        walk.follow(path, ("**", "*"))
    else:
        walk.match(path)
    files, left_out = sorted(walk.files), Counter(walk.left_out)
    if split is not None and files:
        place = f"{key} = {source!r}, split = {split!r}"
        files = sorted(files_of_split(files, top, split, place))
        left_out[other_splits(split)] += len(walk.files) - len(files)
    if is_folder:
        check_complete(files, f"{key} = {source!r}")
    matches = Source(files=tuple(files), encoding=encoding, left_out=+left_out)
    if not matches.files:
        if _MAGIC.search(source) is None and not os.path.lexists(source):
            raise ConfigError(f"{key} = {source!r}: no such file or folder{_remedy(source)}")
        omitted = f" (left out: {matches.omissions})" if matches.left_out else ""
        raise ConfigError(
            f"{key} = {source!r}: matches no file of text{omitted}; give a file or folder of"
            f" {formats}, or a glob of such files"
        )
    return matches


def _remedy(source: str) -> str:
    """Returns the command for a name of the Hub; empty for other names."""
    name = hub_name(source)
    return "" if name is None else f"; to get this data set from the Hub: {fetch_data(name)}"


class _Walk:
    """A walk over files below a folder; their names match the parts of a glob.

    Links wait in ``_links`` until every folder was listed, so that a file is named by its own path
    where links lead to it, too. A folder is entered once for the same parts, which ends cycles.
    """

    def __init__(
        self, name: str, top: Path, encoding: str | None, *, any_split: bool = False
    ) -> None:
        """Starts a walk.

        ``encoding``: the encoding of files that are taken only if their first record has text.
        None: the glob names the files, and all are read. ``any_split`` takes all splits of saved
        datasets.
        """
        self._name, self._top, self._encoding = name, top, encoding
        self._any_split = any_split
        self.files: list[Path] = []
        self._folders: list[_Step] = []
        self._links: deque[_Step] = deque()
        self._entered: set[tuple[str, _Parts]] = set()
        self._taken: set[str] = set()
        self._kinds: dict[Path, tuple[str, str]] = {}

    @property
    def left_out(self) -> Mapping[str, int]:
        """Numbers of matching files that were left out, by kind."""
        walked = {real for real, parts in self._entered if parts[0] == "**"}
        # A hidden folder is entered where a part of the glob names it.
        named = {real for real, _ in self._entered} | self._taken
        read = {"folder": walked, "hidden": named}
        return Counter(
            kind for kind, real in self._kinds.values() if real not in read.get(kind, ())
        )

    def match(self, pattern: Path) -> None:
        """Takes the files that match a glob."""
        start = Path(pattern.anchor)
        self.follow(start, pattern.relative_to(start).parts)

    def follow(self, folder: Path, parts: Sequence[str]) -> None:
        """Takes the files below ``folder`` that match ``parts``."""
        if parts and parts[-1] == "**":
            parts = (*parts, "*")
        # A row of ** means the same as one.
        unique = (list(group) for _, group in itertools.groupby(parts))
        parts = [part for group in unique for part in (group[:1] if group[0] == "**" else group)]
        self._folders.append((folder, None, tuple(parts)))
        while self._folders or self._links:
            path, real, rest = self._folders.pop() if self._folders else self._links.popleft()
            real = os.path.realpath(path) if real is None else real
            if rest:
                self._enter(path, real, rest)
            else:
                self._take(path, real)

    def _enter(self, folder: Path, real: str, parts: _Parts) -> None:
        if (real, parts) in self._entered:
            self._leave_out(folder, real, "reached twice")
            return
        self._entered.add((real, parts))
        part, rest = parts[0], parts[1:]
        if part == "**":
            self._folders.append((folder, real, rest))
            for entry in self._entries(folder):
                if not os.path.isdir(entry.path):
                    continue
                if entry.name.startswith("."):
                    self._leave_out(Path(entry.path), os.path.join(real, entry.name), "hidden")
                else:
                    self._add(entry, real, parts)
        elif _MAGIC.search(part) is None:
            self._folders.append((folder / part, None, rest))
        else:
            for entry in self._entries(folder):
                if not fnmatch.fnmatchcase(entry.name, part):
                    continue
                if rest and not os.path.isdir(entry.path):
                    continue
                if entry.name.startswith(".") and not part.startswith("."):
                    self._leave_out(Path(entry.path), os.path.join(real, entry.name), "hidden")
                else:
                    self._add(entry, real, rest)

    def _add(self, entry: os.DirEntry[str], folder: str, parts: _Parts) -> None:
        if entry.is_symlink():
            self._links.append((Path(entry.path), None, parts))
        else:
            self._folders.append((Path(entry.path), os.path.join(folder, entry.name), parts))

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        """Returns the entries of a folder by name; none where there is no such folder."""
        try:
            with os.scandir(folder) as listing:
                return sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            if _is_nothing(error):
                return []
            raise ConfigError(f"{self._name}: cannot list {folder}: {reason(error)}") from error

    def _take(self, path: Path, real: str) -> None:
        try:
            status = path.stat()
        except OSError as error:
            if not _is_nothing(error):
                raise ConfigError(f"{self._name}: {path}: {reason(error)}") from error
            if path.is_symlink():
                self._leave_out(path, real, "broken link")
            return
        if stat.S_ISDIR(status.st_mode):
            self._leave_out(path, real, "folder")
        elif not stat.S_ISREG(status.st_mode):
            self._leave_out(path, real, "device or pipe")
        elif not format_of(path):
            self._leave_out(path, real, _kind(path.suffix))
        elif kind := kind_in_dataset(path, self._top, any_split=self._any_split):
            self._leave_out(path, real, kind)
        elif real in self._taken:
            self._leave_out(path, real, "reached twice")
        elif status.st_size == 0:
            self._leave_out(path, real, "empty")
        elif self._encoding is not None and not _has_text(path, self._encoding):
            self._leave_out(path, real, f"{format_of(path)} without {TEXT}")
        else:
            self._taken.add(real)
            self.files.append(path)

    def _leave_out(self, path: Path, real: str, kind: str) -> None:
        self._kinds.setdefault(path, (kind, real))


def _has_text(path: Path, encoding: str) -> bool:
    """Returns whether the first record of a file has a column of text, as far as the format leaves
    that open.
    """
    reader = _OFTEN_OTHER.get(format_of(path))
    if reader is None:
        return True
    try:
        record = next(reader(path, encoding, ignore_bytes, None), None)
    except ConfigError:
        return False
    except OSError:
        return True  # the later reading names the cause
    return record is not None and isinstance(record.fields.get(TEXT), str)


def _fixed(glob: Path) -> Path:
    """Returns the folder of a glob, down to its first part with a wild card."""
    return Path(*itertools.takewhile(lambda part: _MAGIC.search(part) is None, glob.parts))


def _is_nothing(error: OSError) -> bool:
    """Returns whether a name leads to nothing, as opposed to a thing that cannot be read."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def _kind(suffix: str) -> str:
    """Returns a suffix as a kind; names of files may hold any character."""
    if not suffix:
        return "without an ending"
    return suffix if suffix.isprintable() and len(suffix) <= 12 else "of other kinds"


def _stdlib_files() -> list[Path]:
    """Returns the standard library's files without tests and installed packages, of at most 30
    MB.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]
        paths += [Path(folder, name) for name in names if name.endswith((".py", ".txt"))]
    files = sorted(p for p in paths if p.is_file())
    if not files:
        raise ConfigError(
            f"data.path = {STDLIB!r}: {root} has no source files; give a file or a glob"
        )
    totals = itertools.accumulate(p.stat().st_size for p in files)
    return [p for p, total in zip(files, totals, strict=True) if total <= MAX_STDLIB_BYTES]
