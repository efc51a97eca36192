"""Swapping-aware recomputation as mathematics: the model of time, and the integer program.

The model of time (sections 6.2 and 7.1) includes execution, communication and uneven stages. For
the paper's f, 2f and r, a stage's own forward, backward and recomputation are taken. Let k be the
last adjusted stage, and the *busy* time of a stage the sum of the three. Adjusted stages work at
the pace of the busiest adjusted stage, C_adj, the others at that of theirs, C_non (Equation 5). In
one case the model agrees with :func:`penstock.planner.schedule.timing.order_times` to the last bit,
as a test shows. There are no swaps, no recomputation in stages after k, and recomputation waits for
the gradient.

The integer program (section 6.2) chooses the operators that adjusted stages make again. Given are a
swapping design (:class:`SwapStyle`), a number of evicted blocks (lambda) and a fraction (beta). It
is Equation 4: minimise T_0 (Equations 2, 3), subject to memory (Equation 1) and bandwidth. All
adjusted stages drop the same operators, as in the paper. Lambda and beta are enumerated, HiGHS
solves each program, and the fastest combination wins; among equals the one that moves least.

Every maximum of Equations 2, 3 and 5 becomes a variable with one lower bound per argument. That is
exact because the objective presses it down. Two rules go beyond the equations. Memory has room for
recomputed tensors (:class:`~penstock.planner.passes.obscura.memory.Grain`). The evictions of the
warm-up must be able to end with it: Equation 2 lets computation wait for them, a program of ours
does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from penstock.host.sums import added

FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""Values of beta that are tried where a fraction can be swapped."""
LOOKAHEAD = 2
"""A swapped block comes back when the backward this many micro-batches before its own ends."""
_TIE = 1e-9
"""Times with a smaller relative difference are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of a stage per micro-batch."""

    forward_s: float
    backward_s: float
    recompute_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """The paper's 3f + r."""
        return self.forward_s + self.backward_s + self.recompute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """Swapping of a stage. It evicts ``evicted`` activation blocks (lambda) in the warm-up. One of
    them takes ``block_s`` one way (a beta / B).
    """

    evicted: int = 0
    block_s: float = 0.0


def communication_s(times: StageTimes, transfers: Transfers, *, stages_after: int) -> float:
    """Returns the seconds of communication that computation cannot hide, T^C of Equation 2.

    ``stages_after``: k - s. In the warm-up a transfer hides behind one forward and the forward
    bubbles that stage s < k keeps; in the end behind recomputation and backward. Each of both terms
    is at least 0 here (the paper bounds the first only). Epsilon, what swapping designs add, is
    taken as 0.
    """
    spare_s = stages_after * (times.backward_s + times.recompute_s)
    warmup_s = transfers.evicted * (transfers.block_s - times.forward_s) - spare_s
    ending_s = transfers.evicted * (transfers.block_s - times.backward_s - times.recompute_s)
    return max(warmup_s, 0.0) + max(ending_s, 0.0)


def execution_times(
    stages: Sequence[StageTimes],
    num_microbatches: int,
    last_adjusted: int,
    transfers: Sequence[Transfers] = (),
) -> tuple[float, ...]:
    """Returns T_s of every stage: seconds from its first forward to its last backward (Equations 3,
    5).

    ``transfers`` are those of the adjusted stages 0 … k, nothing without swapping. The first entry
    is the time of the pipeline.
    """
    adjusted = range(last_adjusted + 1)
    adjusted_s = max((stages[s].busy_s for s in adjusted), default=0.0)
    other_s = max((stage.busy_s for stage in stages[last_adjusted + 1 :]), default=0.0)
    times = [other_s * (num_microbatches + len(stages) - s - 1) for s in range(len(stages))]
    for s in reversed(adjusted):
        after = last_adjusted - s
        moved_s = 0.0
        if transfers:
            moved_s = communication_s(stages[s], transfers[s], stages_after=after)
        following_s = times[s + 1] + adjusted_s if s + 1 < len(stages) else 0.0
        times[s] = max(following_s, adjusted_s * (num_microbatches + after) + moved_s)
    return tuple(times)


