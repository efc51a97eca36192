"""What ResNet's blocks take on a GPU, from its data sheet: convolutions, norms, activations.

As :mod:`penstock.planner.cost.analytic` reckons language models: a kernel takes what its operations
or its bytes take. fp32 numbers; products on tensor cores in TF32, half as fast as 16-bit ones:
cuDNN's convolutions use it by default.

A norm's weight gradients are by-products of its input gradient and come with it; they are 0 here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.host.sums import added
from penstock.planner.cost.analytic import INSTRUCTION_S
from penstock.planner.cost.block_maker import BANDWIDTH_SHARE
from penstock.planner.cost.catalogue import GPUS, Gpu
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.cost.frameworks import Framework

_BYTES = 4.0
_TF32_SHARE = 0.5
_OPTIMIZER_BYTES = 4.0
"""SGD's momentum, per parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution with its norm, and the activation after it where there is one; sides in pixels.

    ``taps``: rows of its window, which is square; ``side_in`` and ``side_out`` of its pictures.
    """

    width_in: int
    width_out: int
    taps: int
    side_in: int
    side_out: int
    activated: bool = True

    @property
    def parameters(self) -> float:
        """Of the convolution, and two a channel of the norm."""
        return float(self.width_in * self.width_out * self.taps**2 + 2 * self.width_out)

    @property
    def flops(self) -> float:
        """Of the forward, for one picture; each half of the backward has as many."""
        return 2.0 * self.width_in * self.width_out * self.taps**2 * self.side_out**2

    @property
    def in_bytes(self) -> float:
        """Of its input, for one picture."""
        return _BYTES * self.width_in * self.side_in**2

    @property
    def out_bytes(self) -> float:
        """Of its output, for one picture."""
        return _BYTES * self.width_out * self.side_out**2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    gpu: Gpu
    pictures: int
    framework: Framework

    def block(
        self,
        convolutions: Sequence[Convolution],
        *,
        in_bytes: float,
        out_bytes: float,
        sums: bool = True,
    ) -> BlockCost:
        """Returns the cost of a block that keeps its input; ``sums``: it ends with a residual sum
        and its activation. Bytes are those of one picture.
        """
        n = self.pictures
        forward = added(self._product(c) for c in convolutions)
        products = forward
        # The norm reads its input twice and writes; an activation reads and writes.
        moved = added(c.out_bytes * (5 if c.activated else 3) for c in convolutions)
        moved += 5 * out_bytes if sums else 0.0
        # Backward: the norm reads input and gradient twice and writes; an activation reads two.
        moved_back = added(c.out_bytes * (8 if c.activated else 5) for c in convolutions)
        moved_back += 5 * out_bytes if sums else 0.0
        kept = in_bytes + added(c.out_bytes * (2 if c.activated else 1) for c in convolutions)
        parameters = added(c.parameters for c in convolutions)
        # Convolution, norm and activation; sum and activation at the end. p2 adds to the gradients.
        launches = 3 * len(convolutions) + 2 * sums
        forward_s = self._launched(forward + self._moving(moved), launches)
        return BlockCost(
            forward_s=forward_s,
            recompute_s=forward_s,
            backward_input_s=self._launched(products + self._moving(moved_back), launches),
            backward_weight_s=self._launched(products, 2 * len(convolutions)),
            output_bytes=n * out_bytes,
            activation_bytes=n * (kept + (out_bytes if sums else 0.0)),
            # The input and the output gradient of each convolution.
            deferred_bytes=n * added(c.in_bytes + c.out_bytes for c in convolutions),
            workspace_bytes=n * 2 * max(c.out_bytes for c in convolutions),
            parameters=parameters,
            weight_bytes=_BYTES * parameters,
            device_gradient_bytes=_BYTES * parameters,
            static_bytes=_OPTIMIZER_BYTES * parameters,
        )

    def _product(self, conv: Convolution) -> float:
        rate = self.gpu.peak_flops * _TF32_SHARE * self.gpu.efficiency
        moved = conv.in_bytes + conv.out_bytes + _BYTES * conv.parameters / self.pictures
        return max(self.pictures * conv.flops / rate, self._moving(moved))

    def _launched(self, seconds: float, launches: int) -> float:
        return max(seconds, launches * self.framework.launch_s)

    def _moving(self, picture_bytes: float) -> float:
        return self.pictures * picture_bytes / (self.gpu.memory_bandwidth * BANDWIDTH_SHARE)


DEPTHS = (3, 8, 36, 3)
_WIDTHS = (256, 512, 1024, 2048)
_STEM_WIDTH, _CLASSES, _SHOWN_SIDE = 64, 1000, 224


def resnet_152(gpu: str, pictures: int, framework: Framework) -> Costs:
    """Returns costs of ResNet-152 (He et al. 2015) for micro-batches of so many pictures of 224 x
    224: the stem, 50 bottlenecks, and the head. Of ``framework`` only launches count.
    """
    maker = _Maker(gpu=GPUS[gpu], pictures=pictures, framework=framework)
    side, width_in = _SHOWN_SIDE // 4, _STEM_WIDTH
    stem = Convolution(
        width_in=3, width_out=_STEM_WIDTH, taps=7, side_in=_SHOWN_SIDE, side_out=_SHOWN_SIDE // 2
    )
    pooled = _BYTES * _STEM_WIDTH * side**2
    blocks = [maker.block([stem], in_bytes=stem.in_bytes, out_bytes=pooled, sums=False)]
    for stage, (depth, width) in enumerate(zip(DEPTHS, _WIDTHS, strict=True)):
        for place in range(depth):
            side_in, side = side, side // 2 if stage and not place else side
            convolutions = _bottleneck(width_in, width, side_in, side)
            taken, made = _BYTES * width_in * side_in**2, _BYTES * width * side**2
            blocks.append(maker.block(convolutions, in_bytes=taken, out_bytes=made))
            width_in = width
    head = Convolution(width_in=width_in, width_out=_CLASSES, taps=1, side_in=1, side_out=1)
    blocks.append(
        maker.block([head], in_bytes=_BYTES * width_in * side**2, out_bytes=0.0, sums=False)
    )
    return Costs(blocks=tuple(blocks), instruction_s=INSTRUCTION_S)


def _bottleneck(width_in: int, width: int, side_in: int, side: int) -> list[Convolution]:
    """Returns the three convolutions, and that of the shortcut where the shape changes."""
    inner = width // 4
    convolutions = [
        Convolution(width_in=width_in, width_out=inner, taps=1, side_in=side_in, side_out=side_in),
        Convolution(width_in=inner, width_out=inner, taps=3, side_in=side_in, side_out=side),
        Convolution(
            width_in=inner, width_out=width, taps=1, side_in=side, side_out=side, activated=False
        ),
    ]
    if width_in != width or side_in != side:
        convolutions.append(
            Convolution(
                width_in=width_in,
                width_out=width,
                taps=1,
                side_in=side_in,
                side_out=side,
                activated=False,
            )
        )
    return convolutions
