"""Deep Optimizer States: optimizer work shared between CPU and GPU, against its equation 1.

    python -m bench.deep_optimizer_states [--steps 3] [--time-scale 0.25] [--json FILE]

On an emulated device (one GPU of the paper's 4x H100 node with its share of the cores, at the rates
that the paper prints, LLaMA-2 7B): each case trains with ``penstock train``, real processes and
transactions in modelled time. Per case: seconds of a step, measured and simulated; and what two
performance models make of the same rates, for forward and backward as simulated and then the update
phase: equation 1 (state to the GPU and back, in place) and its counterpart for our step (state to
the GPU, weights back; *flushed*: state as well). Figure 16's order is that 50 % of the updates on
the GPU are faster than 33, 25 and 0 %. TwinFlow keeps a share of the state on the GPU and
interleaves nothing; here its CPU does not wait for the GPU as DeepSpeed's does, which helps it.

On a real GPU: ``bench.gpu``, parts kernels and models.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench import emulated
from bench.papers.deep_optimizer_states.rates import H100_BUSY
from penstock.config.schema import Config, parse_config
from penstock.planner.cost.cluster import ADVANCE, Cluster, OptimizerModel
from penstock.planner.cost.emulation import Emulation
from penstock.planner.cost.sources import Prices
from penstock.planner.cost.update_rates import (
    UpdateRates,
    flushing,
    preview_stride,
    preview_throughput,
    resident_throughput,
)
from penstock.planner.planning.configured import build_plan
from penstock.planner.simulate import Simulation, simulate
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.semantics import Lane

PASS = "interleave-updates"
CHOSEN = "stride by the rates"
FLUSHED = "stride by the rates, flushed"
CASES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "all on the CPU": {},
        "TwinFlow 20 %": {"passes": ["twinflow"], "resident_share": 0.2},
        "25 %": {"passes": [PASS], "update_stride": 4},
        "33 %": {"passes": [PASS], "update_stride": 3},
        "50 %": {"passes": [PASS], "update_stride": 2},
        "50 % + residents 20 %": {
            "passes": [PASS],
            "update_stride": 2,
            "resident_share": 0.2,
        },
        CHOSEN: {"passes": [PASS]},
        "50 %, flushed": {"passes": [PASS], "update_stride": 2, "device_updates": "flush"},
        FLUSHED: {"passes": [PASS], "device_updates": "flush"},
    }
)
FIGURE_16 = ("50 %", "33 %", "25 %", "all on the CPU")
"""From the fastest to the slowest."""

PARAMETERS_OF_FP32 = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case; seconds of a step. ``on_device``: share of the blocks."""

    on_device: float
    measured_s: float
    simulated_s: float
    equation_1_s: float
    counterpart_s: float


def machine() -> dict[str, float]:
    """Returns a GPU of the paper's node with busy links and its share of the cores.

    Memory is no limit, as in equation 1. Our sweeps include the conversion to 16 bits.
    """
    rates = H100_BUSY
    return {
        "fetch_bandwidth": PARAMETERS_OF_FP32 * rates.transfer,
        "offload_bandwidth": PARAMETERS_OF_FP32 * rates.transfer,
        "device_optimizer_rate": rates.device,
        "optimizer_rate": 1.0 / (1.0 / rates.host + 1.0 / rates.downscale),
        "dram_bandwidth": 1e15,
    }


def experiment(time_scale: float) -> emulated.Experiment:
    """Returns all cases. Forward and backward take as long as settling half of the blocks."""
    return emulated.Experiment(
        name="deep-optimizer-states",
        title="Deep Optimizer States, LLaMA-2 7B, a quarter of 4 H100 and their cores",
        device="analytic:H100:llama2-7b",
        workers=1,
        sequence=2048,
        micro_batch=1,
        time_scale=time_scale,
        machine=machine(),
        cases=tuple(emulated.EmulatedCase(name=name, make=made(name)) for name in CASES),
        ratios=(),
    )


def made(name: str) -> emulated.Made:
    """Returns the plan that ``penstock train`` makes of a case's schedule."""

    def make(emulation: Emulation) -> Any:
        return build_plan(emulated_config(name), emulation.table)

    return make


def emulated_config(name: str) -> Config:
    """Returns the configuration of a case; its plan does not depend on the time scale."""
    here = experiment(1.0)
    data = emulated.configuration(here, here.cases[0])
    data["train"]["global_batch"] = 16 * here.micro_batch
    data["schedule"] = {"scheme": "1f1b", "recompute": "full", **CASES[name]}
    return parse_config(data)


