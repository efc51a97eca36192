"""Tools of commands in the tests of this folder: one preloader forks their processes."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _forked(preloaded_tools: None) -> None:
    """Has the processes of tools forked."""
