"""Every panel of every dashboard, asked of a real Prometheus that scrapes real runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.grafana.reading import documents, filled, panels
from tests.integration.dashboards.answers import Answer, Line, answers_of
from tests.integration.dashboards.expected import (
    CHANGES,
    CHANGES_BY_OVERFLOWS,
    EMPTY_WHEN_CLEAN,
    NEVER_HERE,
)
from tests.integration.dashboards.runs import WINDOW_S, Seen, Watching, planned, rules_of_members
from tests.integration.dashboards.writing import write
from tests.integration.prometheus import Prometheus, missing
from tests.shelf import Shelf
from tests.system.conftest import Runner, segments_of

pytestmark = [
    pytest.mark.skipif(missing() != "", reason=missing()),
    pytest.mark.integration,
    pytest.mark.timeout(4800),
]
SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class World:
    """Runs, and what was answered about them, by run and panel."""

    prometheus: Prometheus
    seen: dict[str, Seen]
    found: dict[str, dict[str, Answer]]
    folder: Path

    def line(self, run: str, panel: str, name: str) -> Line:
        return self.found[run][panel].line(name)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, shelf: Shelf) -> Iterator[World]:
    root = tmp_path_factory.mktemp("dashboards")
    runner = Runner(root, shelf)
    watching = Watching(root, runner, [rules_of_members(root)])
    try:
        with watching.prometheus as prometheus:
            seen: dict[str, Seen] = {}
            for plans in planned(SECONDS):
                seen |= watching.watch(plans)
            found = {name: answers_of(prometheus, one) for name, one in seen.items()}
            # Here, and not in a test: matplotlib keeps the files of its fonts open.
            write(found, root / "DASHBOARDS.md")
            yield World(prometheus=prometheus, seen=seen, found=found, folder=root)
    finally:
        runner.stop_all()
    assert segments_of(root) == []


def test_every_panel_answers(world: World) -> None:
    """In a clean run, or in a faulty one where only faults have an answer; with numbers."""
    empty: dict[str, list[str]] = {"clean": [], "faulty": []}
    for side, silent in empty.items():
        for key, answer in world.found[side].items():
            other = world.found[f"{side}-emulated"][key]
            for letter, lines in answer.by_query.items():
                if not lines and not other.by_query[letter]:
                    silent.append(f"{key} {letter}")
    panels_without = {side: {name.rpartition(" ")[0] for name in empty[side]} for side in empty}
    assert panels_without["clean"] <= {*EMPTY_WHEN_CLEAN, *NEVER_HERE}, empty["clean"]
    assert panels_without["faulty"] == {*NEVER_HERE}, empty["faulty"]
    told = {key: world.found["clean"][key].lines for key in EMPTY_WHEN_CLEAN}
    assert not any(told.values()), told


@pytest.mark.parametrize("run", ["clean", "faulty", "clean-emulated"])
@pytest.mark.parametrize(
    ("panel", "name", "phase", "field"),
    [
        ("overview: Loss", "training", "train", "loss"),
        ("overview: Loss", "evaluation eval", "eval", "loss"),
        ("overview: Gradient norm", "gradient norm", "train", "grad_norm"),
        ("overview: Learning rate", "learning rate", "train", "lr"),
        ("recovery: Loss scale", "loss scale", "train", "loss_scale"),
        ("recovery: Committed step by node", "scheduler", "train", "step"),
    ],
)
def test_values_are_those_of_the_metrics_file(
    world: World, run: str, panel: str, name: str, phase: str, field: str
) -> None:
    """Every value that was ever shown stands in metrics.jsonl, and they were shown in its order."""
    lines = [line[field] for line in world.seen[run].lines(phase) if line[field] is not None]
    shown = world.line(run, panel, name).points
    assert len({value for _, value in shown}) > 1 or field in ("loss_scale", "lr")
    place = 0
    for at_s, value in shown:
        if field == "step" and value == 0.0:
            continue  # before the first
        assert value in lines[place:], f"{value} at {at_s} is in no line from {place} on"
        place = lines.index(value, place)


@pytest.mark.parametrize("run", ["clean", "faulty"])
def test_counters_are_those_of_the_metrics_file(world: World, run: str) -> None:
    """Tokens, decisions: what was counted is what some prefix of the lines has."""
    lines, prometheus = world.seen[run].lines(), world.prometheus
    tokens = list(itertools.accumulate(line["tokens"] for line in lines))
    end_s = world.seen[run].end_s
    counted = prometheus.value(f'sum(penstock_tokens_total{{run="{run}"}})', end_s)
    assert counted in tokens
    known = lines[: tokens.index(counted) + 1]
    for decision in ("commit", "amend", "skip"):
        labels = f'{{run="{run}", decision="{decision}"}}'
        decided = prometheus.value(f"sum(penstock_attempts_total{labels})", end_s)
        total = sum(line["decision"] == decision for line in known)
        assert abs(decided - total) <= 1  # both grow, one after the other
    (at_s, speed) = world.line(run, "overview: Tokens per second", "tokens").points[-1]
    # As many as there were lately, or fewer: where a step or a scrape takes long, a window has few.
    lately = [line for line in lines if at_s - 2 * WINDOW_S <= line["time"] <= at_s]
    assert 0 <= speed * WINDOW_S <= 1.3 * sum(line["tokens"] for line in lately)


@pytest.mark.parametrize("panel", CHANGES, ids=str)
def test_panels_change_under_their_fault(world: World, panel: str) -> None:
    fault, shows = CHANGES[panel]
    clean, faulty = world.found["clean"][panel], world.found["faulty"][panel]
    told = [(line.name, max(line.values)) for line in (*clean.lines, *faulty.lines)]
    assert shows(clean, faulty), f"{fault}: {told}"


@pytest.mark.parametrize("panel", CHANGES_BY_OVERFLOWS, ids=str)
def test_panels_show_overflows(world: World, panel: str) -> None:
    clean, faulty = world.found["clean"][panel], world.found["faulty-overflows"][panel]
    told = [(line.name, line.values[0], line.values[-1]) for line in faulty.lines]
    assert CHANGES_BY_OVERFLOWS[panel](clean, faulty), told


def test_devices_seconds_and_critical_seconds_add_up(world: World) -> None:
    """What the panels stack is the whole: shares of a device's time, and of a step."""
    for run in ("clean", "clean-emulated"):
        waiting = world.found[run]["time: What devices wait for"].lines
        computing = world.found[run]["time: What devices compute"].lines
        together = sum(line.values[-1] for line in (*waiting, *computing))
        assert together == pytest.approx(1.0, abs=0.02), run
        (over_step,) = world.found[run]["time: Sum of resources over the step"].lines
        assert over_step.values[-1] == pytest.approx(1.0, abs=0.05), run


