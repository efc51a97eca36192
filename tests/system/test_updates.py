"""Plans with UPDATE: blocks that workers preview end with the bytes of those that the CPU does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.plan.instructions import Instruction, OffloadGradients, Update
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.rundir import RunDirectory
from tests.system import conftest as H

CHANGES: dict[str, Any] = {**H.CLIPPED, "optimizer": {"settle": "early"}}


def with_updates(plan: Plan) -> Plan:
    """All blocks but every third on the device that makes their gradients, half of which keeps
    their state.
    """

    def behind(instruction: Instruction) -> list[Instruction]:
        if not isinstance(instruction, OffloadGradients):
            return [instruction]
        blocks = plan.backward_stages[instruction.stage].blocks
        return [instruction, *(Update(block=b, resident=b % 3 == 0) for b in blocks if b % 3 != 1)]

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


@pytest.mark.timeout(300)
def test_updates_on_devices_leave_the_same_bytes(runner: Any, clipped_run: Path) -> None:
    """Of tied weights, with clipping in some steps; the other run advances all on the CPU."""
    run_dir = runner.train(configured(runner, clipped_run, CHANGES))
    assert RunDirectory(run_dir).plan.updates.keys() == {0, 2, 3, 5, 6}
    assert [m["loss"] for m in H.metrics(run_dir)] == [m["loss"] for m in H.metrics(clipped_run)]
    assert H.state_bytes(run_dir) == H.state_bytes(clipped_run)
