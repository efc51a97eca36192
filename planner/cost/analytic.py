"""Costs of a named model on a named GPU, computed from data sheets; no number is measured or
fitted.

A kernel takes max(operations / (peak x efficiency), bytes / (bandwidth x 0.85)): the roofline.
Kernels (:mod:`penstock.planner.cost.operators`) add up to the forward of a block and both halves of
its backward. So the ratio of backward to forward is a result.

Left out are launch overhead below :data:`INSTRUCTION_S`, quantisation of matrix sizes to tiles, and
the slow-down of small products. A :class:`~penstock.planner.cost.frameworks.Framework` can add
them.

The head is one block like the embedding. With ``half_layers`` a transformer layer is two blocks,
its attention (or state space) and its MLP (or experts; 2 L + 2 blocks: Obscura, section 7.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.host.errors import ConfigError
from penstock.planner.cost.block_maker import BANDWIDTH_SHARE, BlockMaker, TensorGroup
from penstock.planner.cost.catalogue import Gpu, gpu_named, model_named
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import Costs
from penstock.planner.cost.frameworks import IDEAL, Framework
from penstock.planner.cost.language_models import LanguageModel
from penstock.planner.cost.layer_kernels import Shape
from penstock.planner.cost.operators import OPERATOR_SETS, operator_set

_Entry = TypeVar("_Entry")

INSTRUCTION_S = 2.0e-5
"""Overhead of a compute instruction: launches that the device waits for."""


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
    model: str | LanguageModel,
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
    tensor_parallel: int = 1,
) -> AnalyticCosts:
    """Returns costs for micro-batches of ``micro_batch`` sequences of ``sequence_length`` tokens.

    ``model``: a name or a shape; ``layers`` replaces its number of layers. ``offloaded``: the
    optimizer's state is in host memory and gradients accumulate in fp32. Otherwise the device
    always keeps 12 bytes a parameter of optimizer state (``static_bytes``). With weights and
    gradients of ``itemsize`` bytes that is 16 bytes a parameter, or 18 with
    ``gradient_itemsize=4``. ``efficiency``: the GPU's default unless given. ``framework``: how
    kernels run. ``tensor_parallel``: a device of the plan is a group of so many GPUs, each with its
    part of every layer (Megatron's way, without sequence parallelism). Costs are those of one GPU.
    Sums pass over NVLink or, if a group is larger than a node, over NICs.

    Raises:
        ConfigError: unknown GPU or model, or an impossible number; says what is accepted.
    """
    chip = gpu_named(gpu)
    language_model = model_named(model) if isinstance(model, str) else model
    if layers is not None:
        language_model = replace(language_model, num_layers=layers)
    share = chip.efficiency if efficiency is None else efficiency
    _check_numbers(sequence_length, micro_batch, share)
    host = host or Host()
    group = _group(chip, tensor_parallel, devices_per_node, host)
    maker = BlockMaker(
        gpu=chip,
        model=language_model.shard(tensor_parallel),
        group=group,
        shape=Shape(
            sequence_length=sequence_length,
            micro_batch=micro_batch,
            itemsize=itemsize,
            gradient_itemsize=gradient_itemsize or (4 if offloaded else itemsize),
            flash=flash,
            fused_norms=framework.fused_norms or not language_model.gated,
            fused_rotary=framework.fused_rotary,
        ),
        share=share,
        offloaded=offloaded,
        framework=framework,
    )
    cluster = _cluster(chip, devices_per_node // tensor_parallel or 1, devices_per_switch, host)
    return _priced(maker, language_model, cluster, half_layers=half_layers)


def _priced(
    maker: BlockMaker, model: LanguageModel, cluster: Cluster, *, half_layers: bool
) -> AnalyticCosts:
    names, blocks = zip(*maker.blocks(half_layers), strict=True)
    return AnalyticCosts(
        gpu=maker.gpu,
        model=model,
        shape=maker.shape,
        block_names=names,
        costs=Costs(blocks=blocks, instruction_s=INSTRUCTION_S),
        cluster=cluster,
    )


def _check_numbers(sequence_length: int, micro_batch: int, share: float) -> None:
    for name, value in (("sequence_length", sequence_length), ("micro_batch", micro_batch)):
        if value < 1:
            raise ConfigError(f"{name} = {value}: expected 1 or more")
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"efficiency = {share}: expected a share of the peak, above 0, at most 1")


def _group(gpu: Gpu, size: int, devices_per_node: int, host: Host) -> TensorGroup:
    """Returns a tensor-parallel group of neighbours; over NICs each device has its share of one."""
    if devices_per_node % size and size % devices_per_node:
        raise ConfigError(
            f"tensor_parallel = {size}: nodes have {devices_per_node} devices; give a divisor or a"
            " multiple"
        )
    bandwidth = gpu.nvlink_bandwidth or gpu.pcie_bandwidth
    if size > devices_per_node:
        bandwidth = min(bandwidth, host.nic_bandwidth / devices_per_node)
    return TensorGroup(size=size, bandwidth=bandwidth, latency_s=host.latency_s)


def _cluster(gpu: Gpu, devices_per_node: int, devices_per_switch: int, host: Host) -> Cluster:
    """Returns one node. Peers talk over NVLink; without NVLink, over PCIe through the host.

    A device's own Adam pass reads 16 bytes a parameter of its memory (gradient, weight, moments in
    fp32). It writes 14 (with the 16-bit copy).
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
