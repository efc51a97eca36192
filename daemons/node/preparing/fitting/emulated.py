"""Prepares a run on emulated devices: its files, and its memory at full size and as stored.

The block table follows from ``cluster.device``; no model is read. The memory of the emulated nodes
and GPUs is checked at full size, and the stored bytes are checked against this machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isinf
from pathlib import Path

from penstock.config.schema import Config
from penstock.daemons.node.preparing.fitting.capacity import (
    MachineMemory,
    MemoryDemand,
    memory_demands,
)
from penstock.host.files import write_atomically
from penstock.planner.cost.emulation import Emulation
from penstock.planner.memory.table import MemoryKind, MemoryRow, device_rows, node_rows
from penstock.protocol.plan.plan import Plan


def write_model(emulation: Emulation, run_dir: Path) -> None:
    """Writes the stored table, which daemons and the preparation of data read as the model."""
    write_atomically(run_dir / "table.json", emulation.stored.to_json())
    (run_dir / "model").mkdir(exist_ok=True)
    description = {"model_type": "emulated", "emulated": emulation.name, "eos_token_id": None}
    write_atomically(run_dir / "model" / "config.json", json.dumps(description))


def emulated_rows(config: Config, emulation: Emulation, plan: Plan) -> tuple[MemoryRow, ...]:
    """Returns the rows that this machine stores, then those of the emulated nodes and devices."""
    return (
        *node_rows(config, emulation.stored, plan),
        *(
            replace(row, resource=MemoryKind.EMULATED)
            for row in node_rows(config, emulation.table, plan)
        ),
        *(
            replace(row, resource=MemoryKind.EMULATED) if row.resource is MemoryKind.HOST else row
            for row in device_rows(config, plan, emulation.costs)
        ),
    )


def emulated_demands(
    config: Config,
    emulation: Emulation,
    rows: Sequence[MemoryRow],
    machine: MachineMemory,
    nodes: Sequence[int],
) -> tuple[MemoryDemand, ...]:
    """Returns the stored bytes with this machine's memory, and the full bytes with the emulated
    machine's memory.

    ``memory.host_limit`` and ``memory.device_limit`` are the sizes of the emulated machines.
    """
    stored = [row for row in rows if row.resource is MemoryKind.SHM]
    unlimited = config.model_copy(
        update={"memory": config.memory.model_copy(update={"host_limit": None})}
    )
    real = memory_demands(unlimited, stored, machine, nodes)
    return (
        *(need for need in real if need.place == "machine"),
        *_emulated(config, emulation, rows),
    )


def _emulated(
    config: Config, emulation: Emulation, rows: Sequence[MemoryRow]
) -> Iterator[MemoryDemand]:
    cluster, memory = emulation.cluster, config.memory
    for resource, what, limit, size in (
        (MemoryKind.EMULATED, "host memory", memory.host_limit, cluster.host_memory_bytes),
        (
            MemoryKind.DEVICE,
            f"{emulation.name} memory",
            memory.device_limit,
            cluster.device_memory_bytes,
        ),
    ):
        emulated = None if isinf(size) else int(size)
        places = dict.fromkeys(row.place for row in rows if row.resource is resource)
        for place in places:
            yield MemoryDemand(
                place=place,
                what=f"emulated {what}",
                needed=sum(
                    row.num_bytes for row in rows if row.place == place and row.resource is resource
                ),
                available=emulated if limit is None else limit,
            )
