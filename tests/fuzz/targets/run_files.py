"""Files of a run directory that processes write and others, or the next start, read."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

from penstock.client.planning.described import _dtype, _fields
from penstock.client.views.report.facts import RunFacts
from penstock.client.views.report.incidents import read_history
from penstock.client.views.report.readings import read_metrics
from penstock.client.views.run_view import _metrics
from penstock.config.execution import ScheduleConfig
from penstock.daemons.monitor.metrics.targets import addresses
from penstock.daemons.monitor.observer.analysed import Analysed
from penstock.daemons.monitor.trackers.following import Bookmark, bookmark_path, read_batch
from penstock.daemons.monitor.trackers.sampled import JsonLines
from penstock.daemons.node.endpoint import read_endpoint, read_endpoint_port
from penstock.daemons.node.preparing.changes import read_constraints
from penstock.daemons.node.preparing.numerics import _kernels
from penstock.daemons.node.preparing.places import _recorded
from penstock.daemons.node.preparing.software import Software
from penstock.daemons.node.run_lock import former_home, original_of
from penstock.daemons.node.service_manager import progress_of
from penstock.daemons.optimizer.ceiling import LEAST_STATE_BYTES, ceiling_of
from penstock.daemons.scheduler.journal_tables import step_of
from penstock.daemons.scheduler.rollback import line_attempt
from penstock.host.errors import ExitCode, PenstockError
from penstock.models.checkpoints.causes import quantization_of
from penstock.planner.planning.auto import searched_keys
from penstock.protocol.run.checksums import (
    checksums_text,
    read_checked,
    recorded_values,
    with_checksum,
)
from penstock.protocol.run.hardware.bandwidth_log import BandwidthLog, NicReservations
from penstock.protocol.run.hardware.peer_memory import PeerMemory
from penstock.protocol.run.numerics import KERNELS as KERNELS_FILE
from penstock.protocol.run.numerics import NUMERICS
from penstock.protocol.run.run_result import RunEnd
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.trace import TraceEvent, TraceLane, TraceOrigin
from penstock.protocol.run.trace_reading import TraceFollower, read_traces
from penstock.protocol.wire.control import ControlClient, is_stale
from penstock.shm.layout import SegmentKind
from tests.fuzz.target import Decoder, Form, Open, Target, from_file, plainly
from tests.fuzz.targets.material import run_directory
from tests.protocol.test_numerics import KERNELS, RECIPE

NEVER: tuple[type[Exception], ...] = ()
"""Of readers to which a damaged file is as good as none."""


def in_run(name: str, function: Callable[[Path], object]) -> Open:
    """Returns ``open`` of a function that reads the file ``name`` of a prepared run."""

    @contextmanager
    def opened(folder: Path) -> Iterator[Decoder]:
        run_directory(folder)
        with from_file(name, function)(folder) as read:
            yield read

    return opened


def _note(folder: Path) -> list[bytes]:
    RunEnd(reason="done", code=ExitCode.DONE, keep_memory=False, failed=False, written_s=1.5).write(
        folder
    )
    return [(folder / "ended.json").read_bytes()]


def dumped(*values: Any) -> list[bytes]:
    """Returns JSON texts."""
    return [json.dumps(value).encode() for value in values]


LINE = {
    "phase": "train",
    "step": 3,
    "attempt": 4,
    "epoch": 1,
    "decision": "commit",
    "loss": 2.5,
    "grad_norm": 0.7,
    "lr": 0.001,
    "loss_scale": 1.0,
    "tokens": 512,
    "tokens_per_second": 1000.0,
    "seconds": 0.5,
    "bubble_ratio": 0.1,
    "optimizer_tail_seconds": 0.1,
    "peak_device_bytes": [1, 2],
    "data_epoch": 0.5,
    "time": 1.7e9,
}
EVALUATION = {"phase": "eval", "step": 3, "loss": 2.25, "perplexity": 9.5, "seconds": 0.5}


def metrics_lines() -> list[bytes]:
    """Returns pieces of ``metrics.jsonl``."""
    lines = dumped(LINE, EVALUATION, LINE | {"step": 4, "decision": "skip", "loss": None})
    return [b"\n".join([*lines, b""]), lines[0] + b"\n" + lines[1][:20]]


def log_lines() -> list[bytes]:
    """Returns a log."""
    entries = [
        {"time": 1.7e9, "level": "info", "process": "schedulerd", "message": "epoch 2"},
        {"time": 1.7e9, "level": "warning", "process": "node.a", "message": "worker.0 is lost"},
    ]
    return [b"\n".join([*dumped(*entries), b""])]


def trace_lines() -> list[bytes]:
    """Returns a trace."""
    event = TraceEvent(
        lane=TraceLane.COMPUTE, text="F 0 0", attempt=4, start_s=1.0, end_s=2.0, waited_s=0.5
    )
    return [(TraceOrigin.here("worker.0").to_line() + 2 * event.to_line()).encode()]


def _lines(folder: Path) -> Iterator[Any]:
    return JsonLines(folder / "trace" / "worker.0.jsonl").new()


def _last_line(data: bytes) -> tuple[int, int]:
    line = data.decode(errors="replace")
    return step_of(line), line_attempt(line)


def _follow(folder: Path) -> None:
    TraceFollower(run_dir=folder, wanted=lambda member, attempt: True).look()


def _emulated(folder: Path) -> None:
    log = BandwidthLog(folder / "shared", 2)
    log.since(0.0)
    log.close()


def _nics(folder: Path) -> None:
    nics = NicReservations(folder / "shared", 2)
    nics.occupy(0.0, 1.0, source=0, target=1)
    nics.close()


def _lodging(folder: Path) -> None:
    peers = PeerMemory(folder / "shared", 2, 0)
    peers.bytes_here(0.0, 1.0)
    peers.close()


@contextmanager
def _ceiling(folder: Path) -> Iterator[Decoder]:
    """What an earlier optimizerd measured; nothing is measured here."""
    layout = SimpleNamespace(sizes={SegmentKind.STATE: LEAST_STATE_BYTES})
    spec: Any = SimpleNamespace(layout=layout, node_name="a")
    path = folder / "ceiling-a.json"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return ceiling_of(folder, spec, (0,))

    with patch("penstock.daemons.optimizer.ceiling.measure_ceiling", lambda cores: 1e9):
        yield read


def _control_client(folder: Path) -> object:
    access: Any = SimpleNamespace(connect=lambda address, options: MagicMock())
    return ControlClient.for_run(folder, access=access)


def _facts(folder: Path) -> object:
    facts: Any = RunFacts(RunDirectory(folder), None, None)  # type: ignore[arg-type]
    return facts.created


def _sealed(folder: Path) -> None:
    recorded_values(folder)
    read_checked(folder, "table.json")


def _seals(folder: Path) -> list[bytes]:
    run_directory(folder)
    text = checksums_text(folder, {"run.seed": 1})
    fields = json.loads(text)
    fields["files"]["table.json"] = "0" * 64
    del fields["checksum"]
    return [text.encode(), *dumped(with_checksum(fields))]


def made(function: Callable[[Path], list[bytes]]) -> Callable[[], list[bytes]]:
    """Returns ``seeds`` of what a function writes into a folder."""

    def seeds() -> list[bytes]:
        with tempfile.TemporaryDirectory() as folder:
            return function(Path(folder))

    return seeds


def _home(folder: Path) -> list[bytes]:
    return dumped({"path": str(folder), "device": 1, "inode": 2})


def json_file(
    name: str,
    path: str,
    function: Callable[[Path], object],
    covers: tuple[str, ...],
    *seeds: Any,
    **changes: Any,
) -> Target:
    """Returns the target of a small JSON file of a run directory; readers raise nothing."""
    fields: dict[str, Any] = {"allowed": NEVER, "seeds": lambda: dumped(*seeds)} | changes
    return Target(name=name, open=in_run(path, function), covers=covers, form=Form.JSON, **fields)


ENTRY = {"targets": ["10.0.0.1:29700"], "labels": {"node": "a", "__scheme__": "http"}}

RUN_FILES = (
    json_file(
        "run-json",
        "run.json",
        lambda folder: RunDirectory(folder).run_id,
        ("protocol.run.rundir.RunDirectory.run_id", "host.files.parse_json"),
        {"run_id": "0123456789ab", "created": "2026-01-01T00:00:00Z", "format": 1},
        allowed=(PenstockError,),
    ),
    json_file(
        "created",
        "run.json",
        _facts,
        ("client.views.report.facts.RunFacts._json",),
        {"run_id": "0123456789ab", "created": "2026-01-01T00:00:00Z", "format": 1},
    ),
    json_file(
        "seal",
        "inputs.json",
        _sealed,
        ("protocol.run.checksums._read", "protocol.run.checksums.read_checked"),
        seeds=made(_seals),
        allowed=(PenstockError,),
    ),
    json_file(
        "ended",
        "ended.json",
        RunEnd.read,
        ("protocol.run.run_result.RunEnd.read",),
        seeds=made(_note),
    ),
    json_file(
        "endpoint",
        "endpoint.json",
        lambda folder: (read_endpoint(folder), read_endpoint_port(folder), is_stale(folder)),
        (
            "protocol.wire.control.is_stale",
            "daemons.node.endpoint.read_endpoint",
            "daemons.node.endpoint.read_endpoint_port",
        ),
        {"scheduler": "127.0.0.1:29400", "pid": 4711},
    ),
    json_file(
        "endpoint-for-clients",
        "endpoint.json",
        _control_client,
        ("protocol.wire.control.ControlClient.for_run",),
        {"scheduler": "127.0.0.1:29400", "pid": 4711},
        allowed=(PenstockError,),
        examples=30,
    ),
    json_file(
        "home",
        ".home",
        lambda folder: (original_of(folder), former_home(folder)),
        ("daemons.node.run_lock.original_of", "daemons.node.run_lock.former_home"),
        seeds=made(_home),
    ),
    json_file(
        "places",
        "places.json",
        _recorded,
        ("daemons.node.preparing.places._recorded",),
        {"format": 1, "digests": {"model.path": "00ff", "data.path": "ff00"}},
    ),
    json_file(
        "search",
        "search.json",
        lambda folder: read_constraints(folder, ScheduleConfig()),
        ("daemons.node.preparing.changes.read_constraints",),
        {
            "format": 1,
            "constraints": {"recompute": "full"},
            "schedule": searched_keys(ScheduleConfig()),
        },
        allowed=(PenstockError,),
    ),
    json_file(
        "quantization",
        "config.json",
        quantization_of,
        ("models.checkpoints.causes.quantization_of",),
        {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
    ),
    json_file(
        "model_dtype",
        "config.json",
        lambda folder: _dtype(_fields(folder / "config.json")),
        ("client.planning.described._fields",),
        {"model_type": "llama", "dtype": "bfloat16", "torch_dtype": "float16"},
    ),
    json_file(
        "software",
        "software.json",
        Software.read,
        ("daemons.node.preparing.software.Software.read",),
        {
            "packages": {"torch": "2.13.0"},
            "system": "Linux",
            "processor": "x",
            "cpus": 2,
            "memory_bytes": 1024,
            "gpus": ["x"],
        },
    ),
    json_file(
        "numerics",
        NUMERICS,
        lambda folder: RunDirectory(folder).numerics,
        ("protocol.run.numerics._Stored.from_json",),
        seeds=lambda: [RECIPE.to_json().encode()],
        allowed=(PenstockError,),
    ),
    json_file(
        "kernels",
        KERNELS_FILE,
        _kernels,
        (
            "protocol.run.numerics._Stored.from_json",
            "daemons.node.preparing.numerics._kernels",
        ),
        seeds=lambda: [KERNELS.to_json().encode()],
        allowed=(PenstockError,),
    ),
    json_file(
        "critical",
        "critical.json",
        Analysed.read,
        ("daemons.monitor.observer.analysed.Analysed.read",),
        {"attempt": 5, "step_s": 0.5, "critical_s": {"compute": 0.25}, "savings_s": {"nic": 0.1}},
    ),
    json_file(
        "bookmark",
        "trackers/wandb.json",
        lambda folder: Bookmark.read(bookmark_path(folder, "wandb")),
        ("daemons.monitor.trackers.following.Bookmark.read",),
        {"offset": 100, "lines": 3, "dropped": 0, "failures": 1},
    ),
    json_file(
        "metrics-targets",
        "metrics/a.json",
        addresses,
        (
            "daemons.monitor.metrics.targets.read_targets",
            "daemons.monitor.metrics.targets._entries",
        ),
        [ENTRY],
        [ENTRY, ENTRY | {"targets": []}],
    ),
    Target(
        name="ceiling",
        open=_ceiling,
        covers=("daemons.optimizer.ceiling.ceiling_of",),
        seeds=lambda: dumped({"cores": [0], "bytes_per_second": 10**10}),
        form=Form.JSON,
        allowed=NEVER,
    ),
    Target(
        name="metrics-lines",
        open=in_run("metrics.jsonl", read_metrics),
        covers=(
            "client.views.report.readings.read_metrics",
            "client.views.report.readings._parsed",
        ),
        seeds=metrics_lines,
        form=Form.LINES,
        allowed=NEVER,
    ),
    Target(
        name="metrics-tracked",
        open=in_run("metrics.jsonl", lambda folder: read_batch(folder / "metrics.jsonl", 0, 1.0)),
        covers=(
            "daemons.monitor.trackers.following.read_batch",
            "daemons.monitor.trackers.following._reading",
        ),
        seeds=metrics_lines,
        form=Form.LINES,
        allowed=NEVER,
    ),
    Target(
        name="metrics-progress",
        open=in_run("metrics.jsonl", lambda folder: progress_of(folder, 100)),
        covers=("daemons.node.service_manager.progress_of",),
        seeds=metrics_lines,
        form=Form.LINES,
        allowed=NEVER,
    ),
    Target(
        name="metrics-watched",
        open=plainly(lambda data: [_metrics(line) for line in data.split(b"\n")]),
        covers=("client.views.run_view._metrics",),
        seeds=metrics_lines,
        form=Form.LINES,
        allowed=NEVER,
    ),
    Target(
        name="metrics-last-line",
        open=plainly(_last_line),
        covers=(
            "daemons.scheduler.journal_tables.step_of",
            "daemons.scheduler.rollback.line_attempt",
        ),
        seeds=lambda: dumped(LINE),
        form=Form.JSON,
        allowed=NEVER,
    ),
    Target(
        name="json-lines",
        open=in_run("trace/worker.0.jsonl", lambda folder: list(_lines(folder))),
        covers=("daemons.monitor.trackers.sampled.JsonLines.new",),
        seeds=trace_lines,
        form=Form.LINES,
        allowed=NEVER,
    ),
    Target(
        name="logs",
        open=in_run("logs/schedulerd.jsonl", read_history),
        covers=(
            "client.views.report.incidents.read_history",
            "client.views.report.incidents._entries",
        ),
        seeds=log_lines,
        form=Form.LINES,
        allowed=NEVER,
    ),
    Target(
        name="traces",
        open=in_run("trace/worker.0.jsonl", read_traces),
        covers=(
            "protocol.run.trace_reading.read_traces",
            "protocol.run.trace_reading._read",
            "protocol.run.trace.TraceEvent.from_list",
            "protocol.run.trace.TraceOrigin.from_list",
        ),
        seeds=trace_lines,
        form=Form.LINES,
        examples=100,
    ),
    Target(
        name="traces-followed",
        open=in_run("trace/worker.0.jsonl", _follow),
        covers=("protocol.run.trace_reading.TraceFollower._lives",),
        seeds=trace_lines,
        form=Form.LINES,
        allowed=NEVER,
    ),
    Target(
        name="emulated-traffic",
        open=in_run("shared", _emulated),
        covers=("protocol.run.hardware.bandwidth_log.BandwidthLog.__init__",),
        seeds=lambda: [bytes(100), bytes(2 * 256 * 24)],
        allowed=NEVER,
    ),
    Target(
        name="emulated-nics",
        open=in_run("shared", _nics),
        covers=("protocol.run.hardware.bandwidth_log.NicReservations.__init__",),
        seeds=lambda: [bytes(32)],
        allowed=NEVER,
    ),
    Target(
        name="emulated-lodging",
        open=in_run("shared", _lodging),
        covers=("protocol.run.hardware.peer_memory.PeerMemory.__init__",),
        seeds=lambda: [bytes(2 * 256 * 32)],
        allowed=NEVER,
        examples=20,
    ),
)
