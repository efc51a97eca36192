"""The Prometheus of the other tests: it scrapes, answers, and is gone afterwards."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.prometheus import Prometheus, missing

pytestmark = [
    pytest.mark.skipif(missing() != "", reason=missing()),
    pytest.mark.integration,
]

PAGE = b"# TYPE penstock_step gauge\npenstock_step 7\n"


class Page(http.server.BaseHTTPRequestHandler):
    """Serves one page of metrics."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def address() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_prometheus_scrapes_evaluates_rules_and_answers(tmp_path: Path, address: str) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(
        "groups: [{name: one, rules: [{alert: High, expr: 'penstock_step > 6'}]}]", encoding="utf-8"
    )
    job = {"job_name": "penstock", "static_configs": [{"targets": [address]}]}
    with Prometheus(tmp_path / "prometheus", [job], interval_s=5.0, rules=[rules]) as prometheus:
        (found,) = prometheus.wait_for("penstock_step")
        assert found.value == 7.0
        assert found.labels["instance"] == address
        assert prometheus.value("penstock_step * 2") == 14.0
        assert prometheus.value("scalar(penstock_step)") == 7.0
        at_s = found.points[0][0]
        (ranged,) = prometheus.query_range("penstock_step", at_s, at_s + 1.0, step_s=0.5)
        assert [value for _, value in ranged.points] == [7.0, 7.0, 7.0]
        assert [target["health"] for target in prometheus.targets()] == ["up"]
        prometheus.wait_for('ALERTS{alertname="High", alertstate="firing"}')
        assert [alert["labels"]["alertname"] for alert in prometheus.alerts()] == ["High"]
        with pytest.raises(AssertionError, match="parse error"):
            prometheus.query("rate(")
        with pytest.raises(AssertionError, match="0 series"):
            prometheus.value("absent_one")


def test_a_prometheus_with_a_wrong_configuration_says_so(tmp_path: Path) -> None:
    prometheus = Prometheus(tmp_path, [{"job_name": "a", "scrape_interval": "never"}])
    with pytest.raises(AssertionError, match="not a valid duration"):
        prometheus.start()
