"""What a replica at the partner costs (``memory.mirror``): bytes of memory, and of the network."""

from __future__ import annotations

from typing import Any

from penstock.config.schema import Config, parse_config
from penstock.planner.cost.emulation import Emulation
from penstock.planner.memory.table import MemoryKind, node_rows
from penstock.planner.planning.configured import build_plan
from penstock.planner.planning.pipeline import try_plan
from penstock.planner.planning.pricing import config_context
from penstock.protocol.run.names import ownership
from penstock.shm.layout import replica_layout

NIC = 1e9


def configured(mirror: str) -> Config:
    nodes = [{"name": "a"}, {"name": "b"}]
    sections: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"dtype": "fp16"},
        "data": {"path": "@stdlib", "sequence_length": 256},
        "train": {"steps": 1, "global_batch": 16, "micro_batch": 2},
        "optimizer": {"lr": 1e-3, "grad_dtype": "bf16"},
        "schedule": {"scheme": "1f1b"},
        "cluster": {
            "workers": 1,
            "nodes": nodes,
            "device": "emulated:analytic:V100-32:gpt3-1.3b",
        },
        "emulation": {"machine": {"nic_bandwidth": NIC}},
        "memory": {"mirror": mirror},
    }
    return parse_config(sections)


def test_the_replica_is_a_row_of_the_memory_table() -> None:
    config = configured("partner")
    table = Emulation.of(config).stored
    plan = build_plan(config, table)
    owners = ownership(config, table, plan)
    found = {(row.place, row.use): row for row in node_rows(config, table, plan)}
    for keeper, owner in ((0, 1), (1, 0)):
        names = "ab"
        row = found[f"node {names[keeper]}", f"replica of {names[owner]}"]
        assert row.resource is MemoryKind.SHM
        assert row.num_bytes == sum(replica_layout(table, owners, owner).sizes.values())


def test_a_step_ends_when_partners_have_the_gradients() -> None:
    """With a slow network the larger node's gradients are the tail."""
    steps = {}
    for mirror in ("none", "partner"):
        config = configured(mirror)
        table = Emulation.of(config).stored
        context = config_context(config, table)
        plan = build_plan(config, table, context)
        steps[mirror] = try_plan(plan, context)
    owners = ownership(config, table, plan).owner
    blocks = context.prices.costs.blocks
    most = max(
        sum(blocks[b].gradient_bytes for b, owner in enumerate(owners) if owner == node)
        for node in range(2)
    )
    longer = steps["partner"].makespan_s - steps["none"].makespan_s
    assert 0.8 * most / NIC < longer < 1.05 * most / NIC
