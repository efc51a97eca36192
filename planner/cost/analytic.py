"""Costs of a named model on a named GPU, computed from data sheets: no measurement, nothing fitted.

A kernel takes max(operations / (peak x efficiency), bytes / (bandwidth x 0.85)): the roofline. The
sum over the kernels of :mod:`penstock.planner.cost.operators` gives the forward of a block and both
halves of its backward, so that the ratio of backward to forward is a result. Left out, unless a
:class:`~penstock.planner.cost.frameworks.Framework` says otherwise: launch overhead below
:data:`INSTRUCTION_S`, quantisation of matrix sizes to tiles, and the slow-down of small products
beyond what the roofline shows.

The head is one block like the embedding. With ``half_layers`` a transformer layer is two blocks,
its attention (or state space) and its MLP (or experts; 2 L + 2 blocks: Obscura, section 7.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.planner.cost.catalogue import GPUS, MODELS, Gpu
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs, OperatorCost
from penstock.planner.cost.frameworks import IDEAL, Framework, tile_efficiency
from penstock.planner.cost.kernels.work import Kernel, KernelWork, Shape
from penstock.planner.cost.language_models import FeedForward, LanguageModel, LayerKind, Mixer
from penstock.planner.cost.operators import (
    OPERATOR_SETS,
    embedding_kernels,
    feed_forward_kernels,
    head_kernels,
    mixer_kernels,
    operator_set,
)
from penstock.protocol.errors import ConfigError
from penstock.protocol.sums import added

_Entry = TypeVar("_Entry")

BANDWIDTH_SHARE = 0.85
"""Share of the memory bandwidth that element-wise kernels reach (STREAM-like kernels: 0.8-0.9)."""

INSTRUCTION_S = 2.0e-5
"""Overhead of a compute instruction: launches that the device waits for."""

LAUNCH_S = 5.0e-6
"""From one kernel to the next where a device waits for the host to launch them."""

MANY_LAUNCHES = 16.0
"""Of one operator: more are a loop over tokens, which waits for each launch."""

ADAM_STATE_BYTES = 12.0
"""fp32 master weight and two moments per parameter, where the optimizer is on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A node's CPU side. Defaults: one 32-core EPYC with eight channels of DDR4-3200, HDR network.

    ``dram_bandwidth``: 0.8 of 204.8 GB/s. ``optimizer_rate``: parameters/s of all cores if memory
    is no limit (0.65 G a core and second: measured with this project's AVX-512 kernel).
    """

    dram_bandwidth: float = 1.64e11
    optimizer_rate: float = 2.0e10
    memory_bytes: float = 512e9
    nic_bandwidth: float = 2.5e10
    latency_s: float = 1.0e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticCosts:
    """Costs of all blocks, one node of the GPUs, and what they were made of."""

    gpu: Gpu
    model: LanguageModel
    shape: Shape
    block_names: tuple[str, ...]
    costs: Costs
    cluster: Cluster

    def operators(self, name: str) -> tuple[str, ...]:
        """Returns the operators of a named set (``cmb``, ``mlp``, ``attention``, ``core``) in this
        model.

        Raises:
            ConfigError: unknown set; lists the known ones.
        """
        if name not in OPERATOR_SETS:
            raise ConfigError(
                f"operator set {name!r} is unknown; accepted: {', '.join(OPERATOR_SETS)}"
            )
        return operator_set(name, self.model)


def analytic_costs(
    gpu: str,
    model: str,
    *,
    sequence_length: int,
    micro_batch: int,
    half_layers: bool = False,
    offloaded: bool = True,
    flash: bool = True,
    itemsize: int = 2,
    gradient_itemsize: int | None = None,
    efficiency: float | None = None,
    layers: int | None = None,
    devices_per_node: int = 8,
    devices_per_switch: int = 1,
    host: Host | None = None,
    framework: Framework = IDEAL,
) -> AnalyticCosts:
    """Returns costs for micro-batches of ``micro_batch`` sequences of ``sequence_length`` tokens.

    ``offloaded``: the optimizer's state is in host memory and gradients accumulate in fp32;
    otherwise the device keeps 12 bytes a parameter of optimizer state all the time
    (``static_bytes``) beside weights and gradients of ``itemsize`` bytes: 16 bytes a parameter in
    all, or 18 with ``gradient_itemsize=4``. ``efficiency``: the GPU's default unless given.
    ``layers``: as many instead of the model's own number. ``framework``: how kernels run.

    A block's ``activation_bytes`` are its input and what its ``operators`` keep.

    Raises:
        ConfigError: unknown GPU or model, or an impossible number; says what is accepted.
    """
    chip = _named("GPU", gpu, GPUS)
    language_model = _named("model", model, MODELS)
    if layers is not None:
        language_model = replace(language_model, num_layers=layers)
    share = chip.efficiency if efficiency is None else efficiency
    for name, value in (("sequence_length", sequence_length), ("micro_batch", micro_batch)):
        if value < 1:
            raise ConfigError(f"{name} = {value}: expected 1 or more")
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"efficiency = {share}: expected a share of the peak, above 0, at most 1")
    if gradient_itemsize is None:
        gradient_itemsize = 4 if offloaded else itemsize
    shape = Shape(
        sequence_length=sequence_length,
        micro_batch=micro_batch,
        itemsize=itemsize,
        gradient_itemsize=gradient_itemsize,
        flash=flash,
        fused=framework.fused or not language_model.gated,
    )
    maker = _Maker(
        gpu=chip,
        model=language_model,
        shape=shape,
        share=share,
        offloaded=offloaded,
        framework=framework,
    )
    names, blocks = zip(*maker.blocks(half_layers), strict=True)
    return AnalyticCosts(
        gpu=chip,
        model=language_model,
        shape=shape,
        block_names=names,
        costs=Costs(blocks=blocks, instruction_s=INSTRUCTION_S),
        cluster=_cluster(chip, devices_per_node, devices_per_switch, host or Host()),
    )


def _named(what: str, name: str, known: Mapping[str, _Entry]) -> _Entry:
    if name not in known:
        raise ConfigError(f"{what} {name!r} is not in the catalogue; known: {', '.join(known)}")
    return known[name]


def _cluster(gpu: Gpu, devices_per_node: int, devices_per_switch: int, host: Host) -> Cluster:
    """Returns one node; peers talk over NVLink, or over PCIe through the host where there is none.

    A device's own Adam pass moves 30 bytes a parameter of its memory: reads 16 (gradient, weight,
    moments in fp32), writes 14 (with the 16-bit copy).
    """
    bandwidth = gpu.pcie_bandwidth
    return Cluster(
        devices_per_node=devices_per_node,
        fetch_bandwidth=bandwidth,
        offload_bandwidth=bandwidth,
        devices_per_switch=devices_per_switch,
        switch_bandwidth=bandwidth,
        peer_bandwidth=gpu.nvlink_bandwidth or bandwidth,
        peer_through_host=not gpu.nvlink_bandwidth,
        nic_bandwidth=host.nic_bandwidth,
        dram_bandwidth=host.dram_bandwidth,
        latency_s=host.latency_s,
        optimizer_rate=host.optimizer_rate,
        device_optimizer_rate=gpu.memory_bandwidth * BANDWIDTH_SHARE / 30.0,
        device_memory_bytes=gpu.memory_bytes,
        host_memory_bytes=host.memory_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    """Blocks of one model on one GPU."""

    gpu: Gpu
    model: LanguageModel
    shape: Shape
    share: float
    offloaded: bool
    framework: Framework

    def blocks(self, half_layers: bool) -> Iterator[tuple[str, BlockCost]]:
        model, shape, output = self.model, self.shape, self.shape.bytes_of(self.model.hidden_size)
        yield (
            "embedding",
            self._block(
                embedding_kernels(model, shape),
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
        if kind.mixer is Mixer.STATE_SPACE:
            space = model.state_space
            assert space is not None
            width = h + 5 * space.inner_size
            states = 0 if shape.flash else 4 * space.inner_size * space.state_size
        else:
            width, states = h + 2 * model.head_width + 2 * model.key_value_size, 0
        return self._block(
            mixer_kernels(model, shape, kind, residual_kept=residual_kept),
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
            feed_forward_kernels(model, shape, kind),
            model.feed_forward_parameters(kind),
            input_bytes=shape.bytes_of(h),
            workspace_bytes=shape.bytes_of(width),
        )

    def _head(self) -> BlockCost:
        """Returns the head. With a tied matrix the last stage has its own copy, whose gradients are
        summed.
        """
        model, shape = self.model, self.shape
        own = model.head_own_parameters
        matrix = model.vocab_size * model.hidden_size
        block = self._block(
            head_kernels(model, shape),
            own + matrix,
            input_bytes=shape.bytes_of(model.hidden_size),
            workspace_bytes=shape.bytes_of(model.vocab_size)
            + 4.0 * shape.tokens * model.vocab_size,
        )
        return replace(block, parameters=float(own)) if model.tied else block

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
        """Kernels of one operator together, in the order in which operators first run."""
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
        and launching all but the first where there are more launches than a kernel has in itself.
        """
        gpu, rate = self.gpu, self.gpu.peak_flops * self.share
        if self.framework.tiles and work.product is not None:
            rate *= tile_efficiency(work.product, gpu.multiprocessors)
        return max(
            work.flops / rate,
            work.vector_flops / gpu.vector_flops,
            work.moved_bytes / (gpu.memory_bandwidth * BANDWIDTH_SHARE),
            max(0.0, work.launches - MANY_LAUNCHES) * LAUNCH_S,
        )


def _whole(halves: tuple[BlockCost, BlockCost], residual_bytes: float) -> BlockCost:
    """Returns a layer: the sum between its halves is one tensor, kept by the first."""
    layer = halves[0] + halves[1]
    return replace(layer, activation_bytes=layer.activation_bytes - residual_bytes)
