"""Split backwards, dropped operators, swaps and weights bound anew: against a plain loop, and bit
for bit against a program that does none of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.host.errors import ConfigError
from penstock.models.data.batch import weighted_by_sample
from penstock.models.surgery import table as surgery_table
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs, OperatorCost
from penstock.planner.memory.footprint import device_peaks
from penstock.planner.passes import PASSES, PassContext
from penstock.planner.schedule.schedule import lower, schedule_of
from penstock.protocol.plan.instructions import Forward, Keep, Opcode, parse_program
from penstock.protocol.plan.plan import StageRange
from penstock.workers.attempt import UnusedWorkError
from penstock.workers.epoch import Job
from penstock.workers.handlers import HANDLERS
from penstock.workers.interpreter import InstructionError, run_job
from penstock.workers.platforms.cpu.device import CpuStageBuffer
from penstock.workers.state.routing import TensorRouting

NONE = {"recompute": "none"}
ANY = (OperatorCost(name="norm", forward_s=0.1, activation_bytes=1.0),)
"""Costs with operators count as measured."""


@pytest.fixture(name="poisoned")
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Released weights (of 16 bits, widened) are gone, and come back in other memory."""

    def release(self: CpuStageBuffer) -> None:
        for tensor in self.tensors:
            tensor.fill_(float("nan"))
        self.tensors = ()

    monkeypatch.setattr(CpuStageBuffer, "release", release)


def with_program(cluster: Any, text: str, **changes: Any) -> Any:
    """The one worker of a cluster, to run another program."""
    (worker,) = cluster.workers
    plan = replace(cluster.plan, programs=parse_program(text), **changes)
    worker.context = replace(worker.context, plan=plan, routing=TensorRouting.of(plan))
    return worker


def round_trip(keep: str, after: str, before: str, backward: str, last: str) -> str:
    """Two stages on one device, two micro-batches; weights are released whenever they can be.

    ``after`` and ``before`` stand behind each forward and before each ``backward``; ``last`` comes
    when the weights are released again. ``{}`` is stage and micro-batch, ``{s}`` the stage.
    """
    lines = ["device 0:"]
    for s in (0, 1):
        lines += [f"FW {s} phase=forward"]
        for m in (0, 1):
            lines += [f"F {s} {m} {keep}", after.format(f"{s} {m}")]
        lines += [f"RW {s} phase=forward"]
    for s in (1, 0):
        lines += [f"FW {s} phase=backward"]
        for m in (0, 1):
            lines += [before.format(f"{s} {m}"), f"{backward} {s} {m}"]
        lines += [f"RW {s} phase=backward", last.format(s=s), f"OG {s}"]
    return "\n".join(lines)


ALL, DROP = "keep=all", "keep=selective drop=mul,norm,silu"
WAYS = {
    "bound anew": (ALL, "", "", "B", ""),
    "swapped": (ALL, "SO {} fraction=0.5", "SI {} fraction=0.5", "B", ""),
    "dropped": (DROP, "", "R {}", "B", ""),
    "split": (ALL, "", "", "BI", "BW {s} 0,1"),
    "everything": (
        "keep=selective drop=attention_core,dropout,gate,mul,norm,silu",
        "SO {} fraction=1.0",
        "SI {0} fraction=1.0; R {0} after=gradient",
        "BI",
        "BW {s} 1; BW {s} 0",
    ),
}


@pytest.mark.parametrize(
    ("way", "chunk_rows", "by_sample"),
    [*((way, rows, False) for way in WAYS for rows in (24, 7)), ("everything", 24, True)],
)
def test_the_same_bits_in_every_way(
    make_cluster: Any,
    poisoned: None,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    chunk_rows: int,
    by_sample: bool,
) -> None:
    """Loss and gradients; with chunks of the loss that run again in the backward, too, and with
    weights of labels and smoothed ones.
    """
    monkeypatch.setattr(surgery_table, "loss_rows", lambda _: chunk_rows)
    cluster = make_cluster(
        scheme="gpipe",
        workers=1,
        micro_batches=2,
        schedule=NONE,
        model={"dtype": "bf16"},
        hf={"tie_word_embeddings": True, "num_hidden_layers": 3},
        label_smoothing=0.1 if by_sample else 0.0,
    )

    def job(attempt: int) -> Job:
        made = cluster.job(attempt=attempt)
        return replace(made, batches=weighted_by_sample(made.batches)) if by_sample else made

    wanted = cluster.train(job(1)), cluster.gradient_bytes()
    stages = (StageRange(start=0, stop=3, device=0), StageRange(start=3, stop=5, device=0))
    worker = with_program(
        cluster,
        round_trip(*WAYS[way]),
        forward_stages=stages,
        backward_stages=stages,
        rebinds_weights=True,
    )
    result = worker.run(job(2))
    assert ((result.loss_sum, result.loss_tokens), cluster.gradient_bytes()) == wanted


