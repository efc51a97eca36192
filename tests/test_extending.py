"""``docs/EXTENDING.md``, followed: every recipe is applied to a copy of the sources and used there.

A heading says how many files a recipe touches. A line that is a path says where the blocks below it
go: ``python`` is a new file, ``diff`` an edit of one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock import _ceiling, _native
from tests.tidy import PRODUCT

ROOT = Path(__file__).parents[1]
FOLDERS = tuple(name for name in PRODUCT if name not in ("deploy", "grafana"))

USES = {
    "Schedule": """
        from penstock.planner.schemes import SCHEMES
        assert list(SCHEMES)[2] == "waves"
        penstock("plan --scheme waves --devices 4 --micro-batches 8 --out plan.json",
                 "waves: 4 devices, 8 micro-batches")
        penstock("simulate plan.json", "makespan 42")
        penstock("config schedule.scheme", "waves")
        penstock("plan --scheme waves --devices 2 --micro-batches 4 --recompute full"
                 " --passes mario", "waves + mario")
    """,
    "Pass": """
        penstock("plan --list", "recompute when the gradient is there")
        penstock("plan --scheme 1f1b --devices 4 --micro-batches 4 --recompute full"
                 " --passes wait-for-gradients --out plan.json", "1f1b + wait-for-gradients")
        from pathlib import Path
        from penstock.protocol.plan.instructions import Recompute
        from penstock.protocol.plan.plan import Plan
        plan = Plan.from_json(Path("plan.json").read_text())
        waits = {i.after for program in plan.programs for i in program if isinstance(i, Recompute)}
        assert {wait.name for wait in waits} == {"GRADIENT"}, waits
    """,
    "Optimizer": """
        from penstock.config.schema import parse_config
        config = parse_config({"model": {"hf": {"model_type": "llama"}}, "data": {"path": "x"},
                               "optimizer": {"name": "signum"}})
        traits = config.optimizer.name.traits
        assert (traits.state_arrays, traits.state_bytes) == (("exp_avg",), 4.0)
        penstock("config optimizer.name", "adagrad or signum")
        penstock("config optimizer.momentum", "SGD and Signum")
    """,
    "Platform": """
        from pathlib import Path
        from types import SimpleNamespace
        from penstock.config.schema import parse_config
        from penstock.shm.table import DType
        from penstock.workers.device import WorkerSite
        from penstock.workers.platforms.cpu.device import CpuDevice
        from penstock.workers.platforms.meters import StorageMeter
        from penstock.workers.platforms.registry import open_platform
        config = parse_config({"model": {"hf": {"model_type": "llama"}}, "data": {"path": "x"},
                               "cluster": {"device": "counted"}})
        table = SimpleNamespace(weight_dtype=DType.FP32, grad_dtype=DType.FP32)
        site = WorkerSite(config=config, table=table, run_dir=Path(), device_index=0)
        opened = open_platform(site)
        assert type(opened).__name__ == "CountedPlatform"
        assert isinstance(opened.device, CpuDevice) and isinstance(opened.meter, StorageMeter)
        penstock("config cluster.device", "cpu, counted, cuda")
    """,
    "Transport": """
        from penstock.config.schema import parse_config
        from penstock.workers.channels.opening import group_module, transport_here
        config = parse_config({"model": {"hf": {"model_type": "llama"}}, "data": {"path": "x"},
                               "cluster": {"transport": "loud"}})
        assert transport_here(config) == "loud"
        assert group_module("loud").__name__.endswith("channels.loud")
        penstock("config cluster.transport", "nccl or loud")
    """,
    "Metric": """
        from types import SimpleNamespace
        from prometheus_client import CollectorRegistry
        from penstock.workers.interpreter import JobResult
        from penstock.workers.session import Session
        from penstock.workers.telemetry.metrics import WorkerMetrics
        from penstock.workers.telemetry.timing import Tally
        registry = CollectorRegistry()
        result = JobResult(loss_sum=0.0, loss_tokens=0, wall_s=1.0, tail_s=0.25, tally=Tally())
        Session._measure(SimpleNamespace(_metrics=WorkerMetrics(registry)), result)
        assert registry.get_sample_value("penstock_worker_tail_seconds_total") == 0.25
    """,
    "Key": """
        from penstock.client.configuration import json_schema
        from penstock.config.schema import parse_config
        from penstock.host.errors import ConfigError
        given = {"model": {"hf": {"model_type": "llama"}}, "data": {"path": "x"}}
        penstock("config log_lines", "a whole number, 0 or more (lines); default 0")
        assert "any number" in json_schema()
        with contextlib.suppress(ConfigError):
            parse_config({**given, "observability": {"log_lines": -1}})
            raise AssertionError
        config = parse_config({**given, "observability": {"log_lines": 5}})
        assert config.observability.log_lines == 5
    """,
}
"""By recipe: a program that uses what was added."""

NOT_THE_INSTALLED = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith("ScikitBuild")]
"""
"""An editable installation finds the package in its sources, wherever else it is looked for."""

