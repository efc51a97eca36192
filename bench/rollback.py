"""What is left of the state after a step that did not count: ours beside arithmetic inverses.

``bench/rollback.py [--params 1M] [--json]``

A model of four blocks takes a step (the first, or the hundredth) that is then skipped, or amended
to half its gradients; what must be there is the state before it, or what the halved step alone
makes of that. Gradients: normal ones (0.01); the same times 65536, as they are before a loss scale
is taken out; normal ones with one Inf, or one NaN, in one block, which can only be skipped.

=================== ================================================================================
row                 what rolls back
=================== ================================================================================
penstock exact      nothing: state is written after the decision (advance, preview, settle)
penstock arithmetic the native inverse of the step in place (``optimizer.rollback: arithmetic``,
                    which in training does not step with Inf or NaN at all)
torch fp32          the papers' formulas (SPipe) in torch's fp32; torch.optim has no rollback
deepspeed           DeepSpeedCPUAdam.rollback_subgroup, if it is installed
=================== ================================================================================

Each row is held against its own arithmetic, so that rounding differently counts for nothing.
``bit_equal``: share of parameters whose master and moments all have the right bits. Largest
relative errors, of the masters and of both moments: ``null`` (``lost``) where what should be 0 is
not, or where anything is undefined. Exit code 1 unless ours is exact everywhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.optimizer import count, shared_array
from penstock import _native

LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 1e-3, 0.9, 0.95, 1e-8, 0.1
BLOCKS, STEPS, GRADIENT_SIZE, LOSS_SCALE, AMENDED = 4, (1, 100), 0.01, 65536.0, 0.5
OURS = "penstock exact"

Array = NDArray[Any]
State = list[Array]
"""Master, exp_avg, exp_avg_sq of one block."""


def new_state(num_params: int) -> State:
    """Returns zeros in shared memory."""
    return [shared_array(num_params, np.float32) for _ in range(3)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A block's history up to step ``step``, which is rolled back. ``lagging``: the state two steps
    before it (one step, where it is the first), ``before``: the state it starts from; ``pending``:
    the gradients between the two.
    """

    step: int
    lagging: State
    pending: Array
    before: State
    grads: Array


class Native:
    """The native sweeps over one block."""

    def __init__(self, pool: _native.Pool, num_params: int) -> None:
        self._pool = pool
        self._ranges = [(0, num_params, WEIGHT_DECAY, 1.0)]
        self._out = {
            "weights": shared_array(num_params, np.uint16),
            "weights_dtype": _native.WeightsDtype.BFLOAT16,
        }
        self._undo = shared_array(_native.undo_bytes(pool.num_threads), np.uint8)

    def _hyper(self, step: int, coefficient: float) -> _native.Hyper:
        return _native.Hyper(
            lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, step=step, coefficient=coefficient
        )

    def _arguments(self, state: State, grads: Array, step: int, coefficient: float) -> Any:
        return {
            "master": state[0],
            "arrays": state[1:],
            "grads": [grads],
            "hyper": self._hyper(step, coefficient),
            "ranges": self._ranges,
        }

    def step(self, state: State, grads: Array, step: int, coefficient: float = 1.0) -> None:
        """Runs the classic step in place."""
        arguments = self._arguments(state, grads, step, coefficient)
        _native.step_in_place(self._pool, **arguments, **self._out)

    def exact(self, case: Case, amend: bool) -> State:
        """Runs the steps as optimizerd does: a pending step is settled before the preview."""
        state = aligned(case.lagging)
        new = self._arguments(state, case.grads, case.step, 1.0)
        if case.step == 1:
            _native.preview(self._pool, **new, **self._out)
        else:
            _native.advance(
                self._pool,
                pending_grads=[case.pending],
                pending_hyper=self._hyper(case.step - 1, 1.0),
                undo=self._undo,
                **new,
                **self._out,
            )
        if amend:
            amended = self._arguments(state, case.grads, case.step, AMENDED)
            _native.preview(self._pool, **amended, **self._out)
            _native.settle(self._pool, **amended, undo=self._undo)
        return state

    def arithmetic(self, case: Case, amend: bool) -> State:
        """Runs steps, their inverses, and the amended step."""
        state = aligned(case.before)
        taken = self._arguments(state, case.grads, case.step, 1.0)
        _native.hold(self._pool, **taken, **self._out, undo=self._undo)
        _native.invert(self._pool, **taken, undo=self._undo)
        if amend:
            self.step(state, case.grads, case.step, AMENDED)
        return state


