"""The systems that Obscura's evaluation compares, on its two machines (sections 9.1 and 9.5).

One set of constants for every row of every table:

- Costs are those of :mod:`penstock.planner.cost.analytic` (data sheets and rooflines), half a layer
  a
  block, sequences of 4096 tokens, one in a micro-batch. The paper gives no times.
- Activations are 1.15 times the analytic ones. The factor follows from one number of section 9.3,
  the 106 GB of BPipe without recomputation at 28B: (106 - 56.2) / 5 micro-batches are 9.97 GB,
  where the analytic model has 8.68 GB. What it stands for: norms computed in fp32, copies that
  frameworks make, fragmentation.
- Weights, gradients and optimizer state are on the GPU: 16 bytes a parameter (section 1's 400 GB
  for 13B include activations). The optimizer's step is left out everywhere.
- The limit is 80 GB.
- Every system recomputes as DeepSpeed does, inside the backward: it begins when the gradient is
  there, and holds what it makes of one block at a time (``Grain.BLOCK``). :func:`ours` is this
  system: a RECOMPUTE that does not wait, and makes a whole stage.

What is not modelled: NCCL's synchronous sends, which the paper blames for bubbles that are not
exactly as long as counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from penstock.planner.cost.analytic import analytic_costs
from penstock.planner.cost.catalogue import MODELS
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.cost.operators import operator_set
from penstock.planner.memory.footprint import footprints
from penstock.planner.passes import PASSES
from penstock.planner.passes.base import PassContext
from penstock.planner.passes.obscura import Grain, obscura, obscura_any_swap
from penstock.planner.passes.obscura.aware import swap_aware_recompute
from penstock.planner.passes.obscura.memory import stage_memory
from penstock.planner.passes.obscura.migrate import (
    identify,
    identify_cost_effective,
    migrate_forwards,
    refine_migration,
    relax_dependencies,
)
from penstock.planner.passes.obscura.partition import adjust_partition
from penstock.planner.passes.obscura.shape import FULL, NONE, stage_orders, with_orders
from penstock.planner.schedule.layout import Residency, StageLayout
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.schemes import SCHEMES
from penstock.planner.schemes.base import Recomputation
from penstock.planner.simulate import simulate
from penstock.planner.validate.check import validate
from penstock.protocol.plan.instructions import Backward, Program, Recompute, RecomputeAfter
from penstock.protocol.plan.plan import Plan, StageRange

ACTIVATION_FACTOR = 1.15
MEMORY_BYTES = 80.0e9
SEQUENCE_LENGTH = 4096


@dataclass(frozen=True, kw_only=True)
class PaperCase:
    """A model of ``layers`` layers (``family``: ``llama2`` or ``gpt3``) on GPUs of a node."""

    family: str
    layers: int
    num_stages: int
    num_microbatches: int
    gpu: str = "A100-80"

    @property
    def model(self) -> str:
        """The 13B model of the catalogue that layers are added to."""
        return f"{self.family}-13b"

    @cached_property
    def costs(self) -> Costs:
        """The costs of embedding, two blocks a layer, and head."""
        blocks = self._analytic[0].blocks
        layers = blocks[1:3] * self.layers
        return Costs(
            blocks=tuple(map(_on_device, (blocks[0], *layers, blocks[-1]))),
            instruction_s=self._analytic[0].instruction_s,
        )

    @property
    def cluster(self) -> Cluster:
        """The node that the GPUs are in."""
        return self._analytic[1]

    @cached_property
    def _analytic(self) -> tuple[Costs, Cluster]:
        made = analytic_costs(
            self.gpu,
            self.model,
            sequence_length=SEQUENCE_LENGTH,
            micro_batch=1,
            half_layers=True,
            offloaded=False,
            devices_per_node=self.num_stages,
        )
        return made.costs, made.cluster

    @property
    def context(self) -> PassContext:
        """What passes decide by."""
        return PassContext(
            costs=self.costs,
            cluster=self.cluster,
            memory_limit_bytes=MEMORY_BYTES,
            hop_s=self.costs.blocks[1].output_bytes / self.cluster.peer_bandwidth,
        )

    @cached_property
    def layout(self) -> StageLayout:
        """The even partition of section 7.2: 2 L / p half layers each, embedding and head extra."""
        each = 2 * self.layers // self.num_stages
        starts = [0, *(1 + each * s for s in range(1, self.num_stages)), 2 * self.layers + 2]
        stages = tuple(
            StageRange(start=starts[s], stop=starts[s + 1], device=s)
            for s in range(self.num_stages)
        )
        return StageLayout(
            num_devices=self.num_stages,
            num_microbatches=self.num_microbatches,
            forward=stages,
            backward=stages,
        )

    def schedule(self, scheme: str, recompute: Recomputation) -> Schedule:
        """Returns a scheme on the even partition."""
        return Schedule(
            scheme=scheme,
            layout=self.layout,
            orders=SCHEMES[scheme].order(self.layout, recompute),
            residency=Residency.RESIDENT,
        )

    def operators(self, name: str) -> Recomputation:
        """Returns the recomputation that drops a named set of operators, without those whose
        outputs nobody keeps.
        """
        sizes: dict[str, float] = {}
        for block in self.costs.blocks:
            for operator in block.operators:
                sizes[operator.name] = sizes.get(operator.name, 0.0) + operator.activation_bytes
        names = operator_set(name, MODELS[self.model])
        return Recomputation(mode="selective", drop=tuple(n for n in names if sizes[n] > 0.0))


def _on_device(block: BlockCost) -> BlockCost:
    """Returns the block with everything per parameter on the device, and activations as large as
    the paper's.
    """
    return block.kept_on_device().with_activations(ACTIVATION_FACTOR)


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """A simulated schedule: seconds of an iteration, peak bytes of every stage."""

    schedule: Schedule
    seconds: float
    peak_bytes: tuple[float, ...]

    @property
    def fits(self) -> bool:
        """Whether no stage needs more than the GPU has."""
        return max(self.peak_bytes) <= MEMORY_BYTES


def run(case: PaperCase, schedule: Schedule, grain: Grain) -> SimulatedRun:
    """Validates and simulates. Recomputation waits for gradients if it is inside the backward."""
    if grain is Grain.BLOCK:
        schedule = waiting_for_gradients(schedule)
    plan = lower(schedule)
    validate(plan)
    return SimulatedRun(
        schedule=schedule,
        seconds=simulate(plan, case.costs, case.cluster).pipeline_s,
        peak_bytes=_peaks(case, schedule, plan, grain),
    )


def waiting_for_gradients(schedule: Schedule) -> Schedule:
    """Returns the schedule as systems run it that recompute inside the backward."""
    orders = (
        tuple(
            replace(i, after=RecomputeAfter.GRADIENT) if isinstance(i, Recompute) else i
            for i in order
        )
        for order in schedule.orders
    )
    return replace(schedule, orders=tuple(orders))


def _peaks(case: PaperCase, schedule: Schedule, plan: Plan, grain: Grain) -> tuple[float, ...]:
    """Returns the peak bytes by the books of the plan; block by block, less what is not made at
    once.
    """
    books = footprints(plan, case.costs)
    if grain is Grain.STAGE:
        return tuple(max(book.total_bytes) for book in books)
    peaks: list[float] = []
    for order, book in zip(stage_orders(schedule, swaps=True), books, strict=True):
        whole, part = (
            stage_memory(schedule.layout, case.costs, order.stage, order.recompute, each)
            for each in (Grain.STAGE, Grain.BLOCK)
        )
        if order.recompute == FULL:
            peaks.append(part.with_microbatches(order.in_flight))
        else:
            surplus = whole.remade_bytes - part.remade_bytes
            peaks.append(_peak(plan.programs[order.stage], book.total_bytes, surplus))
    return tuple(peaks)


def _peak(program: Program, totals: Sequence[float], surplus: float) -> float:
    """Returns the most bytes that are there, ``surplus`` less from a RECOMPUTE to the end of its
    BACKWARD.
    """
    most, inside = 0.0, False
    for instruction, total in zip(program, totals, strict=True):
        inside = inside or isinstance(instruction, Recompute)
        most = max(most, total - surplus if inside else total)
        inside = inside and not isinstance(instruction, Backward)
    return most


@cache
def dapple(case: PaperCase) -> SimulatedRun:
    """Runs 1F1B that keeps everything."""
    return run(case, case.schedule("1f1b", NONE), Grain.BLOCK)


@cache
def dapple_plus(case: PaperCase) -> SimulatedRun:
    """Runs 1F1B with full recomputation on all stages: what others are compared with."""
    return run(case, case.schedule("1f1b", FULL), Grain.BLOCK)


@cache
def ohp_cmb(case: PaperCase) -> SimulatedRun:
    """Runs 1F1B that recomputes the cost-effective operators on all stages."""
    return run(case, case.schedule("1f1b", case.operators("cmb")), Grain.BLOCK)


@cache
def bpipe(case: PaperCase, recompute: Recomputation = NONE) -> SimulatedRun:
    """Runs BPipe."""
    return run(case, case.schedule("bpipe", recompute), Grain.BLOCK)


@cache
def bpipe_that_fits(case: PaperCase) -> SimulatedRun:
    """Runs BPipe, with MLP recomputation where it does not fit without."""
    plain = bpipe(case)
    return plain if plain.fits else bpipe(case, case.operators("mlp"))


@cache
def strawman(case: PaperCase) -> SimulatedRun:
    """Runs the strawman: stages over the limit recompute fully, and run forwards early (section
    3.2).
    """
    start = case.schedule("1f1b", NONE)
    identified = identify(start, case.context, grain=Grain.BLOCK)
    return run(case, migrate_forwards(identified, case.context), Grain.BLOCK)


@cache
def paper_obscura(case: PaperCase) -> SimulatedRun:
    """Runs Obscura as the paper does."""
    start = case.schedule("1f1b", NONE)
    return run(case, obscura(start, case.context, grain=Grain.BLOCK), Grain.BLOCK)


@cache
def our_obscura(case: PaperCase) -> SimulatedRun:
    """Runs Obscura on this system: RECOMPUTE does not wait for gradients, and makes a whole
    stage.
    """
    return run(case, obscura(case.schedule("1f1b", NONE), case.context), Grain.STAGE)


@cache
def ours(case: PaperCase) -> SimulatedRun:
    """Returns the faster that fits of Obscura with any number of swaps, and the same with split
    backwards.

    With split backwards (2BP) weight gradients lie in bubbles, as many deferred as memory allows.
    """
    context = case.context
    base = split = obscura_any_swap(case.schedule("1f1b", NONE), context)
    # Those passes do not count tensors between stages.
    tighter = replace(context, memory_limit_bytes=MEMORY_BYTES - 0.9e9)
    for name in ("split-backward", "fill-bubbles", "limit-deferred"):
        split = PASSES[name].run(split, tighter)
    runs = [run(case, schedule, Grain.STAGE) for schedule in (base, split)]
    return min((one for one in runs if one.fits), key=lambda one: one.seconds)


@cache
def ablation(case: PaperCase, last: int) -> tuple[SimulatedRun, ...]:
    """Runs DR, DR+SAR, and DR+SAR+CB as printed and with the fastest partition, with the adjusted
    stages 0 … ``last`` (section 9.6).
    """
    context = case.context
    start = identify_cost_effective(case.schedule("1f1b", NONE), context, grain=Grain.BLOCK)
    orders = stage_orders(start)
    relaxed = with_orders(
        start, (replace(o, recompute=FULL) if o.stage <= last else o for o in orders)
    )
    for step in (migrate_forwards, relax_dependencies, refine_migration):
        relaxed = step(relaxed, context)
    swapping = swap_aware_recompute(relaxed, context, grain=Grain.BLOCK)
    balanced = (
        adjust_partition(swapping, context, grain=Grain.BLOCK, printed=printed)
        for printed in (True, False)
    )
    return tuple(run(case, one, Grain.BLOCK) for one in (relaxed, swapping, *balanced))
