"""Alerts fire on their faults and on nothing else, by Prometheus' own tools."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.grafana.alert_cases import CASES, HEALTHY, Case

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "grafana" / "alerts"
RULES = ALERTS / "penstock.rules.yml"
RUNBOOK = ROOT / "docs" / "RUNBOOK.md"


def checked(*command: str) -> str:
    """What a tool says that must be content; skips where it is not installed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed (see tests/integration/packages)")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def groups() -> list[dict[str, Any]]:
    """All groups of rules."""
    found: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
    return found


def rules() -> list[dict[str, Any]]:
    """All rules that are alerts."""
    return [rule for group in groups() for rule in group["rules"] if "alert" in rule]


def labelled(series: str, run: str) -> str:
    """A series of a run, as metricsd of its first node serves it."""
    name, _, labels = series.partition("{")
    of_run = {"run": run, "node": "a", "instance": f"{run}:9400"}
    words = [f'{key}="{value}"' for key, value in of_run.items()]
    return f"{name}{{{', '.join([*words, *filter(None, [labels.removesuffix('}')])])}}}"


def promtool_test(case: Case) -> dict[str, Any]:
    """A run with the case's fault; beside a healthy one, if anything is to fire."""
    faulty = {**HEALTHY, **case.changed}
    series = [(labelled(name, "faulty"), values) for name, values in faulty.items() if values]
    if any(case.fires.values()):
        series += [(labelled(name, "healthy"), values) for name, values in HEALTHY.items()]
    return {
        "name": case.name,
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname, run) (ALERTS{alertstate="firing"}) * 0',
                "eval_time": f"{seconds}s",
                "exp_samples": [
                    {"labels": '{alertname="PenstockWatchdog"}', "value": 0},
                    *(
                        {"labels": f'{{alertname="{name}", run="faulty"}}', "value": 0}
                        for name in sorted(names)
                    ),
                ],
            }
            for seconds, names in case.fires.items()
        ],
    }


def test_rules_and_routes_are_well_formed() -> None:
    checked("promtool", "check", "rules", str(RULES))
    checked("amtool", "check-config", str(ALERTS / "alertmanager.yml"))


def test_each_alert_fires_on_its_fault_and_on_nothing_else(tmp_path: Path) -> None:
    """At the start, while it pauses, evaluates, saves, restarts and ends, too; never for the
    neighbour.
    """
    tests = tmp_path / "alerts.yml"
    tests.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(RULES)],
                "evaluation_interval": "15s",
                "group_eval_order": [group["name"] for group in groups()],
                "tests": [promtool_test(case) for case in CASES],
            }
        )
    )
    checked("promtool", "test", "rules", str(tests))
    tried = {name for case in CASES for names in case.fires.values() for name in names}
    assert {rule["alert"] for rule in rules()} == tried | {"PenstockWatchdog"}


def test_alerts_say_what_where_and_what_to_do() -> None:
    entries = {
        heading.lower(): text
        for heading, text in re.findall(
            r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOK.read_text(), re.MULTILINE | re.DOTALL
        )
    }
    for rule in rules():
        name, notes = rule["alert"], rule["annotations"]
        assert {"severity"} <= set(rule["labels"]), name
        assert set(notes) == {"summary", "description", "runbook_url"}, name
        assert notes["runbook_url"] == f"docs/RUNBOOK.md#{name.lower()}"
        assert name.lower() in entries, f"docs/RUNBOOK.md lacks {name}"
        if name != "PenstockWatchdog":
            assert "$labels.run" in notes["summary"], name
            assert {"severity", "cause", "resource"} & set(rule["labels"]), name
            for part in ("**Means**", "**See**", "**Do**", "**Harmless**"):
                assert part in entries[name.lower()], f"{name}: docs/RUNBOOK.md lacks {part}"


def test_no_rule_waits_longer_than_two_minutes() -> None:
    for rule in rules():
        waits = rule.get("for", "0s")
        assert int(waits.removesuffix("s")) <= 60, f"{rule['alert']}: for {waits}"


def test_rules_ask_for_metrics_that_there_are() -> None:
    """And the series that promtool is given are those of a real run."""
    known = set(re.findall(r"`(penstock_\w+)`", (ROOT / "docs" / "METRICS.md").read_text()))
    asked = {
        name for group in groups() for rule in group["rules"] for name in names_in(rule["expr"])
    }
    given = {name for series in HEALTHY for name in names_in(series)}
    lost = {name for name in asked | given if re.sub(r"_(sum|count)$", "", name) not in known}
    assert not lost - known


def names_in(expression: str) -> set[str]:
    """Metrics that an expression names."""
    return set(re.findall(r"\bpenstock_\w+", expression))
