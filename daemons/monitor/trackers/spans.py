"""OpenTelemetry: spans of attempts and evaluations, points for memberships, saves and warnings.

An attempt is one trace. Its id follows from run and attempt, so that a collector recognizes a
repeated one. It ends with its decision, at the ``time`` of its line in ``metrics.jsonl``. Traced
attempts (``observability.sample_every``) have a child for each device
(:mod:`~penstock.daemons.monitor.trackers.sampled`). Points are lines of the scheduler's log.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import set_span_in_context

from penstock.daemons.monitor.trackers.sampled import JsonLines, SampledTimes, Stretch
from penstock.daemons.monitor.trackers.sink import Reading, Subject
from penstock.protocol.run.names import SCHEDULERD

TIMEOUT_S = 5.0
_PATH = "/v1/traces"
_KEYS = tuple("step attempt epoch data_epoch decision loss grad_norm tokens".split())
"""Keys of a line of metrics that become attributes."""
_RENAMED = MappingProxyType({"epoch": "membership"})
_POINTS = re.compile(r"(membership|epoch) \d+ begins|(save)d step|(restor)ing from")


class SpanSink:
    """Makes spans with the SDK and exports them itself, because the SDK's processors hide failed
    exports.
    """

    def __init__(self, subject: Subject) -> None:
        url = (subject.config.observability.opentelemetry or "").rstrip("/")
        endpoint = url if url.endswith(_PATH) else url + _PATH
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S)
        self._ended = _Ended()
        self._ids = _Ids(subject.run_id)
        names = {
            "service.name": "penstock",
            "service.instance.id": subject.run_id,
            "penstock.run": subject.name,
        }
        provider = TracerProvider(
            resource=Resource.create(names), id_generator=self._ids, shutdown_on_exit=False
        )
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("penstock")
        self._times = SampledTimes(subject.directory)
        self._log = JsonLines(subject.directory / "logs" / f"{SCHEDULERD}.jsonl")

    def log(self, readings: Sequence[Reading]) -> None:
        """Exports the spans of the readings, and the points since the last time.

        Raises:
            ConnectionError: the collector did not take them.
        """
        self._points()
        self._times.look()
        for reading in readings:
            attempt = reading.line.get("attempt")
            stretch = None
            if reading.line.get("phase") == "train" and isinstance(attempt, int):
                stretch = self._times.attempt(attempt)
            self._span(reading, stretch or _stretch(reading))
        self._export()

    def close(self) -> None:
        """Exports what the scheduler said last.

        Raises:
            ConnectionError: the collector did not take it.
        """
        self._points()
        self._export()
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _span(self, reading: Reading, stretch: Stretch) -> None:
        line = reading.line
        name = "evaluation" if line.get("phase") == "eval" else "attempt"
        number = line.get("attempt")
        self._ids.about(name, number, reading.step)
        words = {
            f"penstock.{_RENAMED.get(key, key)}": line[key]
            for key in _KEYS
            if isinstance(line.get(key), (str, int, float))
        }
        parent = self._tracer.start_span(name, attributes=words, start_time=_ns(stretch.start_s))
        context = set_span_in_context(parent)
        devices: Mapping[str, Stretch] = {}
        if name == "attempt" and isinstance(number, int):
            devices = self._times.devices(number)
        for worker, busy in devices.items():
            self._ids.about(name, number, worker)
            child = self._tracer.start_span(
                worker,
                context=context,
                start_time=_ns(busy.start_s),
                attributes={"penstock.busy_seconds": busy.busy_s},
            )
            child.end(_ns(busy.end_s))
        parent.end(_ns(stretch.end_s))

    def _points(self) -> None:
        for entry in self._log.new():
            if not isinstance(entry, dict) or not isinstance(entry.get("time"), float):
                continue
            text = str(entry.get("message", ""))
            match = _POINTS.match(text)
            if match is None and entry.get("level") not in ("warning", "error"):
                continue
            kind = "warning" if match is None else next(filter(None, match.groups()))
            self._ids.about(kind, entry["time"], text)
            name = {"restor": "restore", "epoch": "membership"}.get(kind, kind)
            span = self._tracer.start_span(
                name, start_time=_ns(entry["time"]), attributes={"penstock.message": text[:1000]}
            )
            span.end(_ns(entry["time"]))

    def _export(self) -> None:
        spans = self._ended.spans
        if spans and self._exporter.export(tuple(spans)) is not SpanExportResult.SUCCESS:
            raise ConnectionError(f"the collector did not take {len(spans)} spans")
        spans.clear()


def _stretch(reading: Reading) -> Stretch:
    seconds = float(reading.line.get("seconds") or 0.0)
    return Stretch(start_s=reading.at_s - seconds, end_s=reading.at_s)


class _Ended(SpanProcessor):
    """Keeps spans that ended, until they are exported."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class _Ids(IdGenerator):
    """Ids that follow from what a span is about."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._digest = bytes(32)

    def about(self, *words: object) -> None:
        """Derives the ids of the next span from these words."""
        text = "\0".join(map(str, (self._run_id, *words)))
        self._digest = hashlib.sha256(text.encode()).digest()

    def generate_trace_id(self) -> int:
        return int.from_bytes(self._digest[:16], "big") or 1

    def generate_span_id(self) -> int:
        return int.from_bytes(self._digest[16:24], "big") or 1


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
