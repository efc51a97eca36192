"""The memory table: bytes by node and array, peaks by device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.planner.cost.profile import GPU_GUESS, TableCosts, table_costs
from penstock.planner.memory.footprint import DevicePeak, device_peaks, footprints
from penstock.planner.memory.table import MemoryKind, MemoryRow, memory_table
from penstock.planner.planning.configured import build_plan
from penstock.planner.planning.pricing import config_prices
from penstock.protocol.plan.instructions import Opcode
from penstock.protocol.plan.plan import Plan
from penstock.shm.table import BlockTable, BorrowedTensor, DType

Tables = Callable[..., BlockTable]
Configs = Callable[..., Config]


def gpu_costs(table: BlockTable, tokens: int) -> TableCosts:
    return table_costs(table, GPU_GUESS, tokens=tokens, own_memory=True)


def rows_of(config: Config, table: BlockTable, plan: Plan) -> tuple[MemoryRow, ...]:
    return memory_table(config, table, plan, config_prices(config, table).costs)


def test_rows_of_two_nodes(make_table: Tables, make_config: Configs) -> None:
    """1024 fp32 parameters a block; SPipe's backward stages 0, 2 are on the second node, 1, 3 on
    the first.
    """
    config = make_config(
        "spipe", workers=1, nodes=2, micro_batches=2, forward_stages=2, backward_stages=4
    )
    table = make_table(4)
    plan = build_plan(config, table)
    found = rows_of(config, table, plan)
    rows = [(r.place, r.use, r.num_bytes) for r in found if r.use != "early messages"]
    owned = 2 * 1024 * 4
    node = [
        ("weights", 2 * owned),
        ("frozen", 0),
        ("master", owned),
        ("exp_avg", owned),
        ("exp_avg_sq", owned),
        ("grads", 2 * owned),
    ]
    assert rows[:12] == [(f"node n{i}", use, num_bytes) for i in (0, 1) for use, num_bytes in node]
    # A forward stage of two blocks and a backward stage of one; gradients of one stage at a time.
    assert rows[12:14] == [
        ("device 0", "weight buffers", 2 * 1024 * 4),
        ("device 0", "gradients", 1024 * 4),
    ]
    assert {row[0] for row in rows[12:]} == {"device 0", "device 1"}


def test_a_split_master_and_one_copy_of_gradients_are_16_bytes_a_parameter(
    make_table: Tables, make_config: Configs
) -> None:
    """With both weight slots, and settles in the next forward."""
    config = make_config("gpipe", nodes=1)

    def changed(**optimizer: str) -> Config:
        changed = config.optimizer.model_copy(update=optimizer)
        return config.model_copy(update={"optimizer": changed})

    ways = {
        "exact": config,
        "split": changed(master="split", settle="early"),
        "arithmetic": changed(rollback="arithmetic"),
    }
    table = dataclasses.replace(make_table(4), weight_dtype=DType.BF16, grad_dtype=DType.BF16)
    parameters = 4 * 1024
    found = {
        name: {
            row.use: row.num_bytes / parameters
            for row in rows_of(one, table, build_plan(one, table))
            if row.resource is MemoryKind.SHM and row.use != "page padding"
        }
        for name, one in ways.items()
    }
    moments = {"frozen": 0, "exp_avg": 4, "exp_avg_sq": 4}
    assert found["split"] == {"weights": 4, "low": 2, **moments, "grads, early": 2}
    assert found["exact"] == {"weights": 4, "master": 4, **moments, "grads": 4}
    assert found["arithmetic"] == {**found["exact"], "grads": 2}
    assert (sum(found["split"].values()), sum(found["exact"].values())) == (16, 20)


def test_a_cpu_worker_needs_host_memory_a_gpu_its_own(
    make_table: Tables, make_config: Configs
) -> None:
    config, table = make_config("gpipe"), make_table(4)
    cuda = config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"device": "cuda"})}
    )
    plan = build_plan(config, table)
    assert rows_of(config, table, plan)[-1].resource is MemoryKind.HOST
    assert rows_of(cuda, table, plan)[-1].resource is MemoryKind.DEVICE


def test_a_tied_gradient_is_stored_where_it_is_computed(
    make_table: Tables, make_config: Configs
) -> None:
    """Block 3 borrows block 0's tensor: a second contribution on the node of block 3."""
    table = make_table(4)
    blocks = list(table.blocks)
    blocks[0] = dataclasses.replace(blocks[0], contributions=2)
    borrowed = BorrowedTensor(name="block0.weight", local_name="tied", owner=0, contribution=1)
    blocks[3] = dataclasses.replace(blocks[3], borrows=(borrowed,))
    tied = dataclasses.replace(table, blocks=tuple(blocks))
    config = make_config("gpipe", workers=1, nodes=2)
    plan = build_plan(config, tied)
    grads = {
        (t is tied, row.place): row.num_bytes
        for t in (table, tied)
        for row in rows_of(config, t, plan)
        if row.use == "grads"
    }
    block = 2 * 1024 * 4
    assert grads == {
        (False, "node n0"): 2 * block,
        (False, "node n1"): 2 * block,
        (True, "node n0"): 2 * block,
        (True, "node n1"): 3 * block,
    }
    # The borrowing device holds the borrowed weights and their gradient, too.
    untied_peak, tied_peak = (device_peaks(plan, gpu_costs(t, 8))[1] for t in (table, tied))
    assert tied_peak.weight_bytes - untied_peak.weight_bytes == 1024 * 4
    assert tied_peak.gradient_bytes - untied_peak.gradient_bytes == 1024 * 4


