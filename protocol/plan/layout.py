"""Places of stages: both cuts of a model, their devices, and the routes of micro-batches.

Code that orders, checks or runs instructions reads here the first and last stage of a route, and
the stage that leaves each checkpoint. :mod:`penstock.planner.schedule.layout` has the layout that
schemes and passes order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from penstock.protocol.plan.instructions import Phase
from penstock.protocol.plan.plan import Plan, StageRange


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """Both cuts of the model with their devices, and the route of each micro-batch.

    See :class:`penstock.protocol.plan.plan.Plan` for stages and routes. Stages are numbered over
    all routes; the stage before or after one in its route is its neighbour in the list.
    """

    num_devices: int
    num_microbatches: int
    forward: tuple[StageRange, ...]
    backward: tuple[StageRange, ...]
    routes: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: Plan) -> StageLayout:
        """Returns the stages of a plan, without its programs."""
        return cls(
            num_devices=plan.num_devices,
            num_microbatches=plan.num_microbatches,
            forward=plan.forward_stages,
            backward=plan.backward_stages,
            routes=plan.routes,
        )

    @cached_property
    def num_blocks(self) -> int:
        """Number of blocks of the model."""
        return self.forward[-1].stop

    @cached_property
    def num_routes(self) -> int:
        """Number of routes that micro-batches can take."""
        return sum(stage.start == 0 for stage in self.forward)

    def stages(self, side: Phase) -> tuple[StageRange, ...]:
        """Returns one of the two lists of stages."""
        return self.forward if side is Phase.FORWARD else self.backward

    def route_of(self, micro_batch: int) -> int:
        """Returns the route of a micro-batch."""
        return self.routes[micro_batch] if self.routes else 0

    @cached_property
    def microbatches_of_route(self) -> tuple[tuple[int, ...], ...]:
        """The micro-batches of every route, ascending."""
        micro_batches: list[list[int]] = [[] for _ in range(self.num_routes)]
        for micro_batch in range(self.num_microbatches):
            micro_batches[self.route_of(micro_batch)].append(micro_batch)
        return tuple(map(tuple, micro_batches))

    @cached_property
    def forward_routes(self) -> tuple[int, ...]:
        """The route of every forward stage."""
        return _routes(self.forward)

    @cached_property
    def backward_routes(self) -> tuple[int, ...]:
        """The route of every backward stage."""
        return _routes(self.backward)

    def is_first_forward(self, stage: int) -> bool:
        """Returns whether a forward stage takes the batch."""
        return self.forward[stage].start == 0

    def is_last_forward(self, stage: int) -> bool:
        """Returns whether a forward stage computes the loss."""
        return self.forward[stage].stop == self.num_blocks

    def is_first_backward(self, stage: int) -> bool:
        """Returns whether a backward stage makes no input gradient; its checkpoint is the batch."""
        return self.backward[stage].start == 0

    def is_last_backward(self, stage: int) -> bool:
        """Returns whether a backward stage starts from the loss."""
        return self.backward[stage].stop == self.num_blocks

    def is_coupled(self, stage: int) -> bool:
        """Returns whether both stages of a number are the same blocks on the same device."""
        return (
            stage < len(self.forward)
            and stage < len(self.backward)
            and self.forward[stage] == self.backward[stage]
        )

    def checkpoint_source(self, backward_stage: int, *, skipped: bool = False) -> int:
        """Returns the forward stage that leaves the input checkpoint of a backward stage.

        That is the stage that contains the backward stage's first block. ``skipped``: its FORWARD
        is left out (see :class:`penstock.protocol.plan.resources.PlanFacts`). Then the result is
        the previous stage, if the two boundaries coincide. Otherwise that FORWARD is missing, and
        the result stays the same.
        """
        source = self._checkpoint_sources[backward_stage]
        begins = self.forward[source].start == self.backward[backward_stage].start
        return source - 1 if skipped and begins and not self.is_first_forward(source) else source

    def checkpoint_after(self, forward_stage: int) -> int | None:
        """Returns the backward stage of the same route that takes a forward stage's output as its
        input; None without one.
        """
        return self._checkpoints_after[forward_stage]

    def checkpoints_of(self, forward_stage: int) -> tuple[int, ...]:
        """Returns the backward stages with an input inside a forward stage, including the first of
        its route.
        """
        return self._checkpoints[forward_stage]

    def blocks_for_checkpoints(self, forward_stage: int) -> range:
        """Returns the blocks in front of the last checkpoint that a FORWARD with ``keep=input``
        leaves. If no instruction needs its output, it computes only these.
        """
        stage = self.forward[forward_stage]
        starts = (self.backward[b].start for b in self.checkpoints_of(forward_stage))
        return range(stage.start, max(starts, default=stage.start))

    @cached_property
    def _checkpoint_sources(self) -> tuple[int, ...]:
        place = {
            (route, block): stage
            for stage, route in enumerate(self.forward_routes)
            for block in self.forward[stage].blocks
        }
        return tuple(
            place[route, self.backward[stage].start]
            for stage, route in enumerate(self.backward_routes)
        )

    @cached_property
    def _checkpoints(self) -> tuple[tuple[int, ...], ...]:
        stages_of: list[list[int]] = [[] for _ in self.forward]
        for stage, source in enumerate(self._checkpoint_sources):
            stages_of[source].append(stage)
        return tuple(map(tuple, stages_of))

    @cached_property
    def _checkpoints_after(self) -> tuple[int | None, ...]:
        starts = {
            (route, stage.start): index
            for index, (route, stage) in enumerate(
                zip(self.backward_routes, self.backward, strict=True)
            )
        }
        return tuple(
            starts.get((route, stage.stop))
            for route, stage in zip(self.forward_routes, self.forward, strict=True)
        )

    def forward_stages_on(self, device: int) -> tuple[int, ...]:
        """Returns the forward stages of a device, in the order of the model."""
        return tuple(i for i, stage in enumerate(self.forward) if stage.device == device)

    def backward_stages_on(self, device: int) -> tuple[int, ...]:
        """Returns the backward stages of a device, last first: as backward passes can run."""
        stages = (i for i, stage in enumerate(self.backward) if stage.device == device)
        return tuple(sorted(stages, reverse=True))


def _routes(stages: tuple[StageRange, ...]) -> tuple[int, ...]:
    routes: list[int] = []
    for stage in stages:
        routes.append((routes[-1] if routes else -1) + (stage.start == 0))
    return tuple(routes)
