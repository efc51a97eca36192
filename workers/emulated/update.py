"""UPDATE on an emulated device: optimizerd's arithmetic on what is stored, in the time of a GPU.

As simulated (:mod:`penstock.planner.simulate.optimizer`): state comes over the incoming stream once
it is settled and the UPDATE was issued, gradients with it if another device made them; the kernel
runs when the compute stream has nothing else to do; weights leave over the outgoing stream.
"""

from __future__ import annotations

import time
from dataclasses import replace

from penstock.protocol.config import OptimizerConfig
from penstock.protocol.plan import Plan
from penstock.protocol.step import OptimizerStep
from penstock.protocol.updating import staging_bytes
from penstock.shm.memory import NodeMemory
from penstock.workers.emulated.clock import sleep_until
from penstock.workers.emulated.device import EmulatedDevice
from penstock.workers.updates import NativePreviewer, PreviewedBlock
from penstock.workers.waiting import Abort


class EmulatedPreviewer:
    """See :class:`penstock.workers.updates.Previewer`."""

    def __init__(
        self,
        device: EmulatedDevice,
        memory: NodeMemory,
        config: OptimizerConfig,
        *,
        plan: Plan,
        device_index: int,
        cores: list[int],
    ) -> None:
        self._device = device
        self._stored = NativePreviewer(memory, config, cores)
        self._plan = plan
        self._index = device_index
        self._issued_at: dict[int, float] = {}
        self._here_at: dict[int, float] = {}
        largest = max(self._parameters(b) for b, d in plan.updates.items() if d == device_index)
        device.staging_bytes = staging_bytes(largest)

    def issue(self, block: int) -> None:
        """Behind what the device computes."""
        self._issued_at[block] = self._device.compute.free_at

    def fetch(self, block: int, abort: Abort) -> None:
        """The copy of the state; that of gradients waits for them."""
        if self._made_here(block):
            self._here_at[block] = self._copy_in(block, self._issued_at.pop(block), gradients=False)

    def preview(self, block: int, step: OptimizerStep, abort: Abort) -> PreviewedBlock:
        """Returns when the copy of the weights would have ended."""
        device, parameters = self._device, self._parameters(block)
        if block not in self._here_at:
            issued_at = max(self._issued_at.pop(block), time.monotonic())
            self._here_at[block] = self._copy_in(block, issued_at, gradients=True)
        cluster = device.emulation.cluster
        start, end = device.compute_between(
            self._here_at.pop(block), parameters / cluster.device_optimizer_rate, abort
        )
        done = self._stored.preview(block, step, abort)
        sleep_until(device.copy_out(end, parameters * cluster.update_offload_bytes), abort)
        return replace(done, start_s=start, end_s=end)

    def close(self) -> None:
        """End the threads."""
        self._stored.close()
        self._device.staging_bytes = 0.0

    def _copy_in(self, block: int, ready_at: float, *, gradients: bool) -> float:
        """When the copy ends; it starts no sooner than now, since what it copies was awaited."""
        device = self._device
        num_bytes = self._parameters(block) * device.emulation.cluster.update_fetch_bytes
        if gradients:
            num_bytes += device.emulation.costs.blocks[block].gradient_bytes
        return device.copy_in(max(ready_at, time.monotonic()), num_bytes)

    def _made_here(self, block: int) -> bool:
        stage = self._plan.backward_stages[self._plan.backward_stage_of(block)]
        return stage.device == self._index

    def _parameters(self, block: int) -> float:
        return self._device.emulation.costs.blocks[block].parameters
