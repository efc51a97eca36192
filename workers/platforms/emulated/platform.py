"""The emulated platform of a worker, and UPDATE on it.

An UPDATE is optimizerd's arithmetic on stored arrays, in the simulated time of a GPU
(:mod:`penstock.planner.simulate.optimizer`). State comes over the incoming stream once it is
settled and the UPDATE was issued. Gradients come with it if another device made them. The kernel
runs when the compute stream is free; weights leave over the outgoing stream. No state of residents
is fetched, but to bring it up to the commit takes as long as the update.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from penstock.config.training import OptimizerConfig
from penstock.host import world
from penstock.planner.cost.catalogue import peak_flops_of
from penstock.planner.cost.emulation import Emulation
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.resources import RESIDENT_BYTES, residents_of, staging_bytes
from penstock.protocol.run.hardware.bandwidth_log import BandwidthLog, NicReservations
from penstock.protocol.run.hardware.peer_memory import PeerMemory
from penstock.protocol.run.names import node_of_device
from penstock.shm.memory import NodeMemory
from penstock.workers.device import WorkerSite
from penstock.workers.platforms.emulated.clock import sleep_until
from penstock.workers.platforms.emulated.device import EmulatedDevice
from penstock.workers.platforms.emulated.handlers import EMULATED_HANDLERS
from penstock.workers.platforms.emulated.memory import EmulatedMeter
from penstock.workers.platforms.emulated.runtime import EmulatedRuntime
from penstock.workers.state.residents import Lag
from penstock.workers.state.updates import (
    NativePreviewer,
    PreviewedBlock,
    UpdateScope,
    own_cores,
)


class EmulatedPlatform:
    """See :class:`penstock.workers.platforms.registry.WorkerPlatform`."""

    handlers = EMULATED_HANDLERS

    def __init__(self, site: WorkerSite) -> None:
        """Makes the device, which announces its copies and reserves NICs in files of the run
        directory.
        """
        self._site = site
        config, emulation = site.config, Emulation.of(site.config)
        node, nodes = node_of_device(config, site.device_index), config.cluster.nodes
        here = site.run_dir, nodes[node].name, config.cluster.workers
        self.device = EmulatedDevice(
            emulation,
            site.table,
            announce=partial(BandwidthLog.of_node(*here).post, site.local_index),
            leave=partial(NicReservations.of_run(site.run_dir, len(nodes)).occupy, source=node),
            peer_memory=PeerMemory.of_node(*here, site.device_index),
        )
        limit, device_bytes = config.memory.device_limit, emulation.cluster.device_memory_bytes
        self.meter = EmulatedMeter(self.device, device_bytes if limit is None else float(limit))
        self.reads = emulation.reads(site.run_dir, config, node)
        peak_flops = peak_flops_of(emulation.name)
        self.peak_flops = None if peak_flops is None else peak_flops / emulation.time_scale

    def set_up_process(self) -> None:
        """Does nothing: sums of emulated devices are exact."""

    def runtime(self) -> EmulatedRuntime:
        """Returns the runtime that makes up numbers instead of a model."""
        return EmulatedRuntime(self._site.table, seed=self._site.config.run.seed)

    def previewer(self, memory: NodeMemory, plan: Plan) -> EmulatedPreviewer:
        """Returns the previewer that updates blocks in the time of a GPU."""
        return EmulatedPreviewer(
            self.device,
            memory,
            self._site.config.optimizer,
            plan=plan,
            device_index=self._site.device_index,
            cores=own_cores(self._site.local_index),
        )


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
        self._flushed = plan.flushed
        self._stored = NativePreviewer(memory, config, cores, self._residents, plan.flushed)
        self._plan = plan
        self._index = device_index
        self._issued_at: dict[int, float] = {}
        self._here_at: dict[int, float] = {}
        largest = max(self._parameters(b) for b, d in plan.updates.items() if d == device_index)
        kept = sum(map(self._parameters, self._residents))
        device.state_bytes = RESIDENT_BYTES * kept
        device.staging_bytes = staging_bytes(largest)

    def issue(self, block: int) -> None:
        """Records the time of the compute stream: the copy of the state starts no sooner."""
        self._issued_at[block] = self._device.compute.free_at

    def fetch(self, block: int, scope: UpdateScope) -> None:
        """Copies the state; gradients are copied when they are present."""
        if self._made_here(block):
            lag = self._lag(block, scope)
            self._here_at[block] = self._copy_in(block, self._issued_at.pop(block), lag)

    def preview(self, block: int, scope: UpdateScope) -> PreviewedBlock:
        """Computes the block's update, and waits for the modelled end of the copies of weights and
        flushed state.
        """
        device, parameters, lag = self._device, self._parameters(block), self._lag(block, scope)
        if block not in self._here_at:
            issued_at = max(self._issued_at.pop(block), world.monotonic())
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
        left = parameters * cluster.update_bytes_out(flush=block in self._flushed)
        sleep_until(device.copy_out(end, left), scope.abort)
        return replace(done, start_s=start, end_s=end)

    def close(self) -> None:
        """Ends the threads."""
        self._stored.close()
        self._device.staging_bytes = self._device.state_bytes = 0.0

    def _lag(self, block: int, scope: UpdateScope) -> Lag:
        """Returns the part of the block's state that the device lacks: all of it, except for
        residents.
        """
        if block not in self._residents:
            return Lag(whole=True)
        return self._stored.residents.lag(block, scope.step.version - 1)

    def _copy_in(self, block: int, ready_at: float, lag: Lag, gradient_bytes: float = 0.0) -> float:
        """Returns the end of the copy. It starts no sooner than now, since its source was
        awaited.
        """
        fetched = self._device.emulation.cluster.update_fetch_bytes if lag.whole else 0.0
        num_bytes = self._parameters(block) * fetched + gradient_bytes
        ready_at = max(ready_at, world.monotonic())
        return self._device.copy_in(ready_at, num_bytes) if num_bytes else ready_at

    def _made_here(self, block: int) -> bool:
        stage = self._plan.backward_stages[self._plan.backward_stage_of(block)]
        return stage.device == self._index

    def _parameters(self, block: int) -> float:
        return self._device.emulation.costs.blocks[block].parameters
