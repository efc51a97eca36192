"""Runs that share frozen weights: one base in /dev/shm, each run's own bytes."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from penstock.shm.base_users import base_uses
from tests.system import conftest as H

FROZEN: dict[str, Any] = {
    "run": {"seed": 20_117},  # no other test shares these weights
    "train": {"steps": 6, "freeze": ["embed_tokens", r"layers\.[0-3]\.", "lm_head"]},
    "schedule": {"scheme": "mobius"},
    "cluster": {"heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 2.0},
}


def run_id(run: H.TrainProcess) -> str:
    return str(json.loads((run.run_dir / "run.json").read_text())["run_id"])


def memoryd_of(run: H.TrainProcess) -> int:
    (pid,) = (pid for name, pid in run.members().items() if name.startswith("memoryd"))
    return pid


def test_two_runs_have_one_base_and_end_as_alone(runner: Any) -> None:
    """Both start at once. One memoryd is killed on the way, and adopts the base again."""
    alone = runner.train(
        runner.configure("alone", H.merge(FROZEN, {"memory": {"share_base": "never"}}))
    )
    endless = H.merge(FROZEN, {"train": {"steps": 10**6}, "optimizer": {"schedule": "constant"}})
    stays = runner.start(runner.configure("stays", endless))
    other = runner.start(runner.configure("other", FROZEN))
    H.wait_for_step(stays, 1)
    os.kill(memoryd_of(stays), signal.SIGKILL)
    code, output = other.wait(500)
    assert code == 0, output
    assert H.state_bytes(other.run_dir) == H.state_bytes(alone)
    H.wait_for_step(stays, H.newest_step(stays.run_dir) + 2)
    uses = [use for use in base_uses() if run_id(stays) in use.runs]
    assert uses and {use.runs for use in uses} == {(run_id(stays),)}
    assert all(use.in_use and not use.filling for use in uses)
    stays.process.send_signal(signal.SIGTERM)
    code, output = stays.wait(500)
    assert code == 130, output
    left = {use.digest for use in base_uses()}
    assert left.isdisjoint(use.digest for use in uses)
