"""ZeRO-3 with offload, as a model of its collectives: data parallelism with shared-out weights.

Source: Rajbhandari et al., "ZeRO-Infinity", 2021; the DeepSpeed baseline of the SPipe paper
(section 4.1). Every device runs the whole model on its own micro-batches, one after the other: a
route per device. A stage is what is gathered at once, by default one block. FETCH_WEIGHTS is an
all-gather of it (``shards_weights``), twice per micro-batch: for the forward and for the backward.
Only the last stage keeps its weights for the backward. REDUCE_GRADIENTS is a reduce-scatter, once
per stage after the last micro-batch.

There is no bubble of dependencies (0); what a device waits for are the collectives. Each device
keeps one micro-batch: input checkpoints of all stages and the activations of one. With ``recompute:
none`` it keeps all activations, and binds their weights again. Two stage-sized buffers.
"""

from __future__ import annotations

from penstock.planner.schedule.layout import ComputeInstruction, Order, Residency, StageLayout
from penstock.planner.schemes.base import (
    Complaint,
    Recomputation,
    Scheme,
    StageDevices,
    require_as_many_backward,
)


def _one_per_block(num_devices: int, num_blocks: int, num_forward: int | None) -> tuple[int, int]:
    del num_devices
    num_stages = num_blocks if num_forward is None else num_forward
    return num_stages, num_stages


def _check_stages(num_forward: int, num_backward: int, num_devices: int) -> Complaint | None:
    del num_devices
    return require_as_many_backward(num_forward, num_backward)


def _same_on_each_device(num_microbatches: int, num_devices: int, num_forward: int) -> str | None:
    del num_forward
    if num_microbatches % num_devices:
        return f"a multiple of {num_devices} (the same number on each worker)"
    return None


def _replicas(num_forward: int, num_backward: int, num_devices: int) -> StageDevices:
    return StageDevices(
        forward=tuple(device for device in range(num_devices) for _ in range(num_forward)),
        backward=tuple(device for device in range(num_devices) for _ in range(num_backward)),
    )


def _distribute(num_microbatches: int, num_devices: int) -> tuple[int, ...]:
    return tuple(m % num_devices for m in range(num_microbatches))


def _orders(layout: StageLayout, recompute: Recomputation) -> tuple[Order, ...]:
    return tuple(_device_order(layout, device, recompute) for device in range(layout.num_devices))


def _device_order(layout: StageLayout, device: int, recompute: Recomputation) -> Order:
    order: list[ComputeInstruction] = []
    for micro_batch in layout.microbatches_of_route[device]:
        order.extend(recompute.forward(s, micro_batch) for s in layout.forward_stages_on(device))
        for stage in layout.backward_stages_on(device):
            order.extend(recompute.backward(stage, micro_batch))
    return tuple(order)


SCHEME = Scheme(
    name="zero3-offload",
    recompute_modes=("full", "none", "selective"),
    default_stages=_one_per_block,
    check_stages=_check_stages,
    check_microbatches=_same_on_each_device,
    place=_replicas,
    routes=_distribute,
    order=_orders,
    residency=Residency.STREAMED,
    whole_model_per_device=True,
    shards_weights=True,
    reduces_gradients=True,
)