def aligned(state: State) -> State:
    """Returns a copy with the alignment that sweeps need."""
    copies = new_state(state[0].size)
    for copy, array in zip(copies, state, strict=True):
        copy[:] = array
    return copies


def torch_step(state: State, grads: Array, step: int, coefficient: float = 1.0) -> None:
    """Runs AdamW's step in fp32, one operation at a time."""
    master, first, second = map(torch.from_numpy, state)
    grad = torch.from_numpy(grads) * coefficient
    first.mul_(BETA1).add_(grad, alpha=1 - BETA1)
    second.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
    master.mul_(1 - LR * WEIGHT_DECAY).sub_(torch_change(first, second, step))


def torch_change(first: torch.Tensor, second: torch.Tensor, step: int) -> torch.Tensor:
    """Returns the change of the masters in a step."""
    root = (second / (1 - BETA2**step)).sqrt_().add_(EPS)
    return (LR / (1 - BETA1**step)) * first / root


def torch_inverse(state: State, grads: Array, step: int) -> None:
    """Inverts a step: solves it for the previous state."""
    master, first, second = map(torch.from_numpy, state)
    grad = torch.from_numpy(grads)
    master.add_(torch_change(first, second, step)).div_(1 - LR * WEIGHT_DECAY)
    first.sub_(grad, alpha=1 - BETA1).div_(BETA1)
    second.addcmul_(grad, grad, value=-(1 - BETA2)).div_(BETA2).clamp_(min=0.0)


def torch_rollback(case: Case, amend: bool) -> State:
    """Runs steps, their inverses, and the amended step."""
    state = aligned(case.before)
    torch_step(state, case.grads, case.step)
    torch_inverse(state, case.grads, case.step)
    if amend:
        torch_step(state, case.grads, case.step, AMENDED)
    return state


class DeepSpeed:
    """One subgroup of DeepSpeedCPUAdam."""

    def __init__(self, state: State, step: int) -> None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        self.state = aligned(state)
        master, first, second = map(torch.from_numpy, self.state)
        self._parameter = torch.nn.Parameter(master)
        self._optimizer = DeepSpeedCPUAdam(
            [self._parameter], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY
        )
        self._optimizer.state[0] = {"step": step - 1, "exp_avg": first, "exp_avg_sq": second}

    def step(self, grads: Array, coefficient: float = 1.0) -> None:
        """Takes the step."""
        self._parameter.grad = torch.from_numpy(grads) * coefficient
        self._optimizer.step_subgroup(0)

    @classmethod
    def stepped(cls, case: Case) -> State:
        """Returns the result of the amended step alone."""
        block = cls(case.before, case.step)
        block.step(case.grads, AMENDED)
        return block.state

    @classmethod
    def rollback(cls, case: Case, amend: bool) -> State:
        """Runs steps, their inverses, and the amended step."""
        block = cls(case.before, case.step)
        block.step(case.grads)
        block._optimizer.rollback_subgroup(0)
        if amend:
            block.step(case.grads, AMENDED)
        return block.state


def histories(native: Native, num_params: int) -> Iterator[tuple[str, list[Case]]]:
    """Yields the blocks of every kind of gradients and step."""
    numbers = np.random.default_rng(0)

    def draw() -> Array:
        grads = shared_array(num_params, np.float32)
        grads[:] = GRADIENT_SIZE * numbers.standard_normal(num_params, np.float32)
        return grads

    for last in STEPS:
        blocks = []
        for _ in range(BLOCKS):
            state = new_state(num_params)
            state[0][:] = 0.02 * numbers.standard_normal(num_params, np.float32)
            lagging, pending = aligned(state), draw()
            for step in range(1, last):
                lagging, pending = aligned(state), draw()
                native.step(state, pending, step)
            blocks.append((lagging, pending, state, draw()))
        for kind in ("normal", "x 65536", "Inf", "NaN"):
            yield kind, [_case(last, kind, number, *b) for number, b in enumerate(blocks)]


