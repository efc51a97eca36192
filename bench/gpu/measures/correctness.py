"""The tests that need a GPU: as they are, and under conditions that bring races to light.

``sanitizer``: torch looks for accesses that no event orders (``TORCH_CUDA_SANITIZER``).
``no caching``: each allocation is the driver's, so memory that is freed too early is gone.
``delays``: copies come late (:mod:`.delays`), with two seeds. Where there is no GPU the tests skip.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from bench.gpu.install import ROOT
from bench.gpu.running import Measurement, Task

FAST = (
    "tests/worker/test_devices.py",
    "tests/worker/test_update.py",
    "tests/models/test_saved_models.py",
)
WHOLE_RUNS = ("tests/system/test_gpu.py",)
_PLUGINS = ("xdist.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
_TEST_S = 45
"""A test that hangs must leave time to say which it was; those of whole runs have their own."""
_INTERRUPTED = 2
"""pytest's exit code."""
_RESERVE_S = 5.0
"""For pytest to write its report after an interrupt."""


def tests(
    task: Task, *, paths: Sequence[str], environ: Mapping[str, str], plugins: Sequence[str] = ()
) -> None:
    """Runs the tests, and reports those passed and those failed.

    Raises:
        RuntimeError: some failed.
    """
    report = task.folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "--junitxml", str(report)]
    command += ["--timeout", str(_TEST_S), "-o", f"faulthandler_timeout={_TEST_S - 5}"]
    command += ["-p", "no:cacheprovider", "--tb=short"]
    for plugin in (*_PLUGINS, *plugins):
        command += ["-p", plugin]
    command += ["--basetemp", str(task.folder / "tmp"), *paths]
    # Only plugins that we know: those of the machine may warn, which is an error here.
    settings = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environ}
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **settings})
    try:
        process.wait(task.left_s - _RESERVE_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait(_RESERVE_S)
    task.say(**outcome(report, interrupted=process.returncode == _INTERRUPTED))
    if process.returncode:
        raise RuntimeError(f"pytest ended with {process.returncode}")


def outcome(report: Path, *, interrupted: bool = False) -> dict[str, object]:
    """Returns how many passed, were skipped and failed, and the first lines of failures.

    ``interrupted``: the last one was under way when time was over; it is none of these.
    """
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failures = {
        f"{case.get('classname')}::{case.get('name')}": _first_line(bad)
        for case in cases
        for bad in [*case.iter("failure"), *case.iter("error")]
    }
    skipped = sum(1 for case in cases if case.find("skipped") is not None)
    return {
        "passed": len(cases) - len(failures) - skipped - interrupted,
        "skipped": skipped,
        "failed": len(failures),
        "interrupted": int(interrupted),
        "failures": failures,
        "test_seconds": round(sum(float(case.get("time", 0.0)) for case in cases), 1),
    }


def _first_line(bad: ElementTree.Element) -> str:
    return (bad.get("message") or bad.text or "").strip().partition("\n")[0][:300]


def _row(
    name: str,
    deadline_s: float,
    paths: Sequence[str] = FAST,
    plugins: Sequence[str] = (),
    **environ: str,
) -> Measurement:
    run = partial(tests, paths=paths, environ=environ, plugins=plugins)
    return Measurement(name=name, deadline_s=deadline_s, run=run)


_DELAYS = ("bench.gpu.measures.delays",)
MEASUREMENTS = (
    _row("as they are", 75),
    _row("sanitizer", 90, TORCH_CUDA_SANITIZER="1"),
    _row("no caching", 60, PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
    _row("delays, seed 1", 60, plugins=_DELAYS, GPU_DELAYS_SEED="1"),
    _row("delays, seed 2", 60, plugins=_DELAYS, GPU_DELAYS_SEED="2"),
    _row("whole runs", 150, WHOLE_RUNS),
)
