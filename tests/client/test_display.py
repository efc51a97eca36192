"""What a training shows without a terminal, and the pieces that read it."""

from __future__ import annotations

import io
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from penstock.client.views.control import show_status, status_dict
from penstock.client.views.display import (
    Plain,
    Smoothed,
    describe,
    duration,
    member_table,
)
from penstock.client.views.run_view import ABSENCE_S, MetricsTail, Observer, RunView, numbers
from penstock.host.errors import StateError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.wire.control import ControlClient


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


def view(*fresh: dict[str, Any], phase: str = "running", message: str = "") -> RunView:
    """The run between two looks."""
    status = pb.StatusReply(phase=phase, message=message, eta_seconds=-1, steps=25)
    return RunView(steps=25, status=status, fresh=fresh)


def test_plain_lines() -> None:
    now = [0.0]
    stream = io.StringIO()
    plain = Plain(stream, clock=lambda: now[0])
    plain.say("training tiny")
    plain.show(view(entry(1), entry(2)))
    plain.show(view(*(entry(step) for step in range(3, 13))))
    plain.show(view(phase="evaluating"))
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
        f"step 2/25  loss 4.9800  {figures}",
        f"step 3/25  loss 4.9700  {figures}",
        f"step 13/25  loss 4.8700  {figures}  clipped",
        "[paused]: by you",
        "step 14  evaluation loss 4.5000",
        f"step 16/25  loss 4.8400  {figures}",
    ]


def test_plain_lines_have_the_passes_over_the_data() -> None:
    """Lines of an older Penstock have none, and lines of made-up data."""
    lines = [describe(entry(10, data_epoch=passes), view()) for passes in (2.375, 0.0, 0.00321)]
    assert [line.split("  ")[1] for line in lines] == ["epoch 2.38", "epoch 0.00", "epoch 0.0032"]
    for line in (entry(10), entry(10, data_epoch=None), entry(10, data_epoch="many")):
        assert "epoch" not in describe(line, view())


def steps_shown(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+)/\d+  loss", text, re.MULTILINE)]


def followed(steps: int, step_s: float, *, look_s: float = 0.5, eval_every: int = 0) -> str:
    """Returns the plain lines of a run that a simulated clock shows every ``look_s``."""
    now, stream, decided = 0.0, io.StringIO(), 0
    plain = Plain(stream, clock=lambda: now)
    while decided < steps:
        now += look_s
        reached = min(steps, int(now / step_s))
        fresh = []
        for step in range(decided + 1, reached + 1):
            fresh.append(entry(step))
            if eval_every and step % eval_every == 0:
                fresh.append(entry(step, phase="eval"))
        decided = reached
        status = pb.StatusReply(phase="running", version=decided, eta_seconds=-1)
        plain.show(RunView(steps=steps, status=status, fresh=tuple(fresh)))
    plain.close()
    return stream.getvalue()


def test_plain_lines_of_short_steps_do_not_flood_a_log() -> None:
    text = followed(100_000, 0.01, eval_every=1)
    steps = steps_shown(text)
    assert steps[:3] == [1, 2, 3] and steps[-1] == 100_000
    assert 100 < len(steps) < 200, "a thousand seconds, a line every 5 s and then less often"
    assert max(b - a for a, b in pairwise(steps)) <= 2_000, "no gap of more than 20 s"
    evaluations = re.findall(r"^step (\d+)  evaluation", text, re.MULTILINE)
    assert 100 < len(evaluations) < 200 and evaluations[-1] == "100000"


def test_plain_lines_of_a_long_run_come_every_minute() -> None:
    steps = steps_shown(followed(86_400, 1.0))
    assert len(steps) < 2_000 and steps[-1] == 86_400
    assert max(b - a for a, b in pairwise(steps)) <= 61


def test_plain_lines_of_seconds_show_each_step() -> None:
    assert steps_shown(followed(20, 6.0)) == list(range(1, 21))


def test_a_step_of_minutes_is_mentioned_every_minute() -> None:
    lines = followed(2, 210.0).splitlines()
    assert [line.partition("  loss")[0] for line in lines] == [
        "step 1/2 has been running for 1:00",
        "step 1/2 has been running for 2:00",
        "step 1/2 has been running for 3:00",
        "step 1/2",
        "step 2/2 has been running for 1:00",
        "step 2/2 has been running for 2:00",
        "step 2/2 has been running for 3:00",
        "step 2/2",
    ]


def test_a_pause_is_said_once_and_a_long_evaluation_every_minute() -> None:
    now, stream = 0.0, io.StringIO()
    plain = Plain(stream, clock=lambda: now)
    for phase in ("evaluating", "paused"):
        for _ in range(3):
            plain.show(view(phase=phase))
            now += 60.0
    plain.close()
    assert stream.getvalue().splitlines() == [
        "[evaluating] for 1:00 so far",
        "[evaluating] for 2:00 so far",
        "[paused]",
    ]


def test_plain_lines_say_once_what_failed_while_training_goes_on() -> None:
    stream = io.StringIO()
    plain = Plain(stream, clock=lambda: 0.0)
    for message in ("", "saving step 10 failed", "saving step 10 failed", "", "saving step 20"):
        plain.show(view(message=message))
    said = ["warning: saving step 10 failed", "warning: saving step 20"]
    assert stream.getvalue().splitlines() == said