def _case(
    step: int, kind: str, number: int, lagging: State, pending: Array, before: State, grads: Array
) -> Case:
    new = shared_array(grads.size, np.float32)
    new[:] = grads * np.float32(LOSS_SCALE if kind == "x 65536" else 1.0)
    if number == 0 and kind in ("Inf", "NaN"):
        new[grads.size // 2] = float(kind)
    return Case(step=step, lagging=lagging, pending=pending, before=before, grads=new)


Rollback = Callable[[Case, bool], State]
Alone = Callable[[Case], State]
"""What the amended step alone leads to."""


def methods(native: Native) -> dict[str, tuple[Rollback, Alone] | None]:
    """Returns the methods by row, or None for a library that is not installed."""

    def ours_alone(case: Case) -> State:
        state = aligned(case.before)
        native.step(state, case.grads, case.step, AMENDED)
        return state

    def torch_alone(case: Case) -> State:
        state = aligned(case.before)
        torch_step(state, case.grads, case.step, AMENDED)
        return state

    there = importlib.util.find_spec("deepspeed") is not None
    return {
        OURS: (native.exact, ours_alone),
        "penstock arithmetic": (native.arithmetic, ours_alone),
        "torch fp32": (torch_rollback, torch_alone),
        "deepspeed": (DeepSpeed.rollback, DeepSpeed.stepped) if there else None,
    }


def largest_error(found: list[Array], wanted: list[Array]) -> float | None:
    """Returns the largest relative error, or None if infinite or undefined."""
    worst = 0.0
    for ours, right in zip(found, wanted, strict=True):
        differ = ours.view(np.uint32) != right.view(np.uint32)
        if not differ.any():
            continue
        ours, right = ours[differ].astype(np.float64), right[differ].astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            error = float(np.max(np.abs(ours - right) / np.abs(right)))
        if not math.isfinite(error):
            return None
        worst = max(worst, error)
    return worst


def compare(found: list[State], wanted: list[State]) -> dict[str, Any]:
    """Returns the figures of one row, over all blocks."""
    equal = [
        np.logical_and.reduce([a.view(np.uint32) == b.view(np.uint32) for a, b in pair])
        for pair in (list(zip(f, w, strict=True)) for f, w in zip(found, wanted, strict=True))
    ]
    return {
        "bit_equal": float(np.mean(np.concatenate(equal))),
        "master_error": largest_error([f[0] for f in found], [w[0] for w in wanted]),
        "moments_error": largest_error(
            [array for f in found for array in f[1:]], [array for w in wanted for array in w[1:]]
        ),
    }


def rows_of(native: Native, num_params: int) -> list[dict[str, Any]]:
    """Returns the whole table."""
    rows: list[dict[str, Any]] = []
    for kind, cases in histories(native, num_params):
        decisions = ("skip",) if kind in ("Inf", "NaN") else ("skip", "amend")
        for decision in decisions:
            for name, method in methods(native).items():
                row = {
                    "name": name,
                    "step": cases[0].step,
                    "gradients": kind,
                    "decision": decision,
                    "installed": method is not None,
                }
                if method is not None:
                    rollback, alone = method
                    amend = decision == "amend"
                    found = [rollback(case, amend) for case in cases]
                    wanted = [alone(case) if amend else case.before for case in cases]
                    row |= compare(found, wanted)
                rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Prints a line for each row."""
    print("step gradients decision row                  bit-equal  largest relative error of")
    print("                                                          masters   moments")
    for row in rows:
        line = f"{row['step']:4d} {row['gradients']:<9} {row['decision']:<8} {row['name']:<20}"
        if not row["installed"]:
            print(f"{line} not installed")
            continue
        errors = (row["master_error"], row["moments_error"])
        shown = "".join(f"{'lost' if e is None else format(e, '.1e'):>10}" for e in errors)
        print(f"{line}{100 * row['bit_equal']:9.3f} %{shown}")


def main() -> int:
    """Computes and prints; returns 1 if our results are not exact."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", default="1M", help="parameters of the four blocks together")
    parser.add_argument("--json", action="store_true", help='{"rows": […]} instead of the table')
    options = parser.parse_args()
    num_params = -(-count(options.params) // (16 * BLOCKS)) * 16
    cores = sorted(os.sched_getaffinity(0))[:2]
    with _native.Pool(cores) as pool:
        rows = rows_of(Native(pool, num_params), num_params)
    if options.json:
        print(json.dumps({"rows": rows}))
    else:
        show(rows)
    return int(any(row["name"] == OURS and row["bit_equal"] < 1.0 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
