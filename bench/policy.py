"""What the hold policy costs beside the better of always and never speculating.

``bench/policy.py [--params 64M] [--blocks 8] [--rounds 9] [--attempts 1000] [--json]``

The sweeps are run and timed, in turns, over blocks in shared memory. From the medians attempts are
put together, by the clock of a pipeline: a forward that waits for each block's weights, a backward
that hands over the gradients of the last block first, and optimizerd's sweeps, one at a time, in
the order in which it runs them. ``backward``: how long the workers' backward takes, in advances of
the whole model (0: the optimizer is all there is; the forward takes half of it). Attempts are
clipped at random at the given rate; the policy sees what the scheduler sees. A ratio is the mean
time of an attempt under the policy over that of the better of the two others; ``changes`` are those
of its mode. Workers that slow the sweeps down, and messages, are not in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.optimizer import OurState, count, measure
from penstock import _native
from penstock.daemons.scheduler.machine.holding import AttemptCosts
from penstock.daemons.scheduler.machine.position import LossScaling, Position
from penstock.shm.control import Decision

RATES = (0.0, 0.05, 0.25, 0.5, 0.75, 1.0)
BACKWARDS = (0.0, 0.5, 1.0, 2.0)
MODES = ("always", "never", "auto")
SWEEPS = ("advance", "preview", "settle", "hold", "status")
WANTED = 1.05

Times = dict[str, list[float]]
"""Kind of sweep -> seconds of each block."""


def timed_sweeps(num_params: int, num_blocks: int, rounds: int, cores: list[int]) -> Times:
    """Returns the median times of the sweeps over the rounds."""
    states = [OurState(num_params // num_blocks // 16 * 16, "bf16") for _ in range(num_blocks)]
    with _native.Pool(cores) as pool:
        cases = {}
        for block, state in enumerate(states):
            of_block: dict[str, Any] = state.cases(_native, pool)
            of_block["status"] = lambda s=state: _native.gradient_status(pool, grads=s.grads)
            cases |= {f"{name} {block}": of_block[name] for name in SWEEPS}
        seconds = measure(cases, rounds)
    return {
        name: [statistics.median(seconds[f"{name} {block}"]) for block in range(num_blocks)]
        for name in SWEEPS
    }


@dataclass
class Pipeline:
    """Workers and optimizerd; all times in seconds since the run began."""

    num_blocks: int
    backward_s: float
    now_s: float = 0.0
    free_s: float = 0.0
    pending: bool = False
    ready_s: list[float] = field(default_factory=list)

    def attempt(self, times: Times, *, hold: bool, clipped: bool) -> float:
        """Runs one attempt; returns the seconds from the previous decision to its own."""
        start_s = self.now_s
        self.free_s = max(self.free_s, self.now_s)
        if hold and self.pending:
            self.free_s += sum(times["settle"])
        kind = "status" if hold else "advance" if self.pending else "preview"
        done_s = self._workers_and(times[kind])
        if clipped and not hold:
            self.free_s += sum(times["preview"])
        self.now_s = self.free_s = max(self.free_s, done_s)
        self.ready_s = [self.now_s] * self.num_blocks
        if hold:
            self.ready_s = [self.now_s + s for s in itertools.accumulate(times["hold"])]
            self.free_s = self.ready_s[-1]
        self.pending = not hold
        return self.now_s - start_s

    def _workers_and(self, sweep_s: list[float]) -> float:
        """Runs forward and backward, with a sweep after each block's gradients; returns the end
        of the backward.
        """
        clock_s, block_s = self.now_s, self.backward_s / self.num_blocks
        for ready_s in self.ready_s:
            clock_s = max(clock_s, ready_s) + block_s / 2
        for block in reversed(range(self.num_blocks)):
            clock_s += block_s
            self.free_s = max(self.free_s, clock_s) + sweep_s[block]
        return clock_s


def run(
    mode: str, times: Times, backward_s: float, rate: float, attempts: int
) -> tuple[float, int]:
    """Returns mean seconds of an attempt, and how often the mode changed."""
    clips = random.Random(f"{rate}")
    scaling = LossScaling(dynamic=False, initial=1.0, growth_interval=1)
    position = Position(version=0, data_position=0, loss_scale=1.0)
    pipeline = Pipeline(len(times["hold"]), backward_s)
    costs, holding, changes = AttemptCosts(), mode == "never", 0
    for _ in range(attempts):
        clipped = clips.random() < rate
        decision = Decision.AMEND if clipped else Decision.COMMIT
        seconds = pipeline.attempt(times, hold=holding, clipped=clipped)
        if mode == "auto":
            costs.add(decision, seconds, held=holding)
            position = position.after(decision, 1, scaling, costs.limits)
            changes += position.hold is not holding
            holding = position.hold
    return pipeline.free_s / attempts, changes


def rows_of(times: Times, attempts: int) -> Iterator[dict[str, Any]]:
    """Yields one row for each length of the backward and rate of clipping."""
    advance_s = sum(times["advance"])
    for backward, rate in itertools.product(BACKWARDS, RATES):
        found = {m: run(m, times, backward * advance_s, rate, attempts) for m in MODES}
        seconds = {mode: mean_s for mode, (mean_s, _) in found.items()}
        yield {
            "backward": backward,
            "clipped": rate,
            **{f"{mode}_ms": round(1e3 * mean_s, 3) for mode, mean_s in seconds.items()},
            "ratio": round(seconds["auto"] / min(seconds["always"], seconds["never"]), 4),
            "changes": found["auto"][1],
        }


def parse_arguments() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=count, default="64M", help="a size, such as 64M")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9, help="after one to warm up")
    parser.add_argument("--attempts", type=int, default=1000)
    parser.add_argument("--json", action="store_true", help='{"rows": […]} instead of the table')
    return parser.parse_args()


def main() -> int:
    """Measures and prints; returns 1 if the policy costs more than allowed."""
    options = parse_arguments()
    cores = sorted(os.sched_getaffinity(0))
    times = timed_sweeps(options.params, options.blocks, options.rounds, cores)
    rows = list(rows_of(times, options.attempts))
    if options.json:
        print(json.dumps({"rows": rows}))
    else:
        print("backward  clipped  always ms  never ms  auto ms  auto/better  changes")
        for r in rows:
            times = f"{r['always_ms']:11.1f}{r['never_ms']:10.1f}{r['auto_ms']:9.1f}"
            print(
                f"{r['backward']:8.1f}{r['clipped']:9.2f}{times}{r['ratio']:13.3f}{r['changes']:9d}"
            )
        print(f"worst: {max(r['ratio'] for r in rows):.3f} (wanted: at most {WANTED})")
    return int(max(r["ratio"] for r in rows) > WANTED)


if __name__ == "__main__":
    sys.exit(main())
