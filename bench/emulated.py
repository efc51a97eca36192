"""Published comparisons on emulated clusters: through the real runtime, and simulated.

    python -m bench.emulated [--experiments spipe-10b mario …] [--steps 4] [--json FILE]

Every plan trains with ``penstock train`` on the emulated cluster of its paper: real processes,
messages and transactions, modelled time. A step's time is the median over all steps but the first
(whose optimizer only previews), on the emulated clock, beside the simulator's for the same plan and
costs. Emulated devices sleep until something would have ended, so what others do on the machine
matters only once its cores are short: the table says how many of them others kept busy (*others*).
Where that is much, run again.

``overhead`` runs SPipe's 19B plan twice: with work that takes no time, for instructions per second
and worker, and in real time, for the share of a step that is lost to the runtime.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from bench.papers.obscura import testbed as obscura_testbed
from bench.papers.spipe_cluster import systems, testbed
from bench.papers.spipe_cluster.measured import Workload, measured
from penstock.config.schema import parse_config
from penstock.planner.cost.emulation import Emulation
from penstock.planner.passes import PASSES, PassContext
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.schedule import lower
from penstock.planner.simulate import simulate
from penstock.protocol.plan.plan import Plan

Made = Callable[[Emulation], Plan]
"""Makes a plan for an emulated cluster."""

_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedCase:
    """A plan of an experiment; ``emulation`` is what its system has of its own."""

    name: str
    make: Made
    emulation: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How much faster one case is than another, and what the paper says."""

    faster: str
    slower: str
    paper: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Cases on one emulated cluster."""

    name: str
    title: str
    device: str
    workers: int
    sequence: int
    micro_batch: int
    time_scale: float
    cases: tuple[EmulatedCase, ...]
    ratios: tuple[Ratio, ...]
    nodes: int = 1
    machine: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRun:
    """Emulated seconds of a step. ``spread``: of the measured steps, largest over smallest, less 1;
    ``others``: cores that other processes of the machine kept busy meanwhile.
    """

    measured_s: float
    simulated_s: float
    spread: float
    others: float

    @property
    def error(self) -> float:
        """Simulated relative to measured, less 1."""
        return self.simulated_s / self.measured_s - 1.0


def spipe(billions: int) -> Experiment:
    """Returns the experiment of SPipe, table 2 and figure 9: one node of four V100, 16 sequences in
    micro-batches of 2.
    """
    workload = Workload(billions=billions, sequence=1024, nodes=1, micro_batch=2, mini_batch=16)
    bed, runs = testbed.analytic(workload), measured()[workload]
    blocking = testbed.with_blocking_transfers(bed.costs)
    share = testbed.efficiency(testbed.V100, workload.micro_batch * workload.sequence)
    # Forward and backward send, recomputation does not; workers know one overhead for all.
    instruction_s = blocking.instruction_s + 2.0 / 3.0 * blocking.sending_s

    def case(system: systems.System) -> EmulatedCase:
        plan = systems.plan_of(
            system, bed.model.num_layers, workload.num_devices, workload.num_microbatches
        )
        return EmulatedCase(
            name=system.name,
            make=lambda emulation: plan,
            emulation={
                "instruction_s": instruction_s,
                "optimizer_bytes": system.optimizer().tail_bytes,
                "optimizer_start": str(system.optimizer().start),
            },
        )

    def ratio(slower: str, average: str) -> Ratio:
        here = runs[slower].iteration_s / runs["SPipe"].iteration_s
        return Ratio(faster="SPipe", slower=slower, paper=f"{here:.2f} (average {average})")

    return Experiment(
        name=f"spipe-{billions}b",
        title=f"SPipe, LLaMA-2 {billions}B on 4 V100",
        device=f"analytic:V100-PCIE-32:spipe-{billions}b:efficiency={share:.4g}",
        workers=workload.num_devices,
        sequence=workload.sequence,
        micro_batch=workload.micro_batch,
        time_scale=0.5,
        machine={"dram_bandwidth": bed.cluster.dram_bandwidth, "device_memory_bytes": 32 * 2**30},
        cases=tuple(map(case, systems.SYSTEMS.values())),
        ratios=(ratio("Mobius", "1.31"), ratio("Megatron", "1.26")),
    )


def scheduled(scheme: str, micro_batches: int, passes: Sequence[str] = ()) -> Made:
    """Returns a case of a scheme without recomputation, with passes."""

    def make(emulation: Emulation) -> Plan:
        costs, cluster = emulation.costs, emulation.cluster
        request = ScheduleRequest(
            scheme=scheme,
            num_devices=devices_of(emulation),
            num_microbatches=micro_batches,
            recompute="none",
        )
        schedule = build_schedule(request, [block.forward_s for block in costs.blocks])
        hop_s = max(block.output_bytes for block in costs.blocks) / cluster.peer_bandwidth
        context = PassContext(
            costs=costs,
            cluster=cluster,
            memory_limit_bytes=cluster.device_memory_bytes,
            hop_s=hop_s + cluster.latency_s,
        )
        for name in passes:
            schedule = PASSES[name].run(schedule, context)
        return lower(schedule)

    return make


def devices_of(emulation: Emulation) -> int:
    """Returns the cluster of all experiments: one node."""
    return emulation.cluster.devices_per_node


def mario(micro_batches: int) -> Experiment:
    """Returns the experiment of Mario, figure 2: a node of four A100-40G, 1F1B; with the model of
    section 6.1.
    """
    steps = ("apply-checkpoint", "overlap-recompute", "remove-redundancy", "prepose-forward")
    return Experiment(
        name="mario",
        title=f"Mario, LLaMA2-3B on 4 A100, {micro_batches} micro-batches of 2",
        device="analytic:A100-40:mario-llama2-3b:offloaded=no,flash=no",
        workers=4,
        sequence=1024,
        micro_batch=2,
        time_scale=6.0,
        cases=(
            EmulatedCase(name="1F1B", make=scheduled("1f1b", micro_batches)),
            EmulatedCase(name="checkpointed", make=scheduled("1f1b", micro_batches, steps[:1])),
            EmulatedCase(name="Mario", make=scheduled("1f1b", micro_batches, steps)),
        ),
        ratios=(
            Ratio(faster="Mario", slower="checkpointed", paper="1.27 (28/22)"),
            Ratio(faster="1F1B", slower="Mario", paper="1.05 (22/21)"),
        ),
    )


def two_bp() -> Experiment:
    """Returns the experiment of 2BP, figure 6: BERT-like on four V100, as many micro-batches as
    devices, or twice.
    """
    passes = ("split-backward", "fill-bubbles", "concatenate")
    shapes = (
        ("GPipe", "gpipe", 4, "1.17 (theory)"),
        ("1F1B-1", "1f1b", 4, "1.21"),
        ("1F1B-2", "1f1b-2", 8, "1.15"),
    )
    cases = tuple(
        EmulatedCase(
            name=f"{name}{' + 2BP' if split else ''}", make=scheduled(scheme, count, split)
        )
        for name, scheme, count, _ in shapes
        for split in ((), passes)
    )
    return Experiment(
        name="2bp",
        title="2BP, BERT-Large on 4 V100",
        device="analytic:V100-16:bert-large:offloaded=no,flash=no",
        workers=4,
        sequence=512,
        micro_batch=2,
        time_scale=20.0,
        cases=cases,
        ratios=tuple(
            Ratio(faster=f"{name} + 2BP", slower=name, paper=paper) for name, _, _, paper in shapes
        ),
    )


def obscura() -> Experiment:
    """Returns the experiment of Obscura, section 9.5: four A800 without NVLink, 32 sequences."""
    case = obscura_testbed.PaperCase(
        family="llama2", layers=40, num_stages=4, num_microbatches=32, gpu="A800-PCIE-80"
    )
    systems: Mapping[str, Callable[[obscura_testbed.PaperCase], obscura_testbed.SimulatedRun]] = {
        "DAPPLE+": obscura_testbed.dapple_plus,
        "Obscura": obscura_testbed.paper_obscura,
        "ours": obscura_testbed.ours,
    }
    options = f"half_layers=yes,offloaded=no,activations={obscura_testbed.ACTIVATION_FACTOR}"

    def made(system: Callable[[obscura_testbed.PaperCase], obscura_testbed.SimulatedRun]) -> Made:
        return lambda emulation: lower(system(case).schedule)

    return Experiment(
        name="obscura",
        title="Obscura, LLaMA-2 13B on 4 A800",
        device=f"analytic:{case.gpu}:{case.model}:{options}",
        workers=case.num_stages,
        sequence=obscura_testbed.SEQUENCE_LENGTH,
        micro_batch=1,
        time_scale=0.2,
        cases=tuple(EmulatedCase(name=name, make=made(system)) for name, system in systems.items()),
        ratios=(
            Ratio(faster="Obscura", slower="DAPPLE+", paper="1.27-1.31"),
            Ratio(faster="ours", slower="DAPPLE+", paper=""),
        ),
    )


EXPERIMENTS: Mapping[str, Callable[[], Experiment]] = MappingProxyType(
    {
        "spipe-10b": lambda: spipe(10),
        "spipe-19b": lambda: spipe(19),
        "mario": lambda: mario(4),
        "obscura": obscura,
        "2bp": two_bp,
    }
)


def configuration(experiment: Experiment, case: EmulatedCase, **emulation: Any) -> dict[str, Any]:
    """Returns the configuration without the plan and its consequences."""
    names = ("a", "b", "c", "d")
    return {
        "model": {"dtype": "fp16"},
        "data": {"path": "@stdlib", "sequence_length": experiment.sequence},
        "train": {"micro_batch": experiment.micro_batch, "global_batch": experiment.micro_batch},
        "optimizer": {"grad_dtype": "bf16", "threads": 1},
        "cluster": {
            "workers": experiment.workers // experiment.nodes,
            "device": f"emulated:{experiment.device}",
            "nodes": [{"name": name} for name in names[: experiment.nodes]],
        },
        "emulation": {
            "scale": 1e-4,
            "time_scale": experiment.time_scale,
            "machine": dict(experiment.machine),
            **case.emulation,
            **emulation,
        },
    }


def run(experiment: Experiment, case: EmulatedCase, steps: int, **emulation: Any) -> EmulatedRun:
    """Trains ``steps`` steps of a case; ``emulation`` overrides the experiment's settings."""
    config = configuration(experiment, case, **emulation)
    emulated = Emulation.of(parse_config(config))
    plan = case.make(emulated)
    config["train"] |= {
        "steps": steps,
        "global_batch": experiment.micro_batch * plan.num_microbatches,
    }
    idle = Load.now()
    step_s = [second / emulated.time_scale for second in train(config, plan)[1:]]
    simulation = simulate(
        plan, emulated.costs, emulated.cluster, optimizer=emulated.optimizer, stops_early=True
    )
    return EmulatedRun(
        measured_s=statistics.median(step_s),
        simulated_s=simulation.makespan_s,
        spread=max(step_s) / min(step_s) - 1.0,
        others=idle.others_since(),
    )


