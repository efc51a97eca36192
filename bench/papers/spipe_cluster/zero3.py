"""DeepSpeed's ZeRO-3 with parameters and optimizer in host memory, as the SPipe paper runs it.

The artifact's configuration (``infinity.sh``) sets ``stage3_max_live_parameters``,
``stage3_max_reuse_distance`` and ``stage3_param_persistence_threshold`` to 0. So a layer's weights
are gathered when they are needed and let go at once: three times for each micro-batch (forward,
recomputation, backward), nothing ahead of time. A gather copies every device's share from the host,
then passes the shares around a ring; a reduce-scatter of 16-bit gradients follows each backward,
and the device's share of it goes to the host. All of that is in the way of compute; the CPU step
comes after it, of a share for each process.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.papers.spipe_cluster.measured import Workload
from bench.papers.spipe_cluster.systems import USABLE_SHARE, Prediction
from bench.papers.spipe_cluster.testbed import (
    V100,
    Constants,
    TestBed,
    analytic,
    constants,
)
from penstock.host.errors import ConfigError
from penstock.planner.cost.costs import Costs

NAME = "DeepSpeed"
GATHERS = 3
"""All-gathers of the whole model for each micro-batch."""

HOST_BYTES = 31.0
"""Bytes of host memory per parameter: 18 of the state (figure 3's: weights, gradients, master and
moments), the rest are fp32 gradients and pinned buffers. Between what ran out of 512 GB (69B on
four nodes) and what did not (30B on two).
"""

SLOW_DEVICES = 32
"""From so many GPUs on the artifact's collectives are slower; we do not know why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of an iteration for each device: through rings, from its host, and to it."""

    ring: float
    fetched: float
    offloaded: float


def traffic(workload: Workload, bed: TestBed = V100, known: Constants | None = None) -> Traffic:
    """Returns what an iteration moves.

    Raises:
        ConfigError: the devices cannot have equally many micro-batches.
    """
    each, rest = divmod(workload.num_microbatches, workload.num_devices)
    if rest:
        raise ConfigError(
            f"mini_batch = {workload.mini_batch}: DeepSpeed needs a multiple of micro_batch x GPUs"
            f" = {workload.micro_batch * workload.num_devices}"
        )
    blocks, devices = analytic(workload, bed, known).costs.blocks, workload.num_devices
    weights = sum(block.weight_bytes for block in blocks)
    gradients = sum(block.gradient_bytes for block in blocks)
    return Traffic(
        ring=(devices - 1) / devices * each * (GATHERS * weights + gradients),
        fetched=each * GATHERS * weights / devices,
        offloaded=each * gradients / devices,
    )


def predict(workload: Workload, bed: TestBed = V100, known: Constants | None = None) -> Prediction:
    """Predicts an iteration: nothing overlaps."""
    known = known or constants()
    made, moved = analytic(workload, bed, known), traffic(workload, bed, known)
    each = workload.num_microbatches // workload.num_devices
    blocks = made.costs.blocks
    compute = each * sum(b.forward_s + b.recompute_s + b.backward_s for b in blocks)
    cluster = made.cluster
    gpu_s = (
        compute
        + moved.ring / gather_bandwidth(workload.num_devices, known)
        + moved.fetched / cluster.fetch_bandwidth
        + moved.offloaded / cluster.offload_bandwidth
    )
    parameters = sum(block.parameters for block in blocks)
    tail_s = parameters / workload.nodes * known.step_bytes / cluster.dram_bandwidth
    return Prediction(
        iteration_s=gpu_s + tail_s,
        gpu_s=gpu_s,
        tail_s=tail_s,
        peak_gb=_peak_bytes(made.costs) / 1e9,
        fits=_peak_bytes(made.costs) <= USABLE_SHARE * bed.device_bytes
        and parameters / workload.nodes * HOST_BYTES <= cluster.host_memory_bytes,
    )


def gather_bandwidth(num_devices: int, known: Constants) -> float:
    """Returns the bytes/s of rings of so many devices."""
    return known.gather_bandwidth_32 if num_devices >= SLOW_DEVICES else known.gather_bandwidth


def _peak_bytes(costs: Costs) -> float:
    """Returns the most that is alive: the inputs of all blocks, and one block with all it needs."""
    kept = len(costs.blocks) * costs.blocks[0].output_bytes
    return kept + max(
        b.weight_bytes + b.device_gradient_bytes + b.activation_bytes + b.workspace_bytes
        for b in costs.blocks
    )
