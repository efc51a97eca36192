"""Results of a simulation: times, shares of idle time, spans.

Labels of spans follow from the instructions that their tasks come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.host.sums import added
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import Costs
from penstock.planner.memory.footprint import DevicePeak, device_peaks
from penstock.planner.schedule.bounds import lower_bound_s
from penstock.planner.schedule.schedule import schedule_of
from penstock.planner.schedule.tensors import transferred
from penstock.planner.simulate.columns import Columns
from penstock.planner.simulate.graph import Label, Tasks, Times
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.semantics import Lane


class Labels:
    """Makes labels of spans, such as ``F 3 0``, ``BW 3 0,1``, ``FW 3 forward``, ``activation 3 0``,
    ``U 3`` and ``S 3``.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def of(self, label: int, row: int) -> str:
        """Returns the label of a task that comes from the instruction in a row."""
        instruction = self._columns.instructions[row]
        if label == Label.OPTIMIZER:
            return f"U {instruction.stage}"
        if label == Label.SETTLE:
            return f"S {instruction.stage}"
        if label == Label.TENSOR:
            tensor = transferred(instruction)
            return f"{tensor.kind} {tensor.stage} {tensor.micro_batch}"
        words = [instruction.opcode.value, str(self._columns.stages[row])]
        if hasattr(instruction, "micro_batch"):
            words.append(str(instruction.micro_batch))
        if hasattr(instruction, "micro_batches"):
            words.append(",".join(map(str, instruction.micro_batches)))
        if hasattr(instruction, "phase"):
            words.append(instruction.phase)
        return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One piece of work on one resource, while it occupies it.

    ``place``: device, or node for the optimizer; ``peer``: the other device of links. ``label``
    starts with a code. Instructions have ``F 3 0`` and the like, transfers ``activation 3 0`` and
    the like. The optimizer of backward stage 3 has ``U 3`` (``S 3``: its settle). On a device ``U
    7`` is the update of block 7.
    """

    lane: Lane
    place: int
    label: str
    start_s: float
    end_s: float
    peer: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """Seconds a device computes, and does not, until the last device has finished computing."""

    busy_s: float
    idle_s: float


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Simulation:
    """Holds what came out. ``pipeline_s`` ends with the last compute instruction, ``makespan_s``
    with everything. Updates on devices are optimizer work: no device is busy with them.
    """

    plan: Plan
    costs: Costs
    cluster: Cluster
    columns: Columns
    tasks: Tasks
    times: Times
    known_peaks: tuple[DevicePeak, ...] | None = None

    @cached_property
    def makespan_s(self) -> float:
        """The end of everything, in seconds."""
        return float(self.times.ends.max(initial=0.0))

    @cached_property
    def pipeline_s(self) -> float:
        """The end of the last compute instruction, in seconds."""
        return float(self.times.ends[self._computes].max(initial=0.0))

    @cached_property
    def offloaded_s(self) -> float:
        """The end of the devices' work with copies of gradients to the host, in seconds; what is
        after it only host cores do.
        """
        offloads = self.tasks.lanes == tuple(Lane).index(Lane.OFFLOAD)
        return max(self.pipeline_s, float(self.times.ends[offloads].max(initial=0.0)))

    @cached_property
    def devices(self) -> tuple[DeviceTimes, ...]:
        """Seconds in which each device computes."""
        busy = np.bincount(
            self.tasks.places[self._computes],
            weights=self.tasks.seconds[self._computes],
            minlength=self.plan.num_devices,
        )
        return tuple(
            DeviceTimes(busy_s=busy_s, idle_s=self.pipeline_s - busy_s) for busy_s in busy.tolist()
        )

    @property
    def num_tasks(self) -> int:
        """Number of simulated pieces of work."""
        return len(self.tasks.seconds)

    @property
    def array_bytes(self) -> int:
        """Memory that the simulation itself keeps: proportional to the plan's instructions."""
        return self.columns.num_bytes + self.tasks.num_bytes + self.times.num_bytes

    @property
    def optimizer_tail_s(self) -> float:
        """The seconds after the last compute instruction: offloads and optimizer work that were not
        hidden.
        """
        return self.makespan_s - self.pipeline_s

    @property
    def bubble_ratio(self) -> float:
        """The share of the pipeline's time in which devices do not compute."""
        return self._idle_share(self.pipeline_s)

    @property
    def idle_ratio(self) -> float:
        """The share of the makespan, tail included, as the SPipe paper counts bubbles."""
        return self._idle_share(self.makespan_s)

    @property
    def device_bubble_ratios(self) -> tuple[float, ...]:
        """The share of the pipeline's time in which a device does not compute, for each device."""
        period_s = self.pipeline_s
        return tuple(d.idle_s / period_s if period_s > 0.0 else 0.0 for d in self.devices)

    @cached_property
    def lower_bound_s(self) -> float:
        """Seconds that no order of the plan's compute instructions can beat (:mod:`.bounds`)."""
        schedule = schedule_of(self.plan)
        return lower_bound_s(schedule.layout, schedule.orders, self.costs)

    @cached_property
    def peaks(self) -> tuple[DevicePeak, ...]:
        """The most that each device holds, by :mod:`penstock.planner.memory.footprint`."""
        if self.known_peaks is not None:
            return self.known_peaks
        return device_peaks(self.plan, self.costs)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Everything that occupied something, by start."""
        tasks, times = self.tasks, self.times
        visible = np.flatnonzero(tasks.lanes >= 0)
        order = visible[np.argsort(times.starts[visible], kind="stable")]
        lanes = tuple(Lane)
        labels = Labels(self.columns)
        return tuple(
            Span(
                lane=lanes[lane],
                place=place,
                label=labels.of(label, origin),
                start_s=start_s,
                end_s=end_s,
                peer=peer if peer >= 0 else None,
            )
            for lane, place, label, origin, start_s, end_s, peer in zip(
                tasks.lanes[order].tolist(),
                tasks.places[order].tolist(),
                tasks.labels[order].tolist(),
                tasks.origins[order].tolist(),
                times.starts[order].tolist(),
                times.ends[order].tolist(),
                tasks.peers[order].tolist(),
                strict=True,
            )
        )

    @cached_property
    def _computes(self) -> slice:
        return slice(0, self.tasks.num_compute)

    def _idle_share(self, period_s: float) -> float:
        busy_s = added(device.busy_s for device in self.devices)
        return 1.0 - busy_s / (period_s * len(self.devices)) if period_s > 0.0 else 0.0

    def summary(self) -> dict[str, Any]:
        """Returns everything but the spans, for ``--json``. Times in seconds, or in the units of
        the costs; ``instructions``: the text form of each device's program.
        """
        programs = self.plan.programs
        return {
            "scheme": self.plan.scheme,
            "devices": self.plan.num_devices,
            "micro_batches": self.plan.num_microbatches,
            "makespan": self.makespan_s,
            "bubble_ratio": self.bubble_ratio,
            "device_busy": [device.busy_s for device in self.devices],
            "device_bubble_ratio": list(self.device_bubble_ratios),
            "optimizer_tail": self.optimizer_tail_s,
            "peak_memory_bytes": [peak.total_bytes for peak in self.peaks],
            "lower_bound": self.lower_bound_s,
            "settled_early": list(self.plan.settled_early),
            "instructions": [[str(i) for i in program] for program in programs],
            "num_instructions": sum(map(len, programs)),
            "makespan_seconds": self.makespan_s,
            "pipeline_seconds": self.pipeline_s,
            "optimizer_tail_seconds": self.optimizer_tail_s,
            "idle_ratio": self.idle_ratio,
            "peak_bytes": [
                {
                    "weights": p.weight_bytes,
                    "gradients": p.gradient_bytes,
                    "activations": p.activation_bytes,
                }
                for p in self.peaks
            ],
        }
