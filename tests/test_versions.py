"""The versions of Python and torch that are accepted, and what others are told."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.host.errors import ExitCode
from penstock.host.requirements import (
    PYTHON,
    TORCH,
    python_objection,
    torch_objection,
)

ROOT = Path(__file__).parents[1]


def test_pip_is_told_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == PYTHON.specifier
    assert f"torch{TORCH.specifier}" in project["dependencies"]
    found = [re.fullmatch(r".* :: Python :: (3\.\d+)", line) for line in project["classifiers"]]
    named = [match[1] for match in found if match]
    assert named == [f"3.{minor}" for minor in range(PYTHON.first[1], PYTHON.last[1] + 1)]


def test_the_page_has_a_row_for_each_torch_and_a_column_for_each_python() -> None:
    page = (ROOT / "docs" / "VERSIONS.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    [table] = [index for index, row in enumerate(rows) if row[:1] == ["torch"]]
    assert rows[table][1:] == [f"Python 3.{minor}" for minor in range(11, PYTHON.last[1] + 1)]
    torches = [f"2.{minor}" for minor in range(TORCH.first[1], TORCH.last[1] + 1)]
    assert [row[0].rpartition(".")[0] for row in rows[table + 2 :][: len(torches)]] == torches


@pytest.mark.parametrize("found", ["2.11.0+cu130", "2.13.0+cpu", "2.15.1", "2.12.0a0+git1234567"])
def test_torches_of_any_build_are_accepted(found: str) -> None:
    assert torch_objection(found) is None


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ("2.10.0", "torch 2.10.0 is too old: Penstock runs with torch 2.11 to 2.15: "),
        ("3.0.0.dev20270101", "torch 3.0.0.dev20270101 is newer than what was tested: "),
        ("none", "torch none is no known version: "),
        (None, "torch is not installed: "),
    ],
)
def test_other_torches_are_named_with_what_would_do(found: str | None, fault: str) -> None:
    objection = torch_objection(found)
    assert objection is not None and objection.startswith(fault)
    assert objection.endswith(f"{sys.executable} -m pip install 'torch>=2.11,<2.16'")


def test_other_pythons_are_named_with_what_would_do() -> None:
    assert python_objection(sys.version_info[:3]) is None
    for found, fault in (((3, 10, 13), "too old"), ((3, 15, 0), "newer than what was tested")):
        objection = python_objection(found)
        assert objection is not None and objection.startswith(
            f"Python {'.'.join(map(str, found))} ({sys.executable}) is {fault}: Penstock runs on"
            " Python 3.11 to 3.14; "
        )


def test_an_older_python_says_so_before_anything_else_fails() -> None:
    for name in ("src/penstock/__init__.py", "protocol/__init__.py", "host/requirements.py"):
        ast.parse((ROOT / name).read_text(encoding="utf-8"), feature_version=(3, 8))
    program = "import sys; sys.version_info = (3, 10, 13, 'final', 0); import penstock"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=500
    )
    assert "ImportError: Python 3.10.13" in done.stderr.splitlines()[-1]


@pytest.fixture
def environment_with_torch_2_10(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds the records of torch 2.10 before its own."""
    records = tmp_path / "torch-2.10.0.dist-info"
    records.mkdir()
    (records / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.0\n")
    others = filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *others])}


@pytest.mark.parametrize(
    "words",
    [
        ["doctor"],
        ["train", "examples/tiny.yaml", "--run-dir"],
        ["node", "--config", "examples/tiny.yaml"],
    ],
    ids=lambda words: words[0],
)
def test_commands_refuse_an_old_torch(
    words: list[str], environment_with_torch_2_10: dict[str, str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "penstock.client.main", *words]
    command += [str(run_dir)] if words[-1] == "--run-dir" else []
    done = subprocess.run(
        command,
        env=environment_with_torch_2_10,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == ExitCode.BAD_CONFIG
    assert "torch 2.10.0 is too old: Penstock runs with torch 2.11 to 2.15" in (
        done.stdout + done.stderr
    )
    assert not run_dir.exists()