def test_replicas_contribute_where_they_run(make_table: Tables, make_config: Configs) -> None:
    """A replica on each of two nodes: the first owns all blocks, and pulls gradients."""
    config = make_config("gpipe", workers=2, nodes=2, replicas=2, reduce_gradients=False)
    table = make_table(4)
    rows = rows_of(config, table, build_plan(config, table))
    copies = 2 * 4 * 1024 * 4
    assert [(r.place, r.resource, r.use, r.num_bytes) for r in rows if "grad" in r.use][:3] == [
        ("node n0", MemoryKind.SHM, "grads", copies),
        ("node n0", MemoryKind.HOST, "gradients of other nodes", copies),
        ("node n1", MemoryKind.SHM, "grads", copies),
    ]
    assert {r.use for r in rows if r.place == "node n1" and r.num_bytes} == {
        "grads",
        "early messages",
    }


def test_replicas_on_two_nodes_contribute_once(make_table: Tables, make_config: Configs) -> None:
    """Devices of the second node send their sums to those of the first, which add them up."""
    config = make_config("gpipe", workers=2, nodes=2, replicas=2)
    table = make_table(4)
    plan = build_plan(config, table)
    rows = rows_of(config, table, plan)
    assert [(r.place, r.num_bytes) for r in rows if "grads" in r.use] == [
        ("node n0", 2 * 4 * 1024 * 4)
    ]
    there = {r.use for r in rows if r.place == "node n1" and r.num_bytes}
    assert there == {"early messages"}
    footprint = footprints(plan, gpu_costs(table, 8))[0]
    at = [i.opcode for i in plan.programs[0]].index(Opcode.OFFLOAD_GRADIENTS)
    assert (footprint.gradient_bytes[at - 1], footprint.workspace_bytes[at]) == (8192.0, 8192.0)


def test_more_routes_than_ready_words(make_table: Tables, make_config: Configs) -> None:
    config = make_config("gpipe", workers=13, micro_batches=13, replicas=13)
    table = make_table(4)
    plan = build_plan(config, table)
    with pytest.raises(
        ConfigError, match=r"13 routes .* 'block0', .* at most 12: use 12 routes or"
    ):
        rows_of(config, table, plan)
    summed = make_config("gpipe", workers=13, micro_batches=13, replicas=13, reduce_gradients=True)
    assert rows_of(summed, table, build_plan(summed, table))


def test_peaks_of_gpipe(make_table: Tables, make_config: Configs) -> None:
    """Device 1 of 2 with keep=all: all 4 micro-batches of 8 tokens are kept, 256 bytes a token and
    block.

    At its first backward it holds weights and gradients of 2 blocks, and the gradient it sends (64
    bytes a token).
    """
    plan = build_plan(make_config("gpipe", workers=2, micro_batches=4), make_table(4))
    assert device_peaks(plan, gpu_costs(make_table(4), 8))[1] == DevicePeak(
        weight_bytes=2 * 1024 * 4,
        gradient_bytes=2 * 1024 * 4,
        activation_bytes=4 * 8 * 256 * 2 + 8 * 64,
    )


def test_recomputation_lowers_the_peak(make_table: Tables, make_config: Configs) -> None:
    def peak(recompute: str) -> float:
        config = make_config("gpipe", workers=2, micro_batches=8, recompute=recompute)
        table = make_table(8)
        plan = build_plan(config, table)
        return device_peaks(plan, gpu_costs(table, 64))[0].activation_bytes

    assert peak("full") < peak("none") / 3
