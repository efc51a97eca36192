"""Memory of an emulated device: the interpreter's tensors, each at its full size.

The account is independent of the plan's. After each instruction it reads the present state:

* fetched stages;
* gradient sums, from the first addition until they are written;
* graphs and the blocks that they went through;
* deferred weight gradients;
* kept, expected and swapped tensors.

Sizes come from the costs and the full table. A running instruction holds all tensors from before
and after it. Some memory is freed without an instruction: sums that are being copied, and
activations that peers swapped to this device and take back. Such memory counts while the
instruction runs, by the clocks of its movers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from penstock.host import world
from penstock.planner.cost.costs import BlockCost
from penstock.protocol.plan.instructions import Instruction
from penstock.protocol.plan.resources import PlanFacts, StateKind, TensorKind, boundary
from penstock.protocol.plan.semantics import COMPUTES, GRAPHS, makes, side_of, takes
from penstock.workers.attempt import Attempt
from penstock.workers.platforms.emulated.device import EmulatedDevice
from penstock.workers.platforms.emulated.runtime import EmulatedOutput
from penstock.workers.state.weights import arrays_of, num_elements
from penstock.workers.telemetry.usage import DeviceMemoryError, MemoryPeak, Usage, Use

_GRADIENT_ITEMSIZE = 4


class _Entry(NamedTuple):
    use: Use
    num_bytes: float
    owner: object
    """Keeps the address in the key from being reused."""


_Entries = Mapping[Hashable, _Entry]

_LEAVES_BY_ITSELF = ("leaving", "lodged")


class EmulatedMeter:
    """See :class:`penstock.workers.platforms.meters.Meter`; exceeding the limit is an error."""

    def __init__(self, device: EmulatedDevice, limit_bytes: float) -> None:
        self.limit_bytes: float | None = limit_bytes
        self.peak: MemoryPeak | None = None
        self._device = device
        self._table, self._costs = device.emulation.table, device.emulation.costs
        self._before: _Entries = {}

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Begins with an empty device."""
        self.peak, self._before = None, {}
        yield
        self._before = {}

    def received(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Does nothing: received tensors are counted with all others."""

    def executed(self, instruction: Instruction, attempt: Attempt) -> None:
        """Counts the memory before and after the instruction together.

        Raises:
            DeviceMemoryError: the sum is more than the device has.
        """
        now = dict(self._entries(attempt))
        before, self._before = self._before, now
        before = {key: entry for key, entry in before.items() if key not in _LEAVES_BY_ITSELF}
        moved = _changes_its_name(instruction, attempt.context.routing.facts)
        if moved is not None:
            before = {k: e for k, e in before.items() if k in now or e.use is not moved}
        needed = _together(before, now)
        needed[Use.WORKSPACE] += self._workspace(instruction, attempt)
        usage = Usage(dict(needed))
        if self.peak is None or usage.total_bytes > self.peak.num_bytes:
            self.peak = MemoryPeak(
                num_bytes=usage.total_bytes,
                usage=usage,
                during=instruction,
                at_s=world.perf_counter(),
            )
        if self.limit_bytes is not None and usage.total_bytes > self.limit_bytes:
            context, in_use = attempt.context, Usage(dict(_together(before, {})))
            raise DeviceMemoryError(
                context.plan.programs[context.device_index],
                in_use,
                wanted_bytes=usage.total_bytes - in_use.total_bytes,
                limit_bytes=self.limit_bytes,
            )

    def usage(self, attempt: Attempt) -> Usage:
        """Returns the present uses."""
        return Usage(dict(_together(dict(self._entries(attempt)), {})))

    def _entries(self, attempt: Attempt) -> Iterator[tuple[Hashable, _Entry]]:
        yield from self._state(attempt)
        yield from self._graphs(attempt)
        yield from self._transfers(attempt)

    def _state(self, attempt: Attempt) -> Iterator[tuple[Hashable, _Entry]]:
        """Yields weights, gradient sums until they are written, and permanent memory of the
        device.
        """
        context, table, layout = attempt.context, self._table, attempt.context.routing.layout
        stages = layout.backward_stages_on(context.device_index)
        static = sum(self._costs.of(layout.backward[b].blocks).static_bytes for b in stages)
        yield "static", _Entry(Use.STATE, static + self._device.state_bytes, None)
        offloaded = self._device.emulation.offloaded
        leaving = self._device.leaving_elements if offloaded else 0.0
        yield "leaving", _Entry(Use.GRADIENTS, leaving * _GRADIENT_ITEMSIZE, None)
        yield "lodged", _Entry(Use.ACTIVATIONS, self._device.lodged_bytes, None)
        yield "staging", _Entry(Use.WORKSPACE, self._device.staging_bytes, None)
        if not offloaded:
            return  # weights and sums are part of the permanent memory
        for key in context.weights.in_use:
            arrays = arrays_of(table, attempt.stages.blocks(key))
            count = sum(num_elements(table, array) for array in arrays)
            yield key, _Entry(Use.WEIGHTS, count * table.weight_dtype.itemsize, None)
        for gradient_sum in attempt.gradients.unpublished:
            count = table.blocks[gradient_sum.block].trainable_elements
            yield gradient_sum, _Entry(Use.GRADIENTS, count * _GRADIENT_ITEMSIZE, None)

    def _graphs(self, attempt: Attempt) -> Iterator[tuple[Hashable, _Entry]]:
        held, device = attempt.held_tensors, self._device
        durations = device.durations(attempt.context.routing.facts)
        for place, output in held.graphs.items():
            assert isinstance(output, EmulatedOutput)
            num_bytes = sum(self._cost(block.index).activation_bytes for block, _ in output.steps)
            if place in device.dropped:
                num_bytes = durations.kept_bytes(*place)
            num_bytes *= 1.0 - device.swapped_share(*place)
            yield ("graph", *place), _Entry(Use.ACTIVATIONS, num_bytes, None)
        for place, deferred in device.deferred.items():
            num_bytes = sum(self._cost(block.index).deferred_bytes for block, _ in deferred)
            # The rest of a graph: the two never exist at the same time.
            yield ("graph", *place), _Entry(Use.DEFERRED, num_bytes, None)

    def _transfers(self, attempt: Attempt) -> Iterator[tuple[Hashable, _Entry]]:
        """Yields transfers; one tensor under two names counts once."""
        held = attempt.held_tensors
        for (kind, stage, _), tensors in held.tensors.items():
            num_bytes = self._transfer_bytes(attempt, kind, stage)
            for tensor in tensors.values():
                storage = tensor.untyped_storage()
                yield storage.data_ptr(), _Entry(Use.TRANSFERS, num_bytes, tensor)
        for kind, stage, m in held.posted:
            num_bytes = self._transfer_bytes(attempt, kind, stage)
            yield (kind, stage, m), _Entry(Use.TRANSFERS, num_bytes, None)

    def _transfer_bytes(self, attempt: Attempt, kind: str, stage: int) -> float:
        tensor = TensorKind.ACTIVATION if kind == "activation" else TensorKind.GRADIENT
        return self._costs.input_bytes(boundary(attempt.context.routing.layout, tensor, stage))

    def _cost(self, block: int) -> BlockCost:
        return self._costs.blocks[block]

    def _workspace(self, instruction: Any, attempt: Attempt) -> float:
        if not isinstance(instruction, COMPUTES):
            return 0.0
        stages = attempt.context.routing.layout.stages(side_of(instruction))
        cost = self._costs.of(stages[instruction.stage].blocks)
        return cost.workspace_of(instruction)


def _changes_its_name(instruction: Instruction, facts: PlanFacts) -> Use | None:
    """Returns the use that an instruction keeps under another name: its input, which a graph saves;
    or gradient sums, which are being copied.
    """
    if any(resource.kind in GRAPHS for resource in makes(instruction, facts)):
        return Use.TRANSFERS
    sums = any(resource.kind is StateKind.SUMS for resource in takes(instruction, facts))
    return Use.GRADIENTS if sums else None


def _together(before: _Entries, now: _Entries) -> defaultdict[Use, float]:
    """Returns bytes by use of the entries in either; an entry with two sizes counts at the larger
    one.
    """
    by_use: defaultdict[Use, float] = defaultdict(float)
    for key in before.keys() | now.keys():
        several = [entries[key] for entries in (before, now) if key in entries]
        by_use[several[-1].use] += max(entry.num_bytes for entry in several)
    return by_use
