"""``penstock train`` and ``penstock watch`` on a real terminal: keys, sizes, and what is left."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.system.conftest import Runner, wait_for_step
from tests.system.terminals import TerminalRun, on_terminal

PENSTOCK = [sys.executable, "-m", "penstock.client.main"]
CHANGES = {"train": {"steps": 100_000, "eval_every": 0}}


def given_back(terminal: TerminalRun) -> bool:
    """Whether the terminal is what it was."""
    seen = terminal.screen
    return terminal.cooked and not seen.alternate and not seen.hidden_cursor


@pytest.mark.slow
def test_a_training_is_steered_by_keys_and_gives_the_terminal_back(runner: Runner) -> None:
    """One run, since it takes seconds to start: at 80 columns, then at 120; paused, saved, stopped
    by the shell and brought back, and ended.
    """
    config = runner.configure("keys", CHANGES)
    run_dir = runner.root / "keys"
    runner.shelf.take(config, run_dir)
    # An interactive shell: without one nobody could bring back what Ctrl-Z stopped.
    with on_terminal(["sh", "-i"]) as terminal:
        terminal.type(f"exec 2>&1; {' '.join(PENSTOCK)} train {config}\n")
        terminal.until("device 1", timeout_s=600.0)
        terminal.until("tokens/s")
        assert not terminal.cooked and terminal.screen.alternate
        assert "keys  training" in terminal.text and "loss" in terminal.text
        terminal.type("p")
        terminal.until("paused on request")
        terminal.until("keys  paused")
        terminal.type("h")
        terminal.until("clipped: the norm of the gradients")
        terminal.type("x")
        terminal.until(lambda: "clipped: the norm of the gradients" not in terminal.text)
        terminal.type("p")
        terminal.until("goes on after a pause")
        terminal.type("s")
        terminal.until("is saved in step-")
        terminal.resize(120, 40)
        terminal.until("words")
        terminal.type("\x1a")  # Ctrl-Z
        terminal.until(lambda: given_back(terminal))
        terminal.type("fg\n")
        terminal.until("keys  training")
        assert terminal.screen.alternate and not terminal.cooked
        terminal.type("q")
        terminal.until("stop the run?")
        terminal.type("n")
        terminal.until("save now")
        terminal.type("qy")
        terminal.until("stopped at step")
        terminal.type("echo code $?\n")
        terminal.until("code 130")
        assert given_back(terminal)
    assert list((run_dir / "state").glob("step-*"))


FAKE = """
import sys, time
from pathlib import Path
from rich.console import Console
from penstock.client.views.screen.commands import Commands
from penstock.client.views.screen.model import Facts
from penstock.client.views.screen.screen import Screen
from penstock.client.views.run_view import RunView
from penstock.protocol.generated import scheduler_pb2 as pb

screen = Screen(Facts(run_dir=None), Commands(lambda: None), Console())
view = RunView(steps=9, status=pb.StatusReply(run_name="fake", phase="running"), fresh=())
try:
    while True:
        screen.show(view)
        if Path(sys.argv[1]).exists():
            word = Path(sys.argv[1]).read_text()
            if word == "raise":
                raise RuntimeError("on purpose")
            view = RunView(steps=9, status=word, fresh=())  # which cannot be drawn
        if screen.wait(0.05):
            break
finally:
    screen.close()
"""


@pytest.mark.slow
def test_two_watch_a_run_and_one_is_killed(runner: Runner) -> None:
    """At three sizes; SIGTERM gives the terminal back, the end of the run is seen."""
    config = runner.configure("watched", {"train": {"steps": 100_000}})
    run = runner.start(config)
    wait_for_step(run, 2)
    watch = [*PENSTOCK, "watch", "--run-dir", run.run_dir]
    with on_terminal(watch, 200, 60) as large, on_terminal(watch, 80, 24) as small:
        for terminal in (large, small):
            terminal.until("watched  training")
            terminal.until("tokens/s")
        small.process.send_signal(signal.SIGTERM)
        assert small.end() == 128 + signal.SIGTERM and given_back(small)
        large.resize(120, 40)
        large.until("work of each member")
        members = run.members()
        os.kill(members["worker.1"], signal.SIGKILL)
        large.until("worker.1 was lost (killed by signal 9)")
        large.until("nothing is lost")
        run.process.send_signal(signal.SIGINT)
        large.until("stopping on request")
        assert large.end() == 5 and given_back(large)
    assert run.wait(500)[0] == 130


@pytest.mark.parametrize("end", ["\x03", "break"])
def test_the_terminal_is_given_back(tmp_path: Path, end: str) -> None:
    """When the user leaves, interrupts, when there is an error, and when the screen has one."""
    order = tmp_path / "order"
    with on_terminal([sys.executable, "-c", FAKE, order]) as terminal:
        terminal.until("fake  training")
        assert not given_back(terminal)
        if len(end) == 1:
            terminal.type(end)
        else:
            order.write_text(end)
        if end == "break":
            terminal.until(lambda: given_back(terminal))
            assert terminal.process.poll() is None, "a screen that fails ends nothing"
            terminal.type("\x03")
        assert (terminal.end() == 0) == (end == "q")
        assert given_back(terminal)


@pytest.mark.parametrize("env", [{"LC_ALL": "C", "NO_COLOR": "1"}], ids=lambda env: "-".join(env))
def test_poor_terminals(env: dict[str, str]) -> None:
    """Where the locale is not UTF-8 there is ASCII only; with NO_COLOR no colour."""
    with on_terminal([sys.executable, "-c", FAKE, os.devnull + "x"], env=env) as terminal:
        terminal.until("fake  training")
        drawn = terminal.raw
        assert drawn.isascii() == ("LC_ALL" in env)
        coloured = any(f"\x1b[{code}m".encode() in drawn for code in ("32", "1;32", "36"))
        assert coloured == ("NO_COLOR" not in env)
