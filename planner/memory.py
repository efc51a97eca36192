"""What a plan needs: shared memory of each node by array, memory of each device by use.

Only needs are computed here; what is there, and whether it suffices, is the client's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.protocol.config import Config
from penstock.protocol.instructions import (
    Backward,
    FetchWeights,
    Forward,
    Instruction,
    Keep,
    OffloadGradients,
    Phase,
    Recompute,
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
    ReleaseWeights,
    SendActivation,
    SendCheckpoint,
    SendGradient,
)
from penstock.protocol.plan import Plan, StageRange
from penstock.shm.layout import NodeLayout, Ownership
from penstock.shm.table import BlockTable

_GRADIENT_ITEMSIZE = 4
"""Gradients accumulate in fp32 on the device, whatever they are published in."""


class Resource(StrEnum):
    """What kind of memory a row counts."""

    SHM = "shm"
    """/dev/shm of a node (part of its RAM; locked when devices are GPUs)."""
    HOST = "host"
    """Private RAM of a CPU worker."""
    DEVICE = "device"
    """Memory of a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """``num_bytes`` of ``resource`` needed at ``place`` (``node a``, ``device 0``) for ``use``."""

    place: str
    resource: Resource
    use: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """What a device holds at the instruction where it holds most."""

    weight_bytes: int = 0
    gradient_bytes: int = 0
    activation_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.gradient_bytes + self.activation_bytes


def memory_table(config: Config, table: BlockTable, plan: Plan) -> tuple[MemoryRow, ...]:
    """Rows of all nodes, then of all devices."""
    ownership = ownership_of(config, table, plan)
    rows: list[MemoryRow] = []
    for node, node_config in enumerate(config.cluster.nodes):
        layout = NodeLayout.compute(table, ownership, node)
        rows += _node_rows(f"node {node_config.name}", layout)
    tokens = config.train.micro_batch * config.data.sequence_length
    resource = Resource.HOST if config.cluster.device == "cpu" else Resource.DEVICE
    for device, peak in enumerate(device_peaks(plan, table, tokens)):
        uses = {
            "weight buffers": peak.weight_bytes,
            "gradients": peak.gradient_bytes,
            "activations": peak.activation_bytes,
        }
        rows += [
            MemoryRow(place=f"device {device}", resource=resource, use=use, num_bytes=num_bytes)
            for use, num_bytes in uses.items()
        ]
    return tuple(rows)


