"""The optimizer's tail: time from the last gradient on a device to the committed step, by scheme.

    python -m bench.tail [--parts here simulated emulated] [--schemes gpipe spipe …]
                         [--modes early …] [--clusters 4:spipe-10b …] [--rounds 3] [--steps 12]
                         [--json]

============ =======================================================================================
mode         what the optimizer does (bytes of memory traffic a parameter, bf16 gradients)
============ =======================================================================================
in-place     the papers' step behind each stage's gradients (28): ``rollback: arithmetic``
synchronous  the same, but only when all gradients are there (Mobius, Megatron); not trained *here*
advance      settles the step before and previews the new one, in one sweep (30)
early        previews (16) behind the gradients; settles (26) during the next forward
auto         early for as many of the last blocks as the planner chooses (column ``early``), advance
             for the others; not *here*, where the planner lets CPU workers advance everything
============ =======================================================================================

*here*: real runs on this machine's cores, a model of ``--hidden`` and ``--layers`` with few tokens.
All modes of a scheme run one after the other, round after round. ``tail`` and ``step`` are medians
over rounds of a run's medians, from ``metrics.jsonl``; ratios are medians of the rounds' ratios to
``in-place``. ``traced`` is the tail in the run's trace (without the messages around the decision),
``simulated`` the simulator's with the costs of that trace, ``error`` that one's of ``traced``.

*simulated*: a host of 32 cores whose sweeps could move 600 GB/s and whose eight memory channels
move 164, with as many GPUs as told. *emulated*: the same plans through the real runtime, in
modelled time (``--time-scale``), traced and simulated; ``in-place`` and ``synchronous`` look at the
gradients first there (2 bytes more), as they must where Inf may come.

The text table has a line a scheme: tails with the ratio to in-place, and steps, in ms; at its end
the least and the largest ``error``. ``--json``: ``{"rows": [a mode of a scheme of a part, …]}``, in
seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.emulated import trained
from penstock.client.views.trace.comparison import TraceOutputs, make_trace_report
from penstock.planner.cost.analytic import AnalyticCosts, analytic_costs
from penstock.planner.cost.cluster import ADVANCE, IN_PLACE, SYNCHRONOUS, OptimizerModel
from penstock.planner.cost.sources import Prices
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.planning.overlapped_updates import choose_overlap
from penstock.planner.planning.pipeline import PlanContext
from penstock.planner.schedule.schedule import lower
from penstock.planner.simulate import Simulation, simulate
from penstock.protocol.plan.plan import Plan

SCHEMES = ("gpipe", "1f1b", "chimera", "zb-h1", "mobius", "spipe")
REFERENCE = "in-place"
MODELS: Mapping[str, OptimizerModel] = MappingProxyType(
    {
        REFERENCE: IN_PLACE,
        "synchronous": SYNCHRONOUS,
        "advance": ADVANCE,
        "early": ADVANCE,
        "auto": ADVANCE,
    }
)
"""Of *advance*, *early* and *auto* the plan says how each block is done."""
OPTIMIZER: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        REFERENCE: {"rollback": "arithmetic"},
        "advance": {"settle": "advance"},
        "early": {"settle": "early"},
    }
)
"""Keys of the configuration, of the modes that train *here*."""
GPU, SEQUENCE, MICRO_BATCH, MICRO_BATCHES_EACH = "A100-80", 1024, 2, 2
"""Of the simulated clusters; the last for each GPU."""
WARM_UP = 3
"""Steps that are left out: the first only previews, all of them touch memory for the first time."""

Row = dict[str, Any]


def train(config: Mapping[str, Any], plan: Plan | None = None) -> Row:
    """Returns medians over the steps of a run with traces: seconds on its clock."""
    with tempfile.TemporaryDirectory() as folder:
        traced = {**config, "observability": {"trace": True}}
        run_dir = trained(traced, Path(folder), plan)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        lines = lines[WARM_UP:]
        report = make_trace_report(run_dir, None, None, TraceOutputs())
        return {
            "tail_s": statistics.median(line["optimizer_tail_seconds"] for line in lines),
            "step_s": statistics.median(line["seconds"] for line in lines),
            "traced_s": report.measured.optimizer_tail_s,
            "simulated_s": report.simulated.optimizer_tail_s,
        }


def here_configuration(options: argparse.Namespace, scheme: str, mode: str) -> dict[str, Any]:
    """Returns a configuration of many parameters and few tokens: as many micro-batches as
    workers, each of one sequence.
    """
    return {
        "model": {
            "dtype": "bf16",
            "hf": {
                "model_type": "llama",
                "hidden_size": options.hidden,
                "intermediate_size": options.hidden * 27 // 10,
                "num_hidden_layers": options.layers,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "max_position_embeddings": 64,
                "tie_word_embeddings": False,
            },
        },
        "data": {"path": "@stdlib", "tokenizer": "byte", "sequence_length": 16},
        "train": {
            "steps": options.steps,
            "global_batch": 2,
            "micro_batch": 1,
            "clip_grad_norm": None,
        },
        "optimizer": {"name": "adamw", "lr": 1e-4, "grad_dtype": "bf16", **OPTIMIZER[mode]},
        "schedule": {"scheme": scheme},
        "cluster": {"workers": 2, "device": "cpu"},
    }


def here(options: argparse.Namespace) -> Iterator[Row]:
    """Measures real runs in turns; yields a row for each scheme and mode."""
    modes = [mode for mode in options.modes if mode in OPTIMIZER]
    for scheme in options.schemes:
        rounds: list[dict[str, Row]] = [
            {mode: train(here_configuration(options, scheme, mode)) for mode in modes}
            for _ in range(options.rounds)
        ]
        for mode in modes:
            own = [found[mode] for found in rounds]
            row = {"part": "here", "cluster": "2 workers", "scheme": scheme, "mode": mode}
            row |= {key: statistics.median(one[key] for one in own) for key in own[0]}
            row["error"] = statistics.median(o["simulated_s"] / o["traced_s"] - 1 for o in own)
            if REFERENCE in modes:
                row["of_in_place"] = statistics.median(
                    found[mode]["tail_s"] / found[REFERENCE]["tail_s"] for found in rounds
                )
            yield row


def cluster_of(text: str) -> tuple[int, str]:
    """Parses ``4:spipe-10b``: GPUs and model."""
    gpus, _, model = text.partition(":")
    if not gpus.isdigit() or not model:
        raise argparse.ArgumentTypeError(f"{text!r}: expected GPUS:MODEL, such as 4:spipe-10b")
    return int(gpus), model


def bed_of(gpus: int, model: str) -> AnalyticCosts:
    """Returns a cluster of one node, bound by its memory channels."""
    return analytic_costs(
        GPU, model, sequence_length=SEQUENCE, micro_batch=MICRO_BATCH, devices_per_node=gpus
    )


def plan_of(bed: AnalyticCosts, gpus: int, scheme: str) -> Plan:
    """Returns the scheme's plan with full recomputation."""
    request = ScheduleRequest(
        scheme=scheme,
        num_devices=gpus,
        num_microbatches=MICRO_BATCHES_EACH * gpus,
        recompute="full",
    )
    return lower(build_schedule(request, [block.forward_s for block in bed.costs.blocks]))


