"""Costs: how long a block takes on each resource.

A :class:`CostModel` holds rates of a machine; :func:`block_costs` turns it and a block table into
seconds per block. The simulator sees only :class:`BlockCost` values, so tests give it unit costs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.protocol.errors import ConfigError
from penstock.shm.table import BlockTable


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Rates of a machine. Defaults: a mid-range GPU on PCIe 4.0 x16 and a 32-core host.

    ``device_flops`` per second in FORWARD; ``backward_ratio``: BACKWARD relative to FORWARD
    (without recomputation); ``fetch_bandwidth``, ``offload_bandwidth``, ``transfer_bandwidth`` in
    bytes/s (host to device, device to host, device to device); ``transfer_latency_s`` per message;
    ``optimizer_rate`` in parameters/s of all cores of a node together; ``instruction_s`` overhead
    of each compute instruction.
    """

    device_flops: float = 6.0e13
    backward_ratio: float = 2.0
    fetch_bandwidth: float = 2.0e10
    offload_bandwidth: float = 2.0e10
    transfer_bandwidth: float = 1.0e10
    transfer_latency_s: float = 2.0e-5
    optimizer_rate: float = 1.5e9
    instruction_s: float = 2.0e-5

    def to_json(self) -> str:
        """Serialize; :meth:`from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> CostModel:
        """Parse a profile; rates it lacks keep their defaults.

        Raises:
            ConfigError: not a profile, unknown key, or a rate that is not positive.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"profile: not valid JSON: {error}") from error
        known = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(data, dict) or not set(data) <= set(known):
            raise ConfigError(f"profile: expected an object with keys among {', '.join(known)}")
        for key, value in data.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0.0 < float(value) < float("inf"):
                raise ConfigError(f"profile: {key} is {value!r}, expected a positive number")
        return cls(**data)


CPU_COSTS = CostModel(
    device_flops=3.0e10,
    fetch_bandwidth=8.0e9,
    offload_bandwidth=8.0e9,
    transfer_bandwidth=2.0e9,
    transfer_latency_s=2.0e-4,
    optimizer_rate=4.0e8,
    instruction_s=2.0e-4,
)
"""One CPU core per worker: what ``cluster.device: cpu`` assumes until a profile says better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """Seconds of one block: compute per micro-batch, the rest per attempt.

    ``output_s`` moves its output (or the gradient of it) of one micro-batch between two devices.
    """

    forward_s: float = 0.0
    recompute_s: float = 0.0
    backward_s: float = 0.0
    fetch_s: float = 0.0
    offload_s: float = 0.0
    optimizer_s: float = 0.0
    output_s: float = 0.0

    def __add__(self, other: BlockCost) -> BlockCost:
        return BlockCost(
            forward_s=self.forward_s + other.forward_s,
            recompute_s=self.recompute_s + other.recompute_s,
            backward_s=self.backward_s + other.backward_s,
            fetch_s=self.fetch_s + other.fetch_s,
            offload_s=self.offload_s + other.offload_s,
            optimizer_s=self.optimizer_s + other.optimizer_s,
            output_s=self.output_s + other.output_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """All blocks, and the fixed costs of a compute instruction and of a message, in seconds."""

    blocks: tuple[BlockCost, ...]
    instruction_s: float = 0.0
    latency_s: float = 0.0

    def of(self, blocks: Iterable[int]) -> BlockCost:
        """Sum over a stage."""
        return sum((self.blocks[index] for index in blocks), start=BlockCost())


def block_costs(table: BlockTable, model: CostModel, *, tokens: int) -> Costs:
    """Costs of a table's blocks for micro-batches of ``tokens`` tokens."""
    weight, grad = table.weight_dtype.itemsize, table.grad_dtype.itemsize
    blocks = tuple(
        BlockCost(
            forward_s=block.forward_flops * tokens / model.device_flops,
            recompute_s=block.forward_flops * tokens / model.device_flops,
            backward_s=block.forward_flops * tokens * model.backward_ratio / model.device_flops,
            fetch_s=(block.trainable_elements + block.frozen_elements)
            * weight
            / model.fetch_bandwidth,
            offload_s=block.trainable_elements * grad / model.offload_bandwidth,
            optimizer_s=block.trainable_elements / model.optimizer_rate,
            output_s=block.output_bytes * tokens / model.transfer_bandwidth,
        )
        for block in table.blocks
    )
    return Costs(
        blocks=blocks, instruction_s=model.instruction_s, latency_s=model.transfer_latency_s
    )
