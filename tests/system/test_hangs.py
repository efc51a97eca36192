"""A real run whose workers hang in a system call while they beat, and go on when it is mended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.host.errors import PenstockError
from penstock.protocol.wire.control import ControlClient

TIMEOUT_S = 4.0


def wait_for(condition: Callable[[], Any], what: str) -> None:
    """Poll until ``condition``."""
    deadline = time.monotonic() + 600.0
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.02)


def hangs(run_dir: Path) -> list[str]:
    """What the scheduler's log says about members without progress."""
    log = run_dir / "logs" / "schedulerd.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    messages = [str(json.loads(line)["message"]) for line in lines if line.endswith("}")]
    return [message for message in messages if "no progress" in message]


def answers(run_dir: Path) -> bool:
    """Whether the scheduler runs."""
    try:
        with ControlClient.for_run(run_dir) as client:
            return bool(client.status().phase)
    except PenstockError:
        return False


@pytest.mark.slow
def test_workers_that_hang_in_a_system_call(runner: Any) -> None:
    """What describes the data becomes a pipe that nobody writes into: opening it takes for ever."""
    settings = {"train": {"steps": 3}, "cluster": {"attempt_timeout_s": TIMEOUT_S}}
    path = runner.configure("hung", settings)
    undisturbed = runner.root / "undisturbed"
    runner.train(path, "--run-dir", str(undisturbed))
    run = runner.start(path)
    meta = run.run_dir / "data" / "meta.json"
    wait_for(lambda: answers(run.run_dir), "scheduler, which reads it, too")
    whole = meta.read_bytes()
    meta.unlink()
    os.mkfifo(meta)
    wait_for(lambda: len(hangs(run.run_dir)) == 2, "hang of both workers")
    mended = meta.with_suffix(".mended")
    mended.write_bytes(whole)
    mended.rename(meta)
    code, output = run.wait(500)
    assert code == 0, output
    for worker in ("worker.0", "worker.1"):
        assert any(f"{worker} (pid " in text for text in hangs(run.run_dir))
    assert "s: reading the batch of train 1" in hangs(run.run_dir)[0]
    assert "the attempt hung: worker.0: no progress for" in output, "the user sees it"
    saved = [sorted(d.glob("state/step-*/*.safetensors")) for d in (undisturbed, run.run_dir)]
    assert [p.read_bytes() for p in saved[0]] == [p.read_bytes() for p in saved[1]] != []
