"""Extra time of training frameworks' kernels, beyond the roofline.

:data:`IDEAL`, the default, adds none. A product reaches its share of the peak at every size, and
norms and rotary embeddings are one kernel each. Sums of weight gradients are part of their product,
and the host is never late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from penstock.planner.cost.layer_kernels import Product

_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Tiles of a product's result, as cuBLAS has them (NVIDIA, Matrix Multiplication Background, 2.3).
"""

_L2_FLOPS_PER_BYTE = 43.0
"""Operations of 16-bit products at the peak per byte that multiprocessors can read from L2: A100,
312 TFLOP/s and 5120 bytes per clock (NVIDIA A100 whitepaper). Smaller tiles read more and are
slower.
"""

_TILE_ITEMSIZE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A way of running kernels.

    ``tiles``: products take whole waves of tiles over the multiprocessors. ``fused_norms``: RMSNorm
    is one kernel, otherwise eight, in fp32; ``fused_rotary``: so is the rotary embedding, otherwise
    ten.
    ``gradient_adds``: the sum over micro-batches of weight gradients is a kernel of its own.
    ``launch_s``: seconds of the host for each kernel; a block takes no less than all of its
    launches. ``blocking``: a device computes nothing while it sends or receives.
    """

    name: str
    tiles: bool = False
    fused_norms: bool = True
    fused_rotary: bool = True
    gradient_adds: bool = False
    launch_s: float = 0.0
    blocking: bool = False


IDEAL = Framework(name="ideal")
EAGER = Framework(
    name="eager",
    tiles=True,
    fused_norms=False,
    fused_rotary=False,
    gradient_adds=True,
    launch_s=1.0e-5,
)
"""PyTorch without compilation on a host that launches 100,000 kernels a second."""
MEGATRON_DEEPSPEED = Framework(
    name="megatron-deepspeed",
    tiles=True,
    fused_rotary=False,
    gradient_adds=True,
    launch_s=1.0e-5,
    blocking=True,
)
"""Megatron's kernels for norms, and DeepSpeed's pipeline engine with its blocking sends."""

FRAMEWORKS: Mapping[str, Framework] = MappingProxyType(
    {one.name: one for one in (IDEAL, EAGER, MEGATRON_DEEPSPEED)}
)
"""Every framework by name."""


def tile_efficiency(product: Product, multiprocessors: int) -> float:
    """Returns the share of the rate of endless products that one of this size reaches.

    The best of all tiles: what of whole waves of whole tiles is result (tile and wave quantisation:
    NVIDIA, Matrix Multiplication Background, 3.1 and 3.2), times what L2 lets a tile reach.
    """
    return max(_with_tile(product, multiprocessors, *tile) for tile in _TILES)


def _with_tile(product: Product, multiprocessors: int, rows: int, columns: int) -> float:
    tiles = ceil(product.rows / rows) * ceil(product.columns / columns) * product.count
    waves = ceil(tiles / multiprocessors)
    useful = product.rows * product.columns * product.count
    flops_per_byte = 2.0 * rows * columns / (_TILE_ITEMSIZE * (rows + columns))
    from_l2 = min(1.0, flops_per_byte / _L2_FLOPS_PER_BYTE)
    return from_l2 * useful / (waves * multiprocessors * rows * columns)
