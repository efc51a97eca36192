"""One page of many: what Prometheus' own parser reads there."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.parser import text_string_to_metric_families

from penstock.daemons.monitor.metrics.exposition import MergedExposition
from penstock.protocol.run.metrics_socket import render

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(page: bytes) -> Samples:
    """All samples, none of which is there twice."""
    families = list(text_string_to_metric_families(page.decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names), "a family stands on a page once"
    found = [
        ((sample.name, tuple(sorted(sample.labels.items()))), sample.value)
        for family in families
        for sample in family.samples
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def page(text: str, value: float) -> bytes:
    """A page with a metric of each kind, labelled ``text``."""
    registry = CollectorRegistry()
    Gauge("penstock_gauge", 'With "quotes", \\ and\nlines.', ["why"], registry=registry).labels(
        text
    ).set(value)
    Counter("penstock_things", "Counted.", registry=registry).inc(3)
    Histogram("penstock_wait_seconds", "Spread.", registry=registry, buckets=(1, 2)).observe(1.5)
    Info("penstock_build", "Made of.", registry=registry).info({"version": text})
    return render(registry)


@given(st.text(max_size=20), st.text(max_size=20), st.floats(allow_subnormal=False))
def test_samples_keep_their_names_and_values_and_get_labels(
    text: str, ours: str, value: float
) -> None:
    merged = MergedExposition()
    merged.add(page(text, value), {"process": "a", "run": ours})
    merged.add(page(text, value), {"process": "b", "run": ours})
    expected: Samples = {}
    for process in "ab":
        for (name, labels), number in samples(page(text, value)).items():
            key = tuple(sorted((*labels, ("process", process), ("run", ours))))
            expected[name, key] = number
    found = samples(merged.text())
    assert found.keys() == expected.keys()
    for key, number in expected.items():
        assert found[key] == number or (math.isnan(number) and math.isnan(found[key]))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_page_leave_the_others_alone(garbage: bytes) -> None:
    merged = MergedExposition()
    merged.add(page("x", 1), {"process": "a"})
    alone = merged.text()
    merged.add(garbage, {"process": "b"})
    merged.add(b"# HELP penstock_gauge t\n# TYPE penstock_gauge gauge\n" + garbage, {"p": "c"})
    assert samples(alone).items() <= samples(merged.text()).items()


def test_a_family_has_one_type() -> None:
    merged = MergedExposition()
    merged.add(b"# HELP a b\n# TYPE a gauge\na 1\n", {"process": "1"})
    merged.add(b"# HELP a c\n# TYPE a counter\na 2\n", {"process": "2"})
    merged.add(b"# HELP empty c\n# TYPE empty counter\n", {"process": "2"})
    assert merged.text() == b'# HELP a b\n# TYPE a gauge\na{process="1"} 1\n'
