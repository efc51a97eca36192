"""Speed of the simulator: ``bench/simulator.py --out f.json``.

Each case is one call of ``simulate`` on a plan that is there, with every transfer, copy and
optimizer sweep on shared switches, NICs and DRAM, in one thread. Figures are medians over the
rounds: seconds of the core, which are held against what is needed, and of the clock, with the
fastest and the slowest round; the difference is what else the machine does. Building, lowering and
validating the plan are timed once, apart.

============== ===================================================================================
case           what is simulated
============== ===================================================================================
chimera        32 devices, 64 micro-batches, two routes (Mario reports 700 ms for its simulator)
1f1b           1024 devices in one pipeline, 64 micro-batches
pp32xdp32      32 pipelines of 32 devices each, 64 micro-batches each, gradients reduced over all
============== ===================================================================================
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.layout import OrderedInstruction, StageLayout
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.simulate import simulate
from penstock.planner.validate.check import validate
from penstock.protocol.plan.plan import Plan, StageRange

NEEDED_S = {"chimera": 0.05, "1f1b": 1.0, "pp32xdp32": 1.0}

BLOCK = BlockCost(
    forward_s=0.01,
    recompute_s=0.01,
    backward_input_s=0.01,
    backward_weight_s=0.01,
    output_bytes=33.6e6,
    activation_bytes=1.2e9,
    parameters=2.0e8,
    weight_bytes=4.0e8,
    device_gradient_bytes=8.0e8,
    gradient_bytes=4.0e8,
)

CLUSTER = Cluster(
    devices_per_node=8,
    fetch_bandwidth=25.0e9,
    offload_bandwidth=25.0e9,
    devices_per_switch=2,
    switch_bandwidth=25.0e9,
    peer_bandwidth=20.0e9,
    peer_through_host=True,
    nic_bandwidth=12.5e9,
    dram_bandwidth=200.0e9,
    latency_s=1.0e-5,
    optimizer_rate=2.0e9,
)


def pipeline(scheme: str, devices: int, micro_batches: int) -> Schedule:
    """Returns a scheme with one block per stage."""
    request = ScheduleRequest(
        scheme=scheme, num_devices=devices, num_microbatches=micro_batches, recompute="none"
    )
    return build_schedule(request, [1.0] * devices)


def data_parallel(one: Schedule, count: int) -> Schedule:
    """Returns ``count`` copies of a schedule as pipeline replicas of one, each on its own
    devices.
    """
    layout, stages = one.layout, len(one.layout.forward)

    def moved(stage: StageRange, copy: int) -> StageRange:
        return replace(stage, device=stage.device + copy * layout.num_devices)

    def renumbered(work: OrderedInstruction, copy: int) -> OrderedInstruction:
        return replace(  # type: ignore[call-arg]
            work,
            stage=work.stage + copy * stages,
            micro_batch=work.micro_batch + copy * layout.num_microbatches,
        )

    copies = range(count)
    return replace(
        one,
        layout=StageLayout(
            num_devices=layout.num_devices * count,
            num_microbatches=layout.num_microbatches * count,
            forward=tuple(moved(stage, copy) for copy in copies for stage in layout.forward),
            backward=tuple(moved(stage, copy) for copy in copies for stage in layout.backward),
            routes=tuple(copy for copy in copies for _ in range(layout.num_microbatches)),
        ),
        orders=tuple(
            tuple(renumbered(work, copy) for work in order)
            for copy in copies
            for order in one.orders
        ),
        reduces_gradients=True,
    )


CASES: dict[str, Callable[[], Schedule]] = {
    "chimera": lambda: pipeline("chimera", 32, 64),
    "1f1b": lambda: pipeline("1f1b", 1024, 64),
    "pp32xdp32": lambda: data_parallel(pipeline("1f1b", 32, 64), 32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One case: seconds of each round, by core and by clock, and what was simulated."""

    seconds: list[float]
    clock_seconds: list[float]
    instructions: int
    tasks: int
    array_bytes: int
    prepared: dict[str, float]

    def to_dict(self, needed_s: float) -> dict[str, Any]:
        """Returns the fields of the JSON file."""
        return {
            "median_s": statistics.median(self.seconds),
            "needed_s": needed_s,
            "seconds": self.seconds,
            "clock_median_s": statistics.median(self.clock_seconds),
            "clock_seconds": self.clock_seconds,
            "instructions": self.instructions,
            "tasks": self.tasks,
            "bytes_per_instruction": self.array_bytes / self.instructions,
            "prepared_s": self.prepared,
        }


def measure(make: Callable[[], Schedule], rounds: int) -> Measured:
    """Prepares a case, then simulates it ``rounds`` times after a warm-up."""
    prepared: dict[str, float] = {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = step()
        prepared[name] = time.perf_counter() - start
        return result

    schedule = timed("schedule", make)
    plan: Plan = timed("lower", lambda: lower(schedule))
    timed("validate", lambda: validate(plan))
    costs = Costs(blocks=(BLOCK,) * plan.num_blocks, instruction_s=1.0e-5)
    seconds: list[float] = []
    clock_seconds: list[float] = []
    for round_index in range(rounds + 1):
        gc.collect()
        start, clock_start = time.process_time(), time.perf_counter()
        simulation = simulate(plan, costs, CLUSTER)
        simulation.makespan_s  # noqa: B018 - the figure that a user asks for is part of the work
        if round_index > 0:
            seconds.append(time.process_time() - start)
            clock_seconds.append(time.perf_counter() - clock_start)
    return Measured(
        seconds=seconds,
        clock_seconds=clock_seconds,
        instructions=sum(map(len, plan.programs)),
        tasks=simulation.num_tasks,
        array_bytes=simulation.array_bytes,
        prepared=prepared,
    )


def parse_arguments() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description="Speed of the simulator.")
    parser.add_argument("--rounds", type=int, default=9, help="after one to warm up")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    return parser.parse_args()


def main() -> int:
    """Measures, prints and writes; returns 1 if a case is too slow."""
    options = parse_arguments()
    cases: dict[str, Any] = {}
    for name in options.cases:
        measured = measure(CASES[name], options.rounds)
        cases[name] = measured.to_dict(NEEDED_S[name])
        prepared = ", ".join(f"{step} {s:.2f} s" for step, s in measured.prepared.items())
        clock = measured.clock_seconds
        print(
            f"{name:<10} {statistics.median(measured.seconds) * 1e3:6.1f} ms of a core (needed"
            f" {NEEDED_S[name] * 1e3:.0f}), by the clock {statistics.median(clock) * 1e3:.1f}"
            f" ({min(clock) * 1e3:.1f} to {max(clock) * 1e3:.1f})\n"
            f"{'':<10} {measured.instructions} instructions, {measured.tasks} tasks,"
            f" {cases[name]['bytes_per_instruction']:.0f} bytes an instruction;"
            f" before: {prepared}"
        )
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak memory of the process, plans included: {peak_bytes / 1e9:.2f} GB")
    result = {
        "rounds": options.rounds,
        "machine": platform.processor() or platform.machine(),
        "peak_bytes": peak_bytes,
        "cases": cases,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return int(any(case["median_s"] > case["needed_s"] for case in cases.values()))


if __name__ == "__main__":
    sys.exit(main())
