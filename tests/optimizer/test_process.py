"""optimizerd as a process, in the rig of ``rig.py``; SIGKILL at random instants."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import _native
from penstock.host.stopping import STOP_ORDER
from penstock.host.topology import Topology, format_cpus
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.plan.instructions import Update
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.step import BlockArrays, OptimizerStep
from penstock.protocol.run.hardware.placement import place
from penstock.protocol.wire.frames import (
    BlockUpdated,
    GradientReady,
    encode,
)
from penstock.shm.table import BlockTable, DType
from tests.optimizer.rig import LEARNING_RATE, WAIT_S, Node, Rig, small_table, wait_until
from tests.pages import page_of

RigFactory = Callable[..., Rig]


@pytest.fixture
def new_rig(tmp_path: Path, tools: Any) -> Iterator[RigFactory]:
    rigs: list[Rig] = []

    def create(table: BlockTable, owners: list[int], *, split: bool = False) -> Rig:
        rigs.append(Rig(tmp_path / "run", table, owners, tools, split=split))
        return rigs[-1]

    yield create
    for rig in rigs:
        rig.close()


def test_a_life_without_accidents(new_rig: RigFactory, tools: Any) -> None:
    rig = new_rig(small_table(tools), [0, 0, 0])
    [node] = rig.nodes
    rig.start(node)
    assert node.stream is not None and node.process is not None
    hello = node.stream.hello
    assert (hello.run_id, hello.epoch, hello.data_endpoint) == (rig.run.run_id, 0, "")
    rig.begin()
    for decision in ("commit", "skip", "amend", "hold", "commit"):
        rig.begin_attempt(hold=decision == "hold")
        statuses = rig.statuses()
        expected = float(np.square(rig.grads[(0, 0)], dtype=np.float64).sum())
        assert statuses[0].finite and statuses[0].sum_squares == pytest.approx(expected, rel=1e-6)
        if decision == "skip":
            rig.say_all(skip=pb.Skip(epoch=rig.epoch, attempt=rig.attempt))
            continue
        if decision == "amend":
            rig.amend(0.25)
        rig.journal(coefficient=0.25 if decision in ("amend", "hold") else 1.0)
        rig.commit()
        rig.await_weights()
    rig.settle_and_compare()
    metrics = page_of(rig.run.run_id, hello.member)
    assert 'penstock_sweep_parameters_total{pass="advance"}' in metrics
    assert "penstock_optimizer_cpu_seconds_total" in metrics
    cores = format_cpus(place(rig.config, 0).optimizer)
    assert f'optimizer="{cores}"' in metrics
    if len(Topology.read().nodes) == 1:
        assert "penstock_optimizer_local_state_ratio 1.0" in metrics
    rig.say_all(shutdown=pb.Shutdown(keep_memory=True, reason="done"))
    assert node.process.wait(timeout=WAIT_S) == 0


def test_garbage_strangers_and_lies_on_the_local_socket(new_rig: RigFactory, tools: Any) -> None:
    rig = new_rig(small_table(tools), [0, 0, 0])
    [node] = rig.nodes
    rig.start(node)
    assert node.stream is not None
    rig.begin()
    for data in (b"", b"\xff" * 100, os.urandom(1000)):
        rig.push(node, data)
    member = node.stream.hello.member

    def counted(reason: str) -> bool:
        text = page_of(rig.run.run_id, member)
        return f'dropped_messages_total{{reason="{reason}"}}' in text

    rig.attempt = 1
    honest = rig.message(0, 0)
    rig.push(node, encode(honest))  # its ready word says nothing of the kind
    stranger = GradientReady(
        run_id="0" * 12, epoch=honest.epoch, attempt=1, block=0, contribution=0
    )
    rig.push(node, encode(stranger))
    for reason in ("malformed", "not_ready", "other_run"):
        wait_until(lambda r=reason: counted(r), f"messages counted as {reason}")  # type: ignore[misc]
    rig.attempt = 0
    rig.begin_attempt()
    rig.statuses()
    rig.journal()
    rig.commit()
    rig.settle_and_compare()


def test_a_workers_updates_count_and_lies_about_them_do_not(
    new_rig: RigFactory, tools: Any
) -> None:
    """Block 2 is a device's; the test writes its weights, as a worker does."""
    rig = new_rig(small_table(tools), [0, 0, 0])
    file = rig.run.path / "plan.json"
    plan = Plan.from_json(file.read_text())
    file.write_text(replace(plan, programs=((Update(block=2),),)).to_json())
    [node] = rig.nodes
    rig.start(node)
    assert node.stream is not None
    rig.begin()
    control = node.memory.control
    member = node.stream.hello.member

    def dropped(reason: str) -> bool:
        text = page_of(rig.run.run_id, member)
        return f'dropped_messages_total{{reason="{reason}"}}' in text

    for base in (0, 1):
        rig.begin_attempt()
        step = OptimizerStep.speculative(
            version=base + 1, loss_scale=2.0, learning_rate=LEARNING_RATE
        )
        wait_until(lambda v=base: control.state_version(2) == v, "the settle")  # type: ignore[misc]
        arrays = BlockArrays.of(node.memory, 2, rig.config.optimizer)
        status = arrays.preview(rig.pool, step, rig.config.optimizer)
        truth = BlockUpdated(
            run_id=rig.run.run_id,
            epoch=rig.epoch,
            attempt=rig.attempt,
            block=2,
            version=base + 1,
            finite=True,
            sum_squares=status.sum_squares,
            seconds=0.1,
        )
        for lie in (
            replace(truth, run_id="0" * 12),
            replace(truth, block=0),
            replace(truth, version=base + 2),
            truth,
            truth,
        ):
            rig.push(node, encode(lie))
        assert rig.statuses()[2].sum_squares == status.sum_squares
        rig.journal()
        rig.commit()
        rig.await_weights()
    for reason in ("other_run", "not_on_device", "not_settled", "slot_in_use"):
        wait_until(lambda r=reason: dropped(r), f"messages counted as {reason}")  # type: ignore[misc]
    rig.settle_and_compare()


