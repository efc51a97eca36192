"""Where costs come from: the rates of a machine and a block table."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from penstock.planner.cluster import Cluster
from penstock.planner.costs import BlockCost, Costs
from penstock.protocol.errors import ConfigError
from penstock.shm.table import BlockTable

_GRADIENT_ITEMSIZE = 4
"""Gradients accumulate in fp32 on the device, whatever they are published in."""


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


def block_costs(table: BlockTable, model: CostModel, *, tokens: int) -> Costs:
    """Costs of a table's blocks for micro-batches of ``tokens`` tokens."""
    weight, grad = table.weight_dtype.itemsize, table.grad_dtype.itemsize
    blocks = []
    for block in table.blocks:
        forward_s = block.forward_flops * tokens / model.device_flops
        half_backward_s = forward_s * model.backward_ratio / 2
        blocks.append(
            BlockCost(
                forward_s=forward_s,
                recompute_s=forward_s,
                backward_input_s=half_backward_s,
                backward_weight_s=half_backward_s,
                output_bytes=block.output_bytes * tokens,
                activation_bytes=block.activation_bytes * tokens,
                deferred_bytes=block.activation_bytes * tokens,
                parameters=block.trainable_elements,
                weight_bytes=(block.trainable_elements + block.frozen_elements) * weight,
                device_gradient_bytes=block.trainable_elements * _GRADIENT_ITEMSIZE,
                gradient_bytes=block.trainable_elements * grad,
            )
        )
    return Costs(blocks=tuple(blocks), instruction_s=model.instruction_s)


def cluster_of(model: CostModel, *, devices_per_node: int) -> Cluster:
    """The cluster that a model's rates describe."""
    return Cluster(
        devices_per_node=devices_per_node,
        fetch_bandwidth=model.fetch_bandwidth,
        offload_bandwidth=model.offload_bandwidth,
        peer_bandwidth=model.transfer_bandwidth,
        nic_bandwidth=model.transfer_bandwidth,
        latency_s=model.transfer_latency_s,
        optimizer_rate=model.optimizer_rate,
    )
