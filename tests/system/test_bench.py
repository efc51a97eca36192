"""The benchmark for a GPU, small and without one: its own code must not rot where none is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_benchmark_for_a_gpu_runs_small_on_a_cpu() -> None:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--cases", "spipe", "fsdp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=True)
    penstock, fsdp = done.stdout.splitlines()
    assert re.match(r"spipe +\d+ tokens/s  allocated MiB [-.0-9]+  hidden", penstock)
    assert re.match(r"fsdp +\d+ tokens/s", fsdp)
