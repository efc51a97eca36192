"""Weights of a record's tokens, for ``data.objective: weighted``. No torch.

The column ``weight`` is a number for all tokens of a record, in any format. ``weights`` has a
number for each of ``input_ids``. With both, a token has their product.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.host.errors import ConfigError
from penstock.models.data.chat.masks import Prepared, Sample
from penstock.models.data.chat.requests import Format, RecordForm, names, refused

WEIGHT, WEIGHTS = "weight", "weights"

_LARGEST = 1e6
"""Greatest weight without its sign: a product with a loss stays finite in fp32."""


def with_weights(
    prepared: Sequence[Prepared], place: str, fields: Mapping[str, Any], form: RecordForm
) -> list[Prepared]:
    """Returns the samples of a record with the weights of its columns.

    Raises:
        ConfigError: the record has neither column, or a value is no number in range.
    """
    columns = {name: form.columns.get(name, name) for name in (WEIGHT, WEIGHTS)}
    values = {name: fields.get(column) for name, column in columns.items() if column is not None}
    whole, each = values.get(WEIGHT), values.get(WEIGHTS)
    ids = fields.get(form.columns.get("input_ids", "input_ids") or "")
    ready = form.format in (Format.AUTO, Format.TOKENS) and ids is not None
    if whole is None and each is None:
        raise ConfigError(
            f"{place}: data.objective weighted needs a value in the column {WEIGHT} or,"
            f" with input_ids, {WEIGHTS}; the record's columns are {names(list(fields))}. Name"
            " yours in columns, or use objective next-token"
        )
    if each is not None and not ready:
        raise refused(
            place,
            str(columns[WEIGHTS]),
            each,
            f"goes with input_ids; give {WEIGHT}, one number for the record",
        )
    factor = 1.0 if whole is None else _number(place, str(columns[WEIGHT]), whole)
    numbers = None if each is None else _numbers(place, str(columns[WEIGHTS]), each)
    weighted: list[Prepared] = []
    for item in prepared:
        if numbers is not None and isinstance(item, Sample):
            if len(numbers) != len(item.ids):
                raise ConfigError(
                    f"{place}: {columns[WEIGHTS]} has {len(numbers):,} values for"
                    f" {len(item.ids):,} ids; needs one weight for each id, not shifted"
                )
            product = tuple(factor * number for number in numbers)
            weighted.append(dataclasses.replace(item, weights=product))
        else:
            weighted.append(dataclasses.replace(item, weight=factor))
    return weighted


def _numbers(place: str, name: str, value: Any) -> list[float]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise refused(place, name, value, "needs a list of numbers")
    return [_number(place, f"{name}[{number}]", item) for number, item in enumerate(value)]


def _number(place: str, name: str, value: Any) -> float:
    """Returns a weight.

    Raises:
        ConfigError: it is no number, or too large.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise refused(place, name, value, "needs a number")
    if not (math.isfinite(value) and abs(value) <= _LARGEST):
        raise refused(place, name, value, f"needs a number from -{_LARGEST:.0e} to {_LARGEST:.0e}")
    return float(value)
