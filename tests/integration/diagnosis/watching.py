"""Prometheus, Alertmanager, and who gets their messages."""

from __future__ import annotations

import http.server
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from tests.integration.prometheus import Prometheus, Server

ALERTS = Path(__file__).parents[3] / "grafana" / "alerts"
RULES = ALERTS / "penstock.rules.yml"
INTERVAL_S = 1.0
WATCHDOG = "PenstockWatchdog"
OF_THE_MACHINE = frozenset(
    f"Penstock{name}"
    for name in (
        *("StepSlow", "SlowWorker", "OptimizerStarved", "MemoryBandwidthSaturated"),
        *("NetworkSlow", "MetricsMissing", "MemoryNearlyFull", "DiskNearlyFull"),
    )
)
"""Alerts that others on the machine can cause, rightly: of its cores, memory, disk, loopback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One alert of a message, as people get it. ``at_s``: when, in seconds since 1970."""

    at_s: float
    alert: str
    run: str
    summary: str


class Inbox:
    """Receives what Alertmanager sends: the webhook of all its receivers."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        inbox = self

        class Webhook(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                inbox.receive(json.loads(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing is printed."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Webhook)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def receive(self, body: dict[str, Any]) -> None:
        """Keep the firing alerts of a message."""
        for alert in body["alerts"]:
            if alert["status"] == "firing":
                labels = alert["labels"]
                self.messages.append(
                    Message(
                        at_s=time.time(),
                        alert=labels["alertname"],
                        run=labels.get("run", ""),
                        summary=alert["annotations"]["summary"],
                    )
                )

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _routes(inbox_url: str) -> str:
    """Returns the example for Alertmanager with receivers of ours."""
    config = yaml.safe_load((ALERTS / "alertmanager.yml").read_text())
    for receiver in config["receivers"]:
        for webhook in receiver["webhook_configs"]:
            webhook["url"] = inbox_url
    return yaml.safe_dump(config)


class Watch:
    """All three, from ``with`` to its end; nodes write where they are into ``targets``."""

    def __init__(self, folder: Path) -> None:
        self.targets = folder / "targets"
        self.targets.mkdir(parents=True)
        self.inbox = Inbox()
        routes = folder / "alertmanager.yml"
        routes.write_text(_routes(self.inbox.url))
        argv = ["prometheus-alertmanager", f"--config.file={routes}", "--cluster.listen-address="]
        argv += [f"--storage.path={folder / 'alertmanager'}", "--web.listen-address=127.0.0.1:0"]
        self.alertmanager = Server(argv, folder)
        self._folder = folder
        self.prometheus: Prometheus

    def __enter__(self) -> Watch:
        try:
            self.alertmanager.start()
            address = self.alertmanager.url.removeprefix("http://")
            self.prometheus = Prometheus(
                self._folder / "prometheus",
                [self._job()],
                interval_s=INTERVAL_S,
                rules=[RULES],
                alertmanagers=[address],
            )
            self.prometheus.start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.prometheus.stop()
        self._stop()

    def _stop(self) -> None:
        self.alertmanager.stop()
        self.inbox.close()

    def _job(self) -> dict[str, Any]:
        """As in the example prometheus.yml, with targets of a folder of the test's."""
        files = [{"files": [str(self.targets / "*.json")], "refresh_interval": "2s"}]
        return {"job_name": "penstock", "honor_labels": True, "file_sd_configs": files}

    def fired(self, run: str, since_s: float) -> dict[str, float]:
        """Returns the alerts of a run that have fired since, inhibited or not -> when first."""
        now_s = time.time()
        found: dict[str, float] = {}
        if now_s - since_s < INTERVAL_S:
            return found
        asked = f'ALERTS{{alertstate="firing", run="{run}"}}'
        for series in self.prometheus.query_range(asked, since_s, now_s):
            name, first = series.labels["alertname"], series.points[0][0]
            found[name] = min(first, found.get(name, first))
        return found

    def told(self, run: str, since_s: float = 0.0) -> list[Message]:
        """Returns what people were told about a run since."""
        return [m for m in self.inbox.messages if m.run == run and m.at_s >= since_s]
