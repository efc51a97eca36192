"""How long does a plan take? An event simulation of one attempt.

Resources: per device a compute stream, a host-to-device and a device-to-host stream; per ordered
pair of devices a link; per node one optimizer that takes blocks in the order in which their
gradients arrive. Instructions are issued when the compute instructions before them have ended. A
transfer starts when it is sent and its receive is posted. Every resource serves in an order that
the programs fix, so no event queue is needed.

Only a plan that :func:`penstock.planner.validate.validate` accepts can be simulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.planner.cluster import ADVANCE, Cluster, OptimizerModel, OptimizerStart
from penstock.planner.costs import Costs
from penstock.planner.layout import ComputeInstruction, StageLayout
from penstock.planner.memory import DevicePeak, device_peaks, table_costs
from penstock.planner.profile import CPU_COSTS, CostModel, block_costs, cluster_of
from penstock.planner.tensors import Tensor, TensorKind, endpoints, transferred
from penstock.planner.timing import seconds_of
from penstock.protocol.config import Config
from penstock.protocol.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    FetchWeights,
    Forward,
    Instruction,
    OffloadGradients,
    Opcode,
    Phase,
    Program,
    Recompute,
    RecomputeAfter,
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
    SendActivation,
    SendCheckpoint,
    SendGradient,
)
from penstock.protocol.plan import Plan
from penstock.shm.table import BlockTable


class Lane(StrEnum):
    """What a span occupies."""

    COMPUTE = "compute"
    FETCH = "fetch"
    OFFLOAD = "offload"
    LINK = "link"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One piece of work on one resource. ``place``: device, or node for the optimizer; ``peer`` of
    links.
    """

    lane: Lane
    place: int
    label: str
    start_s: float
    end_s: float
    peer: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """Seconds a device computes, and does not, until the last device has finished computing."""

    busy_s: float
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What came out. ``pipeline_s`` ends with the last compute instruction, ``makespan_s`` with
    everything.
    """

    makespan_s: float
    pipeline_s: float
    devices: tuple[DeviceTimes, ...]
    spans: tuple[Span, ...]
    peaks: tuple[DevicePeak, ...] = ()

    @property
    def optimizer_tail_s(self) -> float:
        """Time after the last compute instruction: offloads and optimizer work that were not
        hidden.
        """
        return self.makespan_s - self.pipeline_s

    @property
    def bubble_ratio(self) -> float:
        """Share of the pipeline's time in which devices do not compute."""
        return self._idle_share(self.pipeline_s)

    @property
    def idle_ratio(self) -> float:
        """Share of the makespan, optimizer tail included: how the SPipe paper counts bubbles."""
        return self._idle_share(self.makespan_s)

    def _idle_share(self, period_s: float) -> float:
        busy_s = sum(device.busy_s for device in self.devices)
        return 1.0 - busy_s / (period_s * len(self.devices)) if period_s > 0.0 else 0.0

    def summary(self) -> dict[str, Any]:
        """For ``penstock plan --json``: everything but the spans."""
        return {
            "makespan_seconds": self.makespan_s,
            "pipeline_seconds": self.pipeline_s,
            "optimizer_tail_seconds": self.optimizer_tail_s,
            "bubble_ratio": self.bubble_ratio,
            "idle_ratio": self.idle_ratio,
            "devices": [{"busy_seconds": d.busy_s, "idle_seconds": d.idle_s} for d in self.devices],
            "peak_bytes": [
                {
                    "weights": p.weight_bytes,
                    "gradients": p.gradient_bytes,
                    "activations": p.activation_bytes,
                }
                for p in self.peaks
            ],
        }


def simulate_config(
    config: Config, table: BlockTable, plan: Plan, model: CostModel | None = None
) -> Simulation:
    """Simulate with the costs of a machine; without ``model`` the defaults for the configured
    device.
    """
    if model is None:
        model = CPU_COSTS if config.cluster.device == "cpu" else CostModel()
    tokens = config.train.micro_batch * config.data.sequence_length
    return simulate(
        plan,
        block_costs(table, model, tokens=tokens),
        cluster_of(model, devices_per_node=config.cluster.workers),
        peaks=device_peaks(plan, table_costs(table, tokens=tokens)),
    )


def simulate(
    plan: Plan,
    costs: Costs,
    cluster: Cluster,
    *,
    optimizer: OptimizerModel = ADVANCE,
    peaks: tuple[DevicePeak, ...] = (),
) -> Simulation:
    """Run one attempt of a valid plan; the devices of a node share its optimizer."""
    clockwork = _Clockwork(StageLayout.of(plan), plan.programs, costs, cluster)
    clockwork.run()
    pipeline_s = max((s.end_s for s in clockwork.spans if s.lane is Lane.COMPUTE), default=0.0)
    spans = clockwork.spans + _optimizer_spans(
        plan, costs, cluster, clockwork.offloaded_s, optimizer
    )
    devices = []
    for device in range(plan.num_devices):
        busy_s = sum(
            s.end_s - s.start_s for s in spans if s.lane is Lane.COMPUTE and s.place == device
        )
        devices.append(DeviceTimes(busy_s=busy_s, idle_s=pipeline_s - busy_s))
    return Simulation(
        makespan_s=max((span.end_s for span in spans), default=0.0),
        pipeline_s=pipeline_s,
        devices=tuple(devices),
        spans=tuple(spans),
        peaks=peaks,
    )


