"""State of the devices of the abstract machine, their shared state, and the events that they wait
for.

Events are numbers: millions of instructions need keys that are cheap to hash.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from penstock.planner.schedule.layout import StageLayout
from penstock.planner.schedule.tensors import Tensor, TensorKind
from penstock.protocol.plan.instructions import (
    Forward,
    Instruction,
    Phase,
    Program,
    ReduceGradients,
)
from penstock.protocol.plan.plan import Plan, StageRange
from penstock.protocol.plan.reduction import Reduction

Event = int
"""Something happens once: a tensor was sent, gradients were offloaded or sent to their root, or all
devices have entered a collective.
"""


class EventNumbers:
    """Turns events into numbers, and numbers back into events."""

    def __init__(self, layout: StageLayout) -> None:
        self._count = count = layout.num_microbatches
        self._gradients = len(layout.forward) * count
        self._checkpoints = self._gradients + len(layout.backward) * count
        self._offloads = self._checkpoints + len(layout.backward) * count
        self._reductions = self._offloads + len(layout.backward)
        self._collectives = self._reductions + len(layout.backward)

    def activation(self, stage: int, micro_batch: int) -> Event:
        """Returns the event "the output of a forward stage was sent"."""
        return stage * self._count + micro_batch

    def gradient(self, stage: int, micro_batch: int) -> Event:
        """Returns the event "the input gradient of a backward stage was sent"."""
        return self._gradients + stage * self._count + micro_batch

    def checkpoint(self, stage: int, micro_batch: int) -> Event:
        """Returns the event "the input checkpoint of a backward stage was sent"."""
        return self._checkpoints + stage * self._count + micro_batch

    def tensor(self, kind: TensorKind, stage: int, micro_batch: int) -> Event:
        """Returns the event "a tensor of any of the three kinds was sent"."""
        match kind:
            case TensorKind.ACTIVATION:
                return self.activation(stage, micro_batch)
            case TensorKind.GRADIENT:
                return self.gradient(stage, micro_batch)
            case TensorKind.CHECKPOINT:
                return self.checkpoint(stage, micro_batch)

    def offload(self, stage: int) -> Event:
        """Returns the event "the gradients of a backward stage are in host memory"."""
        return self._offloads + stage

    def reduction(self, stage: int) -> Event:
        """Returns the event "the gradients of a backward stage are on their way to the stage that
        sums them".
        """
        return self._reductions + stage

    def collective(self, number: int) -> Event:
        """Returns the event "all devices have entered collective ``number``"."""
        return self._collectives + number

    def tensor_of(self, event: Event) -> Tensor | None:
        """Returns the tensor that was sent, ``None`` if the event is of another kind."""
        if event >= self._offloads:
            return None
        if event >= self._checkpoints:
            kind, first = TensorKind.CHECKPOINT, self._checkpoints
        elif event >= self._gradients:
            kind, first = TensorKind.GRADIENT, self._gradients
        else:
            kind, first = TensorKind.ACTIVATION, 0
        stage, micro_batch = divmod(event - first, self._count)
        return Tensor(kind=kind, stage=stage, micro_batch=micro_batch)

    def offload_of(self, event: Event) -> int | None:
        """Returns the backward stage that was offloaded, ``None`` if the event is of
        another kind.
        """
        return event - self._offloads if self._offloads <= event < self._reductions else None

    def reduction_of(self, event: Event) -> int | None:
        """Returns the backward stage that was sent to be summed, ``None`` for other events."""
        return event - self._reductions if self._reductions <= event < self._collectives else None

    def collective_of(self, event: Event) -> int | None:
        """Returns the number of the collective, ``None`` if the event is of another kind."""
        return event - self._collectives if event >= self._collectives else None

    def describe(self, event: Event) -> str:
        """Returns the event in words, for messages."""
        stage, number = self.offload_of(event), self.collective_of(event)
        if stage is not None:
            return f"gradients of backward stage {stage} in host memory"
        stage = self.reduction_of(event)
        if stage is not None:
            return f"gradients of backward stage {stage}, to sum them"
        if number is not None:
            return f"collective {number}"
        return str(self.tensor_of(event))


class RuleError(Exception):
    """An instruction breaks a rule: where, and why."""

    def __init__(self, device: int, position: int, reason: str) -> None:
        super().__init__(reason)
        self.device = device
        self.position = position
        self.reason = reason


class RuleBroken(Exception):
    """A rule is broken. Rules raise it without the place, which :class:`.machine.AbstractMachine`
    adds.
    """


Buffer = tuple[int, Phase]
"""A buffer holds the weights of a forward or of a backward stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRules:
    """The rules of a plan, as :class:`~penstock.protocol.plan.plan.Plan` names them.
    ``evaluation``: the programs only run forwards.
    """

    evaluation: bool
    weight_buffers: int = 2
    rebinds_weights: bool = False
    shards_weights: bool = False

    @classmethod
    def of(cls, plan: Plan, *, evaluation: bool) -> PlanRules:
        """Returns the rules of a plan's training or evaluation programs."""
        return cls(
            evaluation=evaluation,
            weight_buffers=plan.weight_buffers,
            rebinds_weights=plan.rebinds_weights,
            shards_weights=plan.shards_weights,
        )


