"""Metrics as data, the page a process counts into, and the reference page."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from penstock.protocol.metrics.reference import PROCESSES, markdown
from penstock.protocol.metrics.registry import Kind, MetricRegistry, counter, gauge, histogram, info

ROOT = Path(__file__).parents[2]
METRICS = (
    counter("penstock_test_events", "Events.", {"cause": ("fire", "water")}),
    counter("penstock_test_seen", "Seen.", {"what": ("a", "b")}, sparse=True),
    gauge("penstock_test_level", "Level."),
    gauge("penstock_test_late_bytes", "Late.", absent="at first"),
    gauge("penstock_test_parts", "Parts.", {"part": "those of the run"}),
    histogram("penstock_test_seconds", "Time.", (1.0, 2.0)),
    info("penstock_test", "What it is.", {"version": "of the test"}),
)


def samples(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#") and "_created" not in line]


def test_counters_begin_at_zero_and_what_is_not_known_is_absent() -> None:
    registry = CollectorRegistry()
    page = MetricRegistry(METRICS, registry)
    assert samples(registry) == [
        'penstock_test_events_total{cause="fire"} 0.0',
        'penstock_test_events_total{cause="water"} 0.0',
        "penstock_test_level 0.0",
        'penstock_test_seconds_bucket{le="1.0"} 0.0',
        'penstock_test_seconds_bucket{le="2.0"} 0.0',
        'penstock_test_seconds_bucket{le="+Inf"} 0.0',
        "penstock_test_seconds_count 0.0",
        "penstock_test_seconds_sum 0.0",
    ]
    page.add("penstock_test_events", 2, "fire")
    page.add("penstock_test_seen", 1, "b")
    page.set("penstock_test_late_bytes", 7)
    page.ask("penstock_test_parts", lambda: 3, "left")
    page.observe("penstock_test_seconds", 1.5)
    page.say("penstock_test", {"version": "1"})
    value = registry.get_sample_value
    assert value("penstock_test_events_total", {"cause": "fire"}) == 2
    assert value("penstock_test_seen_total", {"what": "b"}) == 1
    assert value("penstock_test_seen_total", {"what": "a"}) is None
    assert value("penstock_test_late_bytes") == 7
    assert value("penstock_test_parts", {"part": "left"}) == 3
    assert value("penstock_test_seconds_bucket", {"le": "2.0"}) == 1
    assert value("penstock_test_info", {"version": "1"}) == 1
    page.forget("penstock_test_late_bytes")
    assert value("penstock_test_late_bytes") is None


def test_a_page_is_brought_up_to_date_when_somebody_looks() -> None:
    registry = CollectorRegistry()
    page = MetricRegistry(METRICS, registry)
    page.refreshed_by(lambda: page.add("penstock_test_events", 1, "fire"))
    generate_latest(registry)
    assert registry.get_sample_value("penstock_test_events_total", {"cause": "fire"}) == 2


def test_no_two_pages_of_a_process_share_a_name() -> None:
    registry = CollectorRegistry()
    MetricRegistry(METRICS, registry)
    with pytest.raises(ValueError, match="Duplicated"):
        MetricRegistry(METRICS[:1], registry)


def test_the_reference_page_is_current() -> None:
    assert (ROOT / "docs" / "METRICS.md").read_text(encoding="utf-8") == markdown()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="not installed: promtool")
@pytest.mark.parametrize("process", PROCESSES)
def test_descriptions_follow_the_conventions(process: str) -> None:
    """promtool reads a page on which every metric has samples."""
    registry = CollectorRegistry()
    page = MetricRegistry(PROCESSES[process], registry)
    for metric in PROCESSES[process]:
        assert metric.text.endswith("."), metric.name
        for labels in _examples(metric.labels.values()):
            if metric.kind is Kind.GAUGE:
                page.set(metric.name, 1, *labels)
            elif metric.kind is Kind.COUNTER:
                page.add(metric.name, 1, *labels)
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(
        command, input=generate_latest(registry), capture_output=True, timeout=600
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")


def _examples(labels: Iterable[object]) -> list[tuple[str, ...]]:
    return [tuple(values if isinstance(values, str) else values[0] for values in labels)]  # type: ignore[index]
