"""The schemes by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.planner.schemes import gpipe, mobius, one_f_one_b, spipe
from penstock.planner.schemes.base import Placement, Recomputation, RecomputeMode, Scheme

SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {s.name: s for s in (gpipe.SCHEME, one_f_one_b.SCHEME, mobius.SCHEME, spipe.SCHEME)}
)
"""Every scheme that ``schedule.scheme`` can name."""

__all__ = ["SCHEMES", "Placement", "Recomputation", "RecomputeMode", "Scheme"]
