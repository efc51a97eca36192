"""SPipe: forward and backward of a stage on different devices, backward stages cut finer.

Source: Ryu et al., "SPipe: Hybrid GPU and CPU Pipeline for Training LLMs under Memory Pressure",
section 3.1 and figure 8. Forward stage i is on device i mod p. The first device to finish its
forwards starts the backward of the last stage. The next device takes the stage before, and so on
(decoupled pass assignment). With forward stages a multiple of p this is device 0 first.
Recomputation makes it possible: only the input checkpoint of a backward stage travels, as soon as
its forward has run. A backward stage (recomputation + backward, three times a forward's work)
should cost about as much as a forward stage. Hence several backward stages per forward stage: the
paper draws two and runs three.

Buffers: two stages of weights; checkpoints of the device's backward stages for all micro-batches,
the activations of one. Let m >= p, forward stages be a multiple of p, and backward stages as long
as forward stages. Then there is no bubble between forward and backward. Only the skew of p - 1
steps remains. With w steps of work per device the bubble is (p - 1) / (w + p - 1). In figure 8 that
is 3 / 27 = 11 % (the figure's 25 % counts weight transfers and the optimizer's tail, too).
"""

from __future__ import annotations

from penstock.planner.schedule.layout import Residency
from penstock.planner.schemes.base import Complaint, Scheme, StageDevices, all_forward_all_backward

_STAGES_PER_DEVICE = 2
_BACKWARD_PER_FORWARD = 3


def _default_stages(num_devices: int, num_blocks: int, num_forward: int | None) -> tuple[int, int]:
    """Returns two forward stages per device, and up to three backward stages for each of them."""
    if num_forward is None:
        num_forward = min(_STAGES_PER_DEVICE * num_devices, num_blocks)
    finer = max(1, min(_BACKWARD_PER_FORWARD, num_blocks // num_forward))
    return num_forward, finer * num_forward


def _check_stages(num_forward: int, num_backward: int, num_devices: int) -> Complaint | None:
    del num_devices
    if num_backward < num_forward:
        return "backward_stages", f"{num_forward} (forward_stages) or more"
    return None


def _place(num_forward: int, num_backward: int, num_devices: int) -> StageDevices:
    """Places backward stages from the last one down, over devices in the order in which they become
    free.
    """
    return StageDevices(
        forward=tuple(i % num_devices for i in range(num_forward)),
        backward=tuple(
            (num_forward + num_backward - 1 - i) % num_devices for i in range(num_backward)
        ),
    )


SCHEME = Scheme(
    name="spipe",
    recompute_modes=("full",),
    default_stages=_default_stages,
    check_stages=_check_stages,
    place=_place,
    order=all_forward_all_backward,
    residency=Residency.STREAMED,
)
