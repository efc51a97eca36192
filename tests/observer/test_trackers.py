"""Trackers: each line reaches them once, and whatever they do, nobody waits for them."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from penstock.config.schema import Config, parse_config
from penstock.daemons.monitor.observer.consumer import is_observed
from penstock.daemons.monitor.trackers import registry, supervised
from penstock.daemons.monitor.trackers.following import Bookmark, bookmark_path, read_batch
from penstock.daemons.monitor.trackers.main import TRIES, follow
from penstock.daemons.monitor.trackers.registry import check_trackers, wanted_trackers
from penstock.daemons.monitor.trackers.sink import Reading, settings_of
from penstock.daemons.monitor.trackers.supervised import TrackerConsumer, make_trackers
from penstock.host.errors import ConfigError
from penstock.host.stopping import StopSignal
from penstock.protocol.run.rundir import RunDirectory


def line(step: int, **changes: Any) -> str:
    fields = {"step": step, "phase": "train", "loss": 5.0 - step, "decision": "commit", **changes}
    return json.dumps(fields) + "\n"


@dataclass
class Recording:
    """A sink in memory; raises at the steps that it is told."""

    bad: Sequence[int] = ()
    taken: list[int] = field(default_factory=list)
    closed: bool = False

    def log(self, readings: Sequence[Reading]) -> None:
        if any(reading.step in self.bad for reading in readings):
            raise OSError("no")
        self.taken += [reading.step for reading in readings]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "trackers").mkdir()
    return tmp_path


def stopped() -> StopSignal:
    stop = StopSignal()
    stop.set()
    return stop


def test_each_line_is_handed_on_once_also_by_the_next_process(run_dir: Path) -> None:
    file = run_dir / "metrics.jsonl"
    file.write_text(line(1) + "no line of metrics\n" + line(2) + '{"step": 3, "pha')
    first = Recording()
    follow(first, run_dir, "wandb", stopped())
    assert first.taken == [1, 2] and first.closed
    with file.open("a") as more:
        more.write('se": "eval", "loss": 2.5}\n' + line(4))
    second = Recording()
    follow(second, run_dir, "wandb", stopped())
    assert second.taken == [3, 4]
    place = Bookmark.read(bookmark_path(run_dir, "wandb"))
    assert place == Bookmark(offset=file.stat().st_size, lines=4)


def test_what_a_tracker_never_takes_is_left_out_and_counted(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(line(step) for step in range(1, 6)))
    for _ in range(TRIES):
        with pytest.raises(OSError, match="no"):
            follow(Recording(bad=[3]), run_dir, "wandb", stopped())
    sink = Recording(bad=[3])
    follow(sink, run_dir, "wandb", stopped())
    assert sink.taken == [1, 2, 4, 5]
    place = Bookmark.read(bookmark_path(run_dir, "wandb"))
    assert (place.lines, place.dropped, place.failures) == (4, 1, 0)


def test_a_place_is_any_bytes_and_a_file_may_be_moved_away(run_dir: Path) -> None:
    notes = bookmark_path(run_dir, "wandb")
    for content in (
        b"",
        b"[]",
        b"\xff",
        b'{"offset": -1, "lines": 0, "dropped": 0, "failures": 0}',
    ):
        notes.write_bytes(content)
        assert Bookmark.read(notes) == Bookmark()
    file = run_dir / "metrics.jsonl"
    assert read_batch(file, 100, 0.0) == ([], 0)
    file.write_text(line(1))
    readings, offset = read_batch(file, 100, 0.0)
    assert [reading.step for reading in readings] == [1] and offset == file.stat().st_size


def test_names_are_those_that_people_expect() -> None:
    fields = json.loads(
        line(7, lr=1e-3, grad_norm=None, tokens_per_second=900.0, decision="amend", data_epoch=0.5)
    )
    reading = Reading.of(fields, 0.0)
    assert reading is not None and reading.step == 7
    assert reading.values == {
        "train/epoch": 0.5,
        "train/loss": -2.0,
        "train/learning_rate": 1e-3,
        "perf/tokens_per_second": 900.0,
        "train/amended": 1.0,
        "train/skipped": 0.0,
    }
    held_out = Reading.of({"step": 7, "phase": "eval", "loss": 2.0, "perplexity": 7.4}, 0.0)
    assert held_out is not None
    assert held_out.values == {"eval/loss": 2.0, "eval/perplexity": 7.4}
    assert Reading.of([], 0.0) is None and Reading.of({"step": "x"}, 0.0) is None


def configured(**observability: Any) -> Config:
    return parse_config(
        {
            "model": {"hf": {"model_type": "llama"}},
            "data": {"path": "@stdlib"},
            "train": {"steps": 4},
            "observability": {"sample_every": 0, **observability},
        }
    )


def test_a_run_with_trackers_has_an_observer() -> None:
    config = configured(trackers=["wandb"], opentelemetry="http://127.0.0.1:4318")
    assert wanted_trackers(config) == ("wandb", "opentelemetry") and is_observed(config)
    assert not is_observed(configured())
    settings = settings_of(config)
    assert settings["train.steps"] == 4 and settings["model.hf.model_type"] == "llama"


def test_what_is_not_installed_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_is_there", lambda module: module != "wandb")
    with pytest.raises(ConfigError, match=r"trackers: wandb: .*pip install 'penstock\[wandb\]'"):
        check_trackers(configured(trackers=["tensorboard", "wandb"]))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match=r"set MLFLOW_TRACKING_URI in the environment, such"):
        check_trackers(configured(trackers=["mlflow"]))
    check_trackers(configured(trackers=["mlflow"], mlflow_uri="file:///data/mlruns"))


# ---- processes ----


@pytest.fixture
def tracked(plain_run: Path, tmp_path: Path) -> RunDirectory:
    """A run directory without seal, whose metrics a tracker may read."""
    leave = shutil.ignore_patterns("state", "trace", "logs", "*.bin")
    shutil.copytree(plain_run, tmp_path / "run", ignore=leave)
    (tmp_path / "run" / "inputs.json").unlink()
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of that name whose ``init`` is to be written."""
    (tmp_path / "packages").mkdir()
    old = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}:{old}")
    yield tmp_path / "packages" / "wandb.py"


