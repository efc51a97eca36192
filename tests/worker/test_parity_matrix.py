"""Every scheme, its backward whole or split, with every recomputation, swapped or not: loss and
gradients are those of a plain loop, and within a scheme the same to the last bit.

What is refused is in :func:`refusal`; nothing else may be.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any, NamedTuple

import pytest
import torch

from penstock.host.errors import ConfigError
from penstock.planner.cost.cluster import Cluster as Machines
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.passes import PASSES, PassContext
from penstock.planner.planning.configured import build_plan
from penstock.planner.schedule.layout import Order, OrderedInstruction
from penstock.planner.schedule.schedule import Schedule, lower, schedule_of
from penstock.planner.schemes import SCHEMES
from penstock.planner.validate.check import validate
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Recompute,
    SwapIn,
    SwapOut,
)
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.executable import check_executable
from penstock.workers.epoch import Job
from tests.worker.cluster import (
    GPT2,
    TOLERANCE,
    Cluster,
    build_cluster,
    make_config,
    relative_error,
)

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
SPLITS: dict[str, tuple[str, ...]] = {
    "whole": (),
    "split": ("split-backward",),
    "2bp": ("2bp",),
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {"recompute": "none"},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective", "drop": ["cmb", "core"]},
}
SWAPS = {"stay": 0.0, "swap": 0.5}
KEEPS = {"none": "all", "full": "input", "selective": "selective"}


Reference = tuple[float, dict[str, torch.Tensor]]
"""Loss sum and gradients by name of the plain loop."""


class Cell(NamedTuple):
    """One way to run a scheme."""

    split: str
    recompute: str
    swap: str


CELLS = [Cell(*words) for words in product(SPLITS, RECOMPUTE, SWAPS)]
CORNERS = [
    Cell("whole", "full", "stay"),
    Cell("whole", "none", "swap"),
    Cell("split", "selective", "swap"),
    Cell("2bp", "none", "stay"),
    Cell("2bp", "selective", "swap"),
]


def settings_of(scheme: str) -> dict[str, Any]:
    """A cluster of the scheme: two devices unless it needs more to do what is special about it."""
    stages: dict[str, dict[str, int]] = {
        "spipe": {"forward_stages": 4, "backward_stages": 6},
        "mobius": {"stages_per_device": 2},
        "megatron-offload": {"stages_per_device": 3},
    }
    return {
        "scheme": scheme,
        "workers": 4 if scheme == "bpipe" else 2,
        "hf": SMALL | ({"num_hidden_layers": 4} if scheme in stages else {}),
        "schedule": stages.get(scheme, {}),
    }


BF16 = {"model": {"dtype": "bf16"}}
UNTIED = {"hf": SMALL | {"tie_word_embeddings": False}}
DROPOUT = {"model": {"hf": GPT2}, "workers": 1}  # threads would share one generator
CERTAIN = {"model": {"hf": GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}}
TWO_NODES = {"nodes": 2}
OTHERS = {
    "1f1b, untied, on two nodes": ("1f1b", UNTIED | TWO_NODES),
    "chimera on two nodes": ("chimera", TWO_NODES),
    "zb-v, untied, on two nodes": ("zb-v", UNTIED | TWO_NODES),
    "mobius in bf16": ("mobius", BF16),
    "megatron-offload in bf16 on two nodes": ("megatron-offload", BF16 | TWO_NODES),
    "hanayo, gpt2": ("hanayo", CERTAIN),
    "1f1b, gpt2 with dropout": ("1f1b", DROPOUT),
    "mobius, gpt2 with dropout in bf16": (
        "mobius",
        DROPOUT | {"model": {"hf": GPT2, "dtype": "bf16"}},
    ),
}
LABS = {scheme: settings_of(scheme) for scheme in SCHEMES} | {
    name: settings_of(scheme) | changes for name, (scheme, changes) in OTHERS.items()
}


def refusal(scheme: str, cell: Cell) -> str | None:
    """Why a cell cannot be; part of the message."""
    if scheme == "spipe" and cell.recompute != "full":
        return (
            f"schedule.recompute = {cell.recompute!r}: spipe runs forward and backward of a block"
            " on different devices, so it keeps no activations; accepted: full"
        )
    if scheme == "bpipe" and cell.recompute == "full":
        return "schedule.recompute = 'full': bpipe does not recompute this way; accepted: none, sel"
    if cell.recompute == "full" and cell.swap != "stay":
        return "no activations: no FORWARD with keep=all or keep=selective ran before it"
    return None


def swapped(schedule: Schedule, fraction: float) -> Schedule:
    """This share of what a forward keeps goes to the host at once and comes back when it is
    needed. What the schedule swaps itself stays as it is.
    """
    if not fraction:
        return schedule
    orders = tuple(tuple(_swapped(order, fraction)) for order in schedule.orders)
    return replace(schedule, orders=orders)


def _swapped(order: Order, fraction: float) -> Iterator[OrderedInstruction]:
    away = {(i.stage, i.micro_batch) for i in order if isinstance(i, SwapOut)}
    back: set[tuple[int, int]] = set(away)
    for i in order:
        if isinstance(i, Recompute | Backward | BackwardInput):
            key = (i.stage, i.micro_batch)
            if key not in back:
                back.add(key)
                yield SwapIn(stage=i.stage, micro_batch=i.micro_batch, fraction=fraction)
        yield i
        if isinstance(i, Forward) and (i.stage, i.micro_batch) not in away:
            yield SwapOut(stage=i.stage, micro_batch=i.micro_batch, fraction=fraction)


def split(schedule: Schedule, way: str) -> Schedule:
    """``split``: halves of backwards next to each other. ``2bp``: apart, where devices wait if
    every block takes a second each way, else all weight gradients at the end.
    """
    block = BlockCost(forward_s=1.0, recompute_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    context = PassContext(
        costs=Costs(blocks=(block,) * schedule.layout.num_blocks),
        cluster=Machines(devices_per_node=4),
    )
    for name in SPLITS[way]:
        schedule = PASSES[name].run(schedule, context)
    whole = any(isinstance(i, Backward) for order in schedule.orders for i in order)
    return at_the_end(schedule) if way == "2bp" and (whole or not late(schedule)) else schedule


def at_the_end(schedule: Schedule) -> Schedule:
    """All weight gradients of a device after everything else, in their order."""
    split = PASSES["split-backward"].run(schedule, None)
    return replace(
        schedule,
        orders=tuple(
            tuple(sorted(order, key=lambda i: isinstance(i, BackwardWeight)))
            for order in split.orders
        ),
    )


def late(schedule: Schedule) -> bool:
    """Whether a device does anything else between the halves of some backward."""
    return any(
        isinstance(first, BackwardInput) and not isinstance(second, BackwardWeight)
        for order in schedule.orders
        for first, second in pairwise(order)
    )


class Outcome(NamedTuple):
    """What a plan computes."""

    loss_sum: float
    bits: list[bytes]


def train(cluster: Cluster, job: Job, reference: Reference | None) -> float:
    """Sum of the losses of a job that leaves nothing behind, held against the plain loop's."""
    loss_sum, tokens = cluster.train(job)
    cluster.check_finished(job)
    assert tokens == job.counted_tokens
    if reference is not None:
        wanted_loss, wanted = reference
        assert loss_sum == pytest.approx(wanted_loss, rel=TOLERANCE)
        assert relative_error(cluster.gradients(), wanted) < TOLERANCE
    return loss_sum


