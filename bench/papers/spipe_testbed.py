"""The test-bed of the SPipe paper: its measured runs, its machines as a cluster, its systems.

Runs: ``data/spipe_figure9_v100.csv``, the expected results that come with the paper's artifact
(figure 9: 16 workloads on four systems). Machines: table 1, Cluster V100. Models: table 2.

What is below holds for all runs; nothing is chosen per run. From the paper and the data sheets of
what it names: four V100 PCIe per node (112 TFLOP/s, 900 GB/s), PCIe 3.0 x16 (12.5 GB/s each way)
through the host's memory, 8 channels of DDR4-2666 (128 of 171 GB/s), a network of 25 GB/s, stages
of equal numbers of layers (embedding and head with the outer ones), recomputation inside the
backward. Five numbers are fitted to the file as a whole; they are the constants with the word
*fitted*.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from penstock.planner.build import ScheduleRequest, build_schedule
from penstock.planner.cost.analytic import AnalyticCosts, Host, analytic_costs
from penstock.planner.cost.cluster import OptimizerModel, OptimizerStart
from penstock.planner.cost.costs import Costs
from penstock.planner.schedule import Schedule, lower
from penstock.planner.simulate import Simulation, simulate
from penstock.protocol.plan.instructions import RecomputeAfter
from penstock.protocol.plan.plan import Plan

DEVICES_PER_NODE = 4

EFFICIENCY = 0.71
"""Fitted: share of the tensor cores' peak that large matrix products reach (0.6 in the catalogue,
where it stands for launches and transfers, too, which are counted apart here).
"""

BLOCKING_S = 6.5e-3
"""Fitted: what each compute instruction of the paper's systems takes beside its kernels.

The systems build on Megatron-LM, whose point-to-point transfers end with a synchronisation of the
device: the next instruction's launches start on an idle device.
"""

PEER_BANDWIDTH = 9e9
"""Fitted: bytes/s of those transfers, for which the compute stream waits (PCIe 3.0: 12.5e9)."""

STEP_BYTES = 64.0
"""Fitted: DRAM traffic per parameter of the CPU step of figure 3.

Each line sweeps over memory: to fp32 (10 bytes with the write-allocate), unscale (8), check (4),
Adam (28), copy to fp16 (8), zero the gradients (4 to 8): 62 to 66.
"""

STEP_S = 0.5
"""Fitted: seconds per iteration beside pipeline and optimizer (synchronised result, data, loss)."""

_DRAM_BANDWIDTH = 128e9
_HOST = Host(dram_bandwidth=_DRAM_BANDWIDTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One of figure 9's 16: sizes of model (billion parameters), sequence, cluster, batch."""

    billions: int
    sequence: int
    nodes: int
    micro_batch: int
    mini_batch: int

    @property
    def num_devices(self) -> int:
        """How many GPUs the workload has."""
        return self.nodes * DEVICES_PER_NODE

    @property
    def num_microbatches(self) -> int:
        """How many micro-batches an iteration has."""
        return self.mini_batch // self.micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A measured run: seconds of an iteration, and of its part till the GPUs are done."""

    iteration_s: float
    gpu_s: float


