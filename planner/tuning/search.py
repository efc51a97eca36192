"""Which schedule is fastest on a cluster, within its memory?

A grid over scheme, pipeline x data parallelism, micro-batch size, recomputation and numbers of
stages; then passes on the best of it. Pure and deterministic: the same space gives the same table.
What a candidate costs is decided by :func:`penstock.planner.pipeline.make_schedule` and the
simulator.

Not everything is simulated. A candidate is left out when the weights it keeps cannot fit, when its
devices would need more memory than the limit (counted on the lowered plan), or when no order of its
work could beat the candidates in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from penstock.planner.cost.cluster import ADVANCE, OptimizerModel
from penstock.planner.cost.costs import Costs
from penstock.planner.cost.sources import Prices
from penstock.planner.layout import Residency
from penstock.planner.memory.footprint import device_peaks, swapped_peaks
from penstock.planner.orders.bounds import lower_bound_s
from penstock.planner.pipeline import Terms, lowered, make_schedule
from penstock.planner.replicas import replicate, with_reduction
from penstock.planner.schedule import schedule_of
from penstock.planner.schemes import SCHEMES
from penstock.planner.simulate import simulate
from penstock.planner.tuning.space import Candidate, Space
from penstock.protocol.errors import CapacityError, ConfigError
from penstock.protocol.plan.plan import Plan
from penstock.shm.layout import GRADIENT_COPIES, TWO_COPIES, WEIGHT_SLOTS, Storage

Pricer = Callable[[int], Prices]
"""Prices of the model and one node's worth of cluster, for micro-batches of so many sequences."""

Planner = Callable[[Candidate, Terms], Plan]
"""Makes the plan of a candidate.

Raises:
    ConfigError: there is none. CapacityError: it does not fit.
"""

Settler = Callable[[Plan, Prices], Plan]
"""Chooses which blocks of a plan are settled early."""

Progress = Callable[[int, int, "Outcome | None"], None]
"""Called with candidates done, candidates in all so far, and the best outcome."""

BEST = 3
SCHEMES_REFINED = 4
RESCUED = 3
"""Passes are tried on so many of the best candidates of the grid, on the best of so many other
schemes, and on so many that would be fast but need too much device memory.
"""

_MOMENTS_BYTES = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A candidate that fits. ``host_bytes``: of the node that needs most."""

    candidate: Candidate
    plan: Plan
    step_s: float
    bubble_ratio: float
    optimizer_tail_s: float
    device_bytes: float
    host_bytes: float

    @property
    def rank(self) -> tuple[float, float, Candidate]:
        """Fastest first, then least memory."""
        return self.step_s, self.device_bytes, self.candidate

    def is_like(self, other: Outcome) -> bool:
        """Whether devices do the same, whatever the scheme is called."""
        return (
            self.step_s == other.step_s
            and self.candidate.micro_batch == other.candidate.micro_batch
            and self.plan.forward_stages == other.plan.forward_stages
            and self.plan.programs == other.plan.programs
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes of one device and of one node's memory, and how many outcomes are wanted."""

    device_bytes: float = inf
    host_bytes: float = inf
    keep: int = 20