@dataclass
class Lab:
    """A cluster on which all cells of a scheme run: their gradients lie in the same places."""

    settings: dict[str, Any]
    cluster: Cluster
    first: Plan
    """The scheme as it is."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def job(self) -> Job:
        """The same data for all, under a number of the epoch's own."""
        return self.cluster.job(attempt=self.cluster.epoch, scale=8.0)

    @cached_property
    def reference(self) -> Reference | None:
        """Loss and gradients of the plain loop, which draws no dropout like ours."""
        dropout = getattr(self.cluster.hf_config, "resid_pdrop", 0.0)
        return None if dropout else self.cluster.reference(self.job)

    def plan(self, cell: Cell) -> Plan:
        """The plan of a cell.

        Raises:
            ConfigError: nobody can run it.
        """
        schedule = self.settings["schedule"] | RECOMPUTE[cell.recompute]
        config = make_config(**{**self.settings, "schedule": schedule})
        built = schedule_of(build_plan(config, self.cluster.table))
        found = swapped(split(built, cell.split), SWAPS[cell.swap])
        plan = lower(found)
        validate(plan, self.cluster.table)
        check_executable(plan, devices_per_node=config.cluster.workers)
        return plan

    def outcome(self, plan: Plan) -> Outcome:
        """What it computes, held against the plain loop; equal plans run once."""
        if plan.digest not in self.outcomes:
            self.outcomes[plan.digest] = self._run(plan)
        return self.outcomes[plan.digest]

    def _run(self, plan: Plan) -> Outcome:
        cluster = self.cluster
        cluster.adopt(plan)
        cluster.spoil_gradients()
        job = self.job
        loss_sum = train(cluster, job, self.reference)
        return Outcome(loss_sum, cluster.gradient_bytes())


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """One for all cells of a scheme."""
    settings = LABS[request.param]
    with ExitStack() as stack:
        cluster = build_cluster(stack, make_config(**settings))
        lab = Lab(settings, cluster, cluster.plan)
        lab.outcome(lab.first)  # and connections that the leak check must not count to a test
        yield lab


