"""What the simulator says of the optimizer's tail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from penstock.planner.cost.analytic import Host
from penstock.planner.cost.catalogue import MODELS

ROOT = Path(__file__).parents[2]


def test_tails_on_a_host_of_saturated_memory_channels() -> None:
    command = [sys.executable, "-m", "bench.tail", "--parts", "simulated", "--json"]
    command += ["--clusters", "4:spipe-10b"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=True, cwd=ROOT
    )
    tails: dict[str, dict[str, float]] = defaultdict(dict)
    steps: dict[str, dict[str, float]] = defaultdict(dict)
    early: dict[str, str] = {}
    for row in json.loads(done.stdout)["rows"]:
        tails[row["scheme"]][row["mode"]] = row["tail_s"]
        steps[row["scheme"]][row["mode"]] = row["step_s"]
        if row["mode"] == "auto":
            early[row["scheme"]] = row["early"]
    whole_s = MODELS["spipe-10b"].num_parameters / Host().dram_bandwidth  # a byte of each parameter
    for scheme, tail in tails.items():
        assert 28 * whole_s < tail["synchronous"] < 1.15 * 28 * whole_s
        assert tail["auto"] < 0.72 * tail["in-place"] < 0.72 * tail["synchronous"]
        step = steps[scheme]
        assert step["auto"] < 1.002 * min(step["advance"], step["early"])
    for scheme in ("gpipe", "1f1b", "chimera"):  # whose gradients all come at the end: bytes count
        assert 0.48 < tails[scheme]["early"] / tails[scheme]["in-place"] < 1.02 * 16 / 28
        assert tails[scheme]["advance"] / tails[scheme]["in-place"] == pytest.approx(
            30 / 28, rel=0.02
        )
    # What SPipe hides behind its backwards is better advanced; its last blocks settle early.
    assert tails["spipe"]["early"] > tails["spipe"]["advance"]
    assert early["gpipe"] == "50 of 50"
    assert 0 < int(early["spipe"].partition(" ")[0]) < 35
