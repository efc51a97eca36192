"""UPDATE on an emulated device: optimizerd's arithmetic on what is stored, in the time of a GPU.

As simulated (:mod:`penstock.planner.simulate.optimizer`): state comes over the incoming stream once
it is settled and the UPDATE was issued, gradients with it if another device made them; the kernel
runs when the compute stream has nothing else to do; weights leave over the outgoing stream. Of
residents no state comes, but to bring theirs up to the commit takes as long as the update.
"""

from __future__ import annotations

import time
from dataclasses import replace

from penstock.protocol.config.training import OptimizerConfig
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.updating import RESIDENT_BYTES, residents_of, staging_bytes
from penstock.shm.memory import NodeMemory
from penstock.workers.platforms.emulated.clock import sleep_until
from penstock.workers.platforms.emulated.device import EmulatedDevice
from penstock.workers.state.residents import Lag
from penstock.workers.state.updates import NativePreviewer, PreviewedBlock, UpdateScope


class EmulatedPreviewer:
    """See :class:`penstock.workers.state.updates.Previewer`."""

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
        self._residents = residents_of(plan.programs[device_index])
        self._stored = NativePreviewer(memory, config, cores, self._residents)
        self._plan = plan
        self._index = device_index
        self._issued_at: dict[int, float] = {}
        self._here_at: dict[int, float] = {}
        largest = max(self._parameters(b) for b, d in plan.updates.items() if d == device_index)
        kept = sum(map(self._parameters, self._residents))
        device.state_bytes = RESIDENT_BYTES * kept
        device.staging_bytes = staging_bytes(largest)

    def issue(self, block: int) -> None:
        """Behind what the device computes."""
        self._issued_at[block] = self._device.compute.free_at

    def fetch(self, block: int, scope: UpdateScope) -> None:
        """The copy of the state; that of gradients waits for them."""
        if self._made_here(block):
            lag = self._lag(block, scope)
            self._here_at[block] = self._copy_in(block, self._issued_at.pop(block), lag)

    def preview(self, block: int, scope: UpdateScope) -> PreviewedBlock:
        """Returns when the copy of the weights would have ended."""
        device, parameters, lag = self._device, self._parameters(block), self._lag(block, scope)
        if block not in self._here_at:
            issued_at = max(self._issued_at.pop(block), time.monotonic())
            gradient_bytes = device.emulation.costs.blocks[block].gradient_bytes
            self._here_at[block] = self._copy_in(block, issued_at, lag, gradient_bytes)
        cluster = device.emulation.cluster
        sweeps = 1 if lag.step is None else 2
        start, end = device.compute_between(
            self._here_at.pop(block),
            sweeps * parameters / cluster.device_optimizer_rate,
            scope.abort,
        )
        done = self._stored.preview(block, scope)
        sleep_until(device.copy_out(end, parameters * cluster.update_offload_bytes), scope.abort)
        return replace(done, start_s=start, end_s=end)

    def close(self) -> None:
        """End the threads."""
        self._stored.close()
        self._device.staging_bytes = self._device.state_bytes = 0.0

    def _lag(self, block: int, scope: UpdateScope) -> Lag:
        """Of what the device keeps: all, but of residents."""
        if block not in self._residents:
            return Lag(whole=True)
        return self._stored.residents.lag(block, scope.step.version - 1)

    def _copy_in(self, block: int, ready_at: float, lag: Lag, gradient_bytes: float = 0.0) -> float:
        """When the copy ends; it starts no sooner than now, since what it copies was awaited."""
        fetched = self._device.emulation.cluster.update_fetch_bytes if lag.whole else 0.0
        num_bytes = self._parameters(block) * fetched + gradient_bytes
        ready_at = max(ready_at, time.monotonic())
        return self._device.copy_in(ready_at, num_bytes) if num_bytes else ready_at

    def _made_here(self, block: int) -> bool:
        stage = self._plan.backward_stages[self._plan.backward_stage_of(block)]
        return stage.device == self._index

    def _parameters(self, block: int) -> float:
        return self._device.emulation.costs.blocks[block].parameters