def check_does_what_it_says(plan: Plan, cell: Cell) -> None:
    """So that no cell is another one in disguise."""
    schedule = schedule_of(plan)
    orders = [i for order in schedule.orders for i in order]
    kinds = Counter(map(type, orders))
    forwards = [i for i in orders if isinstance(i, Forward)]
    to_host = [i for i in orders if isinstance(i, SwapOut) and i.peer is None]
    to_peers = kinds[SwapOut] - len(to_host)
    assert {i.keep.value for i in forwards} == {KEEPS[cell.recompute]}
    assert bool(kinds[Recompute]) == (cell.recompute != "none")
    assert len(to_host) == (len(forwards) - to_peers if cell.swap == "swap" else 0)
    splits_itself = plan.scheme in ("zb-h1", "zb-v", "dualpipe-v")
    assert bool(kinds[BackwardInput]) == (cell.split != "whole" or splits_itself)
    if cell.split != "whole":
        assert not kinds[Backward]
    if cell.split == "2bp":
        assert late(schedule)


def check_cell(lab: Lab, cell: Cell) -> None:
    plan = lab.plan(cell)
    check_does_what_it_says(plan, cell)
    found, baseline = lab.outcome(plan), lab.outcome(lab.first)
    assert found.loss_sum == baseline.loss_sum
    same = [a == b for a, b in zip(found.bits, baseline.bits, strict=True)]
    assert all(same), f"{same.count(False)} of {len(same)} gradients differ in their bits"


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
@pytest.mark.parametrize("lab", SCHEMES, indirect=True, scope="module")
def test_schemes(lab: Lab, cell: Cell) -> None:
    reason = refusal(lab.settings["scheme"], cell)
    if reason is None:
        check_cell(lab, cell)
    else:
        with pytest.raises(ConfigError, match=re.escape(reason)):
            lab.plan(cell)


@pytest.mark.parametrize("cell", CORNERS, ids="-".join)
@pytest.mark.parametrize("lab", OTHERS, indirect=True, scope="module")
def test_other_models_and_clusters(lab: Lab, cell: Cell) -> None:
    if refusal(lab.settings["scheme"], cell) is None:
        check_cell(lab, cell)


def test_the_matrix_is_as_large_as_it_looks() -> None:
    verdicts = Counter(refusal(scheme, cell) is None for scheme, cell in product(SCHEMES, CELLS))
    assert verdicts == {True: 210, False: 60}


