"""The schemes by name: every :class:`Scheme` that a module of this folder defines.

A new scheme is a module here, and its name among the choices of ``schedule.scheme``
(:data:`penstock.config.execution.SchemeName`). :data:`SCHEMES` has the order of these choices. A
module's second scheme needs no name there: it can be planned and simulated, not trained with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import get_args

from penstock.config.execution import SchemeName
from penstock.planner.schemes.base import Recomputation, RecomputeMode, Scheme, StageDevices


def _defined() -> Iterator[tuple[Scheme, ...]]:
    """Returns the schemes of each module, in the order of their definition."""
    for module in iter_modules(__path__):
        values = vars(import_module(f"{__name__}.{module.name}")).values()
        if schemes := tuple(value for value in values if isinstance(value, Scheme)):
            yield schemes


def _registry() -> Mapping[str, Scheme]:
    choices = get_args(SchemeName)
    modules = sorted(_defined(), key=lambda schemes: choices.index(schemes[0].name))
    schemes = {scheme.name: scheme for module in modules for scheme in module}
    if missing := {*choices} - {"auto", *schemes}:
        raise ImportError(f"schedule.scheme: no module of planner/schemes defines {missing}")
    return MappingProxyType(schemes)


SCHEMES = _registry()
"""Schemes that ``schedule.scheme`` can name, each followed by the others of its module."""

__all__ = ["SCHEMES", "Recomputation", "RecomputeMode", "Scheme", "StageDevices"]