def settled(plan: Plan, bed: AnalyticCosts, mode: str) -> Plan:
    """Returns the plan with the blocks that the mode settles early."""
    if mode == "auto":
        prices = Prices(costs=bed.costs, cluster=bed.cluster)
        return choose_overlap(plan, PlanContext(prices=prices, stops_early=True))
    blocks = tuple(range(plan.num_blocks)) if mode == "early" else ()
    return replace(plan, settled_early=blocks)


def simulated(options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each cluster, scheme and mode."""
    for gpus, model in options.clusters:
        bed = bed_of(gpus, model)
        for scheme in options.schemes:
            yield from simulated_rows(bed, plan_of(bed, gpus, scheme), options.modes)


def simulated_rows(bed: AnalyticCosts, plan: Plan, modes: Sequence[str]) -> Iterator[Row]:
    """Yields a row for each mode."""

    def run(plan: Plan, mode: str) -> Simulation:
        return simulate(plan, bed.costs, bed.cluster, optimizer=MODELS[mode], stops_early=True)

    reference = run(plan, REFERENCE)
    fits = max(p.total_bytes for p in reference.peaks) <= bed.cluster.device_memory_bytes
    for mode in modes:
        divided = settled(plan, bed, mode)
        found = run(divided, mode)
        yield {
            "part": "simulated",
            "cluster": f"{plan.num_devices} GPUs, {bed.model.name}"
            + ("" if fits else ", too large"),
            "scheme": plan.scheme,
            "mode": mode,
            "tail_s": found.optimizer_tail_s,
            "step_s": found.makespan_s,
            "of_in_place": found.optimizer_tail_s / reference.optimizer_tail_s,
            "early": f"{len(divided.settled_early)} of {plan.num_blocks}",
        }


def emulated(options: argparse.Namespace) -> Iterator[Row]:
    """Runs on emulated GPUs and hosts, which need a core only now and then; not interleaved."""
    for gpus, model in options.clusters:
        bed = bed_of(gpus, model)
        for scheme in options.schemes:
            plan, tails = plan_of(bed, gpus, scheme), dict[str, float]()
            for mode in options.modes:
                divided = settled(plan, bed, mode)
                row = train(emulated_configuration(options, gpus, model, mode), divided)
                scaled = {key: row[key] / options.time_scale for key in ("tail_s", "step_s")}
                tails[mode] = scaled["tail_s"]
                yield {
                    "part": "emulated",
                    "cluster": f"{gpus} GPUs, {model}",
                    "scheme": scheme,
                    "mode": mode,
                    "early": f"{len(divided.settled_early)} of {plan.num_blocks}",
                    **row,
                    **scaled,
                    "error": row["simulated_s"] / row["traced_s"] - 1,
                    "of_in_place": tails[mode] / tails[REFERENCE] if REFERENCE in tails else None,
                }


def emulated_configuration(
    options: argparse.Namespace, gpus: int, model: str, mode: str
) -> dict[str, Any]:
    """Returns the configuration without the plan."""
    way = {"rollback": "arithmetic"} if MODELS[mode] is not ADVANCE else {"settle": "auto"}
    return {
        "model": {"dtype": "bf16"},
        "data": {"path": "@stdlib", "sequence_length": SEQUENCE},
        "train": {
            "steps": options.steps,
            "micro_batch": MICRO_BATCH,
            "global_batch": MICRO_BATCH * MICRO_BATCHES_EACH * gpus,
            "clip_grad_norm": None,
        },
        "optimizer": {
            "grad_dtype": "bf16",
            "threads": 1,
            **way,
        },
        "cluster": {"workers": gpus, "device": f"emulated:analytic:{GPU}:{model}"},
        "emulation": {
            "scale": 1e-4,
            "time_scale": options.time_scale,
            "optimizer_start": str(MODELS[mode].start),
        },
    }


PARTS = MappingProxyType({"here": here, "simulated": simulated, "emulated": emulated})


def cell(row: Row | None, key: str) -> str:
    """Returns milliseconds of a mode, and the tail's ratio to in-place."""
    if row is None:
        return ""
    text = f"{1e3 * row[key]:.{0 if row[key] >= 1 else 1}f}"
    ratio = row.get("of_in_place")
    return text if ratio is None or key != "tail_s" else f"{text} ({ratio:.2f})"


def show(rows: Iterable[Row]) -> None:
    """Prints Markdown with a line for each scheme: tails of all modes, then steps, in ms."""
    modes = tuple(MODELS)
    names = ("part", "cluster", "scheme", *(f"tail {mode}" for mode in modes), "auto: early")
    names += (*(f"step {mode}" for mode in modes), "simulated tail beside traced")
    print(f"| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    for key, group in itertools.groupby(rows, lambda r: (r["part"], r["cluster"], r["scheme"])):
        found = {row["mode"]: row for row in group}
        errors = [row["error"] for row in found.values() if "error" in row]
        cells = (
            *key,
            *(cell(found.get(mode), "tail_s") for mode in modes),
            found["auto"]["early"] if "auto" in found else "",
            *(cell(found.get(mode), "step_s") for mode in modes),
            f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f} %" if errors else "",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["here", "simulated"])
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--modes", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--clusters",
        nargs="+",
        type=cluster_of,
        default=[(4, "spipe-10b"), (8, "spipe-19b")],
        metavar="GPUS:MODEL",
    )
    parser.add_argument("--rounds", type=int, default=3, help="here: runs of each mode")
    parser.add_argument("--steps", type=int, default=12, help=f"of a run, {WARM_UP} to warm up")
    parser.add_argument("--hidden", type=int, default=640, help="here: of the model")
    parser.add_argument("--layers", type=int, default=8, help="here: of the model")
    parser.add_argument("--time-scale", type=float, default=0.5, help="emulated: of its seconds")
    parser.add_argument("--json", action="store_true", help='{"rows": […]} instead of the table')
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: at least {WARM_UP + 1}")
    return options


def main() -> None:
    """Runs the parts and prints."""
    options = parse_arguments()
    rows = (row for part in options.parts for row in PARTS[part](options))
    if options.json:
        print(json.dumps({"rows": list(rows)}))
    else:
        show(rows)


if __name__ == "__main__":
    main()