@lru_cache(maxsize=1)
def measured() -> Mapping[Workload, Mapping[str, MeasuredRun]]:
    """Returns runs by workload and system: Mobius, Megatron, SPipe, and DeepSpeed (no GPU time;
    runs out of memory are left out).
    """
    text = (Path(__file__).parent / "data" / "spipe_figure9_v100.csv").read_text()
    runs: dict[Workload, dict[str, MeasuredRun]] = {}
    for row in csv.DictReader(text.splitlines()):
        if not row["gpu_ms"]:
            continue
        workload = Workload(
            billions=int(row["model_billion"]),
            sequence=int(row["sequence"]),
            nodes=int(row["nodes"]),
            micro_batch=int(row["micro_batch"]),
            mini_batch=int(row["mini_batch"]),
        )
        runs.setdefault(workload, {})[row["system"]] = MeasuredRun(
            iteration_s=float(row["iteration_ms"]) / 1e3, gpu_s=float(row["gpu_ms"]) / 1e3
        )
    return MappingProxyType(runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system of the paper: scheme, stages per device, optimizer.

    ``recomputes_head``: the head's forward is repeated, too. Megatron-LM's recomputation spans
    transformer layers; its 1F1B turns round at the head with one micro-batch, whose logits it can
    keep, which all forwards first (Mobius, SPipe) cannot.
    """

    name: str
    scheme: str
    forward_each: int
    backward_each: int
    optimizer: OptimizerModel
    recomputes_head: bool = True


_AFTER_FLUSH = OptimizerModel(start=OptimizerStart.FLUSH, tail_bytes=STEP_BYTES)

SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        system.name: system
        for system in (
            System(
                name="Mobius",
                scheme="mobius",
                forward_each=2,
                backward_each=2,
                optimizer=_AFTER_FLUSH,
            ),
            System(
                name="Megatron",
                scheme="megatron-offload",
                forward_each=2,
                backward_each=2,
                optimizer=_AFTER_FLUSH,
                recomputes_head=False,
            ),
            System(
                name="SPipe",
                scheme="spipe",
                forward_each=2,
                backward_each=6,
                optimizer=OptimizerModel(tail_bytes=STEP_BYTES),
            ),
        )
    }
)
"""The systems of section 5.1: two stages per GPU; SPipe has two forward and six backward."""


@lru_cache(maxsize=32)
def analytic(workload: Workload) -> AnalyticCosts:
    """Returns the workload's model on the test-bed, without overheads of a system."""
    return analytic_costs(
        "V100-PCIE-32",
        f"spipe-{workload.billions}b",
        sequence_length=workload.sequence,
        micro_batch=workload.micro_batch,
        efficiency=EFFICIENCY,
        devices_per_node=DEVICES_PER_NODE,
        host=_HOST,
    )


def with_blocking_transfers(costs: Costs) -> Costs:
    """Returns costs with which compute waits for transfers, as in the paper's systems."""
    transfer_s = costs.blocks[0].output_bytes / PEER_BANDWIDTH
    return Costs(blocks=costs.blocks, instruction_s=BLOCKING_S + transfer_s)


def costs_of(system: System, workload: Workload) -> Costs:
    """Returns what blocks take in a system of the paper."""
    costs = with_blocking_transfers(analytic(workload).costs)
    if system.recomputes_head:
        return costs
    head = replace(costs.blocks[-1], recompute_s=0.0)
    return Costs(blocks=(*costs.blocks[:-1], head), instruction_s=costs.instruction_s)


@lru_cache(maxsize=16)
def plan_of(system: System, num_layers: int, num_devices: int, num_microbatches: int) -> Plan:
    """Returns the plan of a system of the paper, cut into equal numbers of layers."""
    return lower(schedule_of(system, num_layers, num_devices, num_microbatches))


def schedule_of(
    system: System, num_layers: int, num_devices: int, num_microbatches: int
) -> Schedule:
    """Returns the schedule of :func:`plan_of`, before lowering."""
    request = ScheduleRequest(
        scheme=system.scheme,
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        forward_stages=system.forward_each * num_devices,
        backward_stages=system.backward_each * num_devices,
        recompute="full",
        recompute_after=RecomputeAfter.GRADIENT,
    )
    return build_schedule(request, [0.0, *(1.0 for _ in range(num_layers)), 0.0])


def simulate_system(name: str, workload: Workload) -> Simulation:
    """Simulates an iteration of a system of the paper, without :data:`STEP_S`."""
    system, bed = SYSTEMS[name], analytic(workload)
    plan = plan_of(system, bed.model.num_layers, workload.num_devices, workload.num_microbatches)
    return simulate(plan, costs_of(system, workload), bed.cluster, optimizer=system.optimizer)
