"""An emulated step gets shorter by what was said, when a resource is taken away."""

from __future__ import annotations

import pytest

from bench.savings import CASES, compare


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_shorter_by_what_was_said(name: str) -> None:
    for found in compare(CASES[name](), steps=6):
        assert found.saved_s > 0.01 * found.step_s, "nothing to compare"
        noise_s = 0.03 * found.step_s  # of a median of five steps
        assert found.said_s == pytest.approx(found.saved_s, rel=0.1, abs=noise_s), found
