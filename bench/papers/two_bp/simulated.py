"""2BP's figures 3, 4, 6 and 7 and the rates of table 3, simulated with costs from data sheets.

Nothing is fitted. What the paper leaves out is chosen once, in :data:`MODELS`, and said above the
tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

from bench.papers.two_bp.resnet_costs import DEPTHS, resnet_152
from bench.papers.two_bp.theory import PLAIN_2BP, make_schedule, run_passes
from penstock.host.sums import added
from penstock.planner.cost.analytic import Host, analytic_costs
from penstock.planner.cost.catalogue import GPUS
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import Costs
from penstock.planner.cost.frameworks import IDEAL, Framework
from penstock.planner.passes import PassContext
from penstock.planner.schedule.schedule import Schedule, lower, schedule_of
from penstock.planner.simulate import Simulation, simulate

SCHEDULES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"naive": ("naive", 1), "GPipe": ("gpipe", 1), "1F1B-1": ("1f1b", 1), "1F1B-2": ("1f1b-2", 2)}
)
"""The paper's four: our scheme, and micro-batches for each device (naive: all in one, or in turns).
"""

_MOMENTS_BYTES = 4.0
"""Adam's two moments in fp16, like weights and gradients: table 2 names one data type for all."""
_ADAM_MOVED_BYTES = 14.0
"""Per parameter: weight, gradient and moments read, all but the gradient written, in fp16."""
_SGD_MOVED_BYTES = 20.0
"""Per parameter: weight, gradient and momentum read, two written, in fp32."""
_CIRRUS = Host(nic_bandwidth=6.8e9)
"""FDR InfiniBand: 54.5 Gbit/s for the four GPUs of a node."""
_RESNET_CUT = (10, 14, 14, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """One of the paper's models: ``unit`` is what its rate counts, ``units`` of them a sample."""

    name: str
    gpu: str
    micro_batch: int
    units: int
    unit: str
    key: str | None = None
    memory_gpu: str = ""


MODELS = (
    TrainedModel(
        name="Transformer-7b",
        key="llama2-7b",
        gpu="A100-40",
        micro_batch=1,
        units=1024,
        unit="tokens/s",
    ),
    TrainedModel(
        name="BERT-Large",
        key="bert-large",
        gpu="A100-40",
        micro_batch=2,
        units=512,
        unit="tokens/s",
    ),
    TrainedModel(
        name="Mamba-1.4b",
        key="mamba-1.4b",
        gpu="A100-80",
        micro_batch=2,
        units=1024,
        unit="tokens/s",
    ),
    TrainedModel(name="ResNet152", gpu="A100-40", micro_batch=8, units=1, unit="pictures/s"),
)
"""Table 2. Sequence lengths of BERT and Mamba are not stated: 512, BERT's own, and 1,024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A schedule without 2BP and with it: simulations, and seconds of the optimizer after each."""

    plain: Simulation
    split: Simulation
    optimizer_s: float
    samples: int

    @property
    def gain(self) -> float:
        """Throughput with 2BP over throughput without."""
        return (self.plain.pipeline_s + self.optimizer_s) / self.split_s

    @property
    def split_s(self) -> float:
        """Returns seconds of a step with 2BP."""
        return self.split.pipeline_s + self.optimizer_s

    @property
    def peaks(self) -> tuple[float, float]:
        """GB of the device that holds most, without 2BP and with it."""
        plain, split = (
            max(peak.total_bytes for peak in one.peaks) / 1e9 for one in (self.plain, self.split)
        )
        return plain, split

    @property
    def growth(self) -> float:
        """Returns memory with 2BP over memory without."""
        return self.peaks[1] / self.peaks[0]


@cache
def figure_3(name: str, schedule: str, framework: Framework = IDEAL) -> Pair:
    """Returns one of the paper's models under one of its schedules, on 4 GPUs."""
    model = next(model for model in MODELS if model.name == name)
    scheme, each = SCHEDULES[schedule]
    pictures = model.key is None
    # The naive way takes 4 micro-batches as one; with pictures in turns, for the norms' sake.
    whole = scheme == "naive" and not pictures
    micro_batches = 1 if whole else 4 * each
    costs, cluster = _costs(model, model.micro_batch * (4 if whole else 1), framework)
    layers = len(costs.blocks) - 2
    cut = _RESNET_CUT if pictures else (layers // 4,) * 4
    moved = _SGD_MOVED_BYTES if pictures else _ADAM_MOVED_BYTES
    built = make_schedule(scheme, 4, micro_batches, _work(cut))
    return _pair(built, costs, cluster, model.gpu, moved, 4 * each * model.micro_batch)


def _costs(model: TrainedModel, micro_batch: int, framework: Framework) -> tuple[Costs, Cluster]:
    if model.key is None:
        assert sum(DEPTHS) == sum(_RESNET_CUT)
        cluster = analytic_costs(
            model.gpu, "bert-large", sequence_length=1, micro_batch=1, devices_per_node=4
        ).cluster
        return resnet_152(model.gpu, micro_batch, framework), cluster
    return _language_model(
        model.gpu,
        model.key,
        model.units,
        micro_batch,
        flash=model.key.startswith("mamba"),
        framework=framework,
    )


def _language_model(
    gpu: str,
    key: str,
    sequence_length: int,
    micro_batch: int,
    *,
    framework: Framework,
    flash: bool = False,
    layers: int | None = None,
    host: Host | None = None,
) -> tuple[Costs, Cluster]:
    analytic = analytic_costs(
        gpu,
        key,
        sequence_length=sequence_length,
        micro_batch=micro_batch,
        offloaded=False,
        flash=flash,
        layers=layers,
        devices_per_node=4,
        host=host,
        framework=framework,
    )
    blocks = (
        replace(block, static_bytes=_MOMENTS_BYTES * block.parameters)
        for block in analytic.costs.blocks
    )
    return replace(analytic.costs, blocks=tuple(blocks)), analytic.cluster


def _work(cut: tuple[int, ...]) -> list[float]:
    """Returns weights of blocks by which layers are cut into stages of so many: embedding and head
    count nothing.
    """
    return [0.0, *(1.0 / layers for layers in cut for _ in range(layers)), 0.0]


def _pair(
    schedule: Schedule,
    costs: Costs,
    cluster: Cluster,
    gpu: str,
    moved_bytes: float,
    samples: int,
) -> Pair:
    hop_s = max(b.output_bytes for b in costs.blocks) / cluster.peer_bandwidth + cluster.latency_s
    context = PassContext(costs=costs, cluster=cluster, hop_s=hop_s)
    split = run_passes(PLAIN_2BP, schedule, context)
    most = max(
        sum(b.parameters for b in costs.blocks[s.start : s.stop])
        for s in lower(schedule).backward_stages
    )
    kept = replace(costs, blocks=tuple(b.kept_on_device() for b in costs.blocks))
    plain_run, split_run = (simulate(lower(one), kept, cluster) for one in (schedule, split))
    return Pair(
        plain=plain_run,
        split=split_run,
        optimizer_s=most * moved_bytes / GPUS[gpu].memory_bandwidth,
        samples=samples,
    )


@cache
def scaled(devices: int, schedule: str, layers: int, framework: Framework = IDEAL) -> Pair:
    """Returns the BERT-like model with so many layers on so many V100s, four a node (figures 6 and
    7).
    """
    scheme, each = SCHEDULES[schedule]
    costs, cluster = _language_model(
        "V100-16", "bert-32", 512, 2, layers=layers, host=_CIRRUS, framework=framework
    )
    built = make_schedule(scheme, devices, devices * each, _work((layers // devices,) * devices))
    return _pair(built, costs, cluster, "V100-16", _ADAM_MOVED_BYTES, 2 * devices * each)


def unfilled_gain(name: str) -> float:
    """Returns the gain of 1F1B-1 where all p2 wait for the end."""
    pair = figure_3(name, "1F1B-1")
    costs, cluster = pair.plain.costs, pair.plain.cluster
    context = PassContext(costs=costs, cluster=cluster)
    passes = ("split-backward", "concatenate")
    late = run_passes(passes, schedule_of(pair.plain.plan), context)
    late_s = simulate(lower(late), costs, cluster).pipeline_s
    return (pair.plain.pipeline_s + pair.optimizer_s) / (late_s + pair.optimizer_s)


def ideal_gain(name: str, framework: Framework) -> float:
    """Returns what 1F1B-1 on 4 equal stages could gain with free transfers and a p1 that takes
    nothing: 7 (f + b) / (4 (f + b) + 3 f), with the model's forward f and backward b.
    """
    costs = figure_3(name, "1F1B-1", framework).plain.costs
    f = added(block.forward_s for block in costs.blocks)
    b = added(block.backward_s for block in costs.blocks)
    return 7 * (f + b) / (4 * (f + b) + 3 * f)


def backward_for(gain: float) -> float:
    """Returns how many forwards long a backward would have to be for :func:`ideal_gain` to be as
    large as ``gain``.
    """
    return 7 * (gain - 1) / (7 - 4 * gain)


def fits(pair: Pair, gpu: str = "V100-16") -> tuple[bool, bool]:
    """Returns whether memory suffices without 2BP, and with 2BP."""
    room = GPUS[gpu].memory_bytes / 1e9
    return pair.peaks[0] <= room, pair.peaks[1] <= room


def rate(name: str, framework: Framework = IDEAL) -> float:
    """Returns the tokens or pictures a second of 1F1B-1 with 2BP (table 3)."""
    model = next(model for model in MODELS if model.name == name)
    pair = figure_3(name, "1F1B-1", framework)
    return pair.samples * model.units / pair.split_s
