"""Processes of these tests import modules of the tests, which no package that is installed has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="package", autouse=True)
def modules_of_tests() -> Iterator[None]:
    """The repository is on the path of processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield
