"""Plans with UPDATE: blocks that workers preview, or flush, end with the bytes of those that the
CPU does, whoever is killed meanwhile.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.plan.instructions import Instruction, OffloadGradients, Update
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.rundir import RunDirectory
from tests.system import conftest as H

HERE = Path(__file__).parent
CHANGES: dict[str, Any] = {**H.CLIPPED, "optimizer": {"settle": "early"}}


def with_updates(plan: Plan) -> Plan:
    """All blocks but every third on the device that makes their gradients; half of these keep their
    state, the others are flushed.
    """

    def behind(instruction: Instruction) -> list[Instruction]:
        if not isinstance(instruction, OffloadGradients):
            return [instruction]
        blocks = plan.backward_stages[instruction.stage].blocks
        return [instruction, *(update(b) for b in blocks if b % 3 != 1)]

    def update(block: int) -> Update:
        return Update(block=block, resident=block % 3 == 0, flush=block % 3 == 2)

    programs = tuple(tuple(i for old in p for i in behind(old)) for p in plan.programs)
    updated = replace(plan, programs=programs, settled_early=()).updates
    left = tuple(b for b in plan.settled_early if b not in updated)
    return replace(plan, programs=programs, settled_early=left)


def configured(runner: Any, undisturbed: Path, changes: dict[str, Any]) -> Path:
    """The same run with the plan of ``undisturbed``, and updates on its devices."""
    plan = with_updates(RunDirectory(undisturbed).plan)
    file = runner.root / "updates.json"
    file.write_text(plan.to_json())
    path: Path = runner.configure("run", {**changes, "schedule": {"file": str(file)}})
    return path


def test_updates_on_devices_leave_the_same_bytes(runner: Any, clipped_run: Path) -> None:
    """Of tied weights, with clipping in some steps; the other run advances all on the CPU."""
    run_dir = runner.train(configured(runner, clipped_run, CHANGES))
    assert RunDirectory(run_dir).plan.updates.keys() == {0, 2, 3, 5, 6}
    assert RunDirectory(run_dir).plan.flushed == (2, 5)
    assert [m["loss"] for m in H.metrics(run_dir)] == [m["loss"] for m in H.metrics(clipped_run)]
    assert H.state_bytes(run_dir) == H.state_bytes(clipped_run)


def test_kills_inside_flushes_leave_the_same_bytes(runner: Any, clipped_run: Path) -> None:
    """The worker that flushes dies with half a block written, later optimizerd while another one
    does, and the scheduler between the journal and its broadcast. What was flushed without a commit
    is written anew, what was committed and not taken over is settled.
    """
    hook, marker = runner.root / "hook", runner.root / "killed"
    hook.mkdir()
    parts = ("kill_inside_flush.py", "kill_after_journal.py")
    (hook / "sitecustomize.py").write_text("\n".join((HERE / part).read_text() for part in parts))
    run = runner.start(
        configured(runner, clipped_run, CHANGES),
        env={
            "PYTHONPATH": os.pathsep.join([str(hook), os.environ.get("PYTHONPATH", "")]),
            "TEST_KILL_MARKER": str(marker),
            "TEST_KILL_WORKER": "4",
            "TEST_KILL_OPTIMIZERD": "9",
            "TEST_KILL_VERSION": "14",
        },
    )
    code, output = run.wait(500)
    assert code == 0, f"exit code {code}\n{output}\n{H.tail_logs(run.run_dir)}"
    assert all(Path(f"{marker}{who}").exists() for who in ("", "-worker", "-optimizerd"))
    assert H.state_bytes(run.run_dir) == H.state_bytes(clipped_run)


@pytest.mark.slow
def test_a_flushed_state_is_saved_and_resumed_in_other_forms(
    runner: Any, clipped_run: Path
) -> None:
    """Interrupted twice: with flushes, then with all blocks on the CPU, then with flushes again."""
    interrupted(runner.start(configured(runner, clipped_run, CHANGES)), 5)
    plan = RunDirectory(runner.root / "run").plan
    assert plan.flushed
    interrupted(runner.start(runner.configure("run", CHANGES)), 14)
    assert not RunDirectory(runner.root / "run").plan.updates
    run_dir = runner.train(configured(runner, clipped_run, CHANGES))
    assert RunDirectory(run_dir).plan.flushed == plan.flushed
    assert H.state_bytes(run_dir) == H.state_bytes(clipped_run)


def interrupted(run: Any, step: int) -> None:
    """Ctrl-C behind a step: the state is saved."""
    H.wait_for_step(run, step)
    os.kill(run.process.pid, signal.SIGINT)
    code, output = run.wait(500)
    assert code == 130, f"exit code {code}\n{output}\n{H.tail_logs(run.run_dir)}"
