"""Short real runs, traced: nothing is missing from the trace, nothing in it contradicts itself."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.client.main import app
from penstock.protocol.run.rundir import RunDirectory
from tests.client.test_trace import arrows_of
from tests.system import conftest as H

STEPS: int = H.PLAIN["train"]["steps"]
COMPUTE = {"F", "R", "B", "BI", "BW"}


def penstock(*arguments: str) -> str:
    """Standard output of a command that succeeds."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_a_traced_run_beside_its_simulation(plain_run: Path, tmp_path: Path) -> None:
    check_trace(plain_run, tmp_path)


@pytest.mark.slow
def test_a_traced_run_that_recomputes(runner: Any, tmp_path: Path) -> None:
    """Traces and metrics measure by two clocks, which a busy core holds up apart."""
    changes = {**H.PLAIN, "schedule": {"scheme": "spipe"}, "observability": {"trace": True}}
    run_dir = runner.train(runner.configure("traced", changes))
    traced_s, said_s = seconds_of(check_trace(run_dir, tmp_path), run_dir)
    assert traced_s == pytest.approx(said_s, rel=0.05)


def check_trace(run_dir: Path, tmp_path: Path) -> list[dict[str, Any]]:
    out = tmp_path / "chrome.json"
    report = json.loads(penstock("trace", str(run_dir), "--out", str(out), "--json"))
    check_report(report)
    events = json.loads(out.read_text())["traceEvents"]
    check_step(report["where_the_step_went"], events)
    traced_s, _ = seconds_of(events, run_dir)
    spans = [e for e in events if e["ph"] == "X"]
    lasted_us = max(e["ts"] + e["dur"] for e in spans) - min(e["ts"] for e in spans)
    assert 0.0 < traced_s <= lasted_us / 1e6 + 1e-3
    check_chrome(events, RunDirectory(run_dir))
    assert "error" in penstock("trace", str(run_dir), "--attempts", "2:3")
    return events


def check_report(report: dict[str, Any]) -> None:
    assert report["attempts"] == list(range(4, STEPS + 1)), "three to warm up"
    assert (report["left_out"], report["skipped_lines"]) == ({}, 0)
    assert math.isfinite(report["error"]) and report["step_seconds"] > 0.0
    assert 0.0 < report["measured"]["bubble_ratio"] < 1.0
    assert report["measured"]["makespan_seconds"] <= report["step_seconds"]


def check_step(step: dict[str, Any], events: list[dict[str, Any]]) -> None:
    """A step, its journal included, is what its resources add up to."""
    start_us = {e["name"]: e["ts"] for e in events if e["ph"] == "X"}
    attempt = step["attempt"]
    seconds = (start_us[f"attempt {attempt + 1}"] - start_us[f"attempt {attempt}"]) / 1e6
    assert step["step_seconds"] == pytest.approx(seconds, abs=5e-6), "written in microseconds"
    assert sum(step["critical_seconds"].values()) == pytest.approx(step["step_seconds"], rel=1e-6)
    assert step["critical_seconds"]["compute"] > 0.0
    assert 0.0 < step["savings_together_seconds"] <= step["step_seconds"]


def seconds_of(events: list[dict[str, Any]], run_dir: Path) -> tuple[float, float]:
    """All attempts' seconds as traced, and as the metrics say. What the metrics call an attempt
    began when the one before was decided: its journal was still to be written.
    """
    spans = {e["name"]: e["dur"] / 1e6 for e in events if e["ph"] == "X"}
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    said = {line["attempt"]: line["seconds"] for line in lines if "attempt" in line}
    assert sorted(said) == list(range(1, STEPS + 1))
    traced_s = sum(spans[f"attempt {n}"] + spans.get(f"commit {n - 1}", 0.0) for n in said)
    return traced_s, sum(said.values())


def check_chrome(events: list[dict[str, Any]], run: RunDirectory) -> None:
    spans = [event for event in events if event["ph"] == "X"]
    for device, program in enumerate(run.plan.programs):
        executed = Counter(
            (event["args"]["attempt"], event["args"]["what"])
            for event in spans
            if event["pid"] == device + 1 and "what" in event["args"] and event["tid"] == 1
        )
        wanted = [str(i) for i in program if i.opcode.value in COMPUTE]
        for attempt in range(1, STEPS + 1):
            assert [executed[attempt, text] for text in wanted] == [1] * len(wanted)
    trainable = [b.index for b in run.table.blocks if b.trainable_elements]
    passes = Counter(event["name"] for event in spans if event["pid"] == 1000)
    for block in trainable:
        assert passes[f"preview {block}"] >= 1, "the first attempt settles nothing"
        assert passes[f"advance {block}"] >= STEPS - 2
    decisions = [event["name"] for event in spans if event["name"].startswith("commit")]
    assert decisions == [f"commit {attempt}" for attempt in range(1, STEPS + 1)]
    check_lanes(spans)
    arrows = arrows_of(events)
    devices = len(run.plan.programs)
    assert arrows["announcement"] == STEPS * devices
    assert arrows["tensor"] > 0 and arrows["send"] > 0 and arrows["gradients"] >= STEPS


def check_lanes(spans: list[dict[str, Any]]) -> None:
    lanes = defaultdict(list)
    for event in spans:
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for found in lanes.values():
        for (_, end), (start, _) in pairwise(sorted(found)):
            assert start >= end - 2.0, "microseconds: what is written is rounded to them"
