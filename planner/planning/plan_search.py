"""The search for the fastest schedule on a cluster, within its memory.

The search tries a grid over scheme, pipeline x data parallelism, micro-batch size, recomputation
and numbers of stages; then passes on the best of it. It is pure and deterministic: the same space
gives the same table. The plan of a candidate (:mod:`penstock.planner.planning.pipeline`,
:mod:`penstock.planner.planning.configured`) and the simulator decide its cost.

Not every candidate is simulated, and few are planned. A queue sorts candidates by lower bounds of
their step (:mod:`penstock.planner.planning.lower_bounds`): first by the places of their stages,
then by their order. The first candidate is planned and simulated. The search ends when the first in
the queue cannot beat the last in the table. So the table is that of an exhaustive search. A
candidate is left out if its kept weights cannot fit. It is also left out if devices need more
memory than the limit (counted on its order, then on the lowered plan).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from math import inf
from typing import Any, Protocol

from penstock.host.errors import CapacityError, ConfigError
from penstock.host.sums import added
from penstock.planner.cost.cluster import MOMENTS_BYTES
from penstock.planner.cost.costs import Costs
from penstock.planner.cost.sources import Prices
from penstock.planner.memory.footprint import device_peaks, swapped_peaks
from penstock.planner.planning.lower_bounds import Floors, ordered
from penstock.planner.planning.pipeline import PlanContext
from penstock.planner.planning.search_space import Candidate, Space
from penstock.planner.schedule.layout import Residency
from penstock.planner.schemes import SCHEMES
from penstock.planner.simulate import simulate
from penstock.protocol.plan.instructions import Recompute
from penstock.protocol.plan.plan import Plan
from penstock.shm.layout import (
    GRADIENT_COPIES,
    STATE_COPIES,
    TWO_COPIES,
    WEIGHT_SLOTS,
    Storage,
)

Progress = Callable[[int, int, "SearchOutcome | None"], None]
"""Called with candidates done, candidates in all so far, and the best outcome."""

BEST = 3
SCHEMES_REFINED = 4
RESCUED = 3
"""Numbers of candidates that passes are tried on: the best of the grid, the best of other schemes,
and fast ones that lack device memory.
"""

WAYS = tuple(product((True, False), repeat=2))
"""Ways of keeping weights and activations: passes are tried on the best outcome of each."""

GRID_SHARE = 0.6
"""Share of a search's work that the grid may take; the rest is for passes on the best of it."""


