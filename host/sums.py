"""Sums of floats that have the same bits with every Python.

The built-in ``sum`` adds from left to right up to Python 3.11. From 3.12 on it also compensates
rounding errors. Plans follow from such sums, and tests pin them to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add


def added(values: Iterable[float]) -> float:
    """Returns the values added from left to right, each sum rounded to a double; 0 for none."""
    return reduce(add, values, 0)
