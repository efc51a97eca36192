"""Passes of an emulated node: the same arithmetic on what is stored, in the time of the whole."""

from __future__ import annotations

import time

from penstock.daemons.optimizer.kernels import Kernels
from penstock.daemons.optimizer.passes import Pass, PassStatus
from penstock.planner.emulation import Emulation

TURN_S = 5e-3
"""A pass that is ordered so soon after the last one ended was waiting for its turn: it starts where
that one ended, so that what happens in between does not add up.
"""


class EmulatedKernels:
    """Wraps :class:`~penstock.daemons.optimizer.kernels.Kernels`: a pass takes at least as long as
    on the emulated cluster.
    """

    def __init__(self, kernels: Kernels, emulation: Emulation) -> None:
        self._kernels = kernels
        self._emulation = emulation
        self._busy_until = 0.0

    def run(self, work: Pass) -> PassStatus | None:
        """Run the pass, and return when it would have ended."""
        now = time.monotonic()
        waited_for_turn = now - self._busy_until < TURN_S
        start = self._busy_until if waited_for_turn else now
        status = self._kernels.run(work)
        self._busy_until = start + self._emulation.pass_s(work.name, work.block)
        time.sleep(max(0.0, self._busy_until - time.monotonic()))
        return status