def test_lines_have_rate_norm_and_counts() -> None:
    step = describe(entry(3, lr=2.0e-5, grad_norm=1.2345), None)
    assert step.startswith("step 3  loss 4.9700  lr 2e-05  norm 1.23  1,234 tokens/s")
    evaluation = entry(3, phase="eval", loss=2.5, token_accuracy=0.5, tokens=1234)
    words = "step 3  evaluation loss 2.5000  token accuracy 50.0%  over 1,234 tokens"
    assert describe(evaluation, None) == words
    pairs = entry(3, phase="eval", loss=0.5, pair_accuracy=0.75, tokens=1234, pairs=16)
    assert (
        describe(pairs, None)
        == "step 3  evaluation loss 0.5000  pair accuracy 75.0%  over 16 pairs"
    )


def test_a_skipped_attempt_has_no_numbers() -> None:
    stream = io.StringIO()
    plain = Plain(stream, clock=lambda: 0.0)
    plain.show(view(entry(10, loss=None, decision="skip")))
    assert "loss -" in stream.getvalue() and "skip" in stream.getvalue()


def printed(picture: Any) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(picture)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


STATUS = pb.StatusReply(
    phase="running",
    version=5,
    eta_seconds=75.0,
    members=[
        pb.MemberStatus(member="schedulerd", state="ready", pid=41),
        pb.MemberStatus(member="worker.0", state="ready", pid=42, restarts=1),
        pb.MemberStatus(member="worker.1", state="missing"),
    ],
)


def test_status_lists_processes_with_pids() -> None:
    rows = [line.split() for line in printed(member_table(STATUS)).splitlines()[1:]]
    assert rows[0] == ["schedulerd", "ready", "41", "-", "0.0", "s"]
    assert rows[1] == ["worker.0", "ready", "42", "1", "0.0", "s"]


def test_a_smoothed_loss_follows_slowly_and_starts_at_the_first() -> None:
    loss = Smoothed()
    assert loss.value is None
    loss.add(4.0)
    assert loss.value == pytest.approx(4.0)
    for step in range(200):
        loss.add(None if step == 7 else 2.0 + (0.5 if step % 2 else -0.5))
    assert loss.value == pytest.approx(2.0, abs=0.05)


def test_a_scheduler_that_is_away_for_a_moment_is_not_mentioned(tmp_path: Path) -> None:
    """Nor is one that has gone because the run is over."""
    now = [0.0]
    answers: list[pb.StatusReply | None] = []

    class Watched(Observer):
        def _status(self) -> pb.StatusReply | None:
            return answers.pop(0)

    def phases(*replies: pb.StatusReply | None, after_s: float = 0.5) -> list[str]:
        answers.extend(replies)
        found = []
        for _ in replies:
            now[0] += after_s
            found.append(observer.look().phase)
        return found

    observer = Watched(tmp_path, 25, clock=lambda: now[0])
    assert phases(None, None) == ["starting", "starting"]
    endpoint = tmp_path / "endpoint.json"
    endpoint.touch()
    running, done = pb.StatusReply(phase="running"), pb.StatusReply(phase="done")
    assert phases(running, None, None) == ["running"] * 3
    assert phases(running, None, None, after_s=ABSENCE_S * 0.75)[1:] == ["running", "no_answer"]
    endpoint.unlink()  # its node does so at the end
    assert phases(None) == ["ending"]
    endpoint.touch()
    assert phases(done, None, after_s=60) == ["done", "ending"]


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
    assert (fields["data_epoch"], fields["data_epochs"]) == (None, None)
    reply = pb.StatusReply(epoch=2, data_epoch=0.5, data_epochs=8.5)
    fields = status_dict(reply)
    assert (fields["data_epoch"], fields["data_epochs"]) == (0.5, 8.5)
    assert fields["membership"] == fields["epoch"] == 2


class Client:
    """Answers with one status."""

    def __init__(self, reply: pb.StatusReply) -> None:
        self.reply = reply

    def status(self) -> pb.StatusReply:
        return self.reply


@pytest.mark.parametrize(
    ("known", "place"),
    [
        ({}, "step 3/10, membership 2, gpipe"),
        ({"data_epoch": 0.5, "data_epochs": 8.5}, "step 3/10, epoch 0.50 of 8.50, membership 2,"),
    ],
)
def test_status_says_epochs_and_memberships(known: dict[str, float], place: str) -> None:
    last = json.dumps(entry(3, data_epoch=0.5) if known else entry(3))
    reply = pb.StatusReply(
        phase="running",
        version=3,
        steps=10,
        epoch=2,
        plan_scheme="gpipe",
        eta_seconds=-1.0,
        last_metrics_json=last,
        **known,
    )
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    client = cast(ControlClient, Client(reply))
    show_status(client, as_json=False, console=console, run_dir=None)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert place in text
    assert ("step 3  epoch 0.50  loss" in text) == bool(known)


def test_durations() -> None:
    assert [duration(s) for s in (0, 59.6, 61, 3723)] == ["0:00", "1:00", "1:01", "1:02:03"]
