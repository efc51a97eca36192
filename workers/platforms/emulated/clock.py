"""Busy times of an emulated device's parts.

Times are readings of ``time.monotonic``, the same clock in every process of a machine. Work starts
when its part of the device is free and its inputs are present **on this clock**, independent of
Python's delays. The caller then sleeps until the clock shows the end. So delays of Python and of
the operating system do not add up, as long as they are shorter than the work itself. A GPU with
queued kernels behaves the same.

:class:`Durations` has the times of a plan's instructions on an emulated device, and the bytes that
they send.
"""

from __future__ import annotations

from typing import Any

from penstock.host import world
from penstock.planner.cost.costs import Costs
from penstock.planner.schedule.tensors import transferred
from penstock.planner.schedule.timing import seconds_of
from penstock.protocol.plan.instructions import Forward, Keep
from penstock.protocol.plan.resources import PlanFacts, boundary
from penstock.workers.waiting import POLL_S, Abort


class EmulatedStream:
    """A resource that serves one piece of work after the other. Thread-safe."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self._lock = world.lock()

    def occupy(self, ready_at: float, seconds: float) -> tuple[float, float]:
        """Reserves the stream for work that can start at ``ready_at``; returns its start and
        end.
        """
        with self._lock:
            start = max(self.free_at, ready_at)
            self.free_at = start + seconds
            return start, self.free_at


def sleep_until(at: float, abort: Abort | None = None) -> None:
    """Returns when the clock shows ``at``.

    Raises:
        Interrupted: aborted.
    """
    while (left_s := at - world.monotonic()) > 0.0:
        if abort is not None:
            abort.check()
        world.sleep(min(left_s, POLL_S))


class Durations:
    """Emulated seconds and bytes of a plan's instructions."""

    def __init__(self, facts: PlanFacts, costs: Costs) -> None:
        self._facts = facts
        self._layout = facts.layout
        self._costs = costs
        self._seconds = seconds_of(facts, costs)

    def seconds(self, instruction: Any) -> float:
        """Returns the seconds on the compute stream; a forward of the last stage ends at its last
        checkpoint.
        """
        layout = self._layout
        if (
            isinstance(instruction, Forward)
            and instruction.keep is Keep.INPUT
            and layout.is_last_forward(instruction.stage)
        ):
            needed = layout.blocks_for_checkpoints(instruction.stage)
            return self._costs.of(needed).forward_s + self._costs.instruction_s
        return self._seconds(instruction)

    def num_bytes(self, send: Any) -> float:
        """Returns the bytes that an instruction sends."""
        kind = transferred(send).kind
        return self._costs.input_bytes(boundary(self._layout, kind, send.stage))

    def kept_bytes(self, stage: int, micro_batch: int) -> float:
        """Returns the bytes that a forward kept."""
        cost = self._costs.of(self._layout.forward[stage].blocks)
        drop = self._facts.drops.get((stage, micro_batch), ())
        return cost.activation_bytes - cost.drop_bytes(drop)
