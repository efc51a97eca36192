"""Attempts and evaluations on devices: versions, waits, aborts, bad programs, faults.

Whether schemes compute what a plain loop does is in ``test_parity_matrix.py``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.host.errors import ConfigError, ExitCode
from penstock.protocol.plan.instructions import Opcode, parse_instruction
from penstock.protocol.plan.plan import Plan, StageRange
from penstock.protocol.run.executable import check_executable
from penstock.shm.control import ControlView
from penstock.workers.attempt import UnusedWorkError
from penstock.workers.data import job_number
from penstock.workers.handlers import HANDLERS
from penstock.workers.interpreter import InstructionError, JobResult, run_job
from penstock.workers.state.weights import buffers_needed
from penstock.workers.waiting import Interrupted
from tests.worker.cluster import TOLERANCE, relative_error
from tests.worker.ending import aborting


def test_replicas_add_up_to_one_pipeline_with_the_whole_batch(make_cluster: Any) -> None:
    """Only the order of additions differs."""
    results = []
    for workers, replicas in ((2, 1), (4, 2)):
        cluster = make_cluster(scheme="1f1b", workers=workers, schedule={"replicas": replicas})
        loss = cluster.train(cluster.job())
        results.append((loss, cluster.gradients()))
    (once, gradients), (twice, summed) = results
    assert once[0] == pytest.approx(twice[0], rel=1e-7) and once[1] == twice[1]
    assert relative_error(summed, gradients) < TOLERANCE


def test_weight_buffers_are_those_that_the_device_fetches_at_a_time(make_cluster: Any) -> None:
    """One for each resident stage, two where weights are streamed."""
    found = {}
    for scheme, schedule in (
        ("1f1b", {}),
        ("chimera", {}),
        ("interleaved", {"stages_per_device": 4}),
        ("mobius", {"stages_per_device": 4}),
    ):
        plan = make_cluster(scheme=scheme, workers=2, schedule=schedule).plan
        found[scheme] = [
            buffers_needed(*both) for both in zip(plan.programs, plan.evaluation, strict=True)
        ]
    assert found == {"1f1b": [1, 1], "chimera": [2, 2], "interleaved": [4, 4], "mobius": [2, 2]}


def test_ready_words_name_epoch_and_attempt(make_cluster: Any) -> None:
    cluster = make_cluster(workers=2, hf={"tie_word_embeddings": True})
    cluster.train(cluster.job(attempt=9))
    control = cluster.memories[0].control
    assert {control.ready(b, k) for b, k in cluster.contributions(0)} == {(1, 9)}


def test_the_same_attempt_gives_the_same_bits(make_cluster: Any) -> None:
    cluster = make_cluster(scheme="spipe", workers=2, nodes=2, hf={"tie_word_embeddings": True})
    first = cluster.train(cluster.job(attempt=1)), cluster.gradient_bytes()
    other = cluster.train(cluster.job(attempt=2, seed=4)), cluster.gradient_bytes()
    again = cluster.train(cluster.job(attempt=3)), cluster.gradient_bytes()
    assert first == again
    assert first != other


def test_versions_alternate_slots_and_copies(make_cluster: Any) -> None:
    cluster = make_cluster(workers=1)
    memory = cluster.memories[0]
    for block in memory.owned_blocks():
        memory.weights(block, 1)[:] = memory.weights(block, 0)
        memory.weights(block, 0)[:] = float("nan")
        memory.control.set_slot_version(block, 1, 1)
        memory.grads(block, 1, 0)[:] = 5.0
    memory.control.set_committed(1)
    job = cluster.job()
    cluster.train(replace(job, base_version=1))
    assert all(torch.isfinite(g).all() for g in cluster.gradients(target=2).values())
    assert {float(memory.grads(b, 1, 0)[0]) for b in memory.owned_blocks()} == {5.0}


def test_waits_for_the_commit(make_cluster: Any) -> None:
    cluster = make_cluster(workers=2)
    memory = cluster.memories[0]
    for block in memory.owned_blocks():
        memory.weights(block, 1)[:] = memory.weights(block, 0)
        memory.control.set_slot_version(block, 1, 1)

    def commit() -> None:
        while not all(w.context.progress.doing().waiting for w in cluster.workers):
            time.sleep(0.001)
        time.sleep(0.2)
        memory.control.set_committed(1)

    committer = threading.Thread(target=commit)
    committer.start()
    results = cluster.run(replace(cluster.job(), base_version=1))
    committer.join()
    first, second = results
    assert isinstance(first, JobResult)
    assert isinstance(second, JobResult)
    for worker, cause in zip(cluster.workers, ("weights", "activations"), strict=True):
        assert worker.context.account.seconds(None)[cause] > 0.1
    for result in (first, second):
        assert result.tally.busy_s < result.wall_s - 0.1


def test_a_missing_commit_ends_in_an_error_that_says_so(make_cluster: Any) -> None:
    cluster = make_cluster(workers=1, timeout_s=0.2)
    (result,) = cluster.run(replace(cluster.job(), base_version=1))
    assert isinstance(result, InstructionError)
    assert "waited 0.2 s for weights of block 0 at version 1: committed is 0" in str(result)


@contextmanager
def a_save_of(control: ControlView, blocks: Sequence[int]) -> Iterator[threading.Event]:
    """Pins blocks for a second; the event is set just before the pins are removed."""
    read = threading.Event()

    def remove() -> None:
        read.set()
        for block in blocks:
            control.set_pin(block, None)

    for block in blocks:
        control.set_pin(block, 0)
    timer = threading.Timer(1.0, remove)
    timer.start()
    try:
        yield read
    finally:
        timer.join()


def test_the_deadline_of_weights_starts_when_a_save_has_read_the_block(make_cluster: Any) -> None:
    """A hold of the committed step overwrites the state, so the hold waits for the save."""
    cluster = make_cluster(workers=1, timeout_s=0.2)
    with a_save_of(cluster.memories[0].control, [0]) as read:
        (result,) = cluster.run(replace(cluster.job(), base_version=1))
        has_read = read.is_set()
    assert "waited 0.2 s for weights of block 0 at version 1" in str(result)
    assert has_read


@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
def test_the_only_copy_of_gradients_waits_for_its_settle(
    make_cluster: Any, grad_dtype: str
) -> None:
    """Gradients of version 1, which is committed, are not overwritten before the state has them.
    The deadline of the wait starts when a save has read the blocks.
    """
    cluster = make_cluster(
        workers=1,
        model={"dtype": "bf16"},
        grad_dtype=grad_dtype,
        optimizer={"master": "split", "settle": "early"},
        timeout_s=0.2,
    )
    memory = cluster.memories[0]
    grads = [memory.grads(block, 0, 0) for block in memory.owned_blocks()]
    for block in memory.owned_blocks():
        assert not memory.has((block, "grads", 1, 0))
        memory.weights(block, 1)[:] = memory.weights(block, 0)
        memory.control.set_slot_version(block, 1, 1)
        grads[block][:] = 5
    memory.control.set_committed(1)
    with a_save_of(memory.control, memory.owned_blocks()) as read:
        (result,) = cluster.run(replace(cluster.job(), base_version=1))
        has_read = read.is_set()
    assert isinstance(result, InstructionError)
    assert "waited 0.2 s for optimizerd to settle block" in str(result)
    assert has_read
    assert "(its state is at 0)" in str(result)
    assert all((array == 5).all() for array in grads)
    for block in memory.owned_blocks():
        memory.control.set_state_version(block, 1)
    cluster.begin(2)
    cluster.train(replace(cluster.job(), base_version=1))
    assert not any((array == 5).all() for array in grads)


@pytest.mark.parametrize(
    ("scheme", "schedule"),
    [
        ("1f1b", {}),
        ("spipe", {}),
        ("spipe", {"passes": ["skip-dead-forward"]}),
        ("chimera", {}),
        ("hanayo", {}),
        ("gpipe", {"replicas": 2}),
    ],
)
def test_evaluation_counts_every_token_once(
    make_cluster: Any, scheme: str, schedule: dict[str, Any]
) -> None:
    cluster = make_cluster(
        scheme=scheme, workers=2, nodes=2, schedule=schedule, hf={"tie_word_embeddings": True}
    )
    before = cluster.gradient_bytes()
    job = cluster.job(phase="eval", attempt=job_number(1, 0))
    loss_sum, loss_tokens = cluster.train(job)
    assert loss_tokens == job.counted_tokens
    assert loss_sum == pytest.approx(cluster.reference(job)[0], rel=TOLERANCE)
    assert cluster.gradient_bytes() == before


def test_frozen_parameters_get_no_gradients(make_cluster: Any) -> None:
    cluster = make_cluster(
        scheme="spipe", workers=2, nodes=2, freeze=("embed_tokens", r"layers\.[23]\.")
    )
    job = cluster.job()
    cluster.train(job)
    wanted = cluster.reference(job)[1]
    frozen = {s.name for b in cluster.table.blocks for s in b.tensors if not s.trainable}
    assert len(frozen) > 9
    found = cluster.gradients()
    assert relative_error(found, {n: g for n, g in wanted.items() if n not in frozen}) < TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "bf16")]
)
def test_16_bit_storage(make_cluster: Any, dtype: str, grad_dtype: str) -> None:
    """Sums stay in fp32 and are rounded once: the result is within one rounding of the plain
    loop's.
    """
    cluster = make_cluster(
        scheme="spipe",
        workers=2,
        nodes=2,
        model={"dtype": dtype},
        grad_dtype=grad_dtype,
        hf={"tie_word_embeddings": True},
    )
    job = cluster.job()
    loss_sum, _ = cluster.train(job)
    wanted_loss, wanted = cluster.reference(job)
    assert loss_sum == pytest.approx(wanted_loss, rel=TOLERANCE)
    bound = TOLERANCE if grad_dtype == "fp32" else 2.0**-8
    assert relative_error(cluster.gradients(), wanted) < bound


@pytest.mark.parametrize("scheme", ["1f1b", "spipe", "chimera"])
def test_an_aborted_attempt_leaves_nothing_behind(make_cluster: Any, scheme: str) -> None:
    cluster = make_cluster(scheme=scheme, workers=2, nodes=2, micro_batches=8)
    wanted = cluster.train(cluster.job(attempt=1)), cluster.gradient_bytes()
    cluster.begin(2)
    # The abort comes from inside, after a different number of sends each time.
    for epoch, sends in ((2, 1), (3, 3), (4, 7)):
        with aborting(cluster, cluster.workers[0].context.transport, sends):
            results = cluster.run(cluster.job(attempt=epoch))
        assert [type(result) for result in results] == [Interrupted, Interrupted]
        for worker in cluster.workers:
            assert worker.context.weights.in_use == ()
        cluster.begin(epoch + 1)
    # What was sent before the aborts arrives late and is of an old epoch.
    assert (cluster.train(cluster.job(attempt=9)), cluster.gradient_bytes()) == wanted


def test_an_abort_ends_a_wait_for_a_peer_at_once(make_cluster: Any) -> None:
    cluster = make_cluster(workers=2)
    found: list[Exception] = []

    def work() -> None:
        try:
            cluster.workers[1].run(cluster.job())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.2)
    cluster.abort_all()
    thread.join()
    assert [str(error) for error in found] == ["drained"]


def test_a_silent_peer_is_named(make_cluster: Any) -> None:
    cluster = make_cluster(workers=2, timeout_s=0.3)
    with pytest.raises(InstructionError) as caught:
        cluster.workers[1].run(cluster.job(attempt=4))
    text = str(caught.value)
    assert "'F 1 0 keep=all' failed" in text
    awaited = "activation of stage 0, micro-batch 0 (train 4) from worker.0"
    assert f"LostMemberError: waited 0.3 s for {awaited}" in text
    assert "membership 1, train 4" in text
    assert "'FW 1 phase=forward'" in text  # what ran before


def program_of(*texts: str) -> tuple[Any, ...]:
    """The programs of one device."""
    return (tuple(map(parse_instruction, texts)),)


@pytest.mark.parametrize("where", ["programs", "evaluation"])
def test_swaps_to_devices_of_other_nodes_are_refused(where: str) -> None:
    stages = (StageRange(start=0, stop=1, device=0),)
    plan = Plan(
        scheme="gpipe",
        num_devices=1,
        num_microbatches=1,
        forward_stages=stages,
        backward_stages=stages,
        programs=program_of("F 0 0 keep=all"),
        evaluation=((),),
    )
    swapping = replace(plan, **{where: program_of("F 0 0 keep=all", "SO 0 0 fraction=0.5 peer=1")})
    check_executable(swapping, devices_per_node=2)
    name = {"programs": "plan", "evaluation": "evaluation"}[where]
    with pytest.raises(ConfigError) as caught:
        check_executable(swapping, devices_per_node=1)
    assert str(caught.value) == (
        f"{name}: gpipe, device 0, instruction 1 is 'SO 0 0 fraction=0.5 peer=1', and workers do"
        " not swap to devices of other nodes (device 0 is on node 0, its peer on node 1,"
        " cluster.workers = 1); they swap to devices of their node, or to host memory (no peer=)"
    )


@pytest.mark.parametrize(
    ("opcode", "left"),
    [
        (Opcode.BACKWARD, "graphs"),
        (Opcode.OFFLOAD_GRADIENTS, "gradients"),
        (Opcode.RELEASE_WEIGHTS, "weights"),
    ],
)
def test_work_left_behind_is_an_error(make_cluster: Any, opcode: Opcode, left: str) -> None:
    cluster = make_cluster(workers=1, micro_batches=1)
    program = tuple(i for i in cluster.plan.programs[0] if i.opcode is not opcode)
    worker = cluster.workers[0]
    with pytest.raises(UnusedWorkError, match=rf"left behind {left}: "):
        worker.run(cluster.job(), program)
    cluster.begin(2)
    assert isinstance(worker.run(cluster.job()), JobResult)  # and nothing of it stayed


def test_a_failing_handler_is_located(make_cluster: Any) -> None:
    cluster = make_cluster(workers=1, micro_batches=1)
    worker = cluster.workers[0]

    def fail(instruction: Any, attempt: Any) -> None:
        raise ZeroDivisionError("no luck")

    with pytest.raises(InstructionError, match="ZeroDivisionError: no luck") as caught:
        run_job(
            worker.context,
            cluster.job(),
            cluster.plan.programs[0],
            {**HANDLERS, Opcode.BACKWARD: fail},
        )
    assert caught.value.exit_code is ExitCode.LOST_MEMBERS
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_metrics_of_transfers(make_cluster: Any) -> None:
    cluster = make_cluster(scheme="1f1b", workers=2)
    cluster.train(cluster.job())
    hidden_bytes = 2 * 12 * 32 * 4
    name = "penstock_transfer_bytes_total"
    sender, receiver = cluster.workers
    for kind, source, target in (
        ("activations", sender, receiver),
        ("gradients", receiver, sender),
    ):
        assert source.metric(name, direction="send", kind=kind) == 4 * hidden_bytes
        assert target.metric(name, direction="receive", kind=kind) == 4 * hidden_bytes
