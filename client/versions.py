"""What ``penstock --version`` says."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import penstock

_REPORTED = ("torch", "transformers")
"""Packages whose versions decide bytes: kernels and models are theirs."""


def versions() -> str:
    """Ours on the first line; what else a report of a fault should name on the second. Nothing is
    imported for it.
    """
    others = [f"Python {platform.python_version()}", *map(_version_of, _REPORTED)]
    return f"penstock {penstock.__version__}\n{', '.join(others)}, {platform.machine()}"


def _version_of(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} is missing"
