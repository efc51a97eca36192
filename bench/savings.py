"""Is a step shorter by what its savings say? Six plans on emulated clusters, with and without.

    python -m bench.savings [--cases spipe network …] [--steps 5] [--json FILE]

Each plan trains with ``penstock train`` on an emulated cluster, traced; ``penstock trace`` says
what a step would save without a resource. Then the emulated cluster gets that resource infinitely
fast, and the same plan trains again. The table has the saving that was said beside the one that
came, in seconds of the emulated cluster, and the error as a share of the step and of the saving.
Medians of all steps but the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench import emulated
from bench.emulated import EmulatedCase, Experiment, configuration, trained
from bench.papers.spipe_cluster.measured import Workload
from bench.papers.spipe_cluster.systems import SYSTEMS, plan_of
from bench.papers.spipe_cluster.testbed import analytic
from penstock.client.views.trace.step_report import StepReport
from penstock.config.schema import parse_config
from penstock.planner.cost.emulation import Emulation
from penstock.planner.traces.dependency_graph import Resource
from penstock.planner.traces.measured import measure
from penstock.planner.traces.traced import TracedRun
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.trace_reading import read_traces

FAST = 1e18
"""Bytes, or parameters, a second: no time worth mentioning."""
REMOVALS: Mapping[Resource, Mapping[str, Any]] = MappingProxyType(
    {
        Resource.COMPUTE: {"compute_speed": 1e9, "instruction_s": 0.0},
        Resource.H2D: {"machine": {"fetch_bandwidth": FAST, "switch_bandwidth": FAST}},
        Resource.D2H: {"machine": {"offload_bandwidth": FAST, "switch_bandwidth": FAST}},
        Resource.PEER_LINKS: {"machine": {"peer_bandwidth": FAST, "peer_through_host": 0}},
        Resource.NETWORK: {"machine": {"nic_bandwidth": FAST}},
        Resource.OPTIMIZER: {"machine": {"optimizer_rate": FAST}, "optimizer_bytes": 1e-6},
    }
)
"""Keys of ``emulation`` that take a resource's time away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingsCase:
    """A plan on a cluster, and the resources to take away."""

    experiment: Experiment
    case: EmulatedCase
    removed: tuple[Resource, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Emulated seconds of a step with a resource and without, and what was said to be saved."""

    resource: str
    step_s: float
    without_s: float
    said_s: float
    critical_s: float

    @property
    def saved_s(self) -> float:
        """Returns the measured savings."""
        return self.step_s - self.without_s

    @property
    def error(self) -> float:
        """Returns predicted minus measured savings, as a share of the step."""
        return (self.said_s - self.saved_s) / self.step_s


def optimizer_tail() -> SavingsCase:
    """Returns the case of SPipe's 10B: streamed weights, and a tail of the optimizer."""
    experiment = emulated.spipe(10)
    case = next(case for case in experiment.cases if case.name == "SPipe")
    return SavingsCase(
        experiment=experiment, case=case, removed=(Resource.OPTIMIZER, Resource.COMPUTE)
    )


def streamed_weights() -> SavingsCase:
    """Returns the case of Mobius' plan of the same model behind a PCIe of a sixteenth: bound by
    fetches.
    """
    experiment = emulated.spipe(10)
    case = next(case for case in experiment.cases if case.name == "Mobius")
    machine = {**experiment.machine, "fetch_bandwidth": 0.8e9, "optimizer_rate": 2e10}
    emulation = {**case.emulation, "optimizer_start": "offload"}
    return SavingsCase(
        experiment=replace(experiment, machine=machine, time_scale=0.3),
        case=replace(case, emulation=emulation),
        removed=(Resource.H2D,),
    )


def two_nodes() -> SavingsCase:
    """Returns the case of SPipe's plan on two nodes of two V100 behind slow NICs."""
    experiment = emulated.spipe(10)
    workload = Workload(billions=10, sequence=1024, nodes=1, micro_batch=2, mini_batch=16)
    system = SYSTEMS["SPipe"]
    bed = analytic(workload)
    plan = plan_of(system, bed.model.num_layers, 4, workload.num_microbatches)
    machine = {**experiment.machine, "nic_bandwidth": 2e9}
    return SavingsCase(
        experiment=replace(experiment, nodes=2, machine=machine, time_scale=0.2),
        case=EmulatedCase(name="SPipe on two nodes", make=lambda emulation: plan),
        removed=(Resource.NETWORK,),
    )


def computing() -> SavingsCase:
    """Returns the case of 1F1B with its model on the devices: nothing but computation."""
    experiment = emulated.two_bp()
    case = next(case for case in experiment.cases if case.name == "1F1B-2")
    return SavingsCase(experiment=experiment, case=case, removed=(Resource.COMPUTE,))


def split_backwards() -> SavingsCase:
    """Returns the case of 2BP's split backwards behind slow links between the devices."""
    experiment = emulated.two_bp()
    case = next(case for case in experiment.cases if case.name == "1F1B-1 + 2BP")
    machine = {"peer_bandwidth": 4e8, "peer_through_host": 0}
    return SavingsCase(
        experiment=replace(experiment, machine=machine),
        case=case,
        removed=(Resource.PEER_LINKS,),
    )


def through_the_host() -> SavingsCase:
    """Returns the case of Obscura's plan on devices without peer links: messages go through the
    host, with slow copies from devices.
    """
    experiment = emulated.obscura()
    case = next(case for case in experiment.cases if case.name == "Obscura")
    machine = {"offload_bandwidth": 5e8}
    return SavingsCase(
        experiment=replace(experiment, machine=machine), case=case, removed=(Resource.D2H,)
    )


CASES: Mapping[str, Callable[[], SavingsCase]] = MappingProxyType(
    {
        "optimizer": optimizer_tail,
        "weights": streamed_weights,
        "network": two_nodes,
        "compute": computing,
        "split": split_backwards,
        "offloads": through_the_host,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run: emulated seconds of a step, and the typical step's report, if it was traced."""

    step_s: float
    report: StepReport | None = None


@dataclass(slots=True)
class Runs:
    """Trains one case, with changes of its emulation."""

    case: SavingsCase
    steps: int
    plan: Any = field(init=False)

    def __post_init__(self) -> None:
        config = configuration(self.case.experiment, self.case.case)
        self.plan = self.case.case.make(Emulation.of(parse_config(config)))

    def run(self, removal: Mapping[str, Any], *, traced: bool) -> Ran:
        """Trains with a resource removed, or none."""
        experiment = self.case.experiment
        config = configuration(experiment, self.case.case)
        machine = {**config["emulation"]["machine"], **removal.get("machine", {})}
        config["emulation"] |= {**removal, "machine": machine}
        config["train"] |= {
            "steps": self.steps,
            "global_batch": experiment.micro_batch * self.plan.num_microbatches,
        }
        config["observability"] = {"trace": traced}
        with tempfile.TemporaryDirectory() as folder:
            run_dir = trained(config, Path(folder), self.plan)
            lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
            seconds = [line["seconds"] for line in lines if line["phase"] == "train"][1:]
            report = step_report(run_dir) if traced else None
        return Ran(step_s=statistics.median(seconds) / experiment.time_scale, report=report)


def step_report(run_dir: Path) -> StepReport:
    """Returns the critical path of the median step of a traced run, without the first step."""
    run = RunDirectory(run_dir)
    trace = read_traces(run_dir).slowed(1.0 / run.config.emulation.time_scale)
    traced = TracedRun.of(trace, tuple(node.name for node in run.config.cluster.nodes))
    own_memory = run.config.cluster.platform.own_memory
    attempts = measure(traced, run.plan, copies=own_memory).attempts[1:]
    ordered = sorted(attempts, key=lambda attempt: attempt.makespan_s)
    return StepReport.of(run, ordered[len(ordered) // 2])


def compare(case: SavingsCase, steps: int) -> list[Compared]:
    """Trains a case as it is, and without each of its resources."""
    runs = Runs(case, steps)
    base = runs.run({}, traced=True)
    assert base.report is not None, "it was traced"
    found = []
    for resource in case.removed:
        without = runs.run(REMOVALS[resource], traced=False)
        found.append(
            Compared(
                resource=resource.value,
                step_s=base.step_s,
                without_s=without.step_s,
                said_s=base.report.saved.seconds[resource],
                critical_s=base.report.path.seconds[resource],
            )
        )
    return found


HEAD = (
    "| plan | without | step s | critical s | said s | came s | error of step | of saving |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def row(name: str, found: Compared) -> str:
    """Returns a line of the table."""
    of_saving = (found.said_s - found.saved_s) / found.saved_s if found.saved_s else float("nan")
    return (
        f"| {name} | {found.resource} | {found.step_s:.4g} | {found.critical_s:.4g} |"
        f" {found.said_s:.4g} | {found.saved_s:.4g} | {100 * found.error:+.1f} % |"
        f" {100 * of_saving:+.1f} % |"
    )


def main(words: Sequence[str] | None = None) -> None:
    """Parses arguments, runs the cases, and prints each result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    sys.stdout.write(HEAD + "\n")
    results: dict[str, list[dict[str, Any]]] = {}
    for name in arguments.cases:
        case = CASES[name]()
        compared = compare(case, arguments.steps)
        results[name] = [asdict(one) for one in compared]
        for one in compared:
            sys.stdout.write(row(f"{case.experiment.title}: {case.case.name}", one) + "\n")
            sys.stdout.flush()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