PLANS = [
    # scheme, devices, nodes, schedule, tied: other shapes, and passes as a configuration names them
    ("1f1b", 1, 1, {"recompute": "none"}, False),
    ("1f1b", 4, 2, {"recompute": "full"}, True),
    ("mobius", 4, 2, {"forward_stages": 8}, True),
    ("spipe", 1, 1, {}, False),
    ("spipe", 2, 1, {"forward_stages": 3, "backward_stages": 7}, True),
    ("spipe", 4, 2, {"forward_stages": 5, "backward_stages": 8}, True),
    ("interleaved", 2, 2, {"recompute": "full", "stages_per_device": 4}, True),
    ("chimera", 4, 2, {"recompute": "none"}, False),
    ("hanayo", 2, 2, {"recompute": "full", "forward_stages": 8}, False),
    ("zb-h1", 4, 2, {}, False),
    ("1f1b", 4, 1, {"recompute": "none", "passes": ["mario"]}, True),
    ("1f1b", 4, 1, {"recompute": "none", "passes": ["mario", "split-backward"]}, True),
    ("1f1b", 2, 1, {"recompute": "none", "passes": ["split-backward", "concatenate"]}, True),
    ("1f1b", 2, 2, {"recompute": "selective", "drop": ["mlp", "attention"]}, False),
    ("gpipe", 2, 1, {"recompute": "none", "passes": ["apply-checkpoint"]}, False),
    ("spipe", 2, 2, {"passes": ["skip-dead-forward"]}, True),
    ("spipe", 2, 1, {"passes": ["match-stages", "skip-dead-forward", "overlap-recompute"]}, True),
    ("1f1b", 4, 1, {"recompute": "none", "replicas": 2}, True),
    ("spipe", 4, 2, {"replicas": 2, "passes": ["skip-dead-forward"]}, True),
    ("chimera", 4, 2, {"recompute": "full", "replicas": 2}, True),
    ("gpipe", 2, 2, {"replicas": 2}, True),
    ("gpipe", 4, 1, {"replicas": 4, "reduce_gradients": True}, True),
    ("1f1b", 4, 2, {"replicas": 2, "reduce_gradients": False}, True),
    ("zb-h1", 4, 1, {"replicas": 2, "reduce_gradients": True}, False),
    ("zero3-offload", 1, 1, {}, True),
    ("zero3-offload", 4, 1, {"recompute": "selective", "drop": ["mlp"]}, False),
    ("zero3-offload", 4, 2, {"recompute": "full", "stages_per_device": 3}, True),
]


@pytest.mark.parametrize(("scheme", "devices", "nodes", "schedule", "tied"), PLANS)
def test_other_plans(
    make_cluster: Any, scheme: str, devices: int, nodes: int, schedule: Any, tied: bool
) -> None:
    cluster = make_cluster(
        scheme=scheme,
        workers=devices,
        nodes=nodes,
        schedule=schedule,
        hf={"tie_word_embeddings": tied},
    )
    job = cluster.job(scale=8.0)
    train(cluster, job, cluster.reference(job))


def test_concatenated_weight_gradients_round_otherwise(make_cluster: Any) -> None:
    """One product over the rows of all micro-batches: within tolerance, with bits of its own."""
    cluster = make_cluster(
        scheme="zb-v",
        schedule={"passes": ["concatenate"], "weight_gradients": "concatenated"},
        hf={"num_hidden_layers": 2},
    )
    job = cluster.job()
    train(cluster, job, cluster.reference(job))
    joined = cluster.gradients()
    weights = [i for p in cluster.plan.programs for i in p if isinstance(i, BackwardWeight)]
    assert any(len(i.micro_batches) > 1 for i in weights)
    cluster.adopt(replace(cluster.plan, concatenates_gradients=False))
    train(cluster, cluster.job(attempt=2), cluster.reference(job))
    different = {
        name for name, found in cluster.gradients().items() if not found.equal(joined[name])
    }
    assert "model.layers.0.mlp.up_proj.weight" in different
    assert not any("norm" in name or "embed" in name for name in different)
