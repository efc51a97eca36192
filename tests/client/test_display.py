"""What a training shows without a terminal, and the pieces that read it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.client.control import status_dict
from penstock.client.display import Plain, duration, render
from penstock.client.snapshots import MetricsTail, View, numbers
from penstock.protocol.errors import StateError
from penstock.protocol.generated import scheduler_pb2 as pb


def entry(step: int, **changes: Any) -> dict[str, Any]:
    """One line of metrics."""
    line = {
        "step": step,
        "phase": "train",
        "loss": 5.0 - step / 100,
        "tokens_per_second": 1234.5,
        "bubble_ratio": 0.125,
        "optimizer_tail_seconds": 0.004,
        "decision": "commit",
    }
    return {**line, **changes}


def view(*fresh: dict[str, Any], phase: str = "running", message: str = "") -> View:
    """The run between two looks."""
    status = pb.StatusReply(phase=phase, message=message, eta_seconds=-1, steps=25)
    return View(steps=25, status=status, fresh=fresh)


def test_plain_lines() -> None:
    now = [0.0]
    stream = io.StringIO()
    plain = Plain(stream, clock=lambda: now[0])
    plain.say("training tiny")
    plain.show(view(entry(1), entry(2)))
    plain.show(view(*(entry(step) for step in range(3, 13))))
    now[0] = 6.0
    plain.show(view(entry(13, decision="amend")))
    plain.show(view(phase="paused", message="by you"))
    plain.show(view(entry(14, phase="eval", loss=4.5)))
    plain.show(view(entry(15), entry(16)))
    plain.close()
    figures = "1,234 tokens/s  bubble 12%  optimizer tail 4 ms"
    assert stream.getvalue().splitlines() == [
        "training tiny",
        f"step 1/25  loss 4.9900  {figures}",
        f"step 10/25  loss 4.9000  {figures}",
        f"step 13/25  loss 4.8700  {figures}  amend",
        "[paused]: by you",
        "step 14  evaluation loss 4.5000",
        f"step 16/25  loss 4.8400  {figures}",
    ]


def test_plain_lines_say_once_what_failed_while_training_goes_on() -> None:
    stream = io.StringIO()
    plain = Plain(stream, clock=lambda: 0.0)
    for message in ("", "saving step 10 failed", "saving step 10 failed", "", "saving step 20"):
        plain.show(view(message=message))
    said = ["warning: saving step 10 failed", "warning: saving step 20"]
    assert stream.getvalue().splitlines() == said


def test_a_skipped_attempt_has_no_numbers() -> None:
    stream = io.StringIO()
    plain = Plain(stream, clock=lambda: 0.0)
    plain.show(view(entry(10, loss=None, decision="skip")))
    assert "loss -" in stream.getvalue() and "skip" in stream.getvalue()


def test_the_picture_has_progress_figures_and_processes() -> None:
    status = pb.StatusReply(
        phase="running",
        version=5,
        eta_seconds=75.0,
        members=[pb.MemberStatus(member="worker.0", state="ready", pid=42, restarts=1)],
    )
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(render(View(steps=25, status=status, fresh=()), entry(5)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("step 5/25", "ETA 1:15", "loss 4.9500", "bubble 12%", "worker.0", "ready", "42"):
        assert part in text


def test_lines_that_are_no_metrics_are_left_out(tmp_path: Path) -> None:
    good = [{"phase": "train", "step": 1, "loss": float("nan")}, {"phase": "eval", "step": 2}]
    odd = [b"\xff\xfe", b"[]", b"7", b"{}", b'{"phase": "train"}', b'{"phase": 5, "step": 1}']
    odd += [b'{"phase": "train", "step": "x"}', b"[" * 100_000, b"", b"{"]
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(good[0]).encode(), *odd, json.dumps(good[1]).encode()]
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert [(m["phase"], m["step"]) for m in MetricsTail(path).read()] == [
        ("train", 1),
        ("eval", 2),
    ]
    stream = io.StringIO()
    plain = Plain(stream, clock=lambda: 0.0)
    plain.show(view(*MetricsTail(path).read()))
    assert stream.getvalue().startswith("step 1/25  loss nan")
    assert numbers([1, 2.5, None, "x", float("nan"), float("inf"), True]) == [1, 2.5]
    (tmp_path / "directory").mkdir()
    with pytest.raises(StateError, match="directory: cannot read it: Is a directory"):
        MetricsTail(tmp_path / "directory").read()


def test_metrics_are_read_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == ()
    first, second = json.dumps(entry(1)), json.dumps(entry(2))
    path.write_text(first + "\n" + second[:10])
    assert tail.read() == (entry(1),)
    with path.open("a") as file:
        file.write(second[10:] + "\n")
    assert tail.read() == (entry(2),)
    assert MetricsTail.at_end(path).read() == ()


def test_status_as_json_has_numbers() -> None:
    reply = pb.StatusReply(version=3, steps=10, last_metrics_json=json.dumps(entry(3)))
    fields = status_dict(reply)
    assert (fields["version"], fields["steps"], fields["epoch"]) == (3, 10, 0)
    assert fields["last_metrics"]["step"] == 3
    assert fields["members"] == []


def test_durations() -> None:
    assert [duration(s) for s in (0, 59.6, 61, 3723)] == ["0:00", "1:00", "1:01", "1:02:03"]
