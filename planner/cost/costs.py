"""Costs: what the blocks of a model take, per micro-batch and per attempt.

Compute is in seconds of one device, everything that moves or stays is in bytes; how fast bytes move
is :class:`penstock.planner.cost.cluster.Cluster`'s matter. Where costs come from:
:mod:`penstock.planner.cost.profile`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType

from penstock.host.sums import added
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Keep,
    Recompute,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """One operator of a block, for one micro-batch.

    ``activation_bytes``: what the backward reads of its outputs, which its dropping saves until
    then. ``forward_s``: what making it again costs.
    """

    name: str
    forward_s: float
    activation_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeSource:
    """Outputs of ``operator`` that a recomputation may read, but not the backward.

    For one micro-batch ``num_bytes`` of them are kept if two conditions hold: all operators of a
    set in ``needed_by`` are dropped, and ``operator`` is not. An empty ``operator`` cannot be
    dropped.
    """

    operator: str
    needed_by: tuple[tuple[str, ...], ...]
    num_bytes: float

    def kept_bytes(self, drop: frozenset[str]) -> float:
        """Returns the bytes that are kept where these operators are dropped."""
        needed = any(drop.issuperset(names) for names in self.needed_by)
        return self.num_bytes if needed and self.operator not in drop else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspaces:
    """Bytes that each kind of computation needs for one micro-batch while it runs. Input, output,
    and all that the stage keeps are not among them.

    ``forward``: without a graph; ``graph``: FORWARD that keeps one, RECOMPUTE; the others: BACKWARD
    and its halves. A stage needs less than its greediest block, if that block runs while others
    keep nothing.
    """

    forward: float = 0.0
    graph: float = 0.0
    backward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    @property
    def greatest(self) -> float:
        """Bytes of the greediest kind."""
        return max(
            self.forward,
            self.graph,
            self.backward,
            self.backward_input,
            self.backward_weight,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One block, or (by ``+``) one stage.

    Seconds per micro-batch: ``forward_s``; ``recompute_s``, its forward again, with autograd;
    ``backward_input_s`` and ``backward_weight_s``, p1 and p2 of the 2BP paper.

    Bytes per micro-batch: ``output_bytes``, of the output, and so of the next block's checkpoint or
    gradient (a stage has those of its last block); ``activation_bytes``, which a forward keeps for
    the backward; ``deferred_bytes``, which stay between BACKWARD_INPUT and BACKWARD_WEIGHT;
    ``workspace_bytes`` while compute runs (a stage has those of its greediest block);
    ``workspaces``, the same by kind of computation, if known.

    Once for all micro-batches and blocks of a device: ``constant_bytes`` (masks, rotary tables).

    Per attempt: trainable ``parameters``; ``weight_bytes``, of a weight buffer;
    ``device_gradient_bytes``, accumulated on the device; ``gradient_bytes``, as offloaded;
    ``static_bytes``, other memory that a device always keeps for a block it owns (optimizer state
    that is not on the host).

    ``operators`` make up ``forward_s`` and ``activation_bytes``; empty if unknown. ``sources``:
    tensors that are kept instead if some of them are dropped.
    """

    forward_s: float = 0.0
    recompute_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    output_bytes: float = 0.0
    activation_bytes: float = 0.0
    deferred_bytes: float = 0.0
    workspace_bytes: float = 0.0
    constant_bytes: float = 0.0
    parameters: float = 0.0
    weight_bytes: float = 0.0
    device_gradient_bytes: float = 0.0
    gradient_bytes: float = 0.0
    static_bytes: float = 0.0
    operators: tuple[OperatorCost, ...] = ()
    sources: tuple[RecomputeSource, ...] = ()
    workspaces: Workspaces | None = None

    @property
    def by_kind(self) -> Workspaces:
        """Workspaces; all alike where only one number is known."""
        if self.workspaces is not None:
            return self.workspaces
        same = self.workspace_bytes
        return Workspaces(
            forward=same, graph=same, backward=same, backward_input=same, backward_weight=same
        )

    def seconds_of(self, kind: type[Instruction]) -> float:
        """Returns the seconds of a compute instruction on a stage per micro-batch, with nothing
        dropped.
        """
        seconds: float = getattr(self, _SECONDS[kind])
        return seconds

    def workspace_of(self, instruction: Instruction) -> float:
        """Returns the workspace bytes of an instruction on a stage; 0 if it does not compute."""
        kind = _WORKSPACES.get(type(instruction))
        if kind is None:
            return 0.0
        if isinstance(instruction, Forward) and instruction.keep in (Keep.INPUT, Keep.NONE):
            kind = "forward"
        num_bytes: float = getattr(self.by_kind, kind)
        return num_bytes

    @property
    def backward_s(self) -> float:
        """Seconds of an unsplit backward."""
        return self.backward_input_s + self.backward_weight_s

    def drop_seconds(self, drop: Iterable[str]) -> float:
        """Returns the seconds to make the outputs of some operators again."""
        names = frozenset(drop)
        return added(op.forward_s for op in self.operators if op.name in names)

    def drop_bytes(self, drop: Iterable[str]) -> float:
        """Returns the bytes that dropping the outputs of some operators saves, per micro-batch."""
        return self.remade_bytes(drop) - self.source_bytes(drop)

    def remade_bytes(self, drop: Iterable[str]) -> float:
        """Returns the bytes that making dropped outputs again adds, per micro-batch."""
        names = frozenset(drop)
        return added(op.activation_bytes for op in self.operators if op.name in names)

    def source_bytes(self, drop: Iterable[str]) -> float:
        """Returns the bytes that are kept only to make dropped outputs again, per micro-batch."""
        names = frozenset(drop)
        return added(source.kept_bytes(names) for source in self.sources)

    def kept_on_device(self) -> BlockCost:
        """Returns the cost with weights, gradients and optimizer state in device memory for good.
        Nothing of the block moves, and its optimizer step is left out.
        """
        return replace(
            self,
            static_bytes=self.static_bytes + self.weight_bytes + self.device_gradient_bytes,
            parameters=0.0,
            weight_bytes=0.0,
            device_gradient_bytes=0.0,
            gradient_bytes=0.0,
        )

    def faster(self, factor: float) -> BlockCost:
        """Returns the cost on a device that computes ``factor`` times as fast."""
        seconds = {name: getattr(self, name) / factor for name in _COMPUTED}
        operators = (replace(op, forward_s=op.forward_s / factor) for op in self.operators)
        return replace(self, **seconds, operators=tuple(operators))

    def with_activations(self, factor: float) -> BlockCost:
        """Returns the cost with activations ``factor`` times as large."""
        return replace(
            self,
            activation_bytes=self.activation_bytes * factor,
            operators=tuple(
                replace(operator, activation_bytes=operator.activation_bytes * factor)
                for operator in self.operators
            ),
            sources=tuple(
                replace(source, num_bytes=source.num_bytes * factor) for source in self.sources
            ),
        )

    def __add__(self, other: BlockCost) -> BlockCost:
        """Returns the cost of this block followed by another."""
        values = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        return BlockCost(
            **values,
            output_bytes=other.output_bytes,
            workspace_bytes=max(self.workspace_bytes, other.workspace_bytes),
            constant_bytes=max(self.constant_bytes, other.constant_bytes),
            operators=self.operators + other.operators,
            sources=self.sources + other.sources,
            workspaces=_one_after_the_other(self, other),
        )


