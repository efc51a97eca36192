"""Sweeps of an emulated node: the same arithmetic on what is stored, in the time of the whole.

Copies of the node's devices go through the same memory; sweeps have what these leave
(:mod:`penstock.protocol.run.hardware.bandwidth_log`).
"""

from __future__ import annotations

from penstock.daemons.optimizer.kernels import Kernels
from penstock.daemons.optimizer.machine.sweeps import Sweep
from penstock.host import world
from penstock.planner.cost.emulation import Emulation
from penstock.protocol.plan.step import SweepStatus
from penstock.protocol.run.hardware.bandwidth_log import BandwidthLog, finish_at

TURN_S = 5e-3
"""A sweep that is ordered within this many seconds of the last one's end was waiting for its turn.
It then starts at that end, so that the time between sweeps does not add up.
"""


_LOOK_S = 2e-3
"""Seconds between a sweep's checks for new copies."""


class EmulatedKernels:
    """Wraps :class:`~penstock.daemons.optimizer.kernels.Kernels`: a sweep takes at least as long as
    on the emulated cluster.
    """

    def __init__(self, kernels: Kernels, emulation: Emulation, log: BandwidthLog) -> None:
        self._kernels = kernels
        self._emulation = emulation
        self._bandwidth_log = log
        self._busy_until = 0.0

    def run(self, work: Sweep) -> SweepStatus | None:
        """Runs the sweep, and returns when it would have ended."""
        now = world.monotonic()
        waited_for_turn = now - self._busy_until < TURN_S
        start = self._busy_until if waited_for_turn else now
        status = self._kernels.run(work)
        self._busy_until = self._wait(start, work)
        return status

    def moved_by(self, work: Sweep) -> tuple[float, float]:
        """Returns what the emulated sweep goes through, and moves."""
        whole = self._emulation.sweep_work(work.name, work.block)
        if whole is None:
            return self._kernels.moved_by(work)
        return self._emulation.costs.blocks[work.block].parameters, whole.num_bytes

    def _wait(self, start: float, work: Sweep) -> float:
        """Sleeps until a sweep that began at ``start`` would have ended; returns when that was, in
        seconds of ``time.monotonic``.
        """
        whole = self._emulation.sweep_work(work.name, work.block)
        if whole is None:
            return start
        while True:
            end = finish_at(
                start,
                whole.num_bytes,
                limit=whole.limit,
                capacity=whole.capacity,
                copies=self._bandwidth_log.since(start),
            )
            left_s = end - world.monotonic()
            if left_s <= 0.0:
                return end
            world.sleep(min(left_s, _LOOK_S))
