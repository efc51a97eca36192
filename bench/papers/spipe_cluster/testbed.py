"""The test-beds of the SPipe paper: its machines as clusters, its models' costs, its constants.

Machines: table 1. Models: table 2. How processes are bound comes from the artifact's launcher
(``examples/run.sh``): on Cluster V100 every process has a quarter of the EPYC's cores and two of
its eight memory channels, on Cluster RTX 3090 two processes share a half.

From data sheets: peaks and bandwidths of the GPUs, PCIe 3.0 and 4.0 x16 (12.5 and 25 GB/s each way,
through the host's memory), eight channels of DDR4-2666 and DDR4-3200 (three quarters of their
peak), a network of 25 GB/s. What is fitted stands in ``data/spipe_constants.json``, written by
``python -m bench.papers.spipe_cluster.fit`` from the runs at hand on Cluster V100; nothing is
chosen per run, and nothing is fitted to Cluster RTX 3090.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from types import MappingProxyType

from bench.papers.spipe_cluster.measured import DATA, DEVICES_PER_NODE, Workload
from penstock.planner.cost.analytic import AnalyticCosts, Host, analytic_costs
from penstock.planner.cost.catalogue import GPUS
from penstock.planner.cost.costs import Costs

CONSTANTS = DATA / "spipe_constants.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What is fitted to measured runs, all of them together.

    ``efficiency``: share of the tensor cores' peak that large matrix products reach on a V100 (0.6
    in the catalogue, where it stands for launches and transfers, too, which are counted apart
    here); ``small_tokens``: micro-batches of so many tokens reach half of it (tiles that are not
    filled, waves that are not full).

    ``blocking_s``: what each compute instruction takes beside its kernels, and ``peer_bandwidth``
    (bytes/s) for the transfer of what it makes, which it waits for: Megatron-LM's point-to-point
    transfers end with a synchronization of the host, so that launches start on an idle device.

    ``step_bytes``: DRAM traffic per parameter of the CPU step of figure 3. Each line sweeps over
    memory: to fp32 (10 bytes with the write-allocate), unscale (8), check (4), Adam (28), copy to
    fp16 (8), zero the gradients (4 to 8): 62 to 66. ``stage_rate``: parameters/s of the step of one
    stage, for which SPipe's runs have two threads.

    ``gather_bandwidth``: bytes/s of DeepSpeed's collectives; ``gather_bandwidth_32``: with 32 GPUs.
    """

    efficiency: float
    small_tokens: float
    blocking_s: float
    peer_bandwidth: float
    step_bytes: float
    stage_rate: float
    gather_bandwidth: float
    gather_bandwidth_32: float


@lru_cache(maxsize=1)
def constants() -> Constants:
    """Returns the committed constants."""
    known = json.loads(CONSTANTS.read_text(encoding="utf-8"))
    return Constants(**{one.name: float(known[one.name]) for one in fields(Constants)})


@dataclass(frozen=True, slots=True, kw_only=True)
class TestBed:
    """A cluster of table 1. ``numa_domains`` of a node to which processes are bound;
    ``matrix_share``: share of its peak that a GPU of its kind reached in a public measurement of
    large 16-bit matrix products (github.com/mli/transformers-benchmarks: V100 SXM 95 of 125
    TFLOP/s; RTX 3090 Ti 81, of 80 with fp32 accumulation: at half the rate its tensor cores never
    wait, and the card clocks higher than its data sheet says).

    ``peers_direct``: its GPUs read each other's memory over PCIe; otherwise (GeForce) transfers are
    staged in host memory, one copy after the other.
    """

    __test__ = False

    name: str
    gpu: str
    dram_bandwidth: float
    numa_domains: int
    matrix_share: float
    peers_direct: bool

    @property
    def device_bytes(self) -> float:
        """Memory of a GPU: its data sheet's GB are GiB."""
        return GPUS[self.gpu].memory_bytes / 1e9 * 2**30


_CHANNELS_SHARE = 0.75
"""Share of its peak that streaming reaches of DDR4 with all channels in use (0.7 to 0.8)."""

TEST_BEDS: Mapping[str, TestBed] = MappingProxyType(
    {
        bed.name: bed
        for bed in (
            TestBed(
                name="v100",
                gpu="V100-PCIE-32",
                dram_bandwidth=_CHANNELS_SHARE * 8 * 21.33e9,
                numa_domains=4,
                matrix_share=95.0 / 125.0,
                peers_direct=True,
            ),
            TestBed(
                name="3090",
                gpu="RTX3090",
                dram_bandwidth=_CHANNELS_SHARE * 8 * 25.6e9,
                numa_domains=2,
                matrix_share=81.0 / 80.0,
                peers_direct=False,
            ),
        )
    }
)
"""By the name that ``--cluster`` takes."""

V100 = TEST_BEDS["v100"]


def efficiency(bed: TestBed, tokens: int, known: Constants | None = None) -> float:
    """Returns the share of the peak that matrix products reach for micro-batches of ``tokens``.

    Fitted on V100, for all that a layer does; others as much more as matrix products reach there.
    """
    known = known or constants()
    large = known.efficiency * bed.matrix_share / V100.matrix_share
    return large / (1.0 + known.small_tokens / tokens)


@lru_cache(maxsize=64)
def analytic(
    workload: Workload, bed: TestBed = V100, known: Constants | None = None
) -> AnalyticCosts:
    """Returns the workload's model on a test-bed, without overheads of a system.

    Gradients accumulate in 16 bits, as in the artifact.
    """
    made = analytic_costs(
        bed.gpu,
        f"spipe-{workload.billions}b",
        sequence_length=workload.sequence,
        micro_batch=workload.micro_batch,
        gradient_itemsize=2,
        efficiency=efficiency(bed, workload.micro_batch * workload.sequence, known),
        devices_per_node=DEVICES_PER_NODE,
        host=Host(dram_bandwidth=bed.dram_bandwidth),
    )
    return replace(made, cluster=replace(made.cluster, numa_domains=bed.numa_domains))


def with_blocking_transfers(
    costs: Costs, bed: TestBed = V100, known: Constants | None = None
) -> Costs:
    """Returns costs with transfers for which compute waits, as in the paper's systems."""
    known = known or constants()
    bandwidth = known.peer_bandwidth * GPUS[bed.gpu].pcie_bandwidth / GPUS[V100.gpu].pcie_bandwidth
    if not bed.peers_direct:
        bandwidth /= 2.0
    transfer_s = costs.blocks[0].output_bytes / bandwidth
    return Costs(blocks=costs.blocks, instruction_s=known.blocking_s, sending_s=transfer_s)
