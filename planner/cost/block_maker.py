"""Costs of the blocks of a model on one GPU, or on one GPU of a tensor-parallel group. Each kernel
of :mod:`penstock.planner.cost.operators` takes as long as the roofline says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.host.sums import added
from penstock.planner.cost.catalogue import Gpu
from penstock.planner.cost.costs import BlockCost, OperatorCost
from penstock.planner.cost.frameworks import Framework, tile_efficiency
from penstock.planner.cost.language_models import FeedForward, LanguageModel, LayerKind, Mixer
from penstock.planner.cost.layer_kernels import Kernel, KernelWork, Shape, all_reduce
from penstock.planner.cost.operators import (
    embedding_kernels,
    feed_forward_kernels,
    head_kernels,
    mixer_kernels,
)

BANDWIDTH_SHARE = 0.85
"""Share of the memory bandwidth that element-wise kernels reach (STREAM-like kernels: 0.8-0.9)."""

LAUNCH_S = 5.0e-6
"""Seconds between two kernels if a device waits for the host to launch them."""

MANY_LAUNCHES = 16.0
"""Launches of one operator; more are a loop over tokens, which waits for each launch."""

ADAM_STATE_BYTES = 12.0
"""fp32 master weight and two moments per parameter, where the optimizer is on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """The GPUs of a tensor-parallel group; ``bandwidth`` of each, each way."""

    size: int
    bandwidth: float
    latency_s: float

    def seconds(self, reduced_bytes: float) -> float:
        """Returns the seconds in which a ring sums a tensor of so many bytes."""
        if self.size == 1 or not reduced_bytes:
            return 0.0
        steps = 2 * (self.size - 1)
        return steps * (reduced_bytes / self.size / self.bandwidth + self.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMaker:
    """Blocks of one model, or of a tensor-parallel group's part of it, on one GPU."""

    gpu: Gpu
    group: TensorGroup
    model: LanguageModel
    shape: Shape
    share: float
    offloaded: bool
    framework: Framework

    def blocks(self, half_layers: bool) -> Iterator[tuple[str, BlockCost]]:
        """Yields name and cost of every block."""
        model, shape, output = self.model, self.shape, self.shape.bytes_of(self.model.hidden_size)
        yield (
            "embedding",
            self._block(
                self._reduced(embedding_kernels(model, shape), backward=False),
                model.embedding_parameters,
                input_bytes=8.0 * shape.tokens,
                workspace_bytes=output,
            ),
        )
        kinds = {kind: self._layer(kind, half_layers) for kind in model.pattern}
        for layer in range(model.num_layers):
            for name, block in kinds[model.layer(layer)]:
                yield f"layer {layer}{name}", block
        yield "head", self._head()

    def _layer(self, kind: LayerKind, half_layers: bool) -> list[tuple[str, BlockCost]]:
        """Returns the blocks of a layer, by what follows its name."""
        halved = half_layers and kind.feed_forward is not FeedForward.NONE
        both = kind.feed_forward is not FeedForward.NONE and not half_layers
        mixer = self._mixer(kind, residual_kept=both)
        if kind.feed_forward is FeedForward.NONE:
            return [("", mixer)]
        feed_forward = self._feed_forward(kind)
        if halved:
            name = "state space" if kind.mixer is Mixer.STATE_SPACE else "attention"
            return [(f" {name}", mixer), (" mlp", feed_forward)]
        return [("", _whole((mixer, feed_forward), self.shape.bytes_of(self.model.hidden_size)))]

    def _mixer(self, kind: LayerKind, *, residual_kept: bool) -> BlockCost:
        """Returns the first half of a layer; its workspace are the gradients that exist at once at
        the widest place of the backward.
        """
        model, shape, h = self.model, self.shape, self.model.hidden_size
        kernels = mixer_kernels(model, shape, kind, residual_kept=residual_kept)
        if kind.mixer is Mixer.STATE_SPACE:
            space = model.state_space
            assert space is not None
            width = h + 5 * space.inner_size
            if self.group.size > 1:  # time steps, B and C come from all channels
                kernels.append(all_reduce(shape, space.time_rank + 2 * space.state_size))
            states = 0 if shape.flash else 4 * space.inner_size * space.state_size
        else:
            width, states = h + 2 * model.head_width + 2 * model.key_value_size, 0
        return self._block(
            self._reduced(kernels),
            model.mixer_parameters(kind),
            input_bytes=shape.bytes_of(h),
            workspace_bytes=shape.bytes_of(width) + 4.0 * shape.tokens * states,
        )

    def _feed_forward(self, kind: LayerKind) -> BlockCost:
        """Returns the second half of a layer; its workspace as of the first."""
        model, shape, h = self.model, self.shape, self.model.hidden_size
        if kind.feed_forward is FeedForward.EXPERTS:
            experts = model.experts
            assert experts is not None
            routed = experts.per_token * (h + 3 * experts.intermediate_size)
            width = h + max(routed, 3 * experts.shared_size)
        else:
            width = h + (3 if model.gated else 2) * model.intermediate_size
        return self._block(
            self._reduced(feed_forward_kernels(model, shape, kind)),
            model.feed_forward_parameters(kind),
            input_bytes=shape.bytes_of(h),
            workspace_bytes=shape.bytes_of(width),
        )

    def _head(self) -> BlockCost:
        """Returns the head. With a tied matrix the last stage has a copy; the gradients of both
        copies are summed.
        """
        model, shape = self.model, self.shape
        head_parameters = model.head_own_parameters
        matrix = model.vocab_size * model.hidden_size
        block = self._block(
            self._reduced(head_kernels(model, shape), forward=False),
            head_parameters + matrix,
            input_bytes=shape.bytes_of(model.hidden_size),
            workspace_bytes=shape.bytes_of(model.vocab_size)
            + 4.0 * shape.tokens * model.vocab_size,
        )
        return replace(block, parameters=float(head_parameters)) if model.tied else block

    def _reduced(
        self, kernels: Sequence[Kernel], *, forward: bool = True, backward: bool = True
    ) -> Sequence[Kernel]:
        """Returns kernels with the sum of their result over a tensor-parallel group, and of the
        gradient of their input.
        """
        if self.group.size == 1:
            return kernels
        reduction = all_reduce(
            self.shape, self.model.hidden_size, forward=forward, backward=backward
        )
        return [*kernels, reduction]

    def _block(
        self,
        kernels: Sequence[Kernel],
        parameters: int,
        *,
        input_bytes: float,
        workspace_bytes: float,
    ) -> BlockCost:
        shape = self.shape
        forward_s = self._together([kernel.forward for kernel in kernels])
        weight_s = self._together([kernel.weight_gradient for kernel in kernels])
        return BlockCost(
            forward_s=forward_s,
            recompute_s=forward_s,
            backward_input_s=self._together([kernel.input_gradient for kernel in kernels]),
            backward_weight_s=weight_s + self._adding_s(parameters),
            output_bytes=shape.bytes_of(self.model.hidden_size),
            activation_bytes=input_bytes + added(kernel.kept_bytes for kernel in kernels),
            deferred_bytes=added(kernel.deferred_bytes for kernel in kernels),
            workspace_bytes=workspace_bytes,
            parameters=float(parameters),
            weight_bytes=float(parameters * shape.itemsize),
            device_gradient_bytes=float(parameters * shape.gradient_itemsize),
            gradient_bytes=float(parameters * shape.itemsize),
            static_bytes=0.0 if self.offloaded else parameters * ADAM_STATE_BYTES,
            operators=self._operators(kernels),
        )

    def _operators(self, kernels: Sequence[Kernel]) -> tuple[OperatorCost, ...]:
        """Yields the kernels of each operator, in the order in which operators first run."""
        names = dict.fromkeys(kernel.operator for kernel in kernels)
        return tuple(
            OperatorCost(
                name=name,
                forward_s=added(self._seconds(k.forward) for k in kernels if k.operator == name),
                activation_bytes=added(k.kept_bytes for k in kernels if k.operator == name),
            )
            for name in names
        )

    def _together(self, works: Sequence[KernelWork]) -> float:
        """Returns the seconds of kernels one after the other, or of launching them."""
        seconds = added(map(self._seconds, works))
        if not self.framework.launch_s:
            return seconds
        return max(seconds, added(work.launches for work in works) * self.framework.launch_s)

    def _adding_s(self, parameters: int) -> float:
        """Returns the seconds in which gradients are added to those of other micro-batches."""
        if not self.framework.gradient_adds:
            return 0.0
        moved = parameters * (self.shape.itemsize + 2.0 * self.shape.gradient_itemsize)
        return moved / (self.gpu.memory_bandwidth * BANDWIDTH_SHARE)

    def _seconds(self, work: KernelWork) -> float:
        """Returns the seconds of a kernel by the roofline: the largest of computing, moving bytes,
        and launching. Launches beyond those of the kernel itself count, but for the first.
        """
        gpu, rate = self.gpu, self.gpu.peak_flops * self.share
        if self.framework.tiles and work.product is not None:
            rate *= tile_efficiency(work.product, gpu.multiprocessors)
        return max(
            work.flops / rate,
            self.group.seconds(work.reduced_bytes),
            work.vector_flops / gpu.vector_flops,
            work.moved_bytes / (gpu.memory_bandwidth * BANDWIDTH_SHARE),
            max(0.0, work.launches - MANY_LAUNCHES) * LAUNCH_S,
        )


def _whole(halves: tuple[BlockCost, BlockCost], residual_bytes: float) -> BlockCost:
    """Returns a layer: the sum between its halves is one tensor, kept by the first."""
    layer = halves[0] + halves[1]
    return replace(layer, activation_bytes=layer.activation_bytes - residual_bytes)
