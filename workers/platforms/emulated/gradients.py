"""FETCH_WEIGHTS, REDUCE_GRADIENTS and OFFLOAD_GRADIENTS with the times of collectives.

Elsewhere they are those of real devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.protocol.plan.instructions import (
    FetchWeights,
    OffloadGradients,
    Opcode,
    ReduceGradients,
)
from penstock.workers.attempt import Attempt
from penstock.workers.handlers import state as gradients
from penstock.workers.handlers import state as memory
from penstock.workers.platforms.emulated.collectives import Rings
from penstock.workers.platforms.emulated.compute import device_of
from penstock.workers.state.weights import StageKey, arrays_of


def fetch_weights(instruction: FetchWeights, attempt: Attempt) -> None:
    """With ``shards_weights`` the device's share comes from the host, then the rest around a ring:
    the first use waits until all devices have fetched theirs.
    """
    device, number = device_of(attempt), 0
    rings = _rings(attempt) if _shares(attempt) else None
    blocks = attempt.stages.blocks(StageKey(instruction.stage, instruction.phase))
    if rings is not None:
        number = rings.reserve(device.emulation.costs.of(blocks).weight_bytes)
    device.fetches.append((rings, number, _fetches_from(attempt, blocks)))
    memory.fetch_weights(instruction, attempt)


def reduce_gradients(instruction: ReduceGradients, attempt: Attempt) -> None:
    """Sums go to the root over the link, or with ``shards_weights`` around a ring."""
    device, stage = device_of(attempt), instruction.stage
    flow = attempt.context.flow
    cost = device.emulation.costs.of(flow.layout.backward[stage].blocks)
    if _shares(attempt):
        rings = _rings(attempt)
        number = rings.reserve(cost.gradient_bytes)
        rings.enter(number, device.compute.free_at)
        device.scatters[stage] = number
    elif not flow.reduction.publishes(stage):
        root = flow.reduction.root_device(stage)
        device.sends(attempt.context.device_index, root, cost.device_gradient_bytes)
    gradients.reduce_gradients(instruction, attempt)


def offload_gradients(instruction: OffloadGradients, attempt: Attempt) -> None:
    """The copy starts when the gradients are summed."""
    device = device_of(attempt)
    scatter = device.scatters.pop(instruction.stage, None)
    if scatter is not None:
        device.needs(_rings(attempt).end(scatter))
    gradients.offload_gradients(instruction, attempt)


OWN: Mapping[Opcode, Callable[[Any, Attempt], None]] = MappingProxyType(
    {
        Opcode.FETCH_WEIGHTS: fetch_weights,
        Opcode.REDUCE_GRADIENTS: reduce_gradients,
        Opcode.OFFLOAD_GRADIENTS: offload_gradients,
    }
)


def _fetches_from(attempt: Attempt, blocks: range) -> float | None:
    """When the copy can begin: now, as far as the device has come, if nothing must be waited for.

    The thread that loads may be late; that is Python's matter, not the device's.
    """
    context = attempt.context
    here = (
        context.ownership.owner[array.block] == context.weights.node
        and context.memory.control.readable(array.block, attempt.job.base_version)
        for array in arrays_of(context.table, blocks)
    )
    return device_of(attempt).compute.free_at if all(here) else None


def _shares(attempt: Attempt) -> bool:
    plan = attempt.context.plan
    return plan.shards_weights and plan.num_devices > 1


def _rings(attempt: Attempt) -> Rings:
    device = device_of(attempt)
    if device.rings is None:
        emulation = device.emulation
        device.rings = Rings(attempt.context, attempt.job, emulation.cluster, emulation.time_scale)
    return device.rings
