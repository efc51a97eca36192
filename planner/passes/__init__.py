"""Optimising passes by name; each module of this folder holds those of one paper.

A pass works on a :class:`~penstock.planner.schedule.schedule.Schedule`, before lowering.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.planner.passes import (
    activation_budget,
    decoupled,
    deep_optimizer_states,
    mario,
    obscura,
    offload_or_recompute,
    spipe,
    two_bp,
)
from penstock.planner.passes.base import Pass, PassContext

_ALL: tuple[Pass, ...] = (
    *mario.PASSES,
    *two_bp.PASSES,
    *obscura.PASSES,
    *spipe.PASSES,
    *deep_optimizer_states.PASSES,
    *decoupled.PASSES,
    *activation_budget.PASSES,
    *offload_or_recompute.PASSES,
)

PASSES: Mapping[str, Pass] = MappingProxyType({one.name: one for one in _ALL})
"""Every pass that ``--passes`` can name."""

__all__ = ["PASSES", "Pass", "PassContext"]
