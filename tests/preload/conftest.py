"""Processes of these tests import modules of the tests, which no package that is installed has."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="package", autouse=True)
def modules_of_tests() -> Iterator[None]:
    """The repository is on the path of processes that tests start. SIGINT acts as usual: a shell
    ignores SIGINT for what it starts in the background, and spawned processes would inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield
    signal.signal(signal.SIGINT, before)