def test_a_lost_message_is_found_in_the_ready_words(new_rig: RigFactory, tools: Any) -> None:
    rig = new_rig(small_table(tools), [0, 0, 0])
    [node] = rig.nodes
    rig.start(node)
    rig.begin()
    rig.push = lambda node, data: None  # type: ignore[method-assign]
    rig.begin_attempt()
    assert set(rig.statuses()) == {0, 2}


def test_sigterm_and_refusal_end_the_process(new_rig: RigFactory, tools: Any) -> None:
    rig = new_rig(small_table(tools), [0, 0, 0])
    [node] = rig.nodes
    rig.start(node)
    rig.begin()
    assert node.process is not None
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(timeout=WAIT_S) == 0
    rig.start(node)
    rig.say(node, refused=pb.Refused(reason="an old epoch"))
    assert node.process.wait(timeout=WAIT_S) == 4


def test_it_stops_while_it_waits_for_a_memoryd_that_is_gone(
    new_rig: RigFactory, tools: Any
) -> None:
    rig = new_rig(small_table(tools), [0, 0, 0])
    [node] = rig.nodes
    node.server.close()
    rig.spawn(node)
    assert node.process is not None
    with pytest.raises(subprocess.TimeoutExpired):
        node.process.wait(timeout=3.0)  # it has asked for a lease by then
    node.process.send_signal(STOP_ORDER)
    assert node.process.wait(timeout=600.0) == 0


def test_memory_of_another_incarnation_is_reported(new_rig: RigFactory, tools: Any) -> None:
    rig = new_rig(small_table(tools), [0, 0, 0])
    [node] = rig.nodes
    node.memory.control.set_incarnation(7)
    rig.start(node)
    rig.say(node, begin=pb.Begin(epoch=1, record=rig.record))
    failed = rig.expect(node, "failed")
    assert "incarnation 7" in failed.error and failed.exit_code == 2
    assert node.process is not None and node.process.wait(timeout=WAIT_S) == 2


