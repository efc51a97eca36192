"""What sections 4.2 and 5 of the paper say of updates and iterations, and what we get."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.papers.deep_optimizer_states.forms import MACHINES, step
from bench.papers.deep_optimizer_states.iteration import (
    DEEP,
    GIB,
    LARGEST,
    ONLY_FLUSH,
    PAPERS_CORES,
    TABLE_2,
    ZERO_3,
    Flush,
    System,
    as_range,
    iteration,
    speed_up,
)
from bench.papers.deep_optimizer_states.rates import (
    H100,
    H100_BUSY,
    PAPERS_STRIDE,
    RATES,
    V100,
    V100_MEASURED,
)
from bench.papers.page import Claim, Evidence
from penstock.config.execution import DeviceUpdates
from penstock.planner.cost.update_rates import (
    cpu_subgroups_per_gpu,
    resident_throughput,
    update_stride,
    update_throughput,
)

RECORDED = Path(__file__).parents[1] / "data" / "deep_optimizer_states_emulated.json"
"""Written by ``python -m bench.deep_optimizer_states --json FILE``."""

NO_GPU = "no GPU was lent for this page; `make gpu` measures its like on one (docs/evidence/GPU.md)"
_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
_TWINFLOW = replace(ZERO_3, resident=0.5)


def evaluation() -> Iterable[Claim]:
    """Yields the rows, in the order of the paper."""
    yield from _update_model()
    yield from _iterations()
    yield from _static()
    yield from _sensitivity()


def _update_model() -> Iterable[Claim]:
    ks = ", ".join(f"{cpu_subgroups_per_gpu(rates):.2f} ({name})" for name, rates in RATES.items())
    yield Claim(
        where="equation 1, sections 4.2 and 5.3",
        says="k = 2 on 4x H100 and on 4x V100",
        get=f"k = {ks}, not rounded: as CPU : GPU these are strides of "
        + ", ".join(f"{update_stride(rates):.1f}" for rates in RATES.values()),
        evidence=Evidence.COMPUTED,
    )
    readings = [[update_throughput(V100, k + extra) for k in V100_MEASURED] for extra in (1.0, 0.0)]
    yield Claim(
        where="section 5.4, V100",
        says="k = 2 is best; 1.67, 1.62, 1.28 G/s for 3, 4, 5",
        get="; ".join(
            f"{how}: {', '.join(f'{value / 1e9:.2f}' for value in values)} for 2 to 5"
            for how, values in zip(("k : 1", "every k-th"), readings, strict=True)
        ),
        evidence=Evidence.SIMULATED,
    )
    shares = [4 * update_throughput(H100_BUSY, stride) / 1e9 for stride in (2.0, 3.0, 4.0, None)]
    yield Claim(
        where="figure 16",
        says="50 % of the updates on the GPU are best, then 33, 25, 0 %, for every model",
        get=f"{', '.join(f'{share:.1f}' for share in shares)} G/s, independent of the model"
        + _more_than_half(),
        evidence=Evidence.SIMULATED,
    )
    yield Claim(
        where="figure 16, emulated",
        says="the same order",
        get=_recorded(_order),
        evidence=Evidence.EMULATED,
    )
    yield Claim(
        where="figure 8",
        says="update throughput 70 % higher than ZeRO-3's on average, alike for all models",
        get=f"{100 * (shares[0] / shares[3] - 1):.0f} % higher, alike by construction",
        evidence=Evidence.SIMULATED,
    )


def _more_than_half() -> str:
    best = 4 * update_throughput(H100, update_stride(H100)) / 1e9
    half = 4 * update_throughput(H100, 2.0) / 1e9
    share = 100 / update_stride(H100)
    return (
        f"; with idle links {half:.1f} at 50 % and {best:.1f} at {share:.0f} %, which the paper did"
        " not try"
    )


def _iterations() -> Iterable[Claim]:
    base, deep = iteration(LARGEST, ZERO_3), iteration(LARGEST, DEEP)
    yield Claim(
        where="figure 7, 20B",
        says="asynchronous flushes alone 1.9 x, with updates on the GPU 2.5 x",
        get=f"{speed_up(LARGEST, ONLY_FLUSH):.2f} x and {speed_up(LARGEST):.2f} x;"
        f" {base.total_s:.1f} and {deep.total_s:.1f} s",
        evidence=Evidence.SIMULATED,
    )
    machine = next(m for m in MACHINES if "paper's CPU" in m.name)
    alone = step(machine, 4, None).seconds
    forms = {form: step(machine, 4, form).seconds for form in DeviceUpdates if form != "auto"}
    yield Claim(
        where="the same, in our runtime's plans",
        says="(7B on 4 H100 with the paper's CPU rates, one micro-batch a GPU)",
        get=f"1F1B: all on the CPU {alone:.2f} s; ours {forms[DeviceUpdates.PREVIEW]:.2f}, the"
        f" paper's form {forms[DeviceUpdates.FLUSH]:.2f}"
        f" ({alone / forms[DeviceUpdates.FLUSH]:.2f} x); here the CPU does not wait for copies to"
        " begin with",
        evidence=Evidence.SIMULATED,
    )
    small = iteration(TABLE_2["7B"], ZERO_3).total_s
    yield Claim(
        where="figure 9",
        says="100 iterations: 2.5 x as well; 20B takes as long as 7B with ZeRO-3",
        get=f"the same in a steady state; {deep.total_s:.2f} and {small:.2f} s",
        evidence=Evidence.SIMULATED,
    )
    sizes = [
        (model.parameters * num_bytes / GIB, printed)
        for model in TABLE_2.values()
        for num_bytes, printed in ((4, model.fp16_gib), (16, model.fp32_gib))
    ]
    yield Claim(
        where="table 2",
        says="sizes of five models in GB; 48 layers for 20B",
        get=f"4 and 16 bytes of 12 l h^2 parameters, in GiB: within"
        f" {100 * max(abs(ours / printed - 1) for ours, printed in sizes):.0f} %, with 44 layers"
        " for 20B (48 would be 9 % more)",
        evidence=Evidence.COMPUTED,
    )


def _static() -> Iterable[Claim]:
    updates = [
        resident_throughput(H100_BUSY, share, PAPERS_STRIDE)
        / resident_throughput(H100_BUSY, share, None)
        for share in _SHARES
    ]
    yield Claim(
        where="figure 10",
        says="updates at least 1.7 x faster than TwinFlow for 0 to 50 % static residents",
        get=f"{as_range(updates)} x",
        evidence=Evidence.SIMULATED,
    )
    yield Claim(
        where="figure 10, emulated",
        says="(20 % residents: the whole step, one stage, 16 micro-batches)",
        get=_recorded(_twinflow),
        evidence=Evidence.EMULATED,
    )
    ratios = [speed_up(LARGEST, replace(DEEP, resident=share)) for share in _SHARES]
    yield Claim(
        where="figure 11",
        says="iterations about 2 x faster than TwinFlow's for every share",
        get=f"{as_range(ratios)} x",
        evidence=Evidence.SIMULATED,
    )
    deep, twin = iteration(LARGEST, DEEP).total_s, iteration(LARGEST, _TWINFLOW).total_s
    saved = 0.5 * 12.0 * LARGEST.parameters / 4 / 1e9
    yield Claim(
        where="figure 11",
        says="3.0 s without residents, 40 % faster than TwinFlow with 50 % (4.3 s), for 35 GB a GPU"
        " less",
        get=f"{deep:.1f} s ({100 * (deep / 3.0 - 1):+.0f} %) and {twin:.1f} s"
        f" ({100 * (twin / 4.3 - 1):+.0f} %): {100 * (twin / deep - 1):.0f} % faster, for"
        f" {saved:.0f} GB less",
        evidence=Evidence.SIMULATED,
    )
    some = [speed_up(model, replace(DEEP, resident=0.2)) for model in TABLE_2.values()]
    yield Claim(
        where="figure 12",
        says="1.7 to 2.3 x TwinFlow with 20 % residents, for all models",
        get=f"{as_range(some)} x",
        evidence=Evidence.SIMULATED,
    )


def _sensitivity() -> Iterable[Claim]:
    by_batch = [speed_up(LARGEST, micro_batch=count) for count in (1, 2, 4, 8)]
    yield Claim(
        where="figure 13",
        says="2.5 to 1.6 x for micro-batches of 1 to 8",
        get=f"{by_batch[0]:.1f} to {by_batch[-1]:.1f} x",
        evidence=Evidence.SIMULATED,
    )
    yield Claim(
        where="figure 14",
        says="up to 3 x with few cores a GPU, less and then alike with many",
        get=_cores(),
        evidence=Evidence.SIMULATED,
    )
    pair_s = max(1 / H100.host + 1 / H100.downscale, 3.5 / H100.transfer + 1 / H100.device)
    there, back = 3.5 / H100.transfer / pair_s, 3.0 / H100.transfer / pair_s
    before, after = iteration(LARGEST, ZERO_3), iteration(LARGEST, DEEP)
    yield Claim(
        where="figure 15",
        says="with 50 % of updates on the GPU PCIe is at 40 %; 30 TFLOP/s become 75",
        get=f"{100 * there:.0f} % in, {100 * back:.0f} % out with links that are otherwise idle:"
        f" the CPU is the limit then; {before.tflops:.0f} become {after.tflops:.0f} (without"
        " recomputation)",
        evidence=Evidence.SIMULATED,
    )
    yield Claim(
        where="figure 15",
        says="GPU at 100 %, CPU at 60 to 70 % (NVML)",
        get=NO_GPU,
        evidence=Evidence.MISSING,
    )
    yield Claim(
        where="figure 17",
        says="up to 4.4 x on one GPU, up to 2.5 x on four (weak scaling)",
        get="; ".join(
            f"{gpus}: {as_range(speed_up(model, gpus=gpus) for model in TABLE_2.values())} x"
            for gpus in (1, 2, 4)
        ),
        evidence=Evidence.SIMULATED,
    )


def _cores() -> str:
    """Returns two strides: the paper's, and that of equation 1 for a number of cores."""
    found: list[str] = []
    for cores in (4.0, 8.0, 16.0, float(PAPERS_CORES)):
        share = cores / PAPERS_CORES
        rates = replace(
            H100_BUSY, host=H100_BUSY.host * share, downscale=H100_BUSY.downscale * share
        )
        balanced = System(flush=Flush.DEVICE, stride=update_stride(rates))
        halves, best = speed_up(LARGEST, cores=cores), speed_up(LARGEST, balanced, cores=cores)
        found.append(f"{cores:.0f}: {halves:.1f} ({best:.1f})")
    return (
        f"x by cores, every second subgroup (equation 1's share): {', '.join(found)}; only the"
        " latter falls as the paper's"
    )


def _recorded(text: Callable[[Mapping[str, Any]], str]) -> str:
    """Returns the results of the recorded emulated runs."""
    return text(json.loads(RECORDED.read_text(encoding="utf-8"))["rows"])


def _order(rows: Mapping[str, Any]) -> str:
    names = ("50 %", "33 %", "25 %", "all on the CPU")
    ours = ", ".join(f"{rows[name]['measured_s']:.2f}" for name in names)
    flushed = rows["50 %, flushed"]["measured_s"]
    return f"{ours} s for 50, 33, 25, 0 % (previewed); 50 % flushed {flushed:.2f} s"


def _twinflow(rows: Mapping[str, Any]) -> str:
    twin, deep = rows["TwinFlow 20 %"]["measured_s"], rows["50 % + residents 20 %"]["measured_s"]
    return f"{twin:.2f} s with TwinFlow, {deep:.2f} s with 50 % interleaved as well"
