"""How a training's exit code and last words follow from what its nodes did."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.client.supervision import (
    Interruptions,
    NodeProcess,
    console_path,
    empty_console,
    exit_code,
)
from penstock.client.train import TrainResult, closing_words, complaints
from penstock.client.views.summary import Reading, loss_words
from penstock.config.schema import Config, parse_config
from penstock.daemons.preload.client import ChildProcess, spawn
from penstock.host.errors import LostMemberError


@pytest.mark.parametrize(
    ("codes", "interrupted", "expected"),
    [
        ([0], False, 0),
        ([0, 0], False, 0),
        ([0], True, 0),
        ([5], True, 130),
        ([5], False, 5),
        ([5, 5], False, 5),
        ([5, -9], False, 4),
        ([5, 130], False, 130),
        ([0, 5], False, 5),
        ([1], False, 4),
        ([255], True, 4),
        ([130], False, 130),
        ([130, -9], True, 130),
        ([2], False, 2),
        ([0, 3], False, 3),
        ([4], True, 4),
        ([-9], False, 4),
        ([-9, 3], False, 3),
    ],
)
def test_exit_codes(codes: list[int], interrupted: bool, expected: int) -> None:
    assert exit_code(codes, interrupted=interrupted) == expected


def config() -> Config:
    return parse_config(
        {"model": {"hf": {"model_type": "x"}}, "data": {"path": "x"}, "train": {"steps": 3}}
    )


def line(step: int, epoch: int = 1, seconds: float = 0.5) -> dict[str, Any]:
    """One line of training metrics: 200 tokens a step."""
    return {
        "phase": "train",
        "step": step,
        "loss": 5.0 - step,
        "tokens": 200,
        "seconds": seconds,
        "epoch": epoch,
    }


def result(run_dir: Path, code: int, steps: int) -> TrainResult:
    lines = tuple(line(step) for step in range(1, steps + 1))
    return TrainResult(exit_code=code, run_dir=run_dir, metrics=lines, error="", seconds=65.0)


def test_last_words_of_a_finished_run(tmp_path: Path) -> None:
    (tmp_path / "state" / "step-00000003").mkdir(parents=True)
    (tmp_path / "state" / ".tmp-step-00000004").mkdir()
    words = closing_words(result(tmp_path, 0, 3), config())
    assert words == [
        "done: 3 steps",
        "  this start     3 steps in 0:02 at 400 tokens/s; 1:05 in all",
        "  loss           2.0000 at step 3; 4.0000 -> 2.0000 (first and last step)",
        f"  metrics        {tmp_path}/metrics.jsonl",
        f"  configuration  {tmp_path}/resolved.yaml",
        f"  saved state    {tmp_path}/state/step-00000003",
        f"  export         penstock export {tmp_path} --format hf OUT",
        f"  report         penstock report {tmp_path}",
    ]


def test_a_resumed_run_tells_the_speed_of_its_last_start_only(tmp_path: Path) -> None:
    """Step 3 was trained twice; a start completes the file with a line of the start before."""
    earlier = [*(line(step, epoch=1, seconds=20.0) for step in (1, 2, 3)), evaluation(2, 2.5, 1)]
    late = line(4, epoch=1, seconds=20.0)
    now = [line(step, epoch=2) for step in (3, 4, 5, 6)] + [evaluation(6, 2.75, 2)]
    trained = TrainResult(
        exit_code=0,
        run_dir=tmp_path,
        metrics=(*earlier, late, *now),
        error="",
        first=len(earlier),
        seconds=65.0,
    )
    assert closing_words(trained, config())[:4] == [
        "done: 6 steps",
        "  this start     4 steps in 0:02 at 400 tokens/s; 1:05 in all",
        "  loss           -1.0000 at step 6; 4.0000 -> -1.0000 (first and last step)",
        "  held-out loss  2.7500 at step 6; best 2.5000 at step 2",
    ]
    summary = trained.summary
    assert (summary.loss, summary.here) == (Reading(step=6, value=-1.0), 4)
    assert (summary.tokens_per_second, summary.training_s) == (400.0, 2.0)
    assert summary.best == Reading(step=2, value=2.5)
    assert len(summary.losses) == 6


def evaluation(step: int, loss: float, epoch: int) -> dict[str, Any]:
    return {"phase": "eval", "step": step, "loss": loss, "tokens": 9, "seconds": 9, "epoch": epoch}


def test_skipped_steps_and_lines_without_numbers_have_no_figures(tmp_path: Path) -> None:
    lines = (line(1), {"phase": "train", "step": 2, "loss": None, "epoch": None})
    skipped = TrainResult(exit_code=5, run_dir=tmp_path, metrics=lines, error="")
    assert skipped.summary.loss == Reading(step=1, value=4.0) and skipped.summary.here == 2
    nothing = TrainResult(exit_code=5, run_dir=tmp_path, metrics=(), error="")
    assert nothing.summary.loss is None and nothing.summary.tokens_per_second is None
    assert list(nothing.summary.lines(1.0)) == [] and nothing.state is None


def test_last_words_have_the_passes_over_the_data(tmp_path: Path) -> None:
    done, stopped = result(tmp_path, 0, 3), result(tmp_path, 5, 2)
    for entry in (*done.metrics, *stopped.metrics):
        entry["data_epoch"] = 2.8333 * entry["step"]
    assert closing_words(done, config())[0] == "done: 3 steps, 8.50 epochs"
    assert closing_words(stopped, config())[0].startswith("stopped at step 2/3, epoch 5.67; ")


def test_the_summary_compares_means_not_two_batches() -> None:
    noisy = [5.0 - 0.02 * step + (0.5 if step % 2 else -0.5) for step in range(100)]
    assert loss_words(noisy) == "4.8100 -> 3.2100 (means of the first and last 20 steps)"
    assert loss_words(noisy[:10]) == "4.9900 -> 4.8300 (means of the first and last 2 steps)"
    assert loss_words([4.0]) == "4.0000 -> 4.0000 (first and last step)"
    assert "last 20 steps" in loss_words(noisy * 30)


@pytest.mark.parametrize("code", [0, 5, 130])
def test_last_words_of_a_stopped_run(tmp_path: Path, code: int) -> None:
    words = closing_words(result(tmp_path, code, 2), config())
    assert words[0].startswith("stopped at step 2/3; the same command resumes from there")
    assert words[-2] == "  saved state    none", "there is nothing to export"


def test_last_words_say_what_only_the_memory_has(tmp_path: Path) -> None:
    (tmp_path / "state" / "step-00000001").mkdir(parents=True)
    [kept] = [
        w for w in closing_words(result(tmp_path, 130, 2), config(), held=True) if "in mem" in w
    ]
    assert "steps 2 to 2 are not saved" in kept
    saved = closing_words(result(tmp_path, 130, 1), config(), held=True)
    assert not any("in memory" in word for word in saved)


def test_last_words_of_a_failure(tmp_path: Path) -> None:
    assert closing_words(result(tmp_path, 3, 1), config()) == [
        f"failed at step 1 (exit code 3); logs: {tmp_path}/logs"
    ]
    words = closing_words(result(tmp_path, 3, 1), config(), kept="memory keeps step 1")
    assert words[1:] == ["  in memory      memory keeps step 1"]


def test_complaints_are_what_processes_told_the_user_once_each(tmp_path: Path) -> None:
    console = console_path(tmp_path)
    console.parent.mkdir()
    told = "penstock: /dev/shm is full\nnode.a: memoryd.a ended with exit code 3\n"
    console.write_text("Traceback\nValueError: x\n" + told + told)
    assert complaints(tmp_path) == "/dev/shm is full"
    console.write_text(
        "schedulerd: shutting down: memoryd.a: the loader failed: penstock: no room\n"
        "node.a: the run ends: memoryd.a: the loader failed: penstock: no room\n"
        "penstock: memoryd.a: the loader failed: penstock: no room\n"
        "penstock: optimizerd.a: no threads\n"
    )
    assert complaints(tmp_path) == (
        "memoryd.a: the loader failed: penstock: no room\noptimizerd.a: no threads"
    )
    console.write_text("Traceback (most recent call last):\nmodule.SomeError: why\nnode.a: died\n")
    assert complaints(tmp_path) == "node.a: died\nmodule.SomeError: why"


class Forks:
    """Starts processes that end by a signal at once; after the first the kernel has room for no
    other.
    """

    def __init__(self, *killed: bool) -> None:
        self._killed = list(killed)

    def start(self, module: str, arguments: Sequence[str], *rest: Any, **more: Any) -> ChildProcess:
        if not self._killed:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        program = "import os; os.kill(os.getpid(), 9)" if self._killed.pop() else "pass"
        return spawn([sys.executable, "-c", program], os.environ)

    def look(self) -> None:
        """Nothing is lost."""


def test_a_node_that_cannot_be_started_again_is_one_sentence(tmp_path: Path) -> None:
    empty_console(tmp_path)
    node = NodeProcess(tmp_path, "a", 5, Forks(True), alone=True)
    os.waitid(os.P_PID, node.pid, os.WEXITED | os.WNOWAIT)
    assert node.poll(replace=True) == -9
    assert node.failure == ("node.a: cannot start its process: Resource temporarily unavailable")
    assert node.poll(replace=True) == -9, "it is not tried again"
    with pytest.raises(LostMemberError, match="cannot start its process"):
        NodeProcess(tmp_path, "b", 5, Forks(), alone=True)


def test_a_signal_ends_the_wait_between_two_looks() -> None:
    interruptions = Interruptions()
    with interruptions.installed(process_ends=False):
        seen = interruptions.state
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        interruptions.wait(3600.0, seen)
        assert interruptions.state == (True, False)
        interruptions.wait(3600.0, seen)  # what came before is not waited for again
        timer.join()
    interruptions.wait(0.0, seen)
