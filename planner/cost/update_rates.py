"""Numbers of optimizer subgroups that belong on the GPU: performance models of the update phase.

Sources: Maurya et al., "Deep Optimizer States: Towards Scalable Training of Transformer Models
Using Interleaved Offloading", Middleware 2024, section 4.2, equation 1. :func:`preview_ratio`
derives the counterpart for our own step of preview and settle.

A *subgroup* is a unit of updates: a slice of the parameters in the paper, a block here. A *stride*
of k puts every k-th subgroup on the GPU (algorithm 1: those with ``(i + 1) % k == 0``); strides
need not be whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from penstock.planner.cost.cluster import Cluster, OptimizerModel


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRates:
    """Rates at which one GPU, and its share of the host, update and move; all in parameters per
    second.

    ``transfer``: B, fp32 numbers over PCIe, each way at the same time; ``device``: U_g, updates on
    the GPU; ``host``: U_c, updates on the CPU; ``downscale``: D_c, fp32 to 16 bits on the CPU.
    """

    transfer: float
    device: float
    host: float
    downscale: float


def cpu_subgroups_per_gpu(rates: UpdateRates) -> float:
    """Returns equation 1's k: subgroups that the CPU updates while one visits the GPU, as a real
    number.

    One subgroup of S parameters is swapped (3 S fp32 numbers each way: weights and moments) and
    updated on the GPU. Meanwhile the CPU updates and converts k subgroups. Their 16-bit weights (k
    S / 2 numbers) go to the GPU, which makes this direction the slower one::

        k (S / U_c + S / D_c) = 3 S / B + k S / (2 B) + S / U_g

    The size of subgroups cancels. Nothing is rounded or limited: below 1 the GPU takes more
    subgroups than the CPU. ``inf`` means that the CPU's 16-bit weights alone fill the link, so that
    every visit of the GPU makes the update longer.
    """
    per_cpu_s = 1.0 / rates.host + 1.0 / rates.downscale - 0.5 / rates.transfer
    return (3.0 / rates.transfer + 1.0 / rates.device) / per_cpu_s if per_cpu_s > 0.0 else inf


def update_stride(rates: UpdateRates) -> float:
    """Returns the stride of subgroups on the GPU, as equation 1 was derived: k + 1.

    The equation counts k subgroups on the CPU *and* one on the GPU. The paper's text and algorithm
    1 take k itself as the stride ("k = 2, i.e., every alternate subgroup"). Its measurements agree
    with k + 1 on both machines (:mod:`bench.papers.deep_optimizer_states` shows both readings). A
    stride of 1.5 is two of three subgroups; ``inf`` is none.
    """
    return cpu_subgroups_per_gpu(rates) + 1.0


def update_throughput(rates: UpdateRates, stride: float | None) -> float:
    """Returns parameters/s of CPU and GPU together, with every ``stride``-th subgroup on the GPU.

    The slower side of each ``stride`` subgroups decides. One side is the CPU's updates and
    conversions. The other is the GPU and the link towards it (prefetched state of one, 16-bit
    weights of the others). ``inf``: all on the CPU. ``None``: the same, and the CPU waits while
    16-bit weights are copied, as ZeRO-3 offload does (section 4.1).

    Raises:
        ValueError: a stride below 1.
    """
    on_cpu_s = 1.0 / rates.host + 1.0 / rates.downscale
    if stride is None:
        return 1.0 / (on_cpu_s + 0.5 / rates.transfer)
    if stride < 1:
        raise ValueError(f"a stride of {stride}: expected 1 or more")
    if stride == inf:
        return 1.0 / max(on_cpu_s, 0.5 / rates.transfer)
    others = stride - 1
    visit_s = 3.0 / rates.transfer + others * 0.5 / rates.transfer + 1.0 / rates.device
    return stride / max(others * on_cpu_s, visit_s)


def resident_throughput(rates: UpdateRates, resident: float, stride: float | None) -> float:
    """Returns parameters/s with a share ``resident`` of the subgroups always on the GPU.

    With ``stride=None`` residents are updated first, and the CPU waits (TwinFlow, section 4.1 and
    figure 5). With a stride they come last, under the transfers of the subgroups before ("static
    residents last").

    Raises:
        ValueError: a share outside 0 to 1.
    """
    if not 0.0 <= resident <= 1.0:
        raise ValueError(f"resident = {resident}: expected a share from 0 to 1")
    moving_s = (1.0 - resident) / update_throughput(rates, stride)
    resident_s = resident / rates.device
    return 1.0 / (moving_s + resident_s if stride is None else max(moving_s, resident_s))


def preview_ratio(cluster: Cluster, optimizer: OptimizerModel) -> float:
    """Returns our counterpart of equation 1: parameters previewed by the CPU for each by all GPUs.

    A preview reads master weight and moments (``update_fetch_bytes``, 12) and writes the 16-bit
    weight only (``update_offload_bytes``, 2). The CPU settles the state of all blocks later. So two
    terms differ from equation 1:

    - Only the new weight comes back. The CPU's new weights do not cross to the GPU now, but with
      the fetch of the stage that needs them. Fetch and offload overlap::

        1 / R_g = max(12 / B_fetch, 2 / B_offload) + 1 / U_g   (one GPU, bytes/s and parameters/s)

    - Conversion is part of the CPU's sweep: there is no D_c.
    - n GPUs and the cores share the host's memory. A preview on the CPU moves ``tail_bytes`` (16),
      one on a GPU 14 there. The GPUs can use at most all of it, the CPU the rest::

        R = min(n R_g, M / 14)          U = min(U_c, (M - 14 R) / 16)

    Both end together if parameters are split as U : R. The function returns U / R. The ratio is 0
    if the GPUs fill the memory bandwidth alone, ``inf`` if the CPU takes no time, or GPUs cannot
    update.
    """
    on_cpu, on_devices = host_rate(cluster, optimizer), _devices_rate(cluster)
    return on_cpu / on_devices if on_cpu < inf and on_devices else inf


def preview_throughput(cluster: Cluster, optimizer: OptimizerModel, stride: float | None) -> float:
    """Returns parameters/s that a node previews with every ``stride``-th block on GPUs (``None``:
    none).

    Limits are the GPUs' copies and kernels, the cores, and the host's memory, which all share::

        min(k n R_g,  k / (k - 1) U_c,  M k / (14 + 16 (k - 1)))

    Raises:
        ValueError: a stride below 1.
    """
    memory, host_bytes = cluster.dram_bandwidth, optimizer.tail_bytes
    if stride is None:
        return min(_cores_rate(cluster, optimizer), memory / host_bytes if host_bytes else inf)
    if stride < 1:
        raise ValueError(f"a stride of {stride}: expected 1 or more")
    others = stride - 1
    visit_s = _visit_s(cluster)
    on_gpus = stride * cluster.devices_per_node / visit_s if visit_s else inf
    on_cpu = stride / others * _cores_rate(cluster, optimizer) if others else inf
    moved = (_update_bytes(cluster) + others * host_bytes) / stride
    return min(on_gpus, on_cpu, memory / moved if moved else inf)


def preview_stride(cluster: Cluster, optimizer: OptimizerModel) -> float | None:
    """Returns the stride of blocks on GPUs with the highest throughput.

    The stride is U / R + 1 of :func:`preview_ratio`, or a whole number that is as good within 1 %.
    Among equals the larger one is taken, since the GPUs have other work. ``None`` if no GPU helps.
    """
    ratio = preview_ratio(cluster, optimizer)
    if ratio == inf:
        return None

    def throughput(stride: float | None) -> float:
        return preview_throughput(cluster, optimizer, stride)

    whole = max((None, *range(int(ratio) + 3, 0, -1)), key=throughput)
    exact = ratio + 1.0
    return exact if throughput(exact) > 1.01 * throughput(whole) else whole


def flushing(cluster: Cluster) -> Cluster:
    """Returns the cluster with updates that flush; :func:`preview_ratio` and its like then describe
    the paper's form.

    State goes to the GPU and back, together with the new weight: ``1 / R_g = max(12 / B_fetch, 14 /
    B_offload) + 1 / U_g``, and 26 bytes of the host's memory instead of 14. In exchange these
    blocks need no settling. Settling would take another 26 bytes (with 16-bit gradients) and the
    cores' time during the next forward.
    """
    return replace(cluster, update_offload_bytes=cluster.update_bytes_out(flush=True))


def device_rate(cluster: Cluster) -> float:
    """Returns R / n of :func:`preview_ratio`: parameters/s of previews on each GPU of a node."""
    return _devices_rate(cluster) / cluster.devices_per_node


def host_rate(cluster: Cluster, optimizer: OptimizerModel, *, alone: bool = False) -> float:
    """Returns U of :func:`preview_ratio`: parameters/s of a node's CPU, with GPUs previewing too or
    ``alone``.
    """
    if cluster.dram_bandwidth == inf or not optimizer.tail_bytes:
        return _cores_rate(cluster, optimizer)
    used = 0.0 if alone else _update_bytes(cluster) * _devices_rate(cluster)
    left = max(0.0, cluster.dram_bandwidth - used)
    return min(_cores_rate(cluster, optimizer), left / optimizer.tail_bytes)


def _cores_rate(cluster: Cluster, optimizer: OptimizerModel) -> float:
    """Returns the CPU's parameters/s of previews, or of sweeps that settle as well, if DRAM is no
    limit.
    """
    speed = cluster.preview_speed if optimizer.settle_bytes else 1.0
    return cluster.optimizer_rate * speed


def _devices_rate(cluster: Cluster) -> float:
    visit_s, moved = _visit_s(cluster), _update_bytes(cluster)
    free = cluster.devices_per_node / visit_s if visit_s else inf
    return min(free, cluster.dram_bandwidth / moved if moved else inf)


def _visit_s(cluster: Cluster) -> float:
    """Returns the seconds per parameter on one GPU: copies both ways at once, then the kernel."""
    copies_s = max(
        cluster.update_fetch_bytes / cluster.fetch_bandwidth,
        cluster.update_offload_bytes / cluster.offload_bandwidth,
    )
    return copies_s + 1.0 / cluster.device_optimizer_rate


def _update_bytes(cluster: Cluster) -> float:
    return cluster.update_fetch_bytes + cluster.update_offload_bytes
