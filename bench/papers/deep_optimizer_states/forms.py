"""Updates on devices in both forms: ours (preview, the CPU settles later) and the paper's (flush).

What each moves, and which one a step is shorter with, by machine: plans and times are those of the
planner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.papers.page import PaperTable
from penstock.config.execution import DeviceUpdates
from penstock.planner.cost.analytic import Host, analytic_costs
from penstock.planner.cost.cluster import ADVANCE, PREVIEW_SETTLE, Cluster, SweepBytes
from penstock.planner.cost.costs import Costs
from penstock.planner.passes import PASSES, PassContext
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.simulate import simulate

_MODEL, _SEQUENCE, _GPUS = "llama2-7b", 2048, 4
_STATE_BYTES = 12.0
_PAPERS_HOST = Host(dram_bandwidth=4.9e11, optimizer_rate=1.0 / (1 / 8e9 + 1 / 62e9))
"""8 billion updates and 62 GB/s conversions a second on all cores; 16 channels of DDR5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Four GPUs and their host; ``link`` in bytes/s each way, if it is not the GPU's PCIe."""

    name: str
    gpu: str
    host: Host
    link: float | None = None

    def prices(self) -> tuple[Costs, Cluster]:
        """Returns the costs of a 7B model on it."""
        found = analytic_costs(
            self.gpu,
            _MODEL,
            sequence_length=_SEQUENCE,
            micro_batch=1,
            devices_per_node=_GPUS,
            gradient_itemsize=2,
            host=self.host,
        )
        if self.link is None:
            return found.costs, found.cluster
        linked = replace(found.cluster, fetch_bandwidth=self.link, offload_bandwidth=self.link)
        return found.costs, linked


MACHINES = (
    Machine(name="4x V100 PCIe (SPipe's)", gpu="V100-PCIE-32", host=Host(dram_bandwidth=1.28e11)),
    Machine(name="the same, slow CPU (1 G/s)", gpu="V100-PCIE-32", host=Host(optimizer_rate=1e9)),
    Machine(name="4x A100-80, DDR4-3200", gpu="A100-80", host=Host()),
    Machine(name="4x H100, DDR5, our sweeps", gpu="H100", host=Host(dram_bandwidth=4.9e11)),
    Machine(name="4x H100, the paper's CPU rates", gpu="H100", host=_PAPERS_HOST),
    Machine(
        name="4x Grace Hopper (C2C 200 GB/s)",
        gpu="H100",
        host=Host(dram_bandwidth=4 * 4.0e11, optimizer_rate=4e10),
        link=2e11,
    ),
)
MICRO_BATCHES = (4, 64)
"""One a GPU, where updates are most of a step, and sixteen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The shortest step of a form: its seconds, and the share of blocks on GPUs."""

    seconds: float
    on_gpus: float


def step(machine: Machine, micro_batches: int, form: DeviceUpdates | None) -> Step:
    """Returns the step of a 1F1B pipeline with a form of updates (``None``: all on the CPU), where
    the CPU's own blocks advance or are settled early, whichever is shorter.
    """
    costs, cluster = machine.prices()
    request = ScheduleRequest(
        scheme="1f1b", num_devices=_GPUS, num_microbatches=micro_batches, recompute="full"
    )
    plain = build_schedule(request, [block.forward_s for block in costs.blocks])
    found: list[Step] = []
    for optimizer in (ADVANCE, PREVIEW_SETTLE):
        context = PassContext(costs=costs, cluster=cluster, optimizer=optimizer)
        plan = lower(_updated(plain, context, form))
        seconds = simulate(plan, costs, cluster, optimizer=optimizer).makespan_s
        found.append(Step(seconds=seconds, on_gpus=len(plan.updates) / plan.num_blocks))
    return min(found, key=lambda one: one.seconds)


def _updated(plain: Schedule, context: PassContext, form: DeviceUpdates | None) -> Schedule:
    if form is None:
        return plain
    return PASSES["interleave-updates"].run(plain, replace(context, device_updates=form))


def forms() -> tuple[PaperTable, ...]:
    """Returns what both forms move, and which is faster when."""
    return _moved(), _faster()


def _moved() -> PaperTable:
    sweeps = SweepBytes.of()
    there, back = _STATE_BYTES, 2.0
    rows = (
        ("state to the GPU", f"{there:.0f}", f"{there:.0f}", "0"),
        ("from the GPU (weight; state)", f"{back:.0f}", f"{back + there:.0f}", "0"),
        (
            "host memory, before the commit",
            f"{there + back:.0f}",
            f"{2 * there + back:.0f}",
            f"{sweeps.advance:.0f}",
        ),
        ("host memory, the CPU's settle", f"{sweeps.settle:.0f}", "0", "0"),
        ("the CPU's sweeps", "1", "0", "1"),
        ("state kept in host memory", f"{there:.0f}", f"{2 * there:.0f}", f"{there:.0f}"),
    )
    return PaperTable(
        title="Deep Optimizer States: what an update moves, ours and the paper's",
        text=(
            "Bytes a parameter (AdamW, weights and gradients of 16 bits), and sweeps. A preview"
            " leaves the state to the CPU, which settles it during the next forward; a flush (the"
            " paper's algorithm 1) writes the next state beside the committed one, and the commit"
            " turns them around; for comparison a block that advances on the CPU. The paper flushes"
            " into the only copy: a step that does not count could not be taken back."
        ),
        columns=("bytes a parameter", "preview and settle", "flush", "CPU only"),
        rows=rows,
    )


def _faster() -> PaperTable:
    rows: list[tuple[str, ...]] = []
    for machine in MACHINES:
        for micro_batches in MICRO_BATCHES:
            alone = step(machine, micro_batches, None)
            preview = step(machine, micro_batches, DeviceUpdates.PREVIEW)
            flush = step(machine, micro_batches, DeviceUpdates.FLUSH)
            seconds = {"CPU only": alone, "preview": preview, "flush": flush}
            best = min(seconds, key=lambda name: seconds[name].seconds)
            rows.append(
                (
                    machine.name,
                    str(micro_batches),
                    f"{alone.seconds:.2f}",
                    f"{preview.seconds:.2f} ({100 * preview.on_gpus:.0f} %)",
                    f"{flush.seconds:.2f} ({100 * flush.on_gpus:.0f} %)",
                    best,
                    f"{alone.seconds / seconds[best].seconds:.2f}",
                )
            )
    return PaperTable(
        title="Deep Optimizer States: which form is faster when",
        text=(
            "Simulated seconds of a step of LLaMA-2 7B on four GPUs (1F1B, sequence 2048,"
            " micro-batches of 1, full recomputation, costs from data sheets): all updates on the"
            " CPU, ours, and the paper's form, with strides by the rates; in brackets the share of"
            " blocks on GPUs. What the CPU does itself advances or is settled early, whichever is"
            " shorter. `schedule.device_updates: auto` takes the shortest of the three."
        ),
        columns=(
            "machine",
            "micro-batches",
            "CPU only",
            "preview and settle",
            "flush",
            "fastest",
            "gain over CPU only",
        ),
        rows=tuple(rows),
    )
