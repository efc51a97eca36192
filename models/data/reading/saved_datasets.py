"""Folders that the library datasets writes (``save_to_disk``): files of theirs that are not text.

A folder of one dataset has ``state.json``, ``dataset_info.json`` and its rows in ``data-*.arrow``;
``map`` and ``filter`` add files of their own. A folder of several splits has ``dataset_dict.json``
and a folder for each split, of which ``train`` is read unless a source names another one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from penstock.host.errors import ConfigError

SPLIT = "train"

_STATE, _INFO, _DICT = "state.json", "dataset_info.json", "dataset_dict.json"
_ROWS = re.compile(r"(?:data-\d+-of-(?P<number>\d+)|dataset)\.arrow")
"""Names of files with rows; older versions of the library write ``dataset.arrow``."""


def kind_in_dataset(path: Path, top: Path, *, any_split: bool = False) -> str | None:
    """Returns the kind of a file that a saved dataset at or below the folder ``top`` has in
    addition to its rows; None for any other file. ``any_split`` takes the rows of every split.
    """
    if path.suffix not in (".arrow", ".json"):
        return None
    folder = path.parent
    if path.name == _DICT or (path.name in (_STATE, _INFO) and _is_dataset(folder)):
        return "description of a dataset"
    if path.suffix == ".arrow" and _is_dataset(folder) and _ROWS.fullmatch(path.name) is None:
        return "result kept by datasets"
    if not any_split and split_in_dict(path, top) not in (None, SPLIT):
        return other_splits(SPLIT)
    return None


def split_in_dict(path: Path, top: Path) -> str | None:
    """Returns the folder of a split that holds a file, if a folder of splits at or below ``top``
    has that folder.
    """
    for parent, child in zip(path.parents, (path, *path.parents), strict=False):
        if not parent.is_relative_to(top):
            break
        if child != path and (parent / _DICT).is_file():
            return child.name
    return None


def other_splits(name: str) -> str:
    """Returns the kind of files that belong to other splits."""
    return f"in splits other than {name}"


def check_complete(files: Sequence[Path], name: str) -> None:
    """Refuses a saved dataset with missing files of rows.

    Raises:
        ConfigError: the folder has fewer files than their names state; begins with ``name``.
    """
    counts: dict[tuple[Path, int], int] = {}
    for path in files:
        row = _ROWS.fullmatch(path.name)
        if row is not None and row["number"] and _is_dataset(path.parent):
            key = (path.parent, int(row["number"]))
            counts[key] = counts.get(key, 0) + 1
    for (folder, number), count in counts.items():
        if count != number:
            raise ConfigError(
                f"{name}: {folder} has {count:,} of the {number:,} files of its dataset; copy the"
                " whole folder"
            )


def _is_dataset(folder: Path) -> bool:
    return os.path.isfile(folder / _STATE) and os.path.isfile(folder / _INFO)