def test_it_ends_at_a_drain_when_its_memory_was_given_back(new_rig: RigFactory, tools: Any) -> None:
    rig = new_rig(small_table(tools), [0, 0, 0])
    [node] = rig.nodes
    rig.start(node)
    node.memory.unlink()
    rig.say(node, drain=pb.Drain(epoch=1))
    assert node.process is not None and node.process.wait(timeout=WAIT_S) == 0


def interrupt(rig: Rig, node: Node, fate: random.Random) -> bool:
    """SIGKILL at a random instant; whether it hit in the middle of a sweep that writes state."""
    control = node.memory.control
    if fate.random() < 0.75:  # aim at a sweep that writes state; on a busy machine it may be missed
        deadline = time.monotonic() + 0.5
        while control.interrupted_sweep is None and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(fate.random() * 0.004)
    else:
        time.sleep(fate.random() * 0.05)
    rig.kill(node)
    hit = _native.undo_state(control.undo_area).armed
    if hit and fate.random() < 0.7:  # once more, while the sweep is being finished
        rig.start(node)
        rig.begin(wait=False)
        time.sleep(fate.random() * 0.01)
        rig.kill(node)
    return hit


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_sigkill_amid_a_sweep_changes_no_byte(split: bool, new_rig: RigFactory, tools: Any) -> None:
    blocks = [tools.make_block(0, [6_000_000, 64]), tools.make_block(1, [1_500_000])]
    rig = new_rig(tools.make_table(blocks, DType.BF16, DType.BF16), [0, 0], split=split)
    [node] = rig.nodes
    seed = random.randrange(1000)
    fate = random.Random(seed)
    print(f"seed {seed}")
    rig.start(node)
    rig.begin()
    hits = kills = holds = 0
    while (hits < 2 or holds < 1) and kills < 100:
        hold = fate.random() < 0.4
        rig.begin_attempt(hold=hold)
        if node.memory.control.state_version(0) == rig.version:
            rig.statuses()  # nothing was pending: no state is written this time
        else:
            hits += interrupt(rig, node, fate)
            kills += 1
            rig.start(node)
            rig.begin()
            continue
        rig.journal(coefficient=0.25 if hold else 1.0)
        if hold:  # the commit starts holds of all blocks
            rig.commit()
            holds += interrupt(rig, node, fate)
            kills += 1
            rig.start(node)
            rig.begin()
        elif fate.random() < 0.5:
            rig.commit()
        else:  # killed between journal and broadcast
            rig.kill(node)
            rig.start(node)
            rig.begin()
        rig.await_weights()
    told = f"seed {seed}: {kills} kills, {hits} amid an advance or settle, {holds} amid a hold"
    print(f"{told}, version {rig.version}")
    assert hits >= 2 and holds >= 1, told
    rig.settle_and_compare()


def test_a_tied_contribution_of_another_node(new_rig: RigFactory, tools: Any) -> None:
    blocks = [tools.make_block(0, [300_000], contributions=2), tools.make_block(1, [5000])]
    rig = new_rig(tools.make_table(blocks, DType.FP32, DType.FP32), [0, 1])
    owner, other = rig.nodes
    assert not owner.memory.has((0, "grads", 0, 1)) and other.memory.has((0, "grads", 0, 1))
    for node in rig.nodes:
        rig.start(node)
        assert node.stream is not None
        assert node.stream.hello.data_endpoint.startswith("tcp://127.0.0.1:")
    rig.begin()
    for decision in ("commit", "amend", "hold", "kill owner", "kill other", "commit"):
        rig.begin_attempt(hold=decision == "hold")
        rig.statuses()
        if decision == "amend":
            rig.amend(0.5)
        rig.journal(coefficient=0.5 if decision in ("amend", "hold") else 1.0)
        rig.commit()
        rig.await_weights()
        if decision.startswith("kill"):
            # The next attempt's gradients are there, its ready word too, when the pending ones are
            # needed again.
            victim = owner if decision.endswith("owner") else other
            rig.begin_attempt()
            rig.kill(victim)
            rig.start(victim)
            rig.begin()
    rig.settle_and_compare()