@dataclass(slots=True, kw_only=True)
class Graph:
    """The tensors that a FORWARD or RECOMPUTE kept for a backward, and the buffer of its weights.

    ``incomplete``: outputs of dropped operators are missing. ``swapped``: the fields of the
    SWAP_OUT that took a part of it away.
    """

    buffer: Buffer
    forwarded: bool
    incomplete: bool = False
    swapped: tuple[float, int | None] | None = None


@dataclass(slots=True, kw_only=True)
class DeviceState:
    """The state of a device.

    ``buffers``: fetched weights and whether they were used; ``gathers``: the collective that brings
    them, if any; ``held``: tensors made on the device; ``posted``: receives not consumed yet, with
    their positions; ``deferred``: BACKWARD_INPUTs without their BACKWARD_WEIGHT; ``received``,
    ``sent``: by peer, in order; ``collectives``: number of collectives that it has entered.
    """

    index: int
    position: int = 0
    buffers: dict[Buffer, bool] = field(default_factory=dict)
    gathers: dict[Buffer, int] = field(default_factory=dict)
    graphs: dict[tuple[int, int], Graph] = field(default_factory=dict)
    deferred: set[tuple[int, int]] = field(default_factory=set)
    held: set[Event] = field(default_factory=set)
    posted: dict[Event, int] = field(default_factory=dict)
    received: dict[int, dict[Event, int]] = field(default_factory=lambda: defaultdict(dict))
    sent: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    collectives: int = 0


class Side:
    """Forward or backward stages, and what was done on them."""

    def __init__(
        self, stages: tuple[StageRange, ...], routes: tuple[int, ...], phase: Phase, count: int
    ) -> None:
        self.stages = stages
        self.routes = routes
        self.phase = phase
        self.devices = [stage.device for stage in stages]
        self.done = bytearray(len(stages) * count)
        self.recomputed = bytearray(len(stages) * count)
        self.weighted = bytearray(len(stages) * count)


class World:
    """All devices, and their shared state.

    ``runs``: True if a FORWARD is in any program; ``remaining``: micro-batches that a backward
    stage still lacks weight gradients of; ``reduces``: True if any device reduces gradients, and
    ``reduction`` where to; ``scatters``: the collective of a stage's reduction, if it is one.
    """

    def __init__(
        self, layout: StageLayout, programs: tuple[Program, ...], rules: PlanRules
    ) -> None:
        count = layout.num_microbatches
        self.layout = layout
        self.programs = programs
        self.rules = rules
        self.events = EventNumbers(layout)
        self.devices = [DeviceState(index=index) for index in range(len(programs))]
        self.route_of = [layout.route_of(m) for m in range(count)]
        self.forward = Side(layout.forward, layout.forward_routes, Phase.FORWARD, count)
        self.backward = Side(layout.backward, layout.backward_routes, Phase.BACKWARD, count)
        self.runs = bytearray(len(layout.forward) * count)
        self.reduces = False
        self.reduction = Reduction.in_programs(
            layout, programs, shards_weights=rules.shards_weights
        )
        for program in programs:
            for instruction in program:
                self._note(instruction)
        self.remaining = [
            len(layout.microbatches_of_route[route]) for route in layout.backward_routes
        ]
        self.backward_stages_of = stages_by_block(layout)
        self.reduced: set[int] = set()
        self.scatters: dict[int, int] = {}
        self.offloaded: set[int] = set()
        self.updated: set[int] = set()
        self.collectives: list[tuple[str, StageRange, int]] = []
        self.happened: set[Event] = set()
        self.waiting: dict[Event, list[int]] = {}
        self.ready = list(range(len(programs)))[::-1]

    def _note(self, instruction: Instruction) -> None:
        if type(instruction) is Forward:
            stage, micro_batch = instruction.stage, instruction.micro_batch
            if stage < len(self.forward.stages) and micro_batch < len(self.route_of):
                self.runs[stage * len(self.route_of) + micro_batch] = 1
        elif type(instruction) is ReduceGradients:
            self.reduces = True

    def is_run(self, stage: int, micro_batch: int) -> bool:
        """Returns whether the FORWARD of a stage is in any program."""
        return bool(self.runs[stage * len(self.route_of) + micro_batch])

    def checkpoint_source(self, stage: int, micro_batch: int) -> int:
        """Returns the forward stage that leaves the checkpoint of a backward stage. Where its usual
        source does not run, it is the one that the layout names instead.
        """
        source = self.layout.checkpoint_source(stage)
        skipped = not self.is_run(source, micro_batch)
        return self.layout.checkpoint_source(stage, skipped=skipped) if skipped else source

    def happen(self, event: Event) -> None:
        """Records an event and wakes the devices that wait for it."""
        self.happened.add(event)
        self.ready += self.waiting.pop(event, ())


def stages_by_block(layout: StageLayout) -> list[list[int]]:
    """Returns the backward stages of every block, one of each route."""
    by_block: list[list[int]] = [[] for _ in range(layout.num_blocks)]
    for index, stage in enumerate(layout.backward):
        for block in stage.blocks:
            by_block[block].append(index)
    return by_block