def test_graphs_are_kept_as_far_as_there_is_room_with_the_same_bits(
    make_cluster: Any, poisoned: None
) -> None:
    cluster = make_cluster(
        scheme="mobius",
        workers=1,
        micro_batches=3,
        schedule={"recompute": "full", "forward_stages": 4},
        model={"dtype": "bf16"},
    )
    wanted = cluster.train(cluster.job()), cluster.gradient_bytes()
    costs = Costs(blocks=(BlockCost(output_bytes=1.0, activation_bytes=10.0, operators=ANY),) * 8)
    least = max(peak.total_bytes for peak in device_peaks(cluster.plan, costs))
    context = PassContext(
        costs=costs, cluster=Cluster(devices_per_node=1), memory_limit_bytes=least + 60.0
    )
    plan = lower(PASSES["keep-graphs"].run(schedule_of(cluster.plan), context))
    forwards = [i for i in plan.programs[0] if isinstance(i, Forward)]
    assert {i.keep for i in forwards if i.stage == 2} == {Keep.ALL, Keep.INPUT}
    assert plan.rebinds_weights
    (worker,) = cluster.workers
    worker.context = replace(worker.context, plan=plan, routing=TensorRouting.of(plan))
    result = worker.run(cluster.job(attempt=2))
    assert ((result.loss_sum, result.loss_tokens), cluster.gradient_bytes()) == wanted


SMALL = {"scheme": "1f1b", "workers": 1, "micro_batches": 2, "schedule": NONE}
RESIDENT = """device 0:
FW 0 phase=forward
F 0 0 keep=selective drop=mul,norm; SO 0 0 fraction=0.5; SI 0 0 fraction=0.5; R 0 0; BI 0 0
F 0 1 keep=selective drop=mul,norm; SO 0 1 fraction=0.5
BW 0 0
SI 0 1 fraction=0.5; R 0 1; B 0 1
OG 0
RW 0 phase=forward"""


def test_everything_is_freed_when_an_attempt_breaks(make_cluster: Any) -> None:
    cluster = make_cluster(**SMALL)
    wanted = cluster.train(cluster.job()), cluster.gradient_bytes()
    worker = with_program(cluster, RESIDENT)
    found: list[Any] = []

    def fail(instruction: Any, attempt: Any) -> None:
        found.extend([attempt.saved_activations(0, 1), attempt.take_deferred(0, 0)])
        attempt.defer(0, 0, found[1])
        assert found[0].bytes and found[0].bytes_elsewhere and found[1].bytes
        raise ZeroDivisionError("no luck")

    handlers = {**HANDLERS, Opcode.BACKWARD_WEIGHT: fail}
    program = worker.context.plan.programs[0]
    with pytest.raises(InstructionError, match="no luck"):
        run_job(worker.context, cluster.job(attempt=2), program, handlers)
    kept, deferred = found
    assert (kept.bytes, kept.bytes_elsewhere, deferred.bytes) == (0, 0, 0)
    context = worker.context
    cluster.begin(2)
    worker.context = replace(worker.context, plan=context.plan, routing=context.routing)
    result = worker.run(cluster.job(attempt=3))
    assert ((result.loss_sum, result.loss_tokens), cluster.gradient_bytes()) == wanted


@pytest.mark.parametrize(
    ("line", "instead", "complaint"),
    [
        ("BW 0 0\n", "", r"left behind deferred weight gradients: \[\(0, 0\)\]"),
        ("BI 0 0\n", "\n", "deferred weight gradients of stage 0, micro-batch 0 are not here"),
        ("SI 0 0 fraction=0.5; ", "", r"saved tensor \d+ .* is swapped out; bring it back"),
        ("F 0 1", "SO 0 0 fraction=0.5; F 0 1", "activations of stage 0, micro-batch 0 are not"),
    ],
)
def test_programs_that_leave_something_out(
    make_cluster: Any, line: str, instead: str, complaint: str
) -> None:
    cluster = make_cluster(**SMALL)
    worker = with_program(cluster, RESIDENT)
    broken = RESIDENT.replace(line, instead, 1)
    assert broken != RESIDENT
    with pytest.raises((InstructionError, UnusedWorkError), match=complaint):
        worker.run(cluster.job(), parse_program(broken)[0])


def test_operators_to_drop_are_known(make_cluster: Any) -> None:
    with pytest.raises(ConfigError, match=r"schedule.drop = \['cmd'\]: unknown operator 'cmd';"):
        make_cluster(schedule={"recompute": "selective", "drop": ["cmd"]})
    with pytest.raises(ConfigError, match=r"operators to drop \(norm\) need 'selective'"):
        make_cluster(schedule={"recompute": "none", "drop": ["norm"]})
    with pytest.raises(ConfigError, match=r"'selective': needs operators to drop"):
        make_cluster(schedule={"recompute": "selective"})