def _optimizer_spans(
    plan: Plan,
    costs: Costs,
    cluster: Cluster,
    offloaded_s: Mapping[int, float],
    optimizer: OptimizerModel,
) -> list[Span]:
    """Each node's optimizer takes stages as their gradients arrive."""
    flush_s = max(offloaded_s.values(), default=0.0)
    free_s: dict[int, float] = defaultdict(float)
    spans: list[Span] = []
    for stage, arrived_s in sorted(offloaded_s.items(), key=lambda item: (item[1], -item[0])):
        node = cluster.node_of(plan.backward_stages[stage].device)
        ready_s = flush_s if optimizer.start is OptimizerStart.FLUSH else arrived_s
        start_s = max(ready_s, free_s[node])
        duration_s = (
            costs.of(plan.backward_stages[stage].blocks).parameters / cluster.optimizer_rate
        )
        free_s[node] = start_s + duration_s
        spans.append(
            Span(
                lane=Lane.OPTIMIZER,
                place=node,
                label=f"U {stage}",
                start_s=start_s,
                end_s=free_s[node],
            )
        )
    return spans


@dataclass(slots=True, kw_only=True)
class _Clock:
    """Times of one device: its last compute instruction ended, its copy streams are free."""

    position: int = 0
    now_s: float = 0.0
    fetch_free_s: float = 0.0
    offload_free_s: float = 0.0
    weights_s: dict[tuple[int, Phase], float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Channel:
    """An ordered pair of devices: what was sent, in order, and how far it has been delivered."""

    sent: list[tuple[Tensor, float]] = field(default_factory=list)
    delivered: int = 0
    free_s: float = 0.0


class _Clockwork:
    """Advances every device as far as it can go, until all are done."""

    def __init__(
        self,
        layout: StageLayout,
        programs: tuple[Program, ...],
        costs: Costs,
        cluster: Cluster,
    ) -> None:
        self._layout = layout
        self._programs = programs
        self._costs = costs
        self._seconds = seconds_of(layout, costs)
        self._cluster = cluster
        self._clocks = [_Clock() for _ in programs]
        self._channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
        self._posted_s: dict[Tensor, float] = {}
        self._arrived_s: dict[Tensor, float] = {}
        self.offloaded_s: dict[int, float] = {}
        self.spans: list[Span] = []
        self._handlers: Mapping[type[Instruction], Callable[[int, Any], bool]] = {
            Forward: self._forward,
            Recompute: self._recompute,
            Backward: self._backward,
            BackwardInput: self._backward,
            BackwardWeight: self._backward_weight,
            SendActivation: self._send,
            SendGradient: self._send,
            SendCheckpoint: self._send,
            RecvActivation: self._post,
            RecvGradient: self._post,
            RecvCheckpoint: self._post,
            FetchWeights: self._fetch,
            OffloadGradients: self._offload,
        }

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for device, program in enumerate(self._programs):
                clock = self._clocks[device]
                while clock.position < len(program):
                    instruction = program[clock.position]
                    handler = self._handlers.get(type(instruction))
                    if handler is not None and not handler(device, instruction):
                        break
                    clock.position += 1
                    moved = True
        stuck = [d for d, p in enumerate(self._programs) if self._clocks[d].position < len(p)]
        if stuck:
            raise ValueError(f"devices {stuck} cannot finish; validate the plan first")

    def _forward(self, device: int, work: Forward) -> bool:
        source = None
        if not self._layout.is_first_forward(work.stage):
            source = Tensor(
                kind=TensorKind.ACTIVATION, stage=work.stage - 1, micro_batch=work.micro_batch
            )
        return self._compute(device, work, source, Phase.FORWARD)

    def _recompute(self, device: int, work: Recompute) -> bool:
        source = None
        if not self._layout.is_first_backward(work.stage):
            source = Tensor(
                kind=TensorKind.CHECKPOINT, stage=work.stage, micro_batch=work.micro_batch
            )
        if work.after is RecomputeAfter.GRADIENT and not self._await_gradient(device, work):
            return False
        return self._compute(device, work, source, Phase.BACKWARD)

    def _await_gradient(self, device: int, work: Recompute) -> bool:
        """Let the device's clock pass the arrival of the gradient that the backward will need."""
        if self._layout.is_last_backward(work.stage):
            return True
        tensor = Tensor(
            kind=TensorKind.GRADIENT, stage=work.stage + 1, micro_batch=work.micro_batch
        )
        places = endpoints(self._layout, tensor.kind, tensor.stage)
        if places is None or places[0] == places[1]:
            return True
        arrived_s = self._arrival(places, tensor)
        if arrived_s is None:
            return False
        clock = self._clocks[device]
        clock.now_s = max(clock.now_s, arrived_s)
        return True

    def _backward(self, device: int, work: Backward | BackwardInput) -> bool:
        source = None
        if not self._layout.is_last_backward(work.stage):
            source = Tensor(
                kind=TensorKind.GRADIENT, stage=work.stage + 1, micro_batch=work.micro_batch
            )
        return self._compute(device, work, source, Phase.BACKWARD)

    def _backward_weight(self, device: int, work: BackwardWeight) -> bool:
        return self._compute(device, work, None, Phase.BACKWARD)

    def _compute(
        self,
        device: int,
        work: ComputeInstruction,
        source: Tensor | None,
        phase: Phase,
    ) -> bool:
        places = endpoints(self._layout, source.kind, source.stage) if source else None
        input_s: float | None = 0.0
        if source is not None and places is not None and places[0] != places[1]:
            input_s = self._arrival(places, source)
        if input_s is None:
            return False
        clock = self._clocks[device]
        weights = clock.weights_s
        fetched_s = weights.get((work.stage, phase), weights.get((work.stage, Phase.FORWARD), 0.0))
        start_s = max(clock.now_s, input_s, fetched_s)
        clock.now_s = start_s + self._seconds(work)
        label = str(work).partition(" keep")[0]
        self._span(Lane.COMPUTE, device, label, start_s, clock.now_s)
        return True

    def _arrival(self, places: tuple[int, int], tensor: Tensor) -> float | None:
        """When a tensor is there; ``None`` while its sender has not come so far."""
        channel = self._channels[places]
        while tensor not in self._arrived_s and channel.delivered < len(channel.sent):
            moving, sent_s = channel.sent[channel.delivered]
            if moving not in self._posted_s:
                return None
            start_s = max(sent_s, self._posted_s[moving], channel.free_s)
            channel.free_s = start_s + self._seconds_on_link(moving)
            self._arrived_s[moving] = channel.free_s + self._cluster.latency_s
            channel.delivered += 1
            label = f"{moving.kind} {moving.stage} {moving.micro_batch}"
            self._span(
                Lane.LINK, places[0], label, start_s, self._arrived_s[moving], peer=places[1]
            )
        return self._arrived_s.get(tensor)

    def _seconds_on_link(self, tensor: Tensor) -> float:
        if tensor.kind is TensorKind.ACTIVATION:
            last = self._layout.forward[tensor.stage].stop - 1
        else:
            last = self._layout.backward[tensor.stage].start - 1
        return self._costs.blocks[last].output_bytes / self._cluster.peer_bandwidth

    def _send(self, device: int, send: SendActivation | SendGradient | SendCheckpoint) -> bool:
        sent = self._channels[device, send.peer].sent
        sent.append((transferred(send), self._clocks[device].now_s))
        return True

    def _post(self, device: int, recv: RecvActivation | RecvGradient | RecvCheckpoint) -> bool:
        self._posted_s[transferred(recv)] = self._clocks[device].now_s
        return True

    def _fetch(self, device: int, fetch: FetchWeights) -> bool:
        forward = fetch.phase is Phase.FORWARD
        stage = (self._layout.forward if forward else self._layout.backward)[fetch.stage]
        clock = self._clocks[device]
        start_s = max(clock.now_s, clock.fetch_free_s)
        clock.fetch_free_s = start_s + (
            self._costs.of(stage.blocks).weight_bytes / self._cluster.fetch_bandwidth
        )
        clock.weights_s[fetch.stage, fetch.phase] = clock.fetch_free_s
        label = f"{Opcode.FETCH_WEIGHTS.value} {fetch.stage} {fetch.phase}"
        self._span(Lane.FETCH, device, label, start_s, clock.fetch_free_s)
        return True

    def _offload(self, device: int, offload: OffloadGradients) -> bool:
        blocks = self._layout.backward[offload.stage].blocks
        clock = self._clocks[device]
        start_s = max(clock.now_s, clock.offload_free_s)
        clock.offload_free_s = start_s + (
            self._costs.of(blocks).gradient_bytes / self._cluster.offload_bandwidth
        )
        self.offloaded_s[offload.stage] = clock.offload_free_s
        label = f"{Opcode.OFFLOAD_GRADIENTS.value} {offload.stage}"
        self._span(Lane.OFFLOAD, device, label, start_s, clock.offload_free_s)
        return True

    def _span(
        self,
        lane: Lane,
        place: int,
        label: str,
        start_s: float,
        end_s: float,
        *,
        peer: int | None = None,
    ) -> None:
        self.spans.append(
            Span(lane=lane, place=place, label=label, start_s=start_s, end_s=end_s, peer=peer)
        )
