"""Ready token ids of a record, with the columns that say which of the ids count. No torch.

Labels decide, as in TRL 1.16. Without labels an id counts if ``assistant_masks`` and
``completion_mask`` have 1 at its place. Ids behind the last 1 of ``attention_mask`` are padding,
which never counts. TRL takes no notice of ``attention_mask``, and trains on padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.host.errors import ConfigError
from penstock.models.data.batch import IGNORED_LABEL
from penstock.models.data.chat.requests import IdsRequest, refused

IDS, LABELS = "input_ids", "labels"
COMPLETION, ASSISTANT, ATTENTION = "completion_mask", "assistant_masks", "attention_mask"
NAMES = (IDS, LABELS, COMPLETION, ASSISTANT, ATTENTION)
"""Names of columns that :func:`ready_ids` reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a record: its name in the data, and its value; None without one."""

    name: str
    value: Any


def ready_ids(place: str, columns: Mapping[str, Column]) -> IdsRequest:
    """Returns the ready ids of a record; ``columns`` are those of all :data:`NAMES`.

    Raises:
        ConfigError: a value is no list of ids, labels are not those of the ids, or labels and masks
            contradict each other.
    """
    ids = _numbers(place, columns[IDS], least=0)
    labels = _labels(place, columns, ids)
    masks = {name: _mask(place, columns, name, ids) for name in (COMPLETION, ASSISTANT)}
    seen = _seen(place, columns, ids)
    if labels is not None:
        hidden = {**masks, ATTENTION: seen}
        for name, mask in hidden.items():
            _check_hidden(place, columns, name, mask, labels)
        return IdsRequest(place=place, ids=ids, labels=labels)
    counting = [mask for mask in (masks[ASSISTANT], seen) if mask is not None]
    if counting:
        labels = tuple(
            token if all(bits) else IGNORED_LABEL
            for token, *bits in zip(ids, *counting, strict=True)
        )
    return IdsRequest(place=place, ids=ids, labels=labels, completion=masks[COMPLETION])


def _labels(
    place: str, columns: Mapping[str, Column], ids: Sequence[int]
) -> tuple[int, ...] | None:
    """Returns the labels of a record; None without labels.

    Raises:
        ConfigError: the labels are not those of the ids.
    """
    column = columns[LABELS]
    if column.value is None:
        return None
    labels = _numbers(place, column, least=IGNORED_LABEL)
    for number, label in enumerate(labels):
        if IGNORED_LABEL < label < 0:
            field = f"{column.name}[{number}]"
            raise refused(place, field, label, f"needs an id, or {IGNORED_LABEL}")
    _check_length(place, columns, LABELS, len(labels), len(ids), "label")
    for number, (label, token) in enumerate(zip(labels, ids, strict=True)):
        if label not in (IGNORED_LABEL, token):
            field = f"{column.name}[{number}]"
            remedy = f"needs {token}, the id at that place, or {IGNORED_LABEL}"
            raise refused(place, field, label, remedy)
    return labels


def _mask(
    place: str, columns: Mapping[str, Column], name: str, ids: Sequence[int]
) -> tuple[bool, ...] | None:
    """Returns the mask of a record under a name; None without one.

    Raises:
        ConfigError: the value is no list of 0 and 1, one for each id.
    """
    column = columns[name]
    if column.value is None:
        return None
    items = _listed(place, column, "0 and 1")
    for number, item in enumerate(items):
        if not isinstance(item, bool | int | float) or item not in (0, 1):
            raise refused(place, f"{column.name}[{number}]", item, "needs 0, 1, false or true")
    _check_length(place, columns, name, len(items), len(ids), "value")
    return tuple(map(bool, items))


def _seen(place: str, columns: Mapping[str, Column], ids: Sequence[int]) -> tuple[bool, ...] | None:
    """Returns the places in front of the padding at the end; None without padding.

    Raises:
        ConfigError: an id in front of others is not seen.
    """
    mask = _mask(place, columns, ATTENTION, ids)
    if mask is None or all(mask):
        return None
    length = sum(mask)
    if not all(mask[:length]):
        name = columns[ATTENTION].name
        raise refused(
            place,
            f"{name}[{mask.index(False)}]",
            0,
            f"only ids at the end may be padding; remove the ids with 0 in {name} from the record,"
            f" or set columns: {{{name}: null}} of its source to train on them",
        )
    return mask


def _check_hidden(
    place: str,
    columns: Mapping[str, Column],
    name: str,
    mask: Sequence[bool] | None,
    labels: Sequence[int],
) -> None:
    """Refuses labels that count an id which a mask leaves out.

    Raises:
        ConfigError: a label counts such an id.
    """
    if mask is None:
        return
    for number, (label, bit) in enumerate(zip(labels, mask, strict=True)):
        if label != IGNORED_LABEL and not bit:
            shown, given = columns[LABELS].name, columns[name].name
            raise refused(
                place,
                f"{shown}[{number}]",
                label,
                f"counts, and {given}[{number}] is 0; set columns: {{{given}: null}} of its source"
                f" for the labels alone, or {{{shown}: null}} for the masks alone",
            )


def _check_length(
    place: str, columns: Mapping[str, Column], name: str, length: int, ids: int, kind: str
) -> None:
    """Refuses a list of another length than that of the ids."""
    if length != ids:
        raise ConfigError(
            f"{place}: {columns[name].name} has {length:,} values and {columns[IDS].name}"
            f" {ids:,}; needs one {kind} for each id, not shifted"
        )


def _listed(place: str, column: Column, kind: str) -> Sequence[Any]:
    """Returns the list in a column.

    Raises:
        ConfigError: the value is no list.
    """
    if not isinstance(column.value, Sequence) or isinstance(column.value, str | bytes):
        raise refused(place, column.name, column.value, f"needs a list of {kind}")
    return column.value


def _numbers(place: str, column: Column, *, least: int) -> tuple[int, ...]:
    """Returns the integers in a column.

    Raises:
        ConfigError: the value is no list of integers of at least ``least``.
    """
    items = _listed(place, column, "integers")
    for number, item in enumerate(items):
        if not isinstance(item, int) or isinstance(item, bool) or item < least:
            remedy = f"needs an integer of at least {least}"
            raise refused(place, f"{column.name}[{number}]", item, remedy)
    return tuple(items)