def test_tensorboard_has_what_metrics_jsonl_has(tracked: RunDirectory) -> None:
    tracker, stop = TrackerConsumer(tracked, "tensorboard"), StopSignal()
    thread = threading.Thread(target=tracker.run, args=(stop,))
    thread.start()
    lines = [json.loads(s) for s in (tracked.path / "metrics.jsonl").read_text().splitlines()]
    deadline = time.monotonic() + 600.0
    while tracker.place.lines < len(lines) and time.monotonic() < deadline:
        time.sleep(0.05)
    stop.set()
    thread.join(60.0)
    (file,) = (tracked.path / "tensorboard").iterdir()
    events = list(EventFileLoader(str(file)).Load())
    found = {
        (event.step, value.tag): value.tensor.float_val[0]
        for event in events
        for value in event.summary.value
        if value.tensor.float_val
    }
    for entry in lines:
        name = "eval/loss" if entry["phase"] == "eval" else "train/loss"
        assert found[entry["step"], name] == pytest.approx(entry["loss"], rel=1e-6)
    assert any("hparams" in v.tag for event in events for v in event.summary.value)


def test_a_tracker_that_hangs_is_left_in_time(
    tracked: RunDirectory, wandb: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    wandb.write_text("import time\n\ndef init(**_): time.sleep(1e6)\n\ndef Settings(**_): ...\n")
    monkeypatch.setattr(supervised, "FLUSH_S", 0.3)
    numbers = CollectorRegistry()
    (tracker,) = make_trackers(tracked, ("wandb",), numbers)
    with caplog.at_level(logging.WARNING):
        tracker.run(stopped())
    assert "wandb did not end in time; it was killed" in caplog.text
    page = generate_latest(numbers).decode()
    assert 'penstock_tracker_lines_total{tracker="wandb"} 0.0' in page
    assert 'penstock_tracker_up{tracker="wandb"} 0.0' in page


def test_a_tracker_that_raises_is_tried_again_and_named_once(
    tracked: RunDirectory, wandb: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    wandb.write_text("raise RuntimeError('the server is away')\n")
    monkeypatch.setattr(supervised, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(supervised, "LOOK_S", 0.02)
    tracker, stop = TrackerConsumer(tracked, "wandb"), StopSignal()
    thread = threading.Thread(target=tracker.run, args=(stop,))
    log = tracked.path / "logs" / "tracker.wandb.jsonl"
    with caplog.at_level(logging.WARNING):
        thread.start()
        deadline = time.monotonic() + 600.0
        while time.monotonic() < deadline:
            if log.exists() and log.read_text().count('"level": "error"') >= 2:
                break
            time.sleep(0.05)
        stop.set()
        thread.join(60.0)
    assert log.read_text().count('"level": "error"') >= 2
    assert caplog.text.count("wandb ended with exit code 4") == 1
