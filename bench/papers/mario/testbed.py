"""The runs of Mario's evaluation: models, shapes and clusters of its section 6, with our costs.

Costs come from data sheets (:mod:`penstock.planner.cost.analytic`), in three ways: by the roofline;
as PyTorch, Megatron and DeepSpeed run kernels (:data:`MEGATRON_DEEPSPEED`), nothing fitted; and the
same with a slower host, whose seconds per kernel are fitted to one row, V-base of LLaMA2-13B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from penstock.planner.cost.analytic import AnalyticCosts, analytic_costs
from penstock.planner.cost.frameworks import MEGATRON_DEEPSPEED, Framework
from penstock.planner.cost.language_models import LanguageModel
from penstock.planner.passes import PASSES, PassContext
from penstock.planner.passes.dispatch import makespan_s
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.memory_order import peak_bytes
from penstock.planner.schedule.schedule import Schedule

SHAPES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"V": ("1f1b", 2), "X": ("chimera", 2), "W": ("interleaved", 1)}
)
"""The paper's names of its schemes: ours, and the micro-batch of all rows but lmbs."""

KINDS = ("base", "ckpt", "ovlp", "lmbs")
GLOBAL_BATCH = 128
SEQUENCE = 1024
CONTEXT_BYTES = 2e9
"""Of CUDA, PyTorch, Megatron and DeepSpeed on each device (section 6.6: about 2 GB)."""

FITTED_TO = ("mario-llama2-13b", "V", 25.11)
"""The only base of table 5 on V that was measured: model, shape, samples/s."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One bar: ``kind`` of a model and shape on so many GPUs. ``sequence``, ``micro_batch``: the
    evaluation's own unless given.
    """

    model: str | LanguageModel
    shape: str
    kind: str
    framework: Framework
    devices: int = 32
    global_batch: int = GLOBAL_BATCH
    sequence: int = SEQUENCE
    tensor_parallel: int = 1
    micro_batch_given: int = 0

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch: those of table 5, twice as many with lmbs."""
        return self.micro_batch_given or SHAPES[self.shape][1] * (1 + (self.kind == "lmbs"))

    @cached_property
    def analytic(self) -> AnalyticCosts:
        """Costs of its micro-batches."""
        return analytic_costs(
            "A100-40",
            self.model,
            sequence_length=self.sequence,
            micro_batch=self.micro_batch,
            offloaded=False,
            flash=False,
            devices_per_node=4,
            framework=self.framework,
            tensor_parallel=self.tensor_parallel,
        )

    @cached_property
    def base(self) -> Schedule:
        """The schedule without checkpointing."""
        request = ScheduleRequest(
            scheme=SHAPES[self.shape][0],
            num_devices=self.devices,
            num_microbatches=self.global_batch // self.micro_batch,
            recompute="none",
        )
        return build_schedule(request, [block.forward_s for block in self.analytic.costs.blocks])

    @cached_property
    def context(self) -> PassContext:
        """A hop takes as long as over the NIC; with blocking sends the sender computes nothing
        meanwhile.
        """
        found = self.analytic
        hop_s = max(b.output_bytes for b in found.costs.blocks) / found.cluster.nic_bandwidth
        costs = found.costs
        if self.framework.blocking:
            blocks = list(costs.blocks)
            for first in {stage.start for stage in self.base.layout.forward}:
                blocks[first] = replace(
                    blocks[first],
                    forward_s=blocks[first].forward_s + hop_s,
                    backward_input_s=blocks[first].backward_input_s + hop_s,
                )
            costs = replace(costs, blocks=tuple(blocks))
        return PassContext(
            costs=costs, cluster=found.cluster, hop_s=hop_s + found.cluster.latency_s
        )

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of its kind."""
        name = {"base": "", "ckpt": "apply-checkpoint", "ovlp": "mario", "lmbs": "mario"}[self.kind]
        return PASSES[name].run(self.base, self.context) if name else self.base

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.global_batch / makespan_s(self.schedule, self.context)

    @property
    def memory_gb(self) -> tuple[float, float]:
        """Least and most of all devices, without what the framework itself takes."""
        schedule = self.schedule
        peaks = peak_bytes(schedule.layout, schedule.residency, self.context.costs, schedule.orders)
        return min(peaks) / 1e9, max(peaks) / 1e9


def fitted() -> Framework:
    """Returns Megatron-DeepSpeed on the host with which :data:`FITTED_TO` is as fast as measured,
    in whole microseconds a kernel.
    """
    model, shape, rate = FITTED_TO
    low, high = 1, 1000
    while high - low > 1:
        middle = (low + high) // 2
        framework = replace(MEGATRON_DEEPSPEED, launch_s=middle * 1e-6)
        found = Run(model=model, shape=shape, kind="base", framework=framework).rate
        low, high = (middle, high) if found > rate else (low, middle)
    return replace(MEGATRON_DEEPSPEED, name="fitted", launch_s=low * 1e-6)
