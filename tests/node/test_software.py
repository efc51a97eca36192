"""A start with other software or hardware than the last one says so, or is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config.schema import Config, parse_config
from penstock.daemons.node.preparing.software import Software, check_software
from penstock.host.errors import ConfigError


def config(*, strict: bool = False, threads: int = 0) -> Config:
    """A small run."""
    return parse_config(
        {
            "run": {"strict": strict},
            "model": {"hf": {"model_type": "llama"}},
            "data": {"path": "@stdlib"},
            "cluster": {"threads_per_worker": threads},
        }
    )


def said(run_dir: Path, software: Software, asked: Config) -> list[str]:
    """Returns the lines of a start with ``software``."""
    lines: list[str] = []
    check_software(asked, run_dir, software, lines.append)
    return lines


HERE = replace(Software.here(), gpus=("NVIDIA H200",))
OTHER = replace(
    HERE,
    packages={**HERE.packages, "torch": "9.9.9"},
    processor="Z80",
    cpus=HERE.cpus + 1,
    gpus=("NVIDIA H100",),
)


def test_a_start_with_other_software_says_so_in_a_line(tmp_path: Path) -> None:
    assert said(tmp_path, HERE, config()) == [], "nothing is known of an earlier start"
    HERE.write(tmp_path)
    assert said(tmp_path, HERE, config(strict=True)) == []
    torch, cpus = HERE.packages["torch"], HERE.cpus
    assert said(tmp_path, OTHER, config()) == [
        f"since the last start: torch: {torch} -> 9.9.9; processor: {HERE.processor} -> Z80;"
        f" CPUs: {cpus} -> {cpus + 1}; GPUs: NVIDIA H200 -> NVIDIA H100; layers may round"
        " differently from the next step on"
    ]
    assert "CPUs:" not in said(tmp_path, OTHER, config(threads=2))[0]


def test_strict_refuses_it(tmp_path: Path) -> None:
    HERE.write(tmp_path)
    with pytest.raises(ConfigError, match=r"run\.strict: .*torch: .* -> 9\.9\.9.*--strict"):
        check_software(config(strict=True), tmp_path, OTHER, print)


def test_notes_of_older_versions_are_compared_as_far_as_they_go(tmp_path: Path) -> None:
    HERE.write(tmp_path)
    path = tmp_path / "software.json"
    fields = json.loads(path.read_text())
    del fields["gpus"]
    path.write_text(json.dumps(fields))
    assert "GPUs" not in said(tmp_path, OTHER, config())[0]
