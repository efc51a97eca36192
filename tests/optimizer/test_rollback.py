"""The table of what rollbacks lose: ours loses nothing, arithmetic does, and Inf and NaN all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_only_ours_is_exact_whatever_the_gradients_are() -> None:
    command = [sys.executable, "-m", "bench.rollback", "--params", "4096", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=True, cwd=ROOT
    )
    rows = {
        (r["name"], r["step"], r["gradients"], r["decision"]): r
        for r in json.loads(done.stdout)["rows"]
        if r["installed"]
    }
    ours = {key: row for key, row in rows.items() if key[0] == "penstock exact"}
    assert len(ours) == 12  # two steps, four kinds of gradients, amended where that is possible
    for row in ours.values():
        figures = (row["bit_equal"], row["master_error"], row["moments_error"])
        assert figures == (1.0, 0.0, 0.0), row
    for name in ("penstock arithmetic", "torch fp32"):
        assert 0.0 < rows[name, 100, "normal", "skip"]["bit_equal"] < 0.9
        for kind in ("Inf", "NaN"):
            assert rows[name, 1, kind, "skip"]["master_error"] is None
