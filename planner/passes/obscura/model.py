"""Obscura's model of time: execution, communication, uneven stages (sections 6.2 and 7.1).

Where the paper writes f, 2f and r, a stage's own forward, backward and recomputation are taken. Let
k be the last adjusted stage, and the *busy* time of a stage the sum of the three. Adjusted stages
work at the pace of the busiest adjusted stage, C_adj, the others at that of theirs, C_non
(Equation 5). Without recomputation in stages after k and without swaps the model agrees with
:func:`penstock.planner.orders.timing.order_times` to the last bit where recomputation waits for the
gradient; this is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds per micro-batch."""

    forward_s: float
    backward_s: float
    recompute_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """3f + r."""
        return self.forward_s + self.backward_s + self.recompute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """Swapping of a stage: ``evicted`` activation blocks (lambda) in the warm-up, ``block_s`` for
    one of them one way (a beta / B).
    """

    evicted: int = 0
    block_s: float = 0.0


def communication_s(times: StageTimes, transfers: Transfers, *, stages_after: int) -> float:
    """Communication that computation cannot hide, T^C of Equation 2; ``stages_after``: k - s.

    In the warm-up a transfer hides behind one forward and the forward bubbles that stage s < k
    keeps; in the end behind recomputation and backward. Each of both terms is at least 0 here
    (the paper bounds the first only). Epsilon, what swapping designs add, is taken as 0.
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
    """T_s of every stage: seconds from its first forward to its last backward (Equations 3, 5).

    ``transfers`` of the adjusted stages 0 … k; none without swapping. The first entry is the time
    of the pipeline.
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
