"""Collectives: every member sends to the next of a ring, all at the same time.

A ring all-reduce of n members sends 2 (n - 1) / n of the data over each link, a reduce-scatter or
an all-gather half of that (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009).
"""

from __future__ import annotations

import numpy as np

from penstock.planner.simulate.columns import Ints
from penstock.planner.simulate.context import Context
from penstock.planner.simulate.graph import Label
from penstock.planner.simulate.lanes import Lane


def add_ring(context: Context, *, rows: Ints, needs: Ints, amount: float, label: Label) -> int:
    """Members are the devices of ``rows``; all start when all ``needs`` have ended.

    ``amount``: bytes that each member sends. Returns the task with whose end all have ended.
    """
    builder, queues = context.builder, context.queues
    ready = context.barrier(needs, int(rows[0]))
    devices = context.columns.devices[rows]
    order = np.argsort(devices)
    rows, sources = rows[order], devices[order]
    targets = np.roll(sources, -1)
    link = context.network.link
    sends = builder.add(
        len(rows),
        lane=Lane.REDUCE,
        queues=queues.collective(sources),
        origins=rows,
        places=sources,
        peers=targets,
        label=label,
        amounts=amount,
        routes=[link(a, b) for a, b in zip(sources.tolist(), targets.tolist(), strict=True)],
        delays=context.cluster.latency_s,
    )
    builder.need(sends, ready)
    return context.barrier(sends, int(rows[0]))