def train(config: dict[str, Any], plan: Plan) -> list[float]:
    """Returns seconds of every step, on the clock."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = trained(config, Path(folder), plan)
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        return [float(line["seconds"]) for line in lines if line["phase"] == "train"]


def trained(config: Mapping[str, Any], folder: Path, plan: Plan | None) -> Path:
    """Runs ``penstock train`` in ``folder``; returns the run directory. ``plan`` None: the run's
    own plan.

    Raises:
        SystemExit: with what it printed, if it failed.
    """
    run_dir, file = folder / "run", folder / "config.yaml"
    if plan is not None:
        (folder / "plan.json").write_text(plan.to_json())
        config = {**config, "schedule": {"file": str(folder / "plan.json")}}
    file.write_text(yaml.safe_dump(dict(config)))
    command = [sys.executable, "-m", "penstock.client.main", "train", str(file)]
    done = subprocess.run(
        [*command, "--run-dir", str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        raise SystemExit(done.stdout)
    return run_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Processor seconds of the machine and of our children until a moment."""

    at_s: float
    machine_s: float
    children_s: float

    @classmethod
    def now(cls) -> Load:
        """Returns busy CPU time without waiting for disks; stolen time counts as busy."""
        words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = map(int, words)
        ticks = user + nice + system + irq + softirq + steal
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(
            at_s=time.monotonic(),
            machine_s=ticks / os.sysconf("SC_CLK_TCK"),
            children_s=children.ru_utime + children.ru_stime,
        )

    def others_since(self) -> float:
        """Returns the cores that other processes kept busy since then."""
        now = Load.now()
        others_s = now.machine_s - self.machine_s - (now.children_s - self.children_s)
        return max(0.0, others_s / (now.at_s - self.at_s))


