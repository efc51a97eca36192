"""A profile: what ``penstock profile`` measured on a machine, as a value.

Written by :mod:`penstock.models.profiling.profile`, read by the planner
(:mod:`penstock.planner.cost.profile` makes costs of it). Its file form is
:mod:`penstock.protocol.plan.profile_file`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from penstock.shm.table import BlockTable


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFit:
    """``slope`` x tokens + ``intercept``: what Mario fits (its section 5.2: y = a n + b)."""

    slope: float
    intercept: float = 0.0

    def at(self, tokens: float) -> float:
        """Returns the value for so many tokens, not below 0."""
        return max(0.0, self.slope * tokens + self.intercept)

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> LinearFit:
        """Fits least squares over (tokens, value); one point gives a line through the origin."""
        if len({x for x, _ in points}) < 2:
            return cls(slope=sum(y for _, y in points) / sum(x for x, _ in points))
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        covariance = sum((x - mean_x) * (y - mean_y) for x, y in points)
        slope = covariance / sum((x - mean_x) ** 2 for x, _ in points)
        return cls(slope=slope, intercept=mean_y - slope * mean_x)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """One operator of a kind of block: its forward, and what it leaves for the backward."""

    name: str
    forward_s: LinearFit
    activation_bytes: LinearFit


@dataclass(frozen=True, slots=True, kw_only=True)
class KindProfile:
    """One kind of block, per micro-batch as functions of its tokens.

    Fields as in :class:`~penstock.planner.cost.costs.BlockCost`; of the workspaces, ``forward`` is
    that of a forward without a graph, ``graph`` that of one with. ``constant_bytes``: what the
    first of all forwards leaves for all others (masks, rotary tables), once for all blocks.
    ``operators``: those that were told apart, in the order in which they run; they need not make up
    the whole block.
    """

    forward_s: LinearFit
    recompute_s: LinearFit
    backward_input_s: LinearFit
    backward_weight_s: LinearFit
    activation_bytes: LinearFit
    deferred_bytes: LinearFit
    output_bytes: LinearFit
    forward_workspace_bytes: LinearFit
    graph_workspace_bytes: LinearFit
    backward_workspace_bytes: LinearFit
    backward_input_workspace_bytes: LinearFit
    backward_weight_workspace_bytes: LinearFit
    constant_bytes: LinearFit
    operators: tuple[OperatorProfile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """Rates of one machine: bytes/s, seconds, parameters/s of all optimizer cores of a node.

    ``instruction_s``: overhead of each compute instruction. Bandwidths are ``inf`` where nothing
    has to move. The four rates are those of the optimizer's sweeps (``native/sweeps.h``);
    ``device_update_rate`` is an UPDATE's on one device, without its copies.
    """

    instruction_s: float
    fetch_bandwidth: float
    offload_bandwidth: float
    peer_bandwidth: float
    latency_s: float
    advance_rate: float
    preview_rate: float
    settle_rate: float
    in_place_rate: float
    device_update_rate: float
    device_memory_bytes: float = inf
    host_memory_bytes: float = inf

    @property
    def separate_memory(self) -> bool:
        """Whether devices have memory of their own, so that weights are copied to them."""
        return self.fetch_bandwidth != inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured: a machine, and the kinds of blocks of the model of ``table`` on it.

    ``device`` says in words what computed; ``sequence_length``: of the micro-batches that were
    measured (attention is quadratic in it, so another length needs another profile);
    ``micro_batch``: the configured one.
    """

    device: str
    sequence_length: int
    micro_batch: int
    machine: MachineProfile
    kinds: Mapping[str, KindProfile] = field(hash=False)
    table: BlockTable

    @property
    def tokens(self) -> int:
        """Tokens of a configured micro-batch."""
        return self.sequence_length * self.micro_batch
