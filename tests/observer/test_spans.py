"""Spans of a real run, as a collector on this machine gets them over HTTP."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from penstock.config.schema import Config
from penstock.daemons.monitor.trackers import spans
from penstock.daemons.monitor.trackers.following import Bookmark, bookmark_path
from penstock.daemons.monitor.trackers.main import TRIES, follow
from penstock.daemons.monitor.trackers.sampled import JsonLines
from penstock.daemons.monitor.trackers.sink import Subject, settings_of
from penstock.daemons.monitor.trackers.spans import SpanSink
from penstock.host.stopping import StopSignal
from penstock.protocol.run.rundir import RunDirectory


class Collector(HTTPServer):
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[ExportTraceServiceRequest] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def spans(self) -> list[Span]:
        groups = (group for request in self.requests for group in request.resource_spans)
        return [span for group in groups for scope in group.scope_spans for span in scope.spans]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert self.path == "/v1/traces" and isinstance(self.server, Collector)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def run(plain_run: Path, tmp_path: Path) -> RunDirectory:
    """A traced run, as its trackers find it."""
    copy = tmp_path / "run"
    shutil.copytree(plain_run, copy, ignore=shutil.ignore_patterns("state", "*.bin"))
    (copy / "trackers").mkdir(exist_ok=True)
    return RunDirectory(copy)


def sink_for(run: RunDirectory, url: str) -> SpanSink:
    observability = run.config.observability.model_copy(update={"opentelemetry": url})
    config: Config = run.config.model_copy(update={"observability": observability})
    subject = Subject(
        run_id=run.run_id,
        name=config.run.name,
        directory=run.path,
        config=config,
        settings=settings_of(config),
    )
    return SpanSink(subject)


def stopped() -> StopSignal:
    stop = StopSignal()
    stop.set()
    return stop


def attributes(span: Span) -> dict[str, object]:
    found = ((entry.key, entry.value) for entry in span.attributes)
    return {key: getattr(value, value.WhichOneof("value")) for key, value in found}


def test_attempts_are_spans_with_devices_as_children(
    run: RunDirectory, collector: Collector
) -> None:
    follow(sink_for(run, collector.url), run.path, "opentelemetry", stopped())
    lines = [json.loads(s) for s in (run.path / "metrics.jsonl").read_text().splitlines()]
    decided = {line["attempt"]: line for line in lines if line["phase"] == "train"}
    attempts = {
        attributes(span)["penstock.attempt"]: span
        for span in collector.spans
        if span.name == "attempt"
    }
    assert attempts.keys() == decided.keys()
    children = [span for span in collector.spans if span.name.startswith("worker.")]
    for number, line in decided.items():
        span, words = attempts[number], attributes(attempts[number])
        assert words["penstock.decision"] == line["decision"]
        assert words["penstock.loss"] == line["loss"]
        assert words["penstock.membership"] == line["epoch"]
        assert words["penstock.data_epoch"] == line["data_epoch"]
        own = [child for child in children if child.parent_span_id == span.span_id]
        assert {child.name for child in own} == {"worker.0", "worker.1"}
        for child in own:
            assert child.trace_id == span.trace_id
            assert span.start_time_unix_nano <= child.start_time_unix_nano
            assert child.end_time_unix_nano <= span.end_time_unix_nano + 5_000_000
    starts = [attempts[number].start_time_unix_nano for number in sorted(attempts)]
    assert starts == sorted(starts)
    log = [json.loads(s) for s in (run.path / "logs/schedulerd.jsonl").read_text().splitlines()]
    points = {attributes(s).get("penstock.message") for s in collector.spans}
    assert {e["message"] for e in log if e["message"].startswith("membership 1 begins")} <= points
    (resource,) = {
        tuple((e.key, e.value.string_value) for e in request.resource_spans[0].resource.attributes)
        for request in collector.requests
    }
    assert dict(resource)["service.instance.id"] == run.run_id


@pytest.mark.parametrize("word", ["membership", "epoch"])
def test_logs_of_an_older_penstock_have_memberships(
    word: str, run: RunDirectory, collector: Collector
) -> None:
    text = f"{word} 1 begins at version 0"
    entry = {"time": 1.7e9, "level": "info", "process": "schedulerd", "message": text}
    (run.path / "logs" / "schedulerd.jsonl").write_text(json.dumps(entry) + "\n")
    (run.path / "metrics.jsonl").unlink()
    follow(sink_for(run, collector.url), run.path, "opentelemetry", stopped())
    assert [(s.name, attributes(s)["penstock.message"]) for s in collector.spans] == [
        ("membership", text)
    ]


def test_spans_that_are_sent_again_have_the_same_ids(
    run: RunDirectory, collector: Collector
) -> None:
    for _ in range(2):
        bookmark_path(run.path, "opentelemetry").unlink(missing_ok=True)
        follow(sink_for(run, collector.url), run.path, "opentelemetry", stopped())
    ids = [(span.trace_id, span.span_id) for span in collector.spans]
    assert len(ids) == 2 * len(set(ids))


def test_lines_wait_for_a_collector_that_is_away(
    run: RunDirectory, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "TIMEOUT_S", 0.05)
    for _ in range(TRIES + 1):
        with pytest.raises(ConnectionError, match=r"did not take \d+ spans"):
            follow(sink_for(run, "http://127.0.0.1:9"), run.path, "opentelemetry", stopped())
    assert Bookmark.read(bookmark_path(run.path, "opentelemetry")) == Bookmark()
    follow(sink_for(run, collector.url), run.path, "opentelemetry", stopped())
    assert any(span.name == "attempt" for span in collector.spans)


def test_lines_that_are_added_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = JsonLines(path)
    assert list(lines.new()) == []
    path.write_text('1\nno json\n[2]\n"half')
    assert list(lines.new()) == [1, [2]]
    with path.open("a") as file:
        file.write(' line"\n')
    assert list(lines.new()) == ["half line"]
    path.write_text("3\n")
    assert list(lines.new()) == [3]