class SwapStyle(StrEnum):
    """The destination of activation blocks."""

    NONE = "none"
    HOST = "host"
    """A fraction beta of each block goes to host memory: OHP's design."""
    PEER = "peer"
    """Whole blocks go to the memory of stage p - 1 - s: BPipe's design."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A design with its parameters, lambda of stage k and beta."""

    style: SwapStyle = SwapStyle.NONE
    evicted: int = 0
    fraction: float = 0.0


Source = tuple[str, tuple[tuple[str, ...], ...]]
"""An operator with outputs that must be kept if it is not dropped, and all operators of one of
these sets are (:class:`penstock.planner.cost.costs.RecomputeSource`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """The facts of one adjusted stage in the program.

    ``operator_s`` and ``operator_bytes``: seconds and bytes of each candidate operator;
    ``source_bytes``: bytes of each source. ``remade_bytes``: rows of bytes by operator, one for a
    whole stage or one per block. Recomputation holds at most the bytes of the greediest row.
    ``held``: micro-batches in flight (mu). ``peer``: the stage that takes its blocks, with
    ``peer_bytes`` free; ``None`` if there is none.
    """

    forward_s: float
    backward_s: float
    operator_s: tuple[float, ...]
    operator_bytes: tuple[float, ...]
    remade_bytes: tuple[tuple[float, ...], ...]
    activation_bytes: float
    fixed_bytes: float
    held: int
    source_bytes: tuple[float, ...] = ()
    peer: int | None = None
    peer_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeProblem:
    """Equation 4. ``stages``: 0 … k; ``following_s``: T of stage k + 1 (0 where there is none);
    bandwidths in bytes/s.
    """

    operators: tuple[str, ...]
    stages: tuple[StageProblem, ...]
    num_microbatches: int
    following_s: float
    limit_bytes: float
    host_bandwidth: float
    peer_bandwidth: float
    sources: tuple[Source, ...] = ()

    def kept_bytes(self, stage: int, drop: Collection[str]) -> float:
        """Returns the bytes that a stage keeps of a micro-batch (a^adj) where operators are
        dropped.
        """
        at, names = self.stages[stage], frozenset(drop)
        dropped = zip(self.operators, at.operator_bytes, strict=True)
        kept = at.activation_bytes - added(size for name, size in dropped if name in names)
        for (operator, needed_by), size in zip(self.sources, at.source_bytes, strict=True):
            required = any(names.issuperset(several) for several in needed_by)
            kept += size if required and operator not in names else 0.0
        return kept

    @property
    def last_adjusted(self) -> int:
        """k, the last adjusted stage."""
        return len(self.stages) - 1

    def bandwidth(self, style: SwapStyle) -> float:
        """Returns B of a design, in bytes/s."""
        return self.peer_bandwidth if style is SwapStyle.PEER else self.host_bandwidth

    def evicted(self, stage: int, swap: Swap) -> int:
        """Returns lambda of a stage: one more than the stage after it, none for a stage without a
        peer.
        """
        if swap.style is SwapStyle.NONE:
            return 0
        if swap.style is SwapStyle.PEER and self.stages[stage].peer is None:
            return 0
        return swap.evicted + self.last_adjusted - stage


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeSolution:
    """A solution: the operators to drop, the swap, and T_0 by the model."""

    drop: tuple[str, ...]
    swap: Swap
    time_s: float


def swaps(problem: RecomputeProblem, evictions: Sequence[int]) -> Iterator[Swap]:
    """Yields no swap, and every design with every lambda and beta."""
    yield Swap()
    for evicted in evictions:
        for fraction in FRACTIONS:
            yield Swap(style=SwapStyle.HOST, evicted=evicted, fraction=fraction)
        if any(stage.peer is not None for stage in problem.stages):
            yield Swap(style=SwapStyle.PEER, evicted=evicted, fraction=1.0)


def evictions_of(stage: StageProblem) -> int:
    """Returns the most blocks of the warm-up that can be evicted. Blocks needed first cannot, nor
    the last ones: their transfers would not end with the warm-up.
    """
    return stage.held - 2 - LOOKAHEAD


def best_solution(problem: RecomputeProblem, evictions: Sequence[int]) -> RecomputeSolution | None:
    """Returns the fastest solution over all swaps with lambda in ``evictions``, or ``None`` where
    nothing fits.
    """
    best: RecomputeSolution | None = None
    for swap in swaps(problem, evictions):
        other = solve(problem, swap)
        if other is not None and (best is None or other.time_s < best.time_s * (1.0 - _TIE)):
            best = other
    return best


def solve(problem: RecomputeProblem, swap: Swap) -> RecomputeSolution | None:
    """Solves the integer program for one swap; returns ``None`` where no set of operators fits.

    Raises:
        RuntimeError: the solver failed for another reason.
    """
    # Takes half a second, which every command that lists passes would pay.
    from scipy.optimize import Bounds, LinearConstraint, milp

    for index, stage in enumerate(problem.stages):
        if problem.evicted(index, swap) > max(evictions_of(stage), 0):
            return None
    rows = _Rows(problem, swap)
    solution = milp(
        rows.objective,
        integrality=rows.integrality,
        bounds=Bounds(rows.lower, rows.upper),
        constraints=LinearConstraint(np.array(rows.matrix), ub=np.array(rows.limits)),
        options={"mip_rel_gap": 0.0},
    )
    if solution.status == 2:
        return None
    if solution.x is None:
        raise RuntimeError(f"the integer program of {swap} was not solved: {solution.message}")
    count = len(problem.operators)
    chosen = tuple(
        name for name, x in zip(problem.operators, solution.x[:count], strict=True) if x > 0.5
    )
    return RecomputeSolution(
        drop=chosen, swap=swap, time_s=float(solution.x[rows.time(0)]) * rows.second
    )


class _Rows:
    """Returns the program as arrays: ``matrix @ x <= limits``.

    Variables, in this order: x of every operator (0 or 1); C_adj; for every stage T_s and the two
    terms of T_s^C; u of every source (1 if it must be kept). Seconds are in units of T_{k+1} or a
    forward, bytes in units of the limit, so that the solver's tolerances fit.
    """

    def __init__(self, problem: RecomputeProblem, swap: Swap) -> None:
        self._problem = problem
        self._swap = swap
        operators, stages = len(problem.operators), len(problem.stages)
        size = operators + 1 + 3 * stages + len(problem.sources)
        self._sources = slice(size - len(problem.sources), size)
        self._pace = operators
        self.second = problem.following_s or max(s.forward_s for s in problem.stages) or 1.0
        self.objective = np.zeros(size)
        self.objective[self.time(0)] = 1.0
        self.integrality = np.array([1] * operators + [0] * (size - operators))
        self.lower = np.zeros(size)
        self.upper = np.array([1.0] * operators + [np.inf] * (size - operators))
        self.matrix: list[np.ndarray] = []
        self.limits: list[float] = []
        self._add_sources()
        for index in range(stages):
            self._add_times(index)
            self._add_memory(index)
            if problem.evicted(index, swap):
                self._add_transfers(index)

    def time(self, stage: int) -> int:
        """Returns the index of T_s."""
        return len(self._problem.operators) + 1 + 3 * stage

    def _add(self, limit: float, unit: float, *terms: tuple[int | slice, object]) -> None:
        """Adds the row ``sum of terms <= limit / unit``."""
        row = np.zeros(len(self.objective))
        for place, value in terms:
            row[place] += np.asarray(value, dtype=float)
        self.matrix.append(row)
        self.limits.append(limit / unit)

    def _add_sources(self) -> None:
        """Adds the condition for kept sources. For each set, u is at least the sum of its x, less
        its size, plus one, less the x of the source's operator.
        """
        places = {name: index for index, name in enumerate(self._problem.operators)}
        for index, (operator, needed_by) in enumerate(self._problem.sources):
            kept = (self._sources.start + index, -1.0)
            made = [(places[operator], -1.0)] if operator in places else []
            for names in needed_by:
                if places.keys() >= set(names):
                    terms = [(places[name], 1.0) for name in names]
                    self._add(len(names) - 1.0, 1.0, *terms, *made, kept)

    def _add_times(self, index: int) -> None:
        problem, second = self._problem, self.second
        stage, t = problem.stages[index], self.time(index)
        operators = slice(0, len(problem.operators))
        remake = np.array(stage.operator_s) / second
        busy = stage.forward_s + stage.backward_s
        # 3f + r <= C_adj
        self._add(-busy, second, (operators, remake), (self._pace, -1.0))
        after = problem.last_adjusted - index
        # T_{s+1} + C_adj <= T_s
        if after:
            self._add(0.0, second, (self.time(index + 1), 1.0), (self._pace, 1.0), (t, -1.0))
        elif problem.following_s:
            self._add(-problem.following_s, second, (self._pace, 1.0), (t, -1.0))
        # C_adj (m + k - s) + T^C <= T_s
        rounds = float(problem.num_microbatches + after)
        self._add(0.0, second, (self._pace, rounds), (t + 1, 1.0), (t + 2, 1.0), (t, -1.0))

    def _add_memory(self, index: int) -> None:
        """Adds Equation 1 and what is recomputed, and the same for the peer that takes blocks."""
        problem = self._problem
        stage = problem.stages[index]
        operators = slice(0, len(problem.operators))
        sizes = np.array(stage.operator_bytes)
        evicted = problem.evicted(index, self._swap)
        held = stage.held - evicted * self._swap.fraction
        room = problem.limit_bytes - stage.fixed_bytes - held * stage.activation_bytes
        for row in stage.remade_bytes:
            terms = (np.array(row) - held * sizes) / problem.limit_bytes
            more = held * np.array(stage.source_bytes) / problem.limit_bytes
            self._add(room, problem.limit_bytes, (operators, terms), (self._sources, more))
        if self._swap.style is SwapStyle.PEER and evicted:
            # In the steady phase one more leaves before one comes back.
            guests = evicted + 1
            spare = stage.peer_bytes - guests * stage.activation_bytes
            self._add(
                spare,
                problem.limit_bytes,
                (operators, -guests * sizes / problem.limit_bytes),
                (self._sources, guests * np.array(stage.source_bytes) / problem.limit_bytes),
            )

    def _add_transfers(self, index: int) -> None:
        """Adds the bandwidth constraint, the end of the evictions, and both terms of Equation 2."""
        problem, swap, second = self._problem, self._swap, self.second
        stage, t = problem.stages[index], self.time(index)
        operators = slice(0, len(problem.operators))
        remake = np.array(stage.operator_s) / second
        per_byte = swap.fraction / problem.bandwidth(swap.style)
        block_s = stage.activation_bytes * per_byte
        saved = np.array(stage.operator_bytes) * per_byte / second
        more = np.array(stage.source_bytes) * per_byte / second
        after, evicted = problem.last_adjusted - index, problem.evicted(index, swap)
        busy = stage.forward_s + stage.backward_s
        self._add(busy - block_s, second, (operators, -saved - remake), (self._sources, more))
        forwards = evictions_of(stage) // evicted
        self._add(
            forwards * stage.forward_s - block_s,
            second,
            (operators, -saved),
            (self._sources, more),
        )
        self._add(
            evicted * (stage.forward_s - block_s) + after * stage.backward_s,
            second,
            (operators, -evicted * saved - after * remake),
            (self._sources, evicted * more),
            (t + 1, -1.0),
        )
        self._add(
            evicted * (stage.backward_s - block_s),
            second,
            (operators, -evicted * (saved + remake)),
            (self._sources, evicted * more),
            (t + 2, -1.0),
        )