def overhead(steps: int) -> dict[str, float]:
    """Measures the costs of the runtime on SPipe's 19B plan."""
    experiment = spipe(19)
    case = next(case for case in experiment.cases if case.name == "SPipe")
    plan = case.make(Emulation.of(parse_config(configuration(experiment, case))))
    nothing = run(experiment, case, 4 * steps, time_scale=1e-6)
    real = run(experiment, case, steps, time_scale=1.0)
    instructions = statistics.mean(map(len, plan.programs))
    return {
        "instructions_per_worker": instructions,
        "instructions_per_second_and_worker": instructions / (nothing.measured_s * 1e-6),
        "step_without_work_s": nothing.measured_s * 1e-6,
        "step_s": real.measured_s,
        "simulated_step_s": real.simulated_s,
        "lost_share": real.measured_s / real.simulated_s - 1.0,
        "bound_of_lost_share": nothing.measured_s * 1e-6 / real.measured_s,
        "others": max(nothing.others, real.others),
    }


def report(experiment: Experiment, runs: Mapping[str, EmulatedRun]) -> str:
    """Returns a table of steps and one of speed-ups."""
    lines = [
        "",
        f"## {experiment.title}",
        "",
        "| plan | measured s | simulated s | error | spread | others |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in runs.items():
        lines.append(
            f"| {name} | {one.measured_s:.4g} | {one.simulated_s:.4g} | {100 * one.error:+.1f} % |"
            f" {100 * one.spread:.1f} % | {one.others:.1f} |"
        )
    lines += ["", "| speed-up | measured | simulated | paper |", "| --- | --- | --- | --- |"]
    for ratio in experiment.ratios:
        fast, slow = runs[ratio.faster], runs[ratio.slower]
        measured = slow.measured_s / fast.measured_s
        simulated = slow.simulated_s / fast.simulated_s
        lines.append(
            f"| {ratio.faster} over {ratio.slower} | {measured:.3f} | {simulated:.3f} |"
            f" {ratio.paper} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parses arguments, runs the cases, and prints each result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [*EXPERIMENTS, "overhead"]
    parser.add_argument("--experiments", nargs="*", default=names, choices=names)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    errors: list[float] = []
    for name in arguments.experiments:
        if name == "overhead":
            found[name] = overhead(arguments.steps)
            lines = [f"{key}: {value:.4g}" for key, value in found[name].items()]
            text = "\n".join(["", "## Overhead of the runtime, SPipe 19B", "", *lines])
        else:
            experiment = EXPERIMENTS[name]()
            runs = {case.name: run(experiment, case, arguments.steps) for case in experiment.cases}
            found[name] = {case: asdict(one) for case, one in runs.items()}
            errors += [abs(one.error) for one in runs.values()]
            text = report(experiment, runs)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    if errors:
        mean = 100 * statistics.mean(errors)
        sys.stdout.write(f"\nmean error of {len(errors)} plans: {mean:.2f} %\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
