"""Whole iterations on the paper's node: what figures 6 to 17 and the abstract speak of.

A model in closed form, of one GPU of 4x H100 with its share of the rest; every number comes from
the paper's text, table 1 and H100's data sheet, and none is fitted to its results:

- forward: the computation, or the gathers of sharded weights over NVLink, whichever takes longer;
  backward: the same with recomputation and the scatter of gradients (DeepSpeed overlaps them);
- gradients to the host: one of :class:`Flush`;
- update: :func:`penstock.planner.cost.update_rates.resident_throughput`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

from bench.papers.deep_optimizer_states.rates import H100_BUSY, PAPERS_STRIDE
from bench.papers.page import PaperTable
from penstock.planner.cost.catalogue import GPUS
from penstock.planner.cost.update_rates import UpdateRates, resident_throughput

GIB = 2.0**30
_SEQUENCE, _VOCABULARY = 2048, 32000
_ALLOCATED, _PAGEABLE, _CONVERTED_HOST = 4e9, 10e9, 62e9
"""Bytes/s: unpinned memory that is allocated, copies to it, conversion on the host (4.1, table 1);
the last in bytes of fp32.
"""
_PINNED_16, _PINNED, _CONVERTED_GPU = 52e9, 55e9, 1.2e12
"""Bytes/s: pinned copies of 16 bits (table 1), of anything (5.1), and conversion on the GPU."""
_NVLINK = 133e9
"""Bytes/s from GPU to GPU, one way (5.1)."""
PAPERS_CORES = 24
"""Cores for each GPU of the paper's node (96 for 4)."""


