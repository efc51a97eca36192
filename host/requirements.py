"""The Pythons and torches that Penstock runs on: those that its tests have passed with.

Older and newer versions are refused: Penstock promises equal bytes, and uses parts of torch that
may change in the next version. ``pyproject.toml`` has the same limits for ``pip``, and
``tests/test_versions.py`` compares both; docs/VERSIONS.md says how to try another version.

``import penstock`` checks the Python first, so this module runs on older Pythons, too.
"""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

from penstock.host.errors import ConfigError


class Versions(NamedTuple):
    """Minor versions from the first to the last, both included."""

    first: tuple[int, int]
    last: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.first[0]}.{self.first[1]} to {self.last[0]}.{self.last[1]}"

    @property
    def specifier(self) -> str:
        """Returns them as ``pip`` writes them."""
        return f">={self.first[0]}.{self.first[1]},<{self.last[0]}.{self.last[1] + 1}"

    def fault(self, found: tuple[int, int]) -> str:
        """Returns the fault of a version; empty if there is none."""
        if self.first <= found <= self.last:
            return ""
        return "too old" if found < self.first else "newer than what was tested"


PYTHON = Versions((3, 11), (3, 14))
TORCH = Versions((2, 11), (2, 15))


def python_objection(found: tuple[int, ...]) -> str | None:
    """Returns why Penstock does not run on this Python, with a remedy; None if it does."""
    fault = PYTHON.fault((found[0], found[1]))
    if not fault:
        return None
    named = ".".join(map(str, found[:3]))
    return (
        f"Python {named} ({sys.executable}) is {fault}: Penstock runs on Python {PYTHON}; install"
        " it into a virtual environment of one of these"
    )


def installed_torch() -> str | None:
    """Returns the version of torch, which is not imported for it; None where there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def torch_objection(found: str | None) -> str | None:
    """Returns why no model can be trained with this version of torch, with a remedy; None if one
    can.
    """
    remedy = f"{sys.executable} -m pip install 'torch{TORCH.specifier}'"
    if found is None:
        return f"torch is not installed: {remedy}"
    numbers = re.match(r"(\d+)\.(\d+)", found)
    fault = TORCH.fault((int(numbers[1]), int(numbers[2]))) if numbers else "no known version"
    if not fault:
        return None
    return f"torch {found} is {fault}: Penstock runs with torch {TORCH}: {remedy}"


def check_torch() -> None:
    """Refuses to continue if no model can be trained.

    Raises:
        ConfigError: torch is missing, or of a version that Penstock was not tested with.
    """
    objection = torch_objection(installed_torch())
    if objection is not None:
        raise ConfigError(objection)
