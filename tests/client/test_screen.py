"""The screen without a terminal: words, curve, and how panels share what room there is."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from penstock.client.views.run_view import PAST_BYTES, MetricsTail, RunView
from penstock.client.views.screen.curve import Series, draw, short
from penstock.client.views.screen.events import Events, Limits, RunEvent, Tone, texts_of
from penstock.client.views.screen.layout import compose
from penstock.client.views.screen.model import Facts, Model
from penstock.client.views.screen.panels import ASCII, UNICODE, Glyphs, joined
from penstock.client.views.screen.screen import changes, rendered
from penstock.client.views.screen.words import Doing, Lane, lane, optimizer_words, worker_words
from penstock.daemons.monitor.observer.analysed import Analysed
from penstock.protocol.generated import scheduler_pb2 as pb

START_S = 1.7e9


def line(step: int, **changes: Any) -> dict[str, Any]:
    """One line of metrics."""
    fields = {
        "phase": "train",
        "step": step,
        "loss": 2.0 + 4.0 * math.exp(-step / 30),
        "grad_norm": 0.9,
        "lr": 1e-3,
        "tokens_per_second": 1234.5,
        "seconds": 0.6,
        "optimizer_tail_seconds": 0.03,
        "loss_scale": 1.0,
        "decision": "commit",
    }
    return {**fields, **changes}


def worker(number: int, activity: str = "", waiting: bool = False) -> pb.MemberStatus:
    """A worker with a device that is nearly full."""
    return pb.MemberStatus(
        member=f"worker.{number}",
        state="ready",
        pid=42,
        doing=pb.Heartbeat(activity=activity, waiting=waiting, progress=3),
        report=pb.AttemptDone(
            busy_seconds=0.4,
            wall_seconds=0.5,
            peak_device_bytes=15 << 30,
            device_limit_bytes=16 << 30,
        ),
    )


def status(*members: pb.MemberStatus, **changes: Any) -> pb.StatusReply:
    """A run of two devices in the middle of its steps."""
    fields: dict[str, Any] = {
        "run_id": "0123456789ab",
        "run_name": "tiny",
        "phase": "running",
        "epoch": 2,
        "version": 60,
        "steps": 100,
        "eta_seconds": 75.0,
        "plan_scheme": "1f1b",
        "members": members
        or (
            pb.MemberStatus(member="schedulerd", state="ready", pid=41),
            pb.MemberStatus(
                member="optimizerd.a",
                state="ready",
                doing=pb.Heartbeat(activity="advance of block 3", progress=1),
            ),
            worker(0, "B 1 0 of train 61"),
            worker(1, "FW 1 phase=forward of train 61, waiting for weights of version 60", True),
        ),
    }
    return pb.StatusReply(**{**fields, **changes})


def model(run_dir: Path | None = None, **changes: Any) -> Model:
    """What a screen knows of that run."""
    seen = Model(Facts(run_dir=run_dir, limits=Limits(clip=1.0)))
    past = tuple(line(step) for step in range(1, 60))
    fresh = (line(60, decision="amend", grad_norm=3.2), line(60, phase="eval", loss=2.5))
    seen.take(RunView(steps=100, status=status(**changes), fresh=fresh, past=past), START_S)
    return seen


def drawn(seen: Model, width: int, height: int, glyphs: Glyphs = UNICODE, page: str = "") -> str:
    """The screen as text; every line has exactly the width."""
    lines = compose(seen, glyphs, width, height, joined("keys"), page)
    assert [text.cell_len for text in lines] == [width] * height
    return "\n".join(text.plain for text in lines)


@pytest.mark.parametrize(
    ("activity", "words"),
    [
        ("B 3 1 of train 7", "computes backward of stage 3, micro-batch 1"),
        ("F 3 1 keep=all of train 7", "computes forward of stage 3, micro-batch 1"),
        ("OG 3 of train 7", "hands gradients of stage 3 to the optimizer"),
        (
            "RA 1 2 peer=0 of train 7, waiting for activation of stage 1, micro-batch 2 (train 7)"
            " from worker.0",
            "waits for activations of stage 1 from device 0",
        ),
        (
            "F 5 0 keep=input of train 7, waiting for weights of version 6",
            "waits for weights of stage 5",
        ),
        ("reading the batch of train 7", "reading the batch"),
        ("reading the batch of train 7, waiting for a disk", "waits for a disk"),
        ("what nobody knows", "what nobody knows"),
    ],
)
def test_what_a_worker_is_at_in_words(activity: str, words: str) -> None:
    assert worker_words(activity) == words


def test_lanes_say_who_waits_who_is_lost_and_who_has_ended() -> None:
    waits = Lane(doing=Doing.WAITING, text="waits for gradients")
    idle = pb.Heartbeat(activity="waiting for gradients", waiting=True)
    optimizer = pb.MemberStatus(member="optimizerd.a", state="ready", doing=idle)
    assert lane(optimizer, "running", 1) == waits
    assert optimizer_words("advance of block 3") == "state and next weights of block 3 (advance)"
    missing = pb.MemberStatus(member="worker.0", state="missing")
    found = [lane(missing, phase, epoch) for phase, epoch in (("gathering", 0), ("running", 2))]
    assert [seen.doing for seen in found] == [Doing.NOTHING, Doing.AWAY]
    assert lane(missing, "done", 2).text == "has ended"


def texts(events: Events) -> list[tuple[int, str, Tone]]:
    """Step, words, tone."""
    return [(e.step, words, e.tone) for e, words in zip(events, texts_of(events), strict=True)]


def test_steps_that_were_not_simply_committed_are_explained() -> None:
    events = Events(Limits(clip=1.0))
    events.add_line(line(1, loss_scale=65536.0), None)
    events.add_line(line(2, decision="amend", grad_norm=3.2, loss_scale=65536.0), None)
    assert texts(events) == [
        (
            2,
            "gradients clipped: norm 3.2, limit 1",
            Tone.GOOD,
        )
    ]
    events.add_line(line(3, decision="amend", grad_norm=2.0, loss_scale=65536.0), None)
    events.add_line(line(3, phase="eval", loss=2.5, perplexity=12.18), None)
    events.add_line(line(3, decision="skip", loss=None, grad_norm=None, loss_scale=65536.0), None)
    events.add_line(line(4, loss_scale=32768.0), None)
    assert [words for _, words, _ in texts(events)] == [
        "gradients clipped: norm 2, limit 1 (2 times since step 2)",
        "evaluation after step 3: loss 2.5000 (perplexity 12.2)",
        "gradients infinite or undefined: no step, the batch is left out; the loss scale was 65536",
    ]
    taken_back = Events(Limits(clip=1.0, arithmetic=True))
    taken_back.add_line(line(2, decision="amend", grad_norm=3.2), None)
    assert "taken back and made again" in texts(taken_back)[0][1]


def test_a_loss_is_told_when_it_begins_and_again_when_it_is_over() -> None:
    events = Events(Limits())
    happening = pb.Happening(
        number=7, kind="broken", step=41, text="worker.1 was lost (killed by signal 9)"
    )
    events.add_status(status(happenings=[happening]), START_S)
    lost = "worker.1 was lost (killed by signal 9): all go back to step 41"
    assert texts(events) == [(41, f"{lost} once all processes are ready", Tone.BAD)]
    happening.seconds = 2.1
    events.add_status(status(happenings=[happening]), START_S + 2)
    assert [words for _, words, _ in texts(events)] == [f"{lost}, nothing is lost; 2.1 s"]
    happening.steps_lost, happening.step = 11, 30
    events.add_status(status(happenings=[happening]), START_S + 3)
    assert "11 steps are computed again" in texts(events)[0][1]
    schedulerd = pb.MemberStatus(member="schedulerd", pid=99)
    events.add_status(
        status(schedulerd, happenings=[pb.Happening(number=1, kind="began")]), START_S
    )
    assert [tone for *_, tone in texts(events)] == [Tone.BAD, Tone.NOTE, Tone.GOOD]


def test_the_head_has_the_passes_over_the_data() -> None:
    text = drawn(model(data_epoch=2.375, data_epochs=8.5), 120, 40)
    assert "step 60/100  epoch 2.38 of 8.50 " in text and "60%  done in 1:15" in text
    assert "epoch" not in drawn(model(), 120, 40).partition("where a step goes")[0]


def test_everything_is_there_at_80_columns() -> None:
    text = drawn(model(Path("/")), 80, 24)
    for words in (
        "tiny  training",
        "1f1b on 2 devices, membership 2",
        "step 60/100",
        "60%  done in 1:15",
        "loss 2.5413  smoothed",
        "norm 3.2 (limit 1)",
        "loss (● on held-out data)",
        "computing 67%   ▓ bubble 17%   ▒ optimizer tail 5%",
        "state and next weights of block 3 (advance)",
        "device 0      80% ",
        "computes backward of stage 1, micro-batch 0",
        "waits for weights of stage 1",
        "devices max 94%   /dev/shm",
        "gradients clipped: norm 3.2, limit 1",
        "evaluation after step 60: loss 2.5000",
    ):
        assert words in text, f"{words!r} is not in\n{text}"


def test_larger_terminals_explain_their_words() -> None:
    for width, height in ((120, 36), (200, 60)):
        text = drawn(model(Path("/")), width, height)
        assert "clipped: the norm of the gradients was over" in text
        assert "bubble: time in which a device has nothing to" in text


def test_any_size_is_filled_exactly(tmp_path: Path) -> None:
    few, seen = Model(Facts(run_dir=None)), model(tmp_path)
    for width in (1, 2, 9, 20, 39, 60, 79, 109, 110, 150, 301):
        for height in (1, 2, 5, 9, 13, 24, 41, 90):
            for page in ("", "help", "events"):
                drawn(seen, width, height, page=page)
            drawn(few, width, height)


def test_many_devices_are_summed_up() -> None:
    members = [worker(number, "B 1 0 of train 61") for number in range(64)]
    members[7] = pb.MemberStatus(member="worker.7", state="missing", restarts=1)
    text = drawn(model(members=members), 80, 24)
    assert "device 7" in text and "is lost" in text and "and 62 others: 62 working" in text


def test_ascii_is_ascii() -> None:
    seen = model(Path("/"))
    for size in ((80, 24), (120, 40)):
        assert drawn(seen, *size, glyphs=ASCII).isascii()


def test_what_others_wrote_cannot_steer_the_terminal() -> None:
    seen = model(Path("/"), message="\x1b[2J\x07 full", run_name="a\nb\x9b")
    seen.events.add(RunEvent(at_s=None, step=1, text="x\x1b]0;title\x07y"))
    text = drawn(seen, 120, 30)
    assert not [c for c in text if not c.isprintable() and c != "\n"]


def test_a_run_that_has_only_begun_promises_nothing() -> None:
    seen = Model(Facts(run_dir=None))
    seen.take(RunView(steps=100, status=None, fresh=()), START_S)
    text = drawn(seen, 80, 24)
    assert "penstock  starting its processes" in text and "step 0/100" in text
    assert "done in ?" in text and "no step has ended yet" in text


def test_a_scheduler_that_is_silent_is_said() -> None:
    seen = model()
    view = RunView(steps=100, status=None, fresh=(), absent_phase="no_answer", silent_s=7.2)
    seen.take(view, START_S + 7)
    assert "no answer from the scheduler for 7 s; what you see is older" in drawn(seen, 80, 24)


def test_the_critical_path_takes_the_place_of_means(tmp_path: Path) -> None:
    Analysed(
        attempt=50,
        step_s=0.5,
        critical_s={"compute": 0.3, "network": 0.2, "overhead": 0.0},
        savings_s={"network": 0.125},
    ).write(tmp_path)
    text = drawn(model(tmp_path), 120, 40)
    assert "where a step goes (500 ms)" in text and "computing 60%" in text
    assert "between nodes 40%" in text and "125 ms" in text and "attempt 50" in text
    for odd in ("", "[]", "{}", '{"attempt": 5}', '{"attempt": 1, "critical_s": {"compute": NaN}}'):
        (tmp_path / "critical.json").write_text(odd)
        assert Analysed.read(tmp_path) is None
    Analysed.forget(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_curve_goes_where_its_points_are() -> None:
    points = [(step, 6.0 - step / 20) for step in range(1, 101)]
    lines = ["".join(cell.text for cell in row) for row in draw(points, [(50, 3.5)], 48, 9)]
    assert lines[0].startswith(" 6.072 ┤⠒⠦⠤⣀ ") and lines[7].startswith(" 0.878 ┤  ")
    assert lines[8].split() == ["step", "1", "50", "100"]
    assert sum("●" in row for row in lines) == 1
    assert all(len(row) == 48 for row in lines)
    assert draw([], [], 48, 9) == [[]] * 9
    flat = draw([(1, 2.0)], [], 48, 9, ascii_only=True)
    assert "".join(cell.text for row in flat for cell in row).count("*") == 1


def test_long_curves_are_averaged() -> None:
    series = Series(limit=64)
    for step in range(1, 10001):
        series.add(step, float(step))
    assert len(series.points) <= 65
    assert all(math.isclose(step, value) for step, value in series.points)
    assert series.points[-1][0] > 9800


@pytest.mark.parametrize(
    ("value", "text"),
    [(4.98213, "4.982"), (12.345, "12.35"), (0.00001, "1e-05"), (1234.5, "1234"), (0.0, "0.000")],
)
def test_numbers_beside_a_curve_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_the_past_of_a_long_run_is_sampled(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert MetricsTail.at_end(path).before() == ()
    path.write_text("".join(json.dumps(line(step)) + "\n" for step in range(1, 11)))
    assert [entry["step"] for entry in MetricsTail.at_end(path).before()] == list(range(1, 11))
    count = 3 * PAST_BYTES // len(json.dumps(line(100000)))
    path.write_text("".join(json.dumps(line(step)) + "\n" for step in range(1, count + 1)))
    tail = MetricsTail.at_end(path)
    steps = [entry["step"] for entry in tail.before()]
    assert steps[0] == 1 and steps[-1] == count and sorted(set(steps)) == steps
    assert count / 4 < len(steps) < count / 2 and tail.read() == ()


def test_no_line_is_wider_than_its_cells() -> None:
    wide = Text("数" * 50, end="")
    lines = compose(model(), UNICODE, 40, 12, wide)
    assert [text.cell_len for text in lines] == [40] * 12


def rows_of(text: str, width: int, height: int) -> list[str]:
    """Returns the rows of a screen with ``text`` in the last one, with their colours."""
    console = Console(force_terminal=True, color_system="256", width=width, file=io.StringIO())
    return rendered(compose(model(), UNICODE, width, height, joined(text)), console, width)


def test_no_erase_follows_a_full_row() -> None:
    rows = rows_of("keys", 80, 24)
    full = changes(rows, None)
    assert full.startswith("\x1b[0m\x1b[2J\x1b[1;1H")
    assert "K" not in re.findall(r"\x1b\[[\d;]*([A-Z])", full)
    later = changes(rows_of("other keys", 80, 24), rows)
    assert re.findall(r"\x1b\[[\d;]*([A-Z])", later) == ["H"], "one row has changed"


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
def test_tmux_shows_the_last_column(tmp_path: Path, width: int, height: int) -> None:
    first, second = rows_of("keys", width, height), rows_of("other keys", width, height)
    drawing = changes(first, None) + changes(second, first)
    (tmp_path / "drawing").write_text("\x1b[?1049h\x1b[?25l\x1b[?7l" + drawing)
    server = ["tmux", "-u", "-f", "/dev/null", "-S", str(tmp_path / "s")]
    command = f"cat {tmp_path}/drawing; tmux -S {tmp_path}/s wait-for -S drawn; exec sleep 600"
    start = [*server, "new-session", "-d", "-x", str(width), "-y", str(height), command]
    subprocess.run(start, check=True, timeout=600)
    try:
        subprocess.run([*server, "wait-for", "drawn"], check=True, timeout=600)
        for _ in range(6000):
            capture = [*server, "capture-pane", "-p", "-N"]
            shown = subprocess.run(capture, check=True, timeout=600, stdout=subprocess.PIPE)
            lines = shown.stdout.decode().split("\n")[:height]
            if lines[-1].startswith("other keys"):
                break
            time.sleep(0.1)
    finally:
        subprocess.run([*server, "kill-server"], check=True, timeout=600)
    plain = [Text.from_ansi(row).plain.rstrip() for row in second]
    assert [line.rstrip() for line in lines] == plain
    assert any(len(line) == width for line in plain), "a row ends in the last column"