PROLOGUE = """
import contextlib, sys, textwrap, warnings
warnings.simplefilter("error")
def penstock(words, expected):
    from typer.testing import CliRunner
    from penstock.client.main import app
    done = CliRunner().invoke(app, words.split(), catch_exceptions=False)
    assert done.exit_code == 0 and expected in done.output, done.output
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One block of a recipe: ``text`` is a file (``python``), or an edit (``diff``)."""

    path: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A section of the document."""

    name: str
    promised: int
    steps: tuple[Step, ...]


def recipes() -> Iterator[Recipe]:
    """Those of the document, in its order."""
    text = (ROOT / "docs" / "EXTENDING.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        heading = re.match(r"(\w+): (\d+) files?\b", section)
        assert heading is not None, section[:40]
        steps, path = [], ""
        for match in re.finditer(
            r"^`([\w/.]+)`$|^```(python|diff|cpp)\n(.*?)^```$", section, re.M | re.S
        ):
            path = match[1] or path
            if match[2]:
                steps.append(Step(path=path, kind=match[2], text=match[3]))
        yield Recipe(name=heading[1], promised=int(heading[2]), steps=tuple(steps))


RECIPES = {recipe.name: recipe for recipe in recipes()}


def linked_copy(to: Path) -> None:
    """The package, kernels and tests in a folder of their own; files are links until edited."""
    package = to / "penstock"
    package.mkdir()
    for module in (_ceiling, _native):
        (package / Path(module.__file__).name).symlink_to(module.__file__)
    (to / "sitecustomize.py").write_text(NOT_THE_INSTALLED, encoding="utf-8")
    for path in (ROOT / "src" / "penstock").iterdir():
        if path.name not in FOLDERS and path.suffix != ".so":
            (package / path.name).symlink_to(path.resolve())
    for folder in (*FOLDERS, "native", "tests"):
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix in (".py", ".cpp", ".h"):
                target = place(to, str(path.relative_to(ROOT)))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(path)


def place(copy: Path, path: str) -> Path:
    """Where a file of the repository lies in a copy."""
    return copy / "penstock" / path if path.split("/")[0] in FOLDERS else copy / path


def apply(step: Step, copy: Path) -> None:
    """Write a step's file, or replace the lines that its edit shows."""
    path = place(copy, step.path)
    if step.kind != "diff":
        assert not path.exists(), f"{step.path} exists"
        path.parent.mkdir(exist_ok=True)
        path.write_text(step.text, encoding="utf-8")
        return
    lines = step.text.splitlines()
    old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
    new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{step.path} has not once:\n{old}"
    path.unlink()
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize("name", USES)
def test_a_recipe_works_and_touches_no_more_files_than_it_says(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    assert len({step.path for step in recipe.steps}) == recipe.promised
    linked_copy(tmp_path)
    for step in recipe.steps:
        apply(step, tmp_path)
    run_in(tmp_path, "-c", f"{PROLOGUE}exec(textwrap.dedent({USES[name]!r}))", timeout_s=900)


def run_in(copy: Path, *words: str, timeout_s: float) -> None:
    """Run Python on a copy, with the build's tools beside it; it must succeed."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=copy,
        env={
            **os.environ,
            "PATH": path,
            "PYTHONPATH": str(copy),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_optimizer_of_the_recipe_takes_textbook_steps(tmp_path: Path) -> None:
    """Builds the kernels with the new step, and runs their tests for it."""
    linked_copy(tmp_path)
    for step in RECIPES["Optimizer"].steps:
        apply(step, tmp_path)
    for name in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "penstock").symlink_to(tmp_path / "penstock")
    build = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", "built")
    run_in(tmp_path, *build, ".", timeout_s=900)
    for built in (tmp_path / "built" / "penstock").glob("*.so"):
        (tmp_path / "penstock" / built.name).unlink(missing_ok=True)
        shutil.copy(built, tmp_path / "penstock")
    tests = "tests/optimizer/test_kernels.py"
    run_in(tmp_path, "-m", "pytest", "-q", tests, "-k", "signum", timeout_s=900)


def test_every_recipe_is_followed() -> None:
    assert set(RECIPES) == set(USES)