class Flush(Enum):
    """How gradients get to the host, and what of that stalls the GPU."""

    DEEPSPEED = "16 bits into pageable memory, converted there (DeepSpeed)"
    HOST = "16 bits into pinned memory, converted by the CPU beside"
    SWEEP = "16 bits into pinned memory, converted within the sweep (ours, grad_dtype bf16)"
    DEVICE = "converted on the GPU, 32 bits into pinned memory (the paper; ours, grad_dtype fp32)"

    @property
    def blocks(self) -> bool:
        """Whether the backward waits for it."""
        return self is Flush.DEEPSPEED

    @property
    def seconds(self) -> float:
        """Seconds for each gradient: of parts one after the other, or the longer of two that
        overlap.
        """
        found: Mapping[Flush, float] = {
            Flush.DEEPSPEED: 2 / _ALLOCATED + 2 / _PAGEABLE + 4 / _CONVERTED_HOST,
            Flush.HOST: max(2 / _PINNED_16, 4 / _CONVERTED_HOST),
            Flush.SWEEP: 2 / _PINNED_16,
            Flush.DEVICE: 4 / _CONVERTED_GPU + 4 / _PINNED,
        }
        return found[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A row of table 2; ``fp16_gib`` and ``fp32_gib`` are the sizes that it prints."""

    layers: int
    hidden: int
    fp16_gib: float
    fp32_gib: float

    @property
    def parameters(self) -> float:
        """Those of the layers' matrices, as ZeRO-Infinity counts."""
        return 12.0 * self.layers * self.hidden**2

    @property
    def forward_flops(self) -> float:
        """Of one sequence."""
        matrices = 2.0 * (self.parameters + self.hidden * _VOCABULARY) * _SEQUENCE
        return matrices + 4.0 * self.layers * self.hidden * _SEQUENCE**2


TABLE_2: Mapping[str, Model] = MappingProxyType(
    {
        "7B": Model(layers=32, hidden=4096, fp16_gib=24, fp32_gib=96),
        "8.3B": Model(layers=72, hidden=3072, fp16_gib=30, fp32_gib=121),
        "10B": Model(layers=50, hidden=4096, fp16_gib=37, fp32_gib=150),
        "13B": Model(layers=40, hidden=5120, fp16_gib=46, fp32_gib=188),
        "20B": Model(layers=44, hidden=6144, fp16_gib=73, fp32_gib=294),
    }
)
"""The table prints 48 layers for 20B; its sizes are those of 44, as GPT-NeoX has."""
LARGEST = TABLE_2["20B"]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What trains: how gradients are flushed, the stride of updates on the GPU (``None``: none, and
    the CPU waits for the copies of weights), and the share of the state that is always there.
    """

    flush: Flush
    stride: float | None
    resident: float = 0.0


ZERO_3 = System(flush=Flush.DEEPSPEED, stride=None)
ONLY_FLUSH = System(flush=Flush.DEVICE, stride=None)
ONLY_UPDATE = System(flush=Flush.DEEPSPEED, stride=PAPERS_STRIDE)
DEEP = System(flush=Flush.DEVICE, stride=PAPERS_STRIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """Seconds of the three phases, and FLOPs of the GPU, recomputation not counted."""

    forward_s: float
    backward_s: float
    update_s: float
    flops: float

    @property
    def total_s(self) -> float:
        """Of an iteration."""
        return self.forward_s + self.backward_s + self.update_s

    @property
    def tflops(self) -> float:
        """TFLOP/s and GPU."""
        return self.flops / self.total_s / 1e12


def iteration(
    model: Model,
    system: System,
    *,
    gpus: int = 4,
    micro_batch: int = 1,
    cores: float = PAPERS_CORES,
    rates: UpdateRates = H100_BUSY,
) -> Iteration:
    """Returns an iteration with full recomputation and one micro-batch a GPU.

    ``cores`` for each GPU: the CPU's updates and conversions are taken to be as fast as they are
    many, up to the paper's 24.
    """
    chip = GPUS["H100"]
    once_s = micro_batch * model.forward_flops / (chip.peak_flops * chip.efficiency)
    own = model.parameters / gpus
    collective_s = 2.0 * (gpus - 1) * own / _NVLINK
    share = cores / PAPERS_CORES
    rates = replace(rates, host=rates.host * share, downscale=rates.downscale * share)
    flushed_s = (1.0 - system.resident) * own * system.flush.seconds
    backward_s = max(3.0 * once_s, 2.0 * collective_s)
    return Iteration(
        forward_s=max(once_s, collective_s),
        backward_s=backward_s + flushed_s if system.flush.blocks else max(backward_s, flushed_s),
        update_s=own / resident_throughput(rates, system.resident, system.stride),
        flops=3.0 * micro_batch * model.forward_flops,
    )


def speed_up(
    model: Model,
    system: System = DEEP,
    *,
    gpus: int = 4,
    micro_batch: int = 1,
    cores: float = PAPERS_CORES,
) -> float:
    """Returns iterations of a system for one of ZeRO-3 (with residents: of TwinFlow)."""
    before, after = (
        iteration(model, one, gpus=gpus, micro_batch=micro_batch, cores=cores).total_s
        for one in (replace(ZERO_3, resident=system.resident), system)
    )
    return before / after


def as_range(values: Iterable[float]) -> str:
    """Returns the least and the greatest of some values as text, with one decimal."""
    found = [f"{value:.1f}" for value in sorted(values)]
    return found[0] if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def gradients() -> PaperTable:
    """Returns the ways of gradients to the host, and what each brings of the speed-up."""
    rows: list[tuple[str, ...]] = []
    for flush in Flush:
        alone = speed_up(LARGEST, System(flush=flush, stride=None))
        both = speed_up(LARGEST, System(flush=flush, stride=PAPERS_STRIDE))
        rows.append(
            (
                flush.value,
                f"{2 / flush.seconds / 1e9:.1f}",
                "yes" if flush.blocks else "no",
                f"{alone:.2f}",
                f"{both:.2f}",
            )
        )
    return PaperTable(
        title="Deep Optimizer States: gradients on their way to the host",
        text=(
            "GB/s of 16-bit gradients by section 4.1's throughputs (DeepSpeed's parts run one after"
            " the other; the paper prints 2.5), whether the backward waits, and iterations of the"
            " 20B model for one of ZeRO-3 with this flush alone, and with every second subgroup"
            " updated on the GPU as well. The paper: 1.9 for its flush, 2.5 with its updates."
        ),
        columns=("gradients", "GB/s", "blocks", "flush alone", "and updates"),
        rows=tuple(rows),
    )


def figures() -> PaperTable:
    """Returns iterations by model: figures 7, 12 and 13."""
    rows: list[tuple[str, ...]] = []
    for name, model in TABLE_2.items():
        before, after = iteration(model, ZERO_3), iteration(model, DEEP)
        twin = replace(DEEP, resident=0.2)
        rows.append(
            (
                name,
                *(f"{one:.2f}" for one in (before.forward_s, before.backward_s, before.update_s)),
                f"{before.total_s:.2f}",
                *(f"{one:.2f}" for one in (after.forward_s, after.backward_s, after.update_s)),
                f"{after.total_s:.2f}",
                f"{before.total_s / after.total_s:.2f}",
                f"{speed_up(model, twin):.2f}",
            )
        )
    return PaperTable(
        title="Deep Optimizer States: iterations by model, figures 7 and 12",
        text=(
            "Seconds of forward, backward and update, and of all, on 4x H100 (sequence 2048,"
            " micro-batch 1, full recomputation): ZeRO-3 offload, then Deep Optimizer States with"
            " every second subgroup on the GPU; how many times as fast; the same for 20 % static"
            " residents against TwinFlow. Nothing is fitted: rates are printed in the paper, PCIe"
            " is at the 40 % that it observes during updates. The paper's 20B: 7.5 s (2.5 x 3 s)"
            " and 3 s. What the model leaves out, contention for the host's memory above all, is on"
            " the side of Deep Optimizer States, whose iterations are too short here."
        ),
        columns=(
            "model",
            "ZeRO-3: fwd",
            "bwd",
            "update",
            "all",
            "theirs: fwd",
            "bwd",
            "update",
            "all",
            "speed-up",
            "with 20 % resident",
        ),
        rows=tuple(rows),
    )
