"""Sums of gradients over the routes of a plan, made by one device for all."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from penstock.protocol.plan.instructions import Opcode
from penstock.protocol.run.names import node_of_device
from penstock.workers.data import job_number
from penstock.workers.device import as_tensor
from penstock.workers.interpreter import InstructionError, JobResult
from penstock.workers.waiting import Interrupted
from tests.worker.cluster import Cluster

FOUR = {"scheme": "gpipe", "workers": 4, "schedule": {"replicas": 4, "reduce_gradients": True}}
ZERO3 = {"scheme": "zero3-offload", "workers": 4, "nodes": 2}


def routes_apart(make_cluster: Any) -> tuple[Cluster, list[list[torch.Tensor]]]:
    """A cluster of four replicas, and the gradients of each block that each of them publishes."""
    apart = make_cluster(
        scheme="gpipe", workers=4, schedule={"replicas": 4, "reduce_gradients": False}
    )
    apart.train(apart.job())
    return apart, [
        [torch.from_numpy(apart.memories[0].grads(block.index, 1, k).copy()) for k in range(4)]
        for block in apart.table.blocks
    ]


def test_the_root_adds_in_the_order_of_routes(make_cluster: Any) -> None:
    """Bit for bit its own sum, then that of route 1, 2 and 3."""
    _, sums = routes_apart(make_cluster)
    summed = make_cluster(**FOUR)
    summed.train(summed.job())
    orders = set()
    for block, (first, *others) in zip(summed.table.blocks, sums, strict=True):
        expected = first.clone()
        for other in others:
            expected += other
        found = as_tensor(summed.memories[0].grads(block.index, 1, 0), summed.table.grad_dtype)
        assert torch.equal(found, expected)
        backwards = others[-1].clone()
        for other in (*others[-2::-1], first):
            backwards += other
        orders.add(torch.equal(found, backwards))
    assert orders == {False}, "the order would not matter"


def test_one_contribution_for_each_use(make_cluster: Any) -> None:
    """Roots of shared-out weights take turns, and their nodes own and hold what they publish."""
    cluster = make_cluster(**ZERO3, hf={"tie_word_embeddings": True})
    nodes = [
        node_of_device(cluster.config, block % 4) for block in range(len(cluster.owners.owner))
    ]
    assert list(cluster.owners.owner) == nodes
    assert {a != b for a, b in pairwise(nodes)} == {True, False}
    uses = [block.contributions for block in cluster.table.blocks]
    assert [len(places) for places in cluster.owners.computed_on] == uses
    assert max(uses) == 2
    job = cluster.job()
    cluster.train(job)
    for node in range(2):
        expected = [
            (1, block, use)
            for block, owner in enumerate(nodes)
            if owner == node
            for use in range(uses[block])
        ]
        assert cluster.announced(node, len(expected)) == expected


def test_the_same_attempt_gives_the_same_bits(make_cluster: Any) -> None:
    cluster = make_cluster(**ZERO3, grad_dtype="bf16")
    first = cluster.train(cluster.job(attempt=1)), cluster.gradient_bytes()
    other = cluster.train(cluster.job(attempt=2, seed=4)), cluster.gradient_bytes()
    again = cluster.train(cluster.job(attempt=3)), cluster.gradient_bytes()
    assert first == again != other


def test_an_abort_between_send_and_sum_leaves_nothing_behind(make_cluster: Any) -> None:
    cluster = make_cluster(**ZERO3)
    wanted = cluster.train(cluster.job(attempt=1)), cluster.gradient_bytes()
    cluster.begin(2)
    transport = cluster.workers[3].context.transport
    real_send = transport.send

    def send(*arguments: Any) -> None:
        real_send(*arguments)
        cluster.abort_all()

    transport.send = send
    results = cluster.run(cluster.job(attempt=2))
    del transport.send
    assert {type(result) for result in results} <= {Interrupted, JobResult}
    assert isinstance(results[3], Interrupted)
    cluster.begin(3)
    assert (cluster.train(cluster.job(attempt=3)), cluster.gradient_bytes()) == wanted


def test_a_route_that_sends_no_sums_is_named(make_cluster: Any) -> None:
    cluster = make_cluster(
        scheme="gpipe",
        workers=2,
        schedule={"replicas": 2, "reduce_gradients": True},
        timeout_s=0.5,
    )
    assert any(i.opcode is Opcode.REDUCE_GRADIENTS for i in cluster.plan.programs[1])
    with pytest.raises(
        InstructionError, match=r"'OG 0' failed: .* for reduction of stage 1, micro"
    ):
        cluster.workers[0].run(cluster.job())


def test_evaluation_reads_shared_out_weights(make_cluster: Any) -> None:
    cluster = make_cluster(**ZERO3)
    job = cluster.job(phase="eval", attempt=job_number(1, 0))
    loss_sum, loss_tokens = cluster.train(job)
    assert loss_tokens == job.counted_tokens
    assert loss_sum == pytest.approx(cluster.reference(job)[0], rel=1e-6)
