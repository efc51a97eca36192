"""Where swaps go in the order of a stage (section 6.1, figure 10).

The three phases of the paper: *eviction*, in the warm-up, keeps the number of blocks on the device
at its target; *eviction-loading*, in the steady phase, evicts one block for every block that comes
back; *loading*, in the end, only brings back. What is evicted is always the newest block, whose
backward is the furthest away, so that blocks needed soon stay and few blocks have to move at all
(Belady's rule). A block is on the device from its forward, or from its SWAP_IN, until its backward
has ended or its SWAP_OUT has; the steady phase gives a SWAP_OUT the time of a backward, and a
SWAP_IN that of a whole round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.planner.layout import Order, OrderedInstruction
from penstock.planner.passes.obscura.recompute import LOOKAHEAD
from penstock.planner.passes.obscura.shape import StageOrder
from penstock.protocol.plan.instructions import SwapIn, SwapOut

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRule:
    """How a stage swaps: ``evicted`` blocks (lambda) in the warm-up, ``fraction`` (beta) of each,
    to the host or to device ``peer``; one transfer takes ``pace`` forwards, rounded up.
    """

    evicted: int
    fraction: float
    pace: int = 1
    peer: int | None = None


def with_swaps(order: StageOrder, rule: SwapRule) -> Order:
    """The order with swaps; unchanged with nothing to evict."""
    return tuple(_Placer(order, rule).run()) if rule.evicted else order.instructions()


@dataclass(slots=True)
class _Placer:
    """Walks through an order. ``here``: blocks wholly on the device; ``away``: evicted blocks."""

    order: StageOrder
    rule: SwapRule
    here: list[int] = field(default_factory=list)
    away: set[int] = field(default_factory=set)

    def run(self) -> Iterator[OrderedInstruction]:
        """The instructions."""
        stage, ahead = self.order.stage, self.order.ahead
        total, done = len(ahead), 0
        warmup = self._evicted_in_warmup()
        for m, count in enumerate(ahead):
            for forward in range(done, count):
                yield self.order.recompute.forward(stage, forward)
                self.here.append(forward)
                if forward in warmup:
                    yield self._evict(forward)
            done = count
            yield from self._make_room(m, more=done < total)
            yield from self.order.backward(m)
            self.here.remove(m)
            yield from self._load(m)

    def _evicted_in_warmup(self) -> frozenset[int]:
        """As late as possible, as far apart as a transfer takes: the last transfer ends before the
        last forward of the warm-up begins.
        """
        last, pace = self.order.warmup - 2, self.rule.pace
        return frozenset(last - pace * i for i in range(1, self.rule.evicted + 1))

    def _target(self) -> float:
        return self.order.warmup - self.rule.evicted * self.rule.fraction

    def _make_room(self, backward: int, *, more: bool) -> Iterator[SwapOut]:
        """Evict until the next forward and the next block to load fit beside what stays.

        Before this backward there are at most as many blocks as the target; after it there is room
        for one forward more, if there is one, and for what is loaded meanwhile.
        """
        due = self.rule.fraction if self._due(backward) is not None else 0.0
        size = len(self.here) + len(self.away) * (1.0 - self.rule.fraction)
        surplus = size - 1.0 + (1.0 if more else 0.0) + due - self._target()
        while surplus > _ROUNDING and self.here[-1] > backward + 1 + LOOKAHEAD:
            yield self._evict(self.here[-1])
            surplus -= self.rule.fraction

    def _due(self, backward: int) -> int | None:
        wanted = backward + LOOKAHEAD
        return wanted if wanted in self.away else None

    def _load(self, backward: int) -> Iterator[SwapIn]:
        due = self._due(backward)
        if due is not None:
            self.away.remove(due)
            self.here.insert(0, due)
            self.here.sort()
            yield SwapIn(
                stage=self.order.stage,
                micro_batch=due,
                fraction=self.rule.fraction,
                peer=self.rule.peer,
            )

    def _evict(self, micro_batch: int) -> SwapOut:
        self.here.remove(micro_batch)
        self.away.add(micro_batch)
        return SwapOut(
            stage=self.order.stage,
            micro_batch=micro_batch,
            fraction=self.rule.fraction,
            peer=self.rule.peer,
        )
