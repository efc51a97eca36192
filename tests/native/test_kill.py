"""SIGKILL in the middle of settle and advance, at random instants: the bytes of a quiet run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import _native

SCRIPT = Path(__file__).with_name("kill_rounds.py")
NUM_ROUNDS = 24


@pytest.mark.parametrize("path", _native.available_vector_paths())
@pytest.mark.parametrize("mode", ["settle", "advance"])
def test_killed_sweeps_are_completed_with_the_same_bytes(mode: str, path: str) -> None:
    seed = random.SystemRandom().randrange(2**32)
    command = [sys.executable, str(SCRIPT), mode, path, str(NUM_ROUNDS), str(seed)]
    result = subprocess.run(
        command,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, f"seed {seed}: {result.stderr}"
    counts = json.loads(result.stdout)
    message = f"seed {seed}: {counts}"
    assert counts["wrong"] == 0, message
    assert counts["guarded"] == 3, message
    # The rest shows that the kills land where they matter and that repair is what saves the bytes.
    assert counts["killed_in_sweep"] >= NUM_ROUNDS // 3, message
    assert counts["needed_restoring"] >= NUM_ROUNDS // 4, message
