"""What devices tell each other in collectives, where programs name no sends and receives.

- Gradient sums, from the other routes of a stage to the one that publishes them
  (:mod:`penstock.protocol.plan.reduction`).
- On devices whose time is modelled, if they share out weights, when each enters a collective, to
  all others: its time follows from that (:mod:`penstock.workers.platforms.emulated`).
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.protocol.plan.instructions import FetchWeights, Program, ReduceGradients
from penstock.protocol.plan.plan import Plan
from penstock.workers.state.flow import Flow

Received = tuple[str, str, int, int]
"""``(phase, kind, stage, micro_batch)`` of a transfer."""


def collective_receives(
    plan: Plan, flow: Flow, device: int, *, modelled: bool
) -> frozenset[Received]:
    """What collectives bring to a device."""
    found: set[Received] = {
        ("train", "reduction", sender, 0)
        for stage in flow.layout.backward_stages_on(device)
        for sender in flow.reduction.senders(stage)
    }
    if modelled and plan.shards_weights:
        found.update(_entries("train", plan.programs, device))
        found.update(_entries("eval", plan.evaluation, device))
    return frozenset(found)


def collective_peers(plan: Plan, flow: Flow, device: int, *, modelled: bool) -> frozenset[int]:
    """Whom collectives make a device send to."""
    if modelled and plan.shards_weights:
        return frozenset(range(plan.num_devices)) - {device}
    return frozenset(
        flow.reduction.root_device(stage)
        for stage in flow.layout.backward_stages_on(device)
        if not flow.reduction.publishes(stage)
    )


def _entries(phase: str, programs: tuple[Program, ...], device: int) -> Iterator[Received]:
    """Every FETCH_WEIGHTS and REDUCE_GRADIENTS is one, in the order of programs."""
    collectives = sum(isinstance(i, FetchWeights | ReduceGradients) for i in programs[device])
    for number in range(collectives):
        for other in range(len(programs)):
            if other != device:
                yield phase, "entry", number, other
