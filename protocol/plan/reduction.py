"""Sums of gradients over several routes: the rule of REDUCE_GRADIENTS.

Backward stages of the same blocks, one of each route, are a *group*. Where a plan reduces
gradients, one member is the group's **root**. The others send it their sums and publish nothing.
The root adds the sums to its own in the order of routes, and its OFFLOAD_GRADIENTS publishes one
contribution for each use of a block. The root is the member of route 0. With ``shards_weights``
roots take turns, stage by stage: a reduce-scatter (ZeRO) with a stage as its smallest piece. The
node of the root owns the blocks.

Where a plan does not reduce, every stage is its own root. Each route publishes its own
contributions, which the optimizer's sweeps sum, and the node of route 0 owns the blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from penstock.host.errors import ConfigError
from penstock.protocol.plan.instructions import Program, ReduceGradients
from penstock.protocol.plan.layout import StageLayout
from penstock.protocol.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """Devices that sum the gradients of each backward stage.

    ``reduces``: sums travel between devices; ``roots``: for each backward stage, the stage with the
    device that publishes its gradients.
    """

    layout: StageLayout
    reduces: bool
    roots: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan) -> Reduction:
        """Returns the reduction of a plan.

        Raises:
            ConfigError: it reduces, and routes are cut differently or meet on a device.
        """
        return cls.in_programs(
            StageLayout.of(plan), plan.programs, shards_weights=plan.shards_weights
        )

    @classmethod
    def in_programs(
        cls, layout: StageLayout, programs: Iterable[Program], *, shards_weights: bool
    ) -> Reduction:
        """Returns the same from parts of a plan; errors are as in :meth:`of`."""
        reduces = any(type(i) is ReduceGradients for program in programs for i in program)
        if not reduces or layout.num_routes == 1:
            return cls(layout=layout, reduces=False, roots=tuple(range(len(layout.backward))))
        groups = _groups(layout)
        roots = list(range(len(layout.backward)))
        for place, group in enumerate(groups):
            root = group[place % len(group)] if shards_weights else group[0]
            for stage in group:
                roots[stage] = root
        return cls(layout=layout, reduces=True, roots=tuple(roots))

    def publishes(self, stage: int) -> bool:
        """Returns whether a backward stage's OFFLOAD_GRADIENTS brings gradients to the host."""
        return self.roots[stage] == stage

    def root_device(self, stage: int) -> int:
        """Returns the device that publishes the gradients of a backward stage."""
        return self.layout.backward[self.roots[stage]].device

    def senders(self, stage: int) -> tuple[int, ...]:
        """Returns the backward stages that send their sums to this one, in the order of routes."""
        return self._senders[stage]

    def published_route(self, stage: int) -> int:
        """Returns the route under which contributions of a backward stage count; 0 if summed."""
        return 0 if self.reduces else self.layout.backward_routes[stage]

    def owner_device(self, block: int) -> int:
        """Returns the device on the node that owns a block."""
        return self._owners[block]

    @cached_property
    def published_devices(self) -> tuple[tuple[int, ...], ...]:
        """The device that publishes each block, by the route that contributions count under."""
        routes: list[list[int]] = [[] for _ in range(self.layout.num_routes)]
        for stage, blocks in enumerate(self.layout.backward):
            route = self.layout.backward_routes[stage]
            routes[route] += [self.root_device(stage)] * len(blocks.blocks)
        return tuple(map(tuple, routes[:1] if self.reduces else routes))

    @property
    def _owners(self) -> tuple[int, ...]:
        return self.published_devices[0]

    @cached_property
    def _senders(self) -> tuple[tuple[int, ...], ...]:
        senders: list[list[int]] = [[] for _ in self.roots]
        for stage, root in enumerate(self.roots):
            if stage != root:
                senders[root].append(stage)
        return tuple(map(tuple, senders))


def spans_nodes(layout: StageLayout, devices_per_node: int) -> bool:
    """Returns whether some blocks have backwards on several nodes, all routes cut alike."""
    try:
        groups = _groups(layout)
    except ConfigError:
        return False
    return any(
        len({layout.backward[stage].device // devices_per_node for stage in group}) > 1
        for group in groups
    )


def _groups(layout: StageLayout) -> list[tuple[int, ...]]:
    """Returns backward stages of the same blocks, in the order of routes, by block.

    Raises:
        ConfigError: routes are cut differently, or meet on a device.
    """
    groups: dict[range, list[int]] = defaultdict(list)
    for index, stage in enumerate(layout.backward):
        groups[stage.blocks].append(index)
    for blocks, group in groups.items():
        if len(group) != layout.num_routes:
            raise ConfigError(
                "plan: REDUCE_GRADIENTS needs backward stages of all"
                f" {layout.num_routes} routes to be cut alike; blocks [{blocks.start},"
                f" {blocks.stop}) are a stage of {len(group)}"
            )
        if len({layout.backward[stage].device for stage in group}) != len(group):
            raise ConfigError(
                f"plan: REDUCE_GRADIENTS sums over devices; backward stages {list(group)} of"
                " different routes share one"
            )
    return [tuple(group) for _, group in sorted(groups.items(), key=lambda item: item[0].start)]
