"""Splits of the files of a source, told by their names as datasets does. No torch.

Four ways are tried, and the first that names a split of any file decides on all files:

1. folders of a DatasetDict;
2. names of shards (``train-00000-of-00002.parquet``);
3. words of folders (``test/a.jsonl``);
4. words of files (``chats_train.jsonl``).

Without any, all files are one split: train, or that of a folder ``test`` or ``validation``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.host.errors import ConfigError
from penstock.models.data.reading.saved_datasets import SPLIT, split_in_dict

_WORDS = {
    **dict.fromkeys(("train", "training"), SPLIT),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words in names, and the splits that datasets takes them for."""

_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}.*")
_APART = re.compile(r"[-._ 0-9]+")


def splits_of(files: Sequence[Path], top: Path) -> dict[str, list[Path]]:
    """Returns the files of each split, below the folder ``top`` or ``top`` itself. Files that
    belong to none are left out.

    Raises:
        ConfigError: the name of a file or folder has the words of two splits.
    """
    ways: tuple[Callable[[Path, Path], str | None], ...] = (
        split_in_dict,
        _of_shard,
        _of_folders,
        lambda path, top: _of_words(path.name, path),
    )
    for way in ways:
        splits: dict[str, list[Path]] = {}
        for path in files:
            if (name := way(path, top)) is not None:
                splits.setdefault(name, []).append(path)
        if splits:
            return splits
    return {_WORDS.get(top.name.lower(), SPLIT): list(files)} if files else {}


def files_of_split(files: Sequence[Path], top: Path, name: str, place: str) -> list[Path]:
    """Returns the files of the split ``name``, which may be any word for it.

    Raises:
        ConfigError: no file belongs to the split; begins with ``place``.
    """
    splits = splits_of(files, top)
    chosen = splits.get(name) or splits.get(_WORDS.get(name.lower(), name))
    if chosen is None:
        names = ", ".join(sorted(splits)) or "none"
        raise ConfigError(
            f"{place}: no file belongs to this split; the splits of the files are {names}. Leave"
            " the name out for all files, as in split: '[:90%]', or name the files in path"
        )
    return chosen


def named_splits(files: Sequence[Path]) -> tuple[str, ...]:
    """Returns the splits that names of files show, in order; none where names are ambiguous."""
    try:
        return tuple(sorted(splits_of(files, Path(os.path.commonpath(files)))))
    except ConfigError:
        return ()


def _of_shard(path: Path, top: Path) -> str | None:
    del top
    shard = _SHARD.fullmatch(path.name)
    return None if shard is None else shard[1]


def _of_folders(path: Path, top: Path) -> str | None:
    """Returns the split that a folder between ``top`` and the file names; the upper one decides."""
    folders = path.parent.relative_to(top).parts if path.parent.is_relative_to(top) else ()
    return next((split for name in folders if (split := _of_words(name, path))), None)


def _of_words(name: str, path: Path) -> str | None:
    """Returns the split of the words in a name; None without one.

    Raises:
        ConfigError: the words are those of two splits.
    """
    words = _APART.split(name.lower())
    splits = sorted({_WORDS[word] for word in words if word in _WORDS})
    if len(splits) > 1:
        raise ConfigError(
            f"{path}: the name has the words of the splits {' and '.join(splits)}; rename it, or"
            " name the files in path in place of a split"
        )
    return splits[0] if splits else None