def test_annotations_mark_what_happened(world: World) -> None:
    marks = {
        annotation["name"]: annotation["expr"]
        for annotation in documents()["overview"]["annotations"]["list"]
    }
    for name, runs in (
        ("Broken attempts", ["faulty"]),
        ("Saves", ["clean", "faulty"]),
        ("Alerts", ["faulty"]),
    ):
        for run in ("clean", "faulty"):
            seen = world.seen[run]
            expr = filled(marks[name], run, "10s", "1h")
            found = world.prometheus.query_range(expr, seen.start_s, seen.end_s)
            assert bool(found) == (run in runs), f"{name}, {run}: {found}"


def test_variables_list_runs_and_their_nodes(world: World) -> None:
    prometheus, seen = world.prometheus, world.seen["clean"]
    runs = {
        series.labels["run"]
        for series in prometheus.query_range("penstock_step", seen.start_s, seen.end_s + 1800)
    }
    assert runs == set(world.seen)
    group = 'group by (node) (penstock_build_info{run="clean"})'
    nodes = prometheus.query_range(group, seen.start_s, seen.end_s)  # one may end before the other
    assert {series.labels["node"] for series in nodes} == {"alpha", "beta"}


def test_a_run_that_ended_leaves_no_values_behind(world: World) -> None:
    """Its targets are gone: Prometheus marks its series as stale, and does not draw them on."""
    for run, seen in world.seen.items():
        left = world.prometheus.query(f'{{run="{run}"}}', seen.end_s + 15.0)
        assert [one.labels for one in left if one.labels["__name__"].startswith("penstock_")] == []


def test_the_document_and_pictures_can_be_made(world: World) -> None:
    lines = (world.folder / "DASHBOARDS.md").read_text("utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert len(rows) == len([panel for panel in panels() if panel.asked]) + 2 * len(documents())
    for dashboard in documents():
        picture = world.folder / "pictures" / f"dashboard-{dashboard}.png"
        assert picture.stat().st_size > 20_000
