"""The generated dashboards: current, complete, and made of PromQL that Prometheus reads."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml

from penstock.grafana.dashboards.colors import CAUSES, COLORS, DECISIONS, MEMBERS, RESOURCES
from penstock.grafana.dashboards.tables import documents as made_now
from tests.grafana import reading

ROOT = Path(__file__).parents[2]
WITHOUT_QUERIES = {"text"}
COLUMNS = 24


def test_the_json_is_what_the_code_makes() -> None:
    written = {path.name: path.read_text("utf-8") for path in reading.GENERATED.iterdir()}
    assert written == made_now(), "run make dashboards"


def test_panels_explain_themselves() -> None:
    """A description of a sentence or more, a unit, and queries, each with a legend."""
    wrong = []
    for panel in reading.panels():
        if panel.kind in WITHOUT_QUERIES:
            continue
        if len(panel.description) < 30 or not panel.description.endswith("."):
            wrong.append(f"{panel.key}: description {panel.description!r}")
        if not panel.asked or not (panel.unit or panel.kind == "heatmap"):
            wrong.append(f"{panel.key}: {len(panel.asked)} queries, unit {panel.unit!r}")
        for asked in panel.asked:
            if panel.kind in ("timeseries", "bargauge", "state-timeline", "gauge"):
                wrong += [f"{panel.key}: no legend"] if asked.legend == "__auto" else []
    assert not wrong, wrong


def test_panels_have_a_place_of_their_own() -> None:
    for name, made in reading.documents().items():
        taken: Counter[tuple[int, int]] = Counter()
        numbers: Counter[int] = Counter()
        for raw in made["panels"]:
            inner = raw.get("panels", ())
            numbers.update(panel["id"] for panel in (raw, *inner))
            place = raw["gridPos"]
            left, top = place.get("x", 0), place.get("y", 0)
            assert left + place["w"] <= COLUMNS, f"{name}: {raw['title']} is too wide"
            cells = ((left + x, top + y) for x in range(place["w"]) for y in range(place["h"]))
            taken.update(cells)
        assert max(taken.values()) == 1, f"{name}: panels lie on each other"
        assert max(numbers.values()) == 1, f"{name}: {numbers}"
    keys = Counter(panel.key for panel in reading.panels())
    assert max(keys.values()) == 1, keys


def test_dashboards_choose_by_run_and_node_and_lead_to_each_other() -> None:
    for name, made in reading.documents().items():
        variables = {entry["name"]: entry for entry in made["templating"]["list"]}
        assert list(variables) == ["datasource", "run", "node", "window"], name
        assert variables["node"]["multi"] and variables["node"]["includeAll"], name
        links = [link for link in made["links"] if link["type"] == "dashboards"]
        assert [(link["tags"], link["keepTime"], link["includeVars"]) for link in links] == [
            (["penstock"], True, True)
        ], name
        assert made["tags"] == ["penstock"]
        assert made["uid"] == f"penstock-{name}"


def test_no_answer_is_made_up_and_every_series_belongs_to_the_chosen_run() -> None:
    wrong = []
    for where, expr in reading.expressions().items():
        if "or vector(" in expr or "or on" in expr:
            wrong.append(f"{where}: {expr}")
        selected = expr.count('run="$run"')
        named = len(reading.METRIC.findall(expr)) + expr.count("ALERTS{")
        if selected != named:
            wrong.append(f"{where}: {named} metrics, {selected} of the run: {expr}")
    assert not wrong, wrong


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_reads_every_expression(tmp_path: Path) -> None:
    """All at once, as rules: promtool names those that it cannot read."""
    rules = [
        {"record": f"query:{index}", "expr": reading.filled(expr, "a", "1m", "1h")}
        for index, expr in enumerate(reading.expressions().values())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    command = ["promtool", "check", "rules", "--lint=none", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_everything_that_has_a_colour_has_its_own() -> None:
    for names in (RESOURCES, ("computing", *CAUSES), DECISIONS, MEMBERS):
        colors = Counter(COLORS[name] for name in names)
        assert max(colors.values()) == 1, colors


def test_every_metric_is_one_that_a_process_has() -> None:
    described = (ROOT / "docs" / "METRICS.md").read_text("utf-8")
    there = set(re.findall(r"^\* `(penstock_\w+)`", described, re.MULTILINE))
    asked = {
        name: where
        for where, expr in reading.expressions().items()
        for name in reading.metrics_of(expr)
    }
    assert {name: where for name, where in asked.items() if name not in there} == {}
