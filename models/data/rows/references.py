"""Files of reference log-probabilities: one little-endian fp64 number for each row of a split. No
torch.

``penstock.models.inference.references`` computes them; workers read them with the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.host.errors import StateError
from penstock.models.data.chunks import Checksums
from penstock.models.data.rows.row_file import RowLayout

FIELD = "references"
"""Field of a split's entry in ``meta.json``: path, key and checksums of the file."""

NUMBER = np.dtype("<f8")


def references_path(entry: Mapping[str, Any]) -> Path:
    """Returns the path of a split's references, relative to the data's folder."""
    return Path(entry["path"]).with_name("references-" + Path(entry["path"]).name)


def read_references(
    data_dir: Path, entry: Mapping[str, Any], layout: RowLayout
) -> NDArray[np.float64] | None:
    """Returns the references of a split, (rows,) fp64; None where its entry has none.

    Raises:
        StateError: the file is damaged.
        OSError, KeyError, TypeError, ValueError: the file is missing, or the entry is damaged.
    """
    fields = entry.get(FIELD)
    if fields is None:
        return None
    path = data_dir / fields["path"]
    size = path.stat().st_size
    Checksums.open(path, data_dir, fields["sums"]).check(0, max(1, size))
    numbers = np.fromfile(path, dtype=NUMBER).astype(np.float64)
    if len(numbers) != layout.rows or not np.isfinite(numbers).all():
        raise StateError(
            f"{path}: has {len(numbers)} finite numbers for {layout.rows} rows; delete {data_dir}"
            " and start again"
        )
    return numbers


def has_references(data_dir: Path, entry: Mapping[str, Any], layout: RowLayout) -> bool:
    """Returns whether the references that a split's entry names are there in full.

    Raises:
        KeyError, TypeError: the entry is damaged.
    """
    fields = entry.get(FIELD)
    if fields is None:
        return True
    path = data_dir / fields["path"]
    return bool(path.is_file() and path.stat().st_size == layout.rows * NUMBER.itemsize)