@dataclass(slots=True, kw_only=True)
class Search:
    """The best outcomes so far, and why others are not among them.

    ``planner`` makes the plan of a candidate, or raises ConfigError. ``storage`` says how a plan's
    host memory is stored. ``optimizer`` and ``stops_early``: as in
    :func:`penstock.planner.simulate.simulate`. ``settler``: asked about the best only, once all are
    known, and what it says of them decides their order.
    """

    pricer: Pricer
    limits: Limits
    planner: Planner | None = None
    optimizer: OptimizerModel = ADVANCE
    storage: Callable[[Plan], Storage] = lambda plan: TWO_COPIES
    stops_early: bool = False
    settler: Settler | None = None
    num_tried: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    _best_of: dict[str, Outcome] = field(default_factory=dict)
    _too_large: list[tuple[float, Candidate]] = field(default_factory=list)
    _prices: dict[int, Prices] = field(default_factory=dict)

    def run(self, space: Space, progress: Progress = lambda done, of, best: None) -> None:
        """Try the grid, then the passes of the space on the best of it."""
        candidates = space.candidates()
        refinements = len(space.pass_sets) * (BEST + SCHEMES_REFINED + RESCUED)
        for done, candidate in enumerate(candidates):
            progress(done, len(candidates) + refinements, self.best)
            self.consider(candidate)
        refined = [
            replace(base, passes=passes) for base in self._bases() for passes in space.pass_sets
        ]
        total = len(candidates) + len(refined)
        for done, candidate in enumerate(refined):
            progress(len(candidates) + done, total, self.best)
            self.consider(candidate)
        if self.settler is not None:
            self._settle_early(self.settler)
        progress(total, total, self.best)

    def _settle_early(self, settler: Settler) -> None:
        """Have it chosen for all that could become the best: what it shortens is the tail."""
        best_s = inf
        for index, outcome in enumerate(self.outcomes):
            if outcome.step_s - outcome.optimizer_tail_s < best_s:
                prices = self._priced(outcome.candidate)
                plan = settler(outcome.plan, prices)
                host_bytes = _host_bytes(plan, prices, self.storage(plan))
                settled = self._outcome(outcome.candidate, plan, outcome.device_bytes, host_bytes)
                self.outcomes[index] = settled
                best_s = min(best_s, settled.step_s)
        self.outcomes.sort(key=lambda outcome: outcome.rank)

    def _bases(self) -> list[Candidate]:
        """What passes are tried on."""
        best = self.outcomes[:BEST]
        seen = {outcome.candidate.scheme for outcome in best}
        others = sorted(
            (outcome for scheme, outcome in self._best_of.items() if scheme not in seen),
            key=lambda outcome: outcome.rank,
        )
        too_large = sorted(self._too_large)[:RESCUED]
        return [
            *(outcome.candidate for outcome in (*best, *others[:SCHEMES_REFINED])),
            *(candidate for _, candidate in too_large),
        ]

    @property
    def best(self) -> Outcome | None:
        """The fastest so far."""
        return self.outcomes[0] if self.outcomes else None

    def consider(self, candidate: Candidate) -> None:
        """Try a candidate; it stays if it is among the best."""
        prices = self._priced(candidate)
        self.num_tried += 1
        try:
            outcome = self._tried(candidate, prices)
        except ConfigError as error:
            memory = str(error).startswith("memory.device_limit")
            outcome = "device memory" if memory else "impossible"
        except CapacityError:
            outcome = "memory of the machine"
        if isinstance(outcome, str):
            self.left_out[outcome] = self.left_out.get(outcome, 0) + 1
            return
        known = self._best_of.setdefault(candidate.scheme, outcome)
        self._best_of[candidate.scheme] = min(known, outcome, key=lambda o: o.rank)
        if any(map(outcome.is_like, self.outcomes)):
            self.left_out["the same"] = self.left_out.get("the same", 0) + 1
            return
        self.outcomes = sorted([*self.outcomes, outcome], key=lambda o: o.rank)
        del self.outcomes[self.limits.keep :]

    def _tried(self, candidate: Candidate, prices: Prices) -> Outcome | str:
        """The outcome, or why there is none."""
        costs, limits = prices.costs, self.limits
        if _kept_bytes(candidate, costs) > limits.device_bytes:
            return "device memory"
        if self._too_slow(_work_s(candidate, costs)):
            return "slower"
        terms = Terms(
            prices=prices,
            optimizer=self.optimizer,
            memory_limit_bytes=None if limits.device_bytes == inf else limits.device_bytes,
        )
        plan = (self.planner or make_plan)(candidate, terms)
        schedule = schedule_of(plan)
        bound_s = lower_bound_s(schedule.layout, schedule.orders, costs)
        if self._too_slow(bound_s):
            return "slower"
        device_bytes = max(peak.total_bytes for peak in device_peaks(plan, costs))
        if device_bytes > limits.device_bytes:
            self._too_large.append((bound_s, candidate))
            return "device memory"
        host_bytes = _host_bytes(plan, prices, self.storage(plan))
        if host_bytes > limits.host_bytes:
            return "host memory"
        return self._outcome(candidate, plan, device_bytes, host_bytes)

    def _outcome(
        self, candidate: Candidate, plan: Plan, device_bytes: float, host_bytes: float
    ) -> Outcome:
        prices = self._priced(candidate)
        simulation = simulate(
            plan,
            prices.costs,
            prices.cluster,
            optimizer=self.optimizer,
            stops_early=self.stops_early,
        )
        return Outcome(
            candidate=candidate,
            plan=plan,
            step_s=simulation.makespan_s,
            bubble_ratio=simulation.bubble_ratio,
            optimizer_tail_s=simulation.optimizer_tail_s,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
        )

    def _priced(self, candidate: Candidate) -> Prices:
        if candidate.micro_batch not in self._prices:
            self._prices[candidate.micro_batch] = self.pricer(candidate.micro_batch)
        return self._prices[candidate.micro_batch]

    def _too_slow(self, at_least_s: float) -> bool:
        full = len(self.outcomes) >= self.limits.keep
        return full and at_least_s >= self.outcomes[-1].step_s


