"""Equation 1 for the paper's two machines, figure 16's order of update throughputs, TwinFlow's
static ratio (figure 10), and our counterpart of the equation. The model itself:
:mod:`penstock.planner.cost.update_rates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from bench.papers.page import PaperTable
from penstock.planner.cost.analytic import Host, analytic_costs
from penstock.planner.cost.cluster import PREVIEW_SETTLE
from penstock.planner.cost.update_rates import (
    UpdateRates,
    cpu_subgroups_per_gpu,
    device_rate,
    preview_ratio,
    preview_stride,
    preview_throughput,
    resident_throughput,
    update_stride,
    update_throughput,
)

V100 = UpdateRates(transfer=3e9, device=35e9, host=2e9, downscale=8.7e9)
"""Section 5.4, "Verifying the correctness", prints all four rates."""

H100 = UpdateRates(transfer=55e9 / 4, device=100e9 / 4, host=8e9 / 4, downscale=62e9 / 4)
"""Rates of one GPU: 55 GB/s of fp32 numbers (5.1); 100 and 8 billion parameters/s of all four GPUs,
and of all CPUs (1); 62 GB/s of fp32 numbers converted (table 1), taken to be one process's.
"""

H100_BUSY = UpdateRates(
    transfer=0.4 * H100.transfer,
    device=H100.device,
    host=H100.host,
    downscale=H100.downscale,
)
"""The same with the PCIe throughput that the paper sees during updates: 40 % of the peak (5.4)."""

RATES: Mapping[str, UpdateRates] = MappingProxyType(
    {"4x V100": V100, "4x H100, links idle": H100, "4x H100, 40 % of PCIe": H100_BUSY}
)

V100_MEASURED: Mapping[int, str] = MappingProxyType({2: "best", 3: "1.67", 4: "1.62", 5: "1.28"})
"""Billions of parameters/s by k, section 5.4. For k = 2 the paper says only that it is best."""

PAPERS_STRIDE = 2.0
"""Every alternate subgroup, section 5.3."""

FIGURE_16: tuple[tuple[str, int | None], ...] = (
    ("50 %", 2),
    ("33 %", 3),
    ("25 %", 4),
    ("0 % (ZeRO-3)", None),
)
"""Shares of updates on the GPU, from the fastest to the slowest in the paper, and their strides."""


def equation_1() -> PaperTable:
    """Returns k of both machines beside the paper's."""
    rows: list[tuple[str, ...]] = []
    for name, rates in RATES.items():
        numbers = (rates.transfer, rates.device, rates.host, rates.downscale)
        k, stride = cpu_subgroups_per_gpu(rates), update_stride(rates)
        rows.append(
            (
                name,
                *(f"{number / 1e9:g}" for number in numbers),
                f"{k:.2f}",
                "2",
                f"{100 / stride:.0f} %",
                "every one" if k <= 1.0 else f"{100 / k:.0f} %",
            )
        )
    return PaperTable(
        title="Deep Optimizer States: the update stride of equation 1",
        text=(
            "B, U_g, U_c, D_c in billions of parameters per second and GPU. The V100's numbers are"
            " printed. The H100's are not: assumed are a quarter of the node's CPU throughput for"
            " each GPU, the conversion rate of table 1 for each process, and PCIe either at its"
            " peak or at the 40 % that the paper observes. The last columns are the share of"
            " updates on the GPU by both readings of k: as equation 1 is derived, k subgroups on"
            " the CPU for each one on the GPU; and as the text and algorithm 1 use it, every k-th"
            " subgroup. Nothing is rounded or limited: with idle links the GPU takes more than"
            " half. Passes go by the first reading, with strides that need not be whole."
        ),
        columns=(
            "machine",
            "B",
            "U_g",
            "U_c",
            "D_c",
            "equation 1: k",
            "paper's k",
            "on the GPU, k : 1",
            "on the GPU, every k-th",
        ),
        rows=tuple(rows),
    )


def figure_16() -> PaperTable:
    """Returns the update throughput by share of updates on the GPU."""
    rows = tuple(
        (
            name,
            f"{4 * update_throughput(H100_BUSY, stride) / 1e9:.1f}",
            f"{4 * update_throughput(H100, stride) / 1e9:.1f}",
        )
        for name, stride in FIGURE_16
    )
    return PaperTable(
        title="Deep Optimizer States: order of figure 16",
        text=(
            "Billions of parameters per second that four H100 and their CPUs update, by the model"
            " of section 4.2, with the assumptions above. In the paper the rows come in this order,"
            " fastest first, for every model size (50 % and 33 % nearly equal for 10B)."
        ),
        columns=("updates on the GPU", "40 % of PCIe", "links idle"),
        rows=rows,
    )