def rates_of(cluster: Cluster) -> UpdateRates:
    """Returns the update rates of one GPU and its share of the cores. Our sweeps include the
    conversion of weights.
    """
    return UpdateRates(
        transfer=min(cluster.fetch_bandwidth, cluster.offload_bandwidth) / PARAMETERS_OF_FP32,
        device=cluster.device_optimizer_rate,
        host=cluster.optimizer_rate / cluster.devices_per_node,
        downscale=inf,
    )


def equation_1_s(cluster: Cluster, parameters: float, case: Mapping[str, Any]) -> float:
    """Returns seconds of the paper's update phase of a GPU's parameters; TwinFlow's CPU waits."""
    share, stride = case.get("resident_share", 0.0), case.get("update_stride")
    return parameters / resident_throughput(rates_of(cluster), share, stride)


def counterpart_s(cluster: Cluster, parameters: float, case: Mapping[str, Any]) -> float:
    """Returns seconds of our update phase. Residents settle the last commit and then preview: two
    sweeps on the GPU, in parallel to the CPU.
    """
    share, stride = case.get("resident_share", 0.0), case.get("update_stride")
    if "device_updates" in case:
        cluster = flushing(cluster)
    moving_s = (1.0 - share) * parameters / preview_throughput(cluster, ADVANCE, stride)
    return max(moving_s, 2.0 * share * parameters / cluster.device_optimizer_rate)


def predicted(
    name: str, plan: Plan, prices: Prices, simulation: Simulation, measured_s: float
) -> Row:
    """Returns the row of a case: measured, simulated, and by both models. Models count from the
    end of the last backward.
    """
    cluster, case = prices.cluster, dict(CASES[name])
    if name in (CHOSEN, FLUSHED):
        moving = flushing(cluster) if name == FLUSHED else cluster
        case["update_stride"] = preview_stride(moving, ADVANCE)
    parameters = sum(block.parameters for block in prices.costs.blocks)
    computed_s = max(span.end_s for span in simulation.spans if span.lane is Lane.COMPUTE)
    return Row(
        on_device=len(plan.updates) / plan.num_blocks,
        measured_s=measured_s,
        simulated_s=simulation.makespan_s,
        equation_1_s=computed_s + equation_1_s(cluster, parameters, case),
        counterpart_s=computed_s + counterpart_s(cluster, parameters, case),
    )


def on_an_emulated_device(options: argparse.Namespace) -> dict[str, Row]:
    """Runs every case with the real runtime."""
    rows: dict[str, Row] = {}
    here = experiment(options.time_scale)
    for case in here.cases:
        one = emulated.run(here, case, options.steps)
        emulation = Emulation.of(emulated_config(case.name))
        plan = case.make(emulation)
        prices = Prices(costs=emulation.costs, cluster=emulation.cluster)
        simulation = simulated(plan, prices, emulation.optimizer)
        rows[case.name] = predicted(case.name, plan, prices, simulation, one.measured_s)
    return rows


def simulated(plan: Plan, prices: Prices, optimizer: OptimizerModel) -> Simulation:
    """Returns the simulated step of a plan."""
    return simulate(plan, prices.costs, prices.cluster, optimizer=optimizer, stops_early=True)


def table(rows: Mapping[str, Row]) -> str:
    """Returns the rows as a table."""
    lines = [
        "| updates on the GPU | share of blocks | measured s | simulated s | error"
        " | equation 1 s | counterpart s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {100 * row.on_device:.0f} % | {row.measured_s:.4g}"
            f" | {row.simulated_s:.4g} | {100 * (row.simulated_s / row.measured_s - 1):+.1f} %"
            f" | {row.equation_1_s:.4g} | {row.counterpart_s:.4g} |"
        )
    return "\n".join(lines)


def verdicts(rows: Mapping[str, Row]) -> dict[str, bool]:
    """Returns two verdicts. Steps take longer in figure 16's order, each by at least 2 %.
    Interleaving with residents beats TwinFlow with as many.
    """
    seconds = [rows[name].measured_s for name in FIGURE_16]
    twin, deep = (rows[name].measured_s for name in ("TwinFlow 20 %", "50 % + residents 20 %"))
    return {
        "order_of_figure_16": all(b > 1.02 * a for a, b in pairwise(seconds)),
        "faster_than_twinflow": deep < twin,
    }


def main() -> int:
    """Parses arguments, measures, and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--time-scale", type=float, default=0.25, help="clock per emulated second")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = on_an_emulated_device(options)
    found = verdicts(rows)
    sys.stdout.write(table(rows) + "\n\n")
    sys.stdout.write("".join(f"{name}: {'yes' if so else 'no'}\n" for name, so in found.items()))
    if options.json is not None:
        named = {name: asdict(row) for name, row in rows.items()}
        ran_on = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        content = {"ran_on": ran_on, "rows": named, **found}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
