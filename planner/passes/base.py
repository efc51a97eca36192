"""Optimising passes: pure functions from a schedule to a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.config.execution import DeviceUpdates
from penstock.planner.cost.cluster import PREVIEW_SETTLE, Cluster, OptimizerModel
from penstock.planner.cost.costs import Costs
from penstock.planner.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """The facts that passes decide by.

    ``memory_limit_bytes``: of one device; ``None`` for no limit. ``hop_s``: seconds of a tensor
    from one device to the next, for decisions by
    :func:`penstock.planner.schedule.timing.order_times`. ``optimizer``: the CPU's way with the
    blocks that it updates. ``update_stride``: every so many-th block is taken by
    ``interleave-updates``; ``None``: the pass decides. ``resident_share``: the share of each
    device's parameters with optimizer state on the device. ``device_updates``: devices preview
    blocks, flush them, or (``auto``) use the form with the shorter simulated step.
    """

    costs: Costs
    cluster: Cluster
    memory_limit_bytes: float | None = None
    hop_s: float = 0.0
    optimizer: OptimizerModel = PREVIEW_SETTLE
    update_stride: float | None = None
    resident_share: float = 0.0
    device_updates: DeviceUpdates = DeviceUpdates.PREVIEW

    @property
    def device_limit_bytes(self) -> float:
        """The memory limit, or without one the device's memory."""
        limit = self.memory_limit_bytes
        return self.cluster.device_memory_bytes if limit is None else limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A named transform of schedules. ``summary``: one line for ``--help``, with the paper's
    section.

    ``run`` returns a schedule that :func:`penstock.planner.validate.check.validate` accepts once
    lowered, or the same schedule where there is nothing to do.

    Raises (``run``):
        ConfigError: the schedule has a shape that the pass cannot work on; the message says which.
    """

    name: str
    summary: str
    run: Callable[[Schedule, PassContext], Schedule]