class Tunable(Protocol):
    """The model and cluster that a search is for, as it asks about them.

    Raises (``plan``):
        ConfigError: the candidate has no plan. CapacityError: it does not fit the machine.
    """

    def context(self, micro_batch: int) -> PlanContext:
        """Returns what candidates with micro-batches of so many sequences are planned with."""

    def plan(self, candidate: Candidate, context: PlanContext) -> Plan:
        """Returns the plan of a candidate, in the context of its micro-batches."""

    def with_overlap(self, plan: Plan, context: PlanContext) -> Plan:
        """Returns a good plan with the best choice of blocks with an overlapped state update."""

    def host_bytes(self, plan: Plan, context: PlanContext) -> float:
        """Returns the bytes of host memory of the node that needs most (:func:`host_bytes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """A candidate that fits. ``host_bytes``: of the node that needs most. ``score_s``: ``step_s``,
    and what :attr:`Search.streaming_cost` adds to it.
    """

    candidate: Candidate
    plan: Plan
    step_s: float
    score_s: float
    bubble_ratio: float
    optimizer_tail_s: float
    device_bytes: float
    host_bytes: float

    @property
    def rank(self) -> tuple[Any, ...]:
        """The sort key of outcomes: fastest first, then least memory."""
        return self.score_s, self.device_bytes, self.candidate.key

    @property
    def keeps(self) -> tuple[bool, bool]:
        """True if weights stay on devices, and True if nothing is recomputed (:data:`WAYS`)."""
        recomputes = any(isinstance(one, Recompute) for one in chain(*self.plan.programs))
        return not streams(self.candidate), not recomputes

    def is_like(self, other: SearchOutcome) -> bool:
        """Returns whether devices do the same, under any name of the scheme."""
        return (
            self.step_s == other.step_s
            and self.candidate.micro_batch == other.candidate.micro_batch
            and self.plan.forward_stages == other.plan.forward_stages
            and self.plan.programs == other.plan.programs
        )


@dataclass(frozen=True, slots=True, order=True)
class _Waiting:
    """A candidate in line: the seconds that it takes at least come first, then the length of its
    program. ``is_ordered``: nothing more is known without its plan.
    """

    floor_s: float
    length: int
    key: tuple[Any, ...]
    candidate: Candidate = field(compare=False)
    is_ordered: bool = field(compare=False)


@dataclass(slots=True, kw_only=True)
class Search:
    """The best outcomes so far, ``keep`` at most, and the reasons why others are not among them.

    ``device_bytes``, ``host_bytes``: of one device's and of one node's memory. Blocks to be settled
    early are chosen for the best outcomes only, once all are known; the result decides their order.

    ``streaming_cost``: the share of a step that a plan with streamed weights must win over one that
    keeps them. ``work``: instructions of plans after which no candidate is planned any more, if one
    fits; a part of them is left for the passes. ``num_instructions``: those so far. ``fastest``:
    the fastest outcome of each way of keeping weights and activations.
    """

    tuned: Tunable
    device_bytes: float = inf
    host_bytes: float = inf
    keep: int = 20
    streaming_cost: float = 0.0
    work: float = inf
    num_tried: int = 0
    num_instructions: int = 0
    fastest: dict[tuple[bool, bool], SearchOutcome] = field(default_factory=dict)
    outcomes: list[SearchOutcome] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    _best_of: dict[str, SearchOutcome] = field(default_factory=dict)
    _too_large: list[tuple[float, Candidate]] = field(default_factory=list)
    _contexts: dict[int, PlanContext] = field(default_factory=dict)
    _floors: dict[int, Floors] = field(default_factory=dict)
    _splits: dict[str, bool] = field(default_factory=dict)

    def run(self, space: Space, progress: Progress = lambda done, of, best: None) -> None:
        """Tries the grid, then the passes of the space on the best of it."""
        candidates = space.candidates()
        refinements = len(space.pass_sets) * (BEST + SCHEMES_REFINED + len(WAYS) + RESCUED)
        self._try(candidates, progress, len(candidates) + refinements, self.work * GRID_SHARE)
        refined = [
            replace(base, request=replace(base.request, passes=passes))
            for base in self._bases()
            for passes in space.pass_sets
        ]
        total = len(candidates) + len(refined)
        self._try(
            refined,
            lambda done, _, best: progress(len(candidates) + done, total, best),
            0,
            self.work,
        )
        self._overlap_updates()
        progress(total, total, self.best)

    def _try(
        self, candidates: Sequence[Candidate], progress: Progress, of: int, work: float
    ) -> None:
        """Tries candidates that could be among the best, those that could be fastest first, until
        the search has done its ``work``.
        """
        line = [self._waiting(candidate) for candidate in candidates]
        heapq.heapify(line)
        done = 0
        while line:
            first = heapq.heappop(line)
            if not first.is_ordered and not self._too_slow(first.floor_s):
                again = self._in_order(first)
                if again is not None:
                    heapq.heappush(line, again)
                    continue
            progress(done, of, self.best)
            done += 1
            if first.is_ordered and self.outcomes and self.num_instructions >= work:
                self._refuse("not tried")
            elif first.is_ordered:
                self._consider(first)
            elif self._too_slow(first.floor_s):
                self._leave_out("slower")
                self.num_tried += 1

    def _waiting(self, candidate: Candidate) -> _Waiting:
        context = self._context(candidate)
        floors = self._floors.setdefault(candidate.micro_batch, Floors(context=context))
        floors.splits = self._splits
        try:
            floor_s = floors.seconds(candidate)
        except ValueError:
            floor_s = 0.0  # its plan will say what is impossible
        return _Waiting(
            floor_s=floor_s,
            length=candidate.length,
            key=candidate.key,
            candidate=candidate,
            is_ordered=bool(candidate.request.passes),
        )

    def _in_order(self, first: _Waiting) -> _Waiting | None:
        """Returns a candidate with the floor of its order; nothing if that is all there is to say,
        which is then noted.
        """
        candidate = first.candidate
        context = self._context(candidate)
        least_bytes = self._floors[candidate.micro_batch].device_bytes(candidate)
        if max(least_bytes, _kept_bytes(candidate, context.prices.costs)) > self.device_bytes:
            self._refuse("device memory")
            return None
        try:
            least = ordered(candidate, context)
        except ConfigError:
            return replace(first, is_ordered=True)  # its plan says, and keeps, what is impossible
        self._splits[candidate.request.scheme] = least.splits
        floor_s = max(first.floor_s, least.seconds)
        if least.device_bytes > self.device_bytes:
            self._too_large.append((floor_s, candidate))
            self._refuse("device memory")
            return None
        return replace(first, floor_s=floor_s, is_ordered=True)

    def _refuse(self, why: str) -> None:
        self.num_tried += 1
        self._leave_out(why)

    def _leave_out(self, why: str) -> None:
        self.left_out[why] = self.left_out.get(why, 0) + 1

    def _overlap_updates(self) -> None:
        """Chooses overlapped updates for all outcomes that could become the best; they shorten the
        tail.
        """
        best_s = inf
        for index, outcome in enumerate(self.outcomes):
            if outcome.step_s - outcome.optimizer_tail_s < best_s:
                context = self._context(outcome.candidate)
                plan = self.tuned.with_overlap(outcome.plan, context)
                if plan is not outcome.plan:
                    host_bytes = self.tuned.host_bytes(plan, context)
                    outcome = self._outcome(
                        outcome.candidate, plan, outcome.device_bytes, host_bytes
                    )
                    self.outcomes[index] = outcome
                best_s = min(best_s, outcome.score_s)
        self.outcomes.sort(key=lambda outcome: outcome.rank)

    def _bases(self) -> list[Candidate]:
        """Returns what passes are tried on."""
        best = self.outcomes[:BEST]
        seen = {outcome.candidate.request.scheme for outcome in best}
        others = sorted(
            (outcome for scheme, outcome in self._best_of.items() if scheme not in seen),
            key=lambda outcome: outcome.rank,
        )
        ways = sorted(self.fastest.values(), key=lambda outcome: outcome.rank)
        too_large = sorted(self._too_large, key=lambda found: (found[0], found[1].key))[:RESCUED]
        tried = (*best, *others[:SCHEMES_REFINED], *ways)
        return [
            *dict.fromkeys(outcome.candidate for outcome in tried),
            *(candidate for _, candidate in too_large),
        ]

    @property
    def best(self) -> SearchOutcome | None:
        """The fastest outcome so far."""
        return self.outcomes[0] if self.outcomes else None

    def required_best(self) -> SearchOutcome:
        """Returns the fastest outcome.

        Raises:
            CapacityError: no candidate fits; counts the reasons.
        """
        if self.best is None:
            reasons = ", ".join(f"{n} for {reason}" for reason, n in sorted(self.left_out.items()))
            raise CapacityError(
                f"no schedule fits (left out: {reasons or 'there are no candidates'}); try other"
                " --schemes, a smaller --global-batch, or --all"
            )
        return self.best

    def consider(self, candidate: Candidate) -> None:
        """Tries a candidate; it stays if it is among the best."""
        self._consider(self._waiting(candidate))

    def _consider(self, waiting: _Waiting) -> None:
        self.num_tried += 1
        try:
            outcome = self._tried(waiting)
        except ConfigError as error:
            memory = str(error).startswith("memory.device_limit")
            outcome = "device memory" if memory else "impossible"
        except CapacityError:
            outcome = "memory of the machine"
        if isinstance(outcome, str):
            self._leave_out(outcome)
            return
        scheme = waiting.candidate.request.scheme
        known = self._best_of.setdefault(scheme, outcome)
        self._best_of[scheme] = min(known, outcome, key=lambda o: o.rank)
        alike = self.fastest.setdefault(outcome.keeps, outcome)
        self.fastest[outcome.keeps] = min(alike, outcome, key=lambda o: o.rank)
        if any(map(outcome.is_like, self.outcomes)):
            self._leave_out("the same")
            return
        self.outcomes = sorted([*self.outcomes, outcome], key=lambda o: o.rank)
        del self.outcomes[self.keep :]

    def _tried(self, waiting: _Waiting) -> SearchOutcome | str:
        """Returns the outcome, or why there is none."""
        candidate = waiting.candidate
        context = self._context(candidate)
        costs = context.prices.costs
        if _kept_bytes(candidate, costs) > self.device_bytes:
            return "device memory"
        if self._too_slow(waiting.floor_s):
            return "slower"
        plan = self.tuned.plan(candidate, context)
        self.num_instructions += sum(map(len, plan.programs))
        device_bytes = max(peak.total_bytes for peak in device_peaks(plan, costs))
        if device_bytes > self.device_bytes:
            self._too_large.append((waiting.floor_s, candidate))
            return "device memory"
        host_bytes = self.tuned.host_bytes(plan, context)
        if host_bytes > self.host_bytes:
            return "host memory"
        return self._outcome(candidate, plan, device_bytes, host_bytes)

    def _outcome(
        self, candidate: Candidate, plan: Plan, device_bytes: float, host_bytes: float
    ) -> SearchOutcome:
        context = self._context(candidate)
        simulation = simulate(
            plan,
            context.prices.costs,
            context.prices.cluster,
            optimizer=context.optimizer,
            stops_early=context.stops_early,
        )
        return SearchOutcome(
            candidate=candidate,
            plan=plan,
            step_s=simulation.makespan_s,
            score_s=simulation.makespan_s * (1.0 + self.streaming_cost * streams(candidate)),
            bubble_ratio=simulation.bubble_ratio,
            optimizer_tail_s=simulation.optimizer_tail_s,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
        )

    def _context(self, candidate: Candidate) -> PlanContext:
        if candidate.micro_batch not in self._contexts:
            self._contexts[candidate.micro_batch] = self.tuned.context(candidate.micro_batch)
        return self._contexts[candidate.micro_batch]

    def _too_slow(self, at_least_s: float) -> bool:
        full = len(self.outcomes) >= self.keep
        return full and at_least_s >= self.outcomes[-1].score_s


def streams(candidate: Candidate) -> bool:
    """Returns whether devices fetch weights more than once."""
    scheme = SCHEMES[candidate.request.scheme]
    return scheme.residency is Residency.STREAMED or scheme.shards_weights


def fragment(candidate: Candidate) -> dict[str, Any]:
    """Returns the part of a configuration that a candidate decides."""
    request = candidate.request
    schedule: dict[str, Any] = {
        "scheme": request.scheme,
        "forward_stages": request.forward_stages,
        "backward_stages": request.backward_stages,
        "recompute": request.recompute,
    }
    if request.replicas > 1:
        schedule["replicas"] = request.replicas
    if request.passes:
        schedule["passes"] = list(request.passes)
    if request.drop:
        schedule["drop"] = list(request.drop)
    return {"train": {"micro_batch": candidate.micro_batch}, "schedule": schedule}


def _kept_bytes(candidate: Candidate, costs: Costs) -> float:
    """Returns the average bytes of kept weights on a device; 0 if weights are streamed."""
    if SCHEMES[candidate.request.scheme].residency is Residency.STREAMED:
        return 0.0
    kept = added(
        block.weight_bytes + block.device_gradient_bytes + block.static_bytes
        for block in costs.blocks
    )
    return kept / candidate.request.num_devices


def host_bytes(
    plan: Plan,
    prices: Prices,
    *,
    storage: Storage = TWO_COPIES,
    moments_bytes: float = MOMENTS_BYTES,
) -> float:
    """Returns the bytes of model state, gradients and swapped activations of the node that needs
    most.

    Each parameter has two copies of weights, and two or one of gradients, as they travel. The
    optimizer keeps the float32 master weight (the lower half of a split one) and ``moments_bytes``.
    Flushed blocks have both twice; on devices that keep the state, the host has none. A node owns
    the blocks of the backward stages that it runs (for the first route), and holds the gradients
    that its devices make.
    """
    state_bytes = moments_bytes + (2.0 if storage.split_master else 4.0)
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
                spare = STATE_COPIES if index in storage.flushed else 1
                state = spare * state_bytes * block.parameters
                nodes[node] += WEIGHT_SLOTS * block.weight_bytes + state
    return max(nodes)