def strides_on_v100() -> PaperTable:
    """Returns the V100's measured strides beside both readings of k."""
    rows = tuple(
        (
            str(k),
            measured,
            f"{update_throughput(V100, k + 1) / 1e9:.2f}",
            f"{update_throughput(V100, k) / 1e9:.2f}",
        )
        for k, measured in V100_MEASURED.items()
    )
    return PaperTable(
        title="Deep Optimizer States: other strides on the V100 machine",
        text=(
            "Billions of parameters per second and GPU. Equation 1 counts k subgroups on the CPU"
            " *for each one* on the GPU (k : 1, a stride of k + 1); the paper's text and algorithm"
            " take k as the stride. The measured order (2 best, then 3, 4, 5) is the model's with"
            " the first reading; with the second, 3 would beat 2. We keep the paper's number and"
            " show both."
        ),
        columns=("k", "paper", "model, k : 1", "model, every k-th"),
        rows=rows,
    )


def figure_10() -> PaperTable:
    """Compares static residents: TwinFlow puts them first and waits, Deep Optimizer States last."""
    rows: list[tuple[str, ...]] = []
    for percent in (0, 10, 20, 30, 40, 50):
        twin = resident_throughput(H100_BUSY, percent / 100, None)
        deep = resident_throughput(H100_BUSY, percent / 100, PAPERS_STRIDE)
        rows.append(
            (
                f"{percent} %",
                f"{20 / (4 * twin / 1e9):.2f}",
                f"{20 / (4 * deep / 1e9):.2f}",
                f"{deep / twin:.2f}",
            )
        )
    return PaperTable(
        title="Deep Optimizer States: static residents, figure 10",
        text=(
            "Seconds of the update phase of 20B parameters on four H100 (40 % of PCIe), with a"
            " share of the optimizer state always on the GPUs: TwinFlow updates residents first"
            " while the CPU waits; Deep Optimizer States last, under the other subgroups' copies."
            " The paper finds at least 1.7 times faster updates for every share."
        ),
        columns=("resident", "TwinFlow", "Deep Optimizer States", "speed-up"),
        rows=tuple(rows),
    )


def ours() -> PaperTable:
    """Returns the counterpart for preview and settle."""
    machines = (
        ("4x V100 PCIe (SPipe's)", "V100-PCIE-32", Host(dram_bandwidth=1.28e11)),
        ("4x V100 PCIe, slow CPU", "V100-PCIE-32", Host(optimizer_rate=1e9)),
        ("4x A100-80, DDR4-3200", "A100-80", Host()),
        ("4x H100, 16 channels of DDR5", "H100", Host(dram_bandwidth=4.9e11)),
    )
    rows: list[tuple[str, ...]] = []
    for name, gpu, host in machines:
        cluster = analytic_costs(
            gpu,
            "llama2-7b",
            sequence_length=2048,
            micro_batch=1,
            devices_per_node=4,
            host=host,
        ).cluster
        stride = preview_stride(cluster, PREVIEW_SETTLE)
        alone, best = (preview_throughput(cluster, PREVIEW_SETTLE, k) for k in (None, stride))
        rows.append(
            (
                name,
                f"{alone / 1e9:.1f}",
                f"{cluster.devices_per_node * device_rate(cluster) / 1e9:.1f}",
                f"{preview_ratio(cluster, PREVIEW_SETTLE):.2f}",
                "none" if stride is None else f"{stride:.3g}",
                f"{best / 1e9:.1f}",
                f"{best / alone:.2f}",
            )
        )
    return PaperTable(
        title="Deep Optimizer States: our counterpart of equation 1",
        text=(
            "Previews (next weights from state and gradients; state is settled later) in billions"
            " of parameters per second and node: of the CPU alone, of the GPUs, and of both with"
            " every stride-th block on a GPU. CPU : GPU is the best ratio without rounding. A"
            " preview moves 16 bytes a parameter of host memory on the CPU, 14 for a GPU, so where"
            " memory is the limit GPUs add little. They pay where cores are few or slow (here: 1"
            " billion parameters per second)."
        ),
        columns=("machine", "CPU alone", "GPUs", "CPU : GPU", "stride", "both", "gain"),
        rows=tuple(rows),
    )