def ownership_of(config: Config, table: BlockTable, plan: Plan) -> Ownership:
    """Nodes that own blocks and compute their contributions: where the backward of a block runs."""
    nodes = [plan.owner_device(block.index) // config.cluster.workers for block in table.blocks]
    return Ownership.from_backward_nodes(table, nodes)


def _node_rows(place: str, layout: NodeLayout) -> Iterable[MemoryRow]:
    uses: dict[str, int] = {}
    for (_, name, _, _), array in layout.arrays.items():
        uses[name] = uses.get(name, 0) + array.num_bytes
    padding = sum(layout.sizes.values()) - sum(uses.values())
    if padding:
        uses["page padding"] = padding
    for use, num_bytes in uses.items():
        yield MemoryRow(place=place, resource=Resource.SHM, use=use, num_bytes=num_bytes)


def device_peaks(plan: Plan, table: BlockTable, tokens: int) -> tuple[DevicePeak, ...]:
    """Peak of every device, from the order of its program alone (receives count from their
    posting).

    ``tokens``: tokens of a micro-batch. Counted are weight buffers, fp32 gradients, kept
    activations, checkpoints, and tensors that arrive or wait to be sent; not: workspace of kernels.
    """
    return tuple(
        _Ledger(plan=plan, table=table, tokens=tokens, device=device).run()
        for device in range(plan.num_devices)
    )


_Entry = tuple[str, int, int]


@dataclass(slots=True, kw_only=True)
class _Ledger:
    """Bytes by what holds them, updated instruction by instruction."""

    plan: Plan
    table: BlockTable
    tokens: int
    device: int
    weights: dict[_Entry, int] = field(default_factory=dict)
    gradients: dict[_Entry, int] = field(default_factory=dict)
    activations: dict[_Entry, int] = field(default_factory=dict)

    def run(self) -> DevicePeak:
        peak = DevicePeak()
        for instruction in self.plan.programs[self.device]:
            freed = self._apply(instruction)
            now = DevicePeak(
                weight_bytes=sum(self.weights.values()),
                gradient_bytes=sum(self.gradients.values()),
                activation_bytes=sum(self.activations.values()),
            )
            peak = max(peak, now, key=lambda p: p.total_bytes)
            for entry in freed:
                self.activations.pop(entry, None)
        return peak

    def _apply(self, instruction: Instruction) -> Sequence[_Entry]:
        """Book what the instruction takes; returns the entries that end with it."""
        match instruction:
            case FetchWeights(stage=s, phase=phase):
                stages = (
                    self.plan.forward_stages
                    if phase is Phase.FORWARD
                    else self.plan.backward_stages
                )
                elements = self._trainable(stages[s]) + sum(
                    self.table.blocks[i].frozen_elements for i in stages[s].blocks
                )
                self.weights[phase, s, 0] = elements * self.table.weight_dtype.itemsize
            case ReleaseWeights(stage=s, phase=phase):
                self.weights.pop((phase, s, 0), None)
            case Forward():
                return self._forward(instruction)
            case Recompute(stage=b, micro_batch=m):
                self.activations["graph", b, m] = self._kept(self.plan.backward_stages[b])
            case Backward(stage=b, micro_batch=m):
                stage = self.plan.backward_stages[b]
                self.gradients["gradients", b, 0] = self._trainable(stage) * _GRADIENT_ITEMSIZE
                if b > 0:
                    self.activations["gradient", b, m] = self._output(stage.start - 1)
                return ("graph", b, m), ("checkpoint", b, m), ("gradient", b + 1, m)
            case OffloadGradients(stage=b):
                self.gradients.pop(("gradients", b, 0), None)
            case RecvActivation(stage=s, micro_batch=m):
                output = self._output(self.plan.forward_stages[s].stop - 1)
                self.activations["activation", s, m] = output
            case RecvGradient(stage=b, micro_batch=m):
                output = self._output(self.plan.backward_stages[b].start - 1)
                self.activations["gradient", b, m] = output
            case RecvCheckpoint(stage=b, micro_batch=m):
                self._book_checkpoint(b, m)
            case SendActivation(stage=s, micro_batch=m):
                return (("activation", s, m),)
            case SendGradient(stage=b, micro_batch=m):
                return (("gradient", b, m),)
            case SendCheckpoint(stage=b, micro_batch=m):
                return (("checkpoint", b, m),)
        return ()

    def _forward(self, forward: Forward) -> Sequence[_Entry]:
        s, m = forward.stage, forward.micro_batch
        stage = self.plan.forward_stages[s]
        if s < len(self.plan.forward_stages) - 1:
            self.activations["activation", s, m] = self._output(stage.stop - 1)
        if forward.keep is Keep.ALL:
            self.activations["graph", s, m] = self._kept(stage)
        if forward.keep is Keep.INPUT:
            for b in self.plan.checkpoints_of(s):
                self._book_checkpoint(b, m)
        return (("activation", s - 1, m),)

    def _book_checkpoint(self, backward_stage: int, micro_batch: int) -> None:
        start = self.plan.backward_stages[backward_stage].start
        if start > 0:
            entry = ("checkpoint", backward_stage, micro_batch)
            self.activations[entry] = self._output(start - 1)

    def _trainable(self, stage: StageRange) -> int:
        """Trainable elements of a stage; a borrowed tensor counts where it is used, too."""
        total = 0
        for index in stage.blocks:
            block = self.table.blocks[index]
            total += block.trainable_elements
            for borrowed in block.borrows:
                if borrowed.owner not in stage.blocks:
                    owner = self.table.blocks[borrowed.owner]
                    total += sum(t.num_elements for t in owner.tensors if t.name == borrowed.name)
        return total

    def _kept(self, stage: StageRange) -> int:
        per_token = sum(self.table.blocks[i].activation_bytes for i in stage.blocks)
        return round(per_token * self.tokens)

    def _output(self, block: int) -> int:
        return round(self.table.blocks[block].output_bytes * self.tokens)
