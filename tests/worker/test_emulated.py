"""Emulated devices one by one: clock, durations, transfers, and the numbers instead of a model."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.config.schema import parse_config
from penstock.models.data.batch import MicroBatch
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.emulation import Emulation
from penstock.planner.planning.configured import build_plan
from penstock.planner.simulate import simulate
from penstock.planner.simulate.network import Network
from penstock.protocol.plan.instructions import Backward, Forward, Recompute, parse_instruction
from penstock.protocol.plan.layout import StageLayout
from penstock.protocol.plan.resources import PlanFacts
from penstock.protocol.plan.semantics import Lane
from penstock.protocol.run.hardware.bandwidth_log import NicReservations
from penstock.protocol.run.hardware.peer_memory import PeerMemory
from penstock.workers.platforms.emulated.clock import Durations, EmulatedStream, sleep_until
from penstock.workers.platforms.emulated.collectives import link_bandwidth
from penstock.workers.platforms.emulated.device import EmulatedDevice, Sending, SwapKey
from penstock.workers.platforms.emulated.runtime import EmulatedRuntime
from penstock.workers.telemetry.account import IdleCause
from penstock.workers.waiting import Abort, Interrupted

CONFIG = parse_config(
    {
        "model": {"dtype": "bf16"},
        "data": {"path": "@stdlib", "sequence_length": 512},
        "train": {"global_batch": 8, "micro_batch": 1},
        "optimizer": {"grad_dtype": "bf16"},
        "schedule": {"scheme": "spipe"},
        "cluster": {"workers": 2, "device": "emulated:analytic:A100-40:gpt3-125m"},
    }
)
EMULATION = Emulation.of(CONFIG)


def test_a_nic_serves_one_transfer_after_the_other(tmp_path: Path) -> None:
    boards = [NicReservations.of_run(tmp_path, 2) for _ in range(2)]  # of two processes
    assert boards[0].occupy(5.0, 2.0, source=0, target=1) == (5.0, 7.0)
    assert boards[1].occupy(6.0, 1.0, source=None, target=1) == (7.0, 8.0)
    assert boards[1].occupy(6.0, 1.0, source=1, target=0) == (6.0, 7.0), "the other way is free"
    boards[0].clear(1)
    assert boards[1].occupy(1.0, 1.0, source=None, target=1) == (1.0, 2.0)
    for board in boards:
        board.close()


@pytest.mark.parametrize("through_host", [False, True])
@pytest.mark.parametrize("target", [1, 2])
@pytest.mark.parametrize(
    "slow", ["fetch_bandwidth", "offload_bandwidth", "peer_bandwidth", "nic_bandwidth"]
)
def test_a_message_alone_is_as_fast_as_simulated(
    through_host: bool, target: int, slow: str
) -> None:
    cluster = dataclasses.replace(
        Cluster(
            devices_per_node=2,
            fetch_bandwidth=8e9,
            offload_bandwidth=8e9,
            switch_bandwidth=8e9,
            peer_bandwidth=8e9,
            peer_through_host=through_host,
            nic_bandwidth=8e9,
        ),
        **{slow: 1e9},  # type: ignore[arg-type]  # names of bandwidths
    )
    network = Network(cluster)
    assert network.link(0, target) == 0
    routes = network.arrays()
    simulated = min([*routes["route_limits"], *routes["capacities"]])
    assert link_bandwidth(cluster, 0, target) == simulated


def leave_at_once(ready_at: float, seconds: float, *, target: int) -> tuple[float, float]:
    """A NIC that is always free."""
    return ready_at, ready_at + seconds


@pytest.fixture
def peer_memory(tmp_path: Path) -> Iterator[PeerMemory]:
    made = PeerMemory.of_node(tmp_path, "a", 2, 0)
    yield made
    made.close()


@pytest.fixture
def device(peer_memory: PeerMemory) -> Iterator[EmulatedDevice]:
    made = EmulatedDevice(
        EMULATION, EMULATION.stored, lambda copy: None, leave_at_once, peer_memory
    )
    yield made
    made.detach()


def test_a_stream_does_one_thing_after_the_other() -> None:
    stream = EmulatedStream()
    assert stream.occupy(5.0, 2.0) == (5.0, 7.0)
    assert stream.occupy(6.0, 1.0) == (7.0, 8.0)
    assert stream.occupy(9.0, 0.0) == (9.0, 9.0)


def test_sleeping_ends_on_time_or_with_the_attempt() -> None:
    at = time.monotonic() + 0.02
    sleep_until(at)
    assert time.monotonic() >= at
    abort = Abort()
    abort.set("drained")
    with pytest.raises(Interrupted):
        sleep_until(time.monotonic() + 60.0, abort)


def test_instructions_take_what_the_simulator_gives_them() -> None:
    plan = build_plan(CONFIG, EMULATION.table)
    durations = Durations(PlanFacts.of(StageLayout.of(plan), plan.programs), EMULATION.costs)
    simulation = simulate(plan, EMULATION.costs, EMULATION.cluster, stops_early=True)
    spans = [span for span in simulation.spans if span.lane is Lane.COMPUTE]
    simulated = {span.label: span.end_s - span.start_s for span in spans}
    for program in plan.programs:
        for instruction in program:
            if isinstance(instruction, (Forward, Recompute, Backward)):
                text = f"{instruction.opcode} {instruction.stage} {instruction.micro_batch}"
                assert durations.seconds(instruction) == pytest.approx(simulated[text]), text


def test_compute_waits_for_weights_and_messages_on_the_clock(device: EmulatedDevice) -> None:
    device.begin()
    begun = device.compute.free_at
    device.needs(begun + 0.01, IdleCause.WEIGHTS)
    device.needs(begun + 0.005, IdleCause.ACTIVATIONS)
    start, end = device.compute_for(0.005, Abort())
    assert (start, end) == (begun + 0.01, begun + 0.01 + 0.005)
    assert device.awaited is IdleCause.WEIGHTS
    device.begin()
    assert device.compute_for(0.001, Abort())[0] == end
    assert device.awaited is None


def test_a_fetch_takes_the_bytes_of_the_whole_block(device: EmulatedDevice) -> None:
    count = EMULATION.stored.blocks[1].trainable_elements
    arrays = [np.zeros(count, dtype=np.uint16)]
    buffers = [device.load(arrays), device.load(arrays)]
    device.begin()
    for buffer in buffers:
        buffer.acquire()
    start, _ = device.compute_for(0.0, Abort())
    whole_s = EMULATION.costs.blocks[1].weight_bytes / EMULATION.cluster.fetch_bandwidth
    (first, second) = (buffer.loaded for buffer in buffers)
    for begun, ended in (first, second):
        assert ended - begun == pytest.approx(whole_s, rel=0.02)
    assert second[0] >= first[1] and start >= second[1]


def test_messages_are_small_and_arrive_when_the_whole_would(device: EmulatedDevice) -> None:
    device.begin()
    sent = device.compute.free_at
    device.sending = Sending(peer=1, num_bytes=4e6, bandwidth=1e8)
    tensors = device.to_host({"hidden": torch.tensor([7])})
    assert sum(t.nbytes for t in tensors.values()) < 5000
    received = device.from_host(tensors)
    assert {name: t.tolist() for name, t in received.items()} == {"hidden": [7]}
    start, _ = device.compute_for(0.0, Abort())
    assert start == pytest.approx(sent + 0.04 + EMULATION.cluster.latency_s)


def test_traces_know_when_swaps_run_and_messages_arrive(device: EmulatedDevice) -> None:
    key = SwapKey(stage=0, micro_batch=0, fraction=1.0, peer=None)
    device.begin()
    device.swap_out(key, 1e6)
    (out,) = device.copies
    device.begin()
    device.swap_in(key, 1e6)
    (back,) = device.copies
    assert out[1] - out[0] == pytest.approx(1e6 / EMULATION.cluster.offload_bandwidth)
    assert back[0] == out[1]
    device.begin()
    device.sending = Sending(peer=1, num_bytes=4e6, bandwidth=1e8)
    device.from_host(device.to_host({"hidden": torch.tensor([7])}))
    assert device.arrived_at == pytest.approx(
        device.compute.free_at + 0.04 + EMULATION.cluster.latency_s
    )


def batch(seed: int) -> MicroBatch:
    tokens = np.random.default_rng(seed).integers(0, 100, (1, 8))
    return MicroBatch(input_ids=tokens, labels=tokens)


def backward_of(order: list[int], *, weights_seed: int = 0) -> tuple[list[bytes], list[float]]:
    """Gradients of all blocks and the losses, after micro-batches in an order."""
    table = EMULATION.stored
    runtime = EmulatedRuntime(table, seed=3)
    blocks = []
    source = torch.Generator().manual_seed(weights_seed)
    sums: dict[int, torch.Tensor] = {}
    for block in table.blocks:
        weights = torch.randn(block.trainable_elements, generator=source).to(torch.bfloat16)
        sums[block.index] = torch.zeros(block.trainable_elements)
        tied = {b.local_name: (weights, sums[b.owner]) for b in block.borrows}
        blocks.append(
            runtime.bind(block.index, weights=weights, grads=sums[block.index], borrowed=tied)
        )
    losses = []
    for m in order:
        output = runtime.forward(
            blocks,
            {},
            batch(m),
            data_position=8,
            micro_batch_index=m,
            training=True,
            loss_weight=1 / 64,
        )
        assert output.loss_sum is not None
        losses.append(float(output.loss_sum))
        runtime.backward(output, {})
    return [sums[b].numpy().tobytes() for b in sorted(sums)], losses


def test_gradients_do_not_depend_on_the_order_but_on_everything_else() -> None:
    gradients, losses = backward_of([0, 1, 2])
    again, reordered = backward_of([2, 0, 1])
    assert (gradients, sorted(losses)) == (again, sorted(reordered))
    assert backward_of([0, 1, 1])[0] != gradients
    assert backward_of([0, 1, 2], weights_seed=1)[0] != gradients


def test_stages_hand_on_what_one_pass_computes() -> None:
    runtime = EmulatedRuntime(EMULATION.stored, seed=3)
    blocks = [
        runtime.bind(b.index, weights=torch.full((b.trainable_elements,), 0.5))
        for b in EMULATION.stored.blocks
    ]
    common = {"data_position": 0, "micro_batch_index": 0, "training": True, "loss_weight": 1.0}
    whole = runtime.forward(blocks, {}, batch(0), checkpoints_at=(5,), **common)  # type: ignore[arg-type]
    first = runtime.forward(blocks[:5], {}, batch(0), **common)  # type: ignore[arg-type]
    second = runtime.forward(blocks[5:], first.tensors, batch(0), **common)  # type: ignore[arg-type]
    assert torch.equal(whole.checkpoints[5]["hidden"], first.tensors["hidden"])
    assert whole.loss_sum is not None and second.loss_sum is not None
    assert torch.equal(whole.loss_sum, second.loss_sum)
    gradient = runtime.backward(second, {})
    assert torch.equal(
        runtime.backward(first, gradient)["hidden"], runtime.backward(whole, {})["hidden"]
    )


def test_sends_carry_the_output_of_the_stage_before() -> None:
    plan = build_plan(CONFIG, EMULATION.table)
    durations = Durations(PlanFacts.of(StageLayout.of(plan), plan.programs), EMULATION.costs)
    hidden = EMULATION.costs.blocks[1].output_bytes
    for text in ("SA 0 0 peer=1", "SG 1 0 peer=0", "SC 1 0 peer=1"):
        assert durations.num_bytes(parse_instruction(text)) == hidden


def test_a_device_holds_what_others_swap_to_it(
    device: EmulatedDevice, peer_memory: PeerMemory, tmp_path: Path
) -> None:
    """From the start of the copy out to the end of the copy back."""
    host = PeerMemory.of_node(tmp_path, "a", 2, 1)
    key = SwapKey(stage=0, micro_batch=0, fraction=1.0, peer=1)
    device.swap_out(key, 3e6)
    device.begin()
    _, sent = device.compute_for(0.1, Abort())
    device.swap_in(key, 3e6)
    (out, _), (_, back) = device.copies[-1], device.copies[-1]
    assert host.bytes_here(sent - 0.05, sent) == 3e6
    assert host.bytes_here(back, back + 1.0) == 0.0
    assert peer_memory.bytes_here(0.0, back) == 0.0
    device.swap_out(key, 3e6)
    device.drop()  # the attempt is given up: nobody takes it back
    assert host.bytes_here(out, back + 1.0) == 0.0
    host.close()


def test_the_time_scale_applies_to_everything(
    device: EmulatedDevice, peer_memory: PeerMemory
) -> None:
    fast = EmulatedDevice(
        dataclasses.replace(EMULATION, time_scale=0.1),
        EMULATION.stored,
        lambda copy: None,
        leave_at_once,
        peer_memory,
    )
    fast.begin()
    start, end = fast.compute_for(0.02, Abort())
    assert end - start == pytest.approx(0.002)
