"""``penstock watch``: what it makes of the end of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import cast

import pytest

from penstock.client.views.display import Plain
from penstock.client.views.screen.following import watch
from penstock.host.errors import LostMemberError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.wire.control import ControlClient
from tests.scheduler.fakes import make_run


class Answers:
    """A client that gives these answers, then none."""

    def __init__(self, *replies: pb.StatusReply) -> None:
        self._replies = list(replies)

    def status(self) -> pb.StatusReply:
        if not self._replies:
            raise LostMemberError("nobody answers")
        return self._replies.pop(0)


def reply(phase: str, version: int, saved: int) -> pb.StatusReply:
    return pb.StatusReply(phase=phase, version=version, saved_version=saved, steps=10)


@pytest.mark.parametrize(
    ("last", "on_disk", "code"),
    [
        (reply("done", 10, 10), (), 0),
        (reply("done", 4, 4), (4,), 5),
        (reply("failed", 10, 4), (4,), 4),
        (reply("saving", 10, 4), (4, 10), 0),
        (reply("running", 9, 4), (4, 10), 0),
        (reply("running", 4, 4), (4, 5), 5),
    ],
)
def test_watch_tells_finished_from_stopped(
    tmp_path: Path, last: pb.StatusReply, on_disk: tuple[int, ...], code: int
) -> None:
    for version in on_disk:
        (tmp_path / "state" / f"step-{version:08d}").mkdir(parents=True)
    client = cast(ControlClient, Answers(reply("running", 3, 0), last))
    assert watch(client, Plain(io.StringIO()), tmp_path) == code


def test_watch_ends_with_the_figures_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run.path / "journal.sqlite").touch()
    lines = [{"phase": "train", "step": step, "loss": 5.0 - step} for step in (1, 2)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stream = io.StringIO()
    client = cast(ControlClient, Answers(reply("failed", 2, 0)))
    assert watch(client, Plain(stream), run.path) == 4
    shown = stream.getvalue().splitlines()
    assert f"test ({run.run_id}): has ended, stopped at step 2/100; saved: nothing" in shown
    assert "  loss           3.0000 at step 2; 4.0000 -> 3.0000 (first and last step)" in shown
    assert shown[-1] == f"report       penstock report {run.path}"