_SECONDS: Mapping[type[Instruction], str] = MappingProxyType(
    {
        Forward: "forward_s",
        Recompute: "recompute_s",
        Backward: "backward_s",
        BackwardInput: "backward_input_s",
        BackwardWeight: "backward_weight_s",
    }
)
_WORKSPACES: Mapping[type[Instruction], str] = MappingProxyType(
    {
        Forward: "graph",
        Recompute: "graph",
        Backward: "backward",
        BackwardInput: "backward_input",
        BackwardWeight: "backward_weight",
    }
)
"""Fields of :class:`Workspaces`; a FORWARD that keeps no graph needs ``forward``."""


def _one_after_the_other(first: BlockCost, second: BlockCost) -> Workspaces | None:
    """Returns the workspaces of two blocks. While the first computes, the second keeps nothing: not
    yet in forwards, no longer in backwards. The second's gradient is on the device then, and only
    the first takes it.
    """
    if second.workspaces is None:
        return None
    early, late = first.workspaces or Workspaces(), second.workspaces
    kept, left = second.activation_bytes, second.deferred_bytes
    between = first.output_bytes
    return Workspaces(
        forward=max(early.forward, late.forward),
        graph=max(early.graph - kept, late.graph),
        backward=max(early.backward - kept + between, late.backward),
        backward_input=max(early.backward_input - (kept - left) + between, late.backward_input),
        backward_weight=max(early.backward_weight - left, late.backward_weight),
    )


_SENT = (Forward, Backward, BackwardInput)
"""Instructions that send their result to another stage."""

_COMPUTED = ("forward_s", "recompute_s", "backward_input_s", "backward_weight_s")
_SUMMED = tuple(
    field.name
    for field in fields(BlockCost)
    if field.name
    not in (
        "output_bytes",
        "workspace_bytes",
        "constant_bytes",
        "operators",
        "sources",
        "workspaces",
    )
)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """All blocks, and the fixed overhead of each compute instruction in seconds.

    ``sending_s``: extra seconds of an instruction with a sent result, on devices that let compute
    wait for transfers.

    ``separate_memory``: devices have memory of their own. OFFLOAD_GRADIENTS then copies while later
    instructions run, and UPDATE needs buffers. Otherwise sums are gone after OFFLOAD_GRADIENTS, and
    UPDATE works on the state in place.
    """

    blocks: tuple[BlockCost, ...]
    instruction_s: float = 0.0
    sending_s: float = 0.0
    separate_memory: bool = True

    def of(self, blocks: range) -> BlockCost:
        """Returns a stage of consecutive blocks."""
        key = (blocks.start, blocks.stop)
        if key not in self._stages:
            self._stages[key] = sum((self.blocks[i] for i in blocks), start=BlockCost())
        return self._stages[key]

    def overhead_s(self, kind: type[Instruction]) -> float:
        """Returns the overhead of a class of compute instructions."""
        return self.instruction_s + (self.sending_s if kind in _SENT else 0.0)

    def faster(self, factor: float) -> Costs:
        """Returns costs of devices that compute ``factor`` times as fast; their overhead stays."""
        if factor == 1.0:
            return self
        return replace(self, blocks=tuple(block.faster(factor) for block in self.blocks))

    def input_bytes(self, block: int) -> float:
        """Returns the bytes of a block's input, which the block before puts out; 0 of the batch."""
        return self.blocks[block - 1].output_bytes if block else 0.0

    @cached_property
    def _stages(self) -> dict[tuple[int, int], BlockCost]:
        return {}