def fragment(candidate: Candidate) -> dict[str, Any]:
    """The part of a configuration that a candidate decides."""
    schedule: dict[str, Any] = {
        "scheme": candidate.scheme,
        "forward_stages": candidate.forward_stages,
        "backward_stages": candidate.backward_stages,
        "recompute": candidate.recompute,
    }
    if candidate.replicas > 1:
        schedule["replicas"] = candidate.replicas
    if candidate.passes:
        schedule["passes"] = list(candidate.passes)
    if candidate.drop:
        schedule["drop"] = list(candidate.drop)
    return {"train": {"micro_batch": candidate.micro_batch}, "schedule": schedule}


def make_plan(candidate: Candidate, terms: Terms) -> Plan:
    """The plan of a candidate: its recipe, as many times as it has replicas.

    Raises:
        ConfigError: impossible combination.
    """
    schedule = replicate(make_schedule(candidate.recipe, terms), candidate.replicas)
    schedule = with_reduction(schedule, "auto", terms.prices.cluster.devices_per_node)
    return lowered(schedule, candidate.scheme)


def _kept_bytes(candidate: Candidate, costs: Costs) -> float:
    """What devices keep on average of a model whose weights stay on them."""
    if SCHEMES[candidate.scheme].residency is Residency.STREAMED:
        return 0.0
    kept = sum(
        block.weight_bytes + block.device_gradient_bytes + block.static_bytes
        for block in costs.blocks
    )
    return kept / candidate.num_devices


def _work_s(candidate: Candidate, costs: Costs) -> float:
    """Forwards and backwards alone, shared out evenly."""
    once = sum(block.forward_s + block.backward_s for block in costs.blocks)
    return once * candidate.num_microbatches / candidate.num_devices


def _host_bytes(plan: Plan, prices: Prices, storage: Storage) -> float:
    """Model state, gradients and swapped activations of the node that needs most.

    Per parameter two copies of weights, and two or one of gradients, as they travel; 12 bytes of
    master weight and moments, or 10 with a split master; nothing where the optimizer's state stays
    on the devices. A node owns the blocks whose backward it runs (for the first route), and holds
    the gradients that its devices make.
    """
    state_bytes = _MOMENTS_BYTES + (2.0 if storage.split_master else 4.0)
    costs, cluster = prices.costs, prices.cluster
    nodes = [0.0] * (cluster.node_of(plan.num_devices - 1) + 1)
    for device, swapped in enumerate(swapped_peaks(plan, costs)):
        nodes[cluster.node_of(device)] += swapped
    owned: set[int] = set()
    for stage in plan.backward_stages:
        node = cluster.node_of(stage.device)
        for index in stage.blocks:
            block = costs.blocks[index]
            if block.static_bytes:
                continue
            copies = 1 if index in storage.single_gradients else GRADIENT_COPIES
            nodes[node] += copies * block.gradient_bytes
            if index not in owned:
                owned.add(index)
                state = state_bytes * block.parameters
                nodes[node] += WEIGHT_SLOTS * block.weight_bytes + state
    return max(nodes)
