"""Identical bits: vector paths, thread counts, and the different ways to the same step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import _native
from penstock._native import WeightsDtype

PATHS = _native.available_vector_paths()
SIZES = [16, 48, 4080, 4096, 4112, 3 * 4096 - 16, 7 * 4096 + 112]

case = st.fixed_dictionaries(
    {
        "num_elements": st.sampled_from(SIZES),
        "seed": st.integers(0, 2**32),
        "bf16": st.booleans(),
        "count": st.integers(1, 3),
        "dtype": st.sampled_from(list(WeightsDtype)),
        "optimizer": st.sampled_from(["adamw", "adam"]),
        "coefficient": st.sampled_from([1.0, 0.37, 2.0**-16]),
    }
)


class Run:
    """One block and its gradients, rebuilt from a seed as often as needed."""

    def __init__(self, kit: Any, case: dict[str, Any], pool: _native.Pool) -> None:
        self.pool = pool
        self.block = kit.block(case["num_elements"], case["seed"])
        self.weights = kit.weights(case["num_elements"], case["dtype"])
        options = {"bf16": case["bf16"], "count": case["count"]}
        self.pending = kit.gradients(case["num_elements"], case["seed"] + 1, **options)
        self.grads = kit.gradients(case["num_elements"], case["seed"] + 2, **options)
        changes = {"optimizer": case["optimizer"], "coefficient": case["coefficient"]}
        self.pending_hyper = kit.hyper(step=4, lr=2e-2, **changes)
        self.hyper = kit.hyper(step=5, **changes)
        self.out = {"weights": self.weights, "weights_dtype": case["dtype"]}

    def settle_pending(self, **options: Any) -> None:
        """Settle the first gradients."""
        _native.settle(
            self.pool,
            grads=self.pending,
            hyper=self.pending_hyper,
            undo=self.block.undo,
            **self.block.state,
            **options,
        )

    def preview(self) -> _native.Status:
        """Preview the second gradients."""
        return _native.preview(
            self.pool, grads=self.grads, hyper=self.hyper, **self.out, **self.block.state
        )

    def advance(self) -> _native.Status:
        """Both at once."""
        return _native.advance(
            self.pool,
            pending_grads=self.pending,
            pending_hyper=self.pending_hyper,
            grads=self.grads,
            hyper=self.hyper,
            undo=self.block.undo,
            **self.out,
            **self.block.state,
        )

    def outcome(self, status: _native.Status) -> tuple[Any, ...]:
        """Everything a sweep leaves, in bits."""
        return (*self.block.bits(), self.weights.tobytes(), status.finite, status.sum_squares.hex())


@settings(max_examples=40, deadline=None)
@given(case=case)
def test_paths_and_threads_give_the_same_bits(
    kit: Any, cores: list[int], case: dict[str, Any]
) -> None:
    outcomes = set()
    for path in PATHS:
        for num_threads in (1, 2, 3):
            thread_cores = [cores[i % len(cores)] for i in range(num_threads)]
            with _native.Pool(thread_cores, vector_path=path) as pool:
                run = Run(kit, case, pool)
                outcomes.add(run.outcome(run.advance()))
    assert len(outcomes) == 1


@settings(max_examples=40, deadline=None)
@given(case=case, path=st.sampled_from(PATHS))
def test_advance_is_settle_then_preview(
    kit: Any, cores: list[int], case: dict[str, Any], path: str
) -> None:
    with _native.Pool([cores[0], cores[-1]], vector_path=path) as pool:
        at_once, one_by_one = Run(kit, case, pool), Run(kit, case, pool)
        one_by_one.settle_pending()
        assert at_once.outcome(at_once.advance()) == one_by_one.outcome(one_by_one.preview())


@settings(max_examples=40, deadline=None)
@given(case=case, path=st.sampled_from(PATHS))
def test_previewed_weights_are_those_of_the_settled_master(
    kit: Any, cores: list[int], case: dict[str, Any], path: str
) -> None:
    with _native.Pool([cores[0], cores[-1]], vector_path=path) as pool:
        run, classic = Run(kit, case, pool), Run(kit, case, pool)
        before = run.block.bits()
        status = run.preview()
        previewed = run.weights.tobytes()
        assert run.block.bits() == before
        _native.settle(
            pool, grads=run.grads, hyper=run.hyper, undo=run.block.undo, **run.block.state
        )
        run.weights[:] = 0
        _native.cast_weights(pool, master=run.block.master, **run.out)
        assert run.weights.tobytes() == previewed
        in_place = _native.step_in_place(
            pool, grads=classic.grads, hyper=classic.hyper, **classic.out, **classic.block.state
        )
        assert classic.outcome(in_place) == run.outcome(status)
        held = _native.gradient_status(pool, grads=run.grads)
        assert held.sum_squares == status.sum_squares


@settings(max_examples=30, deadline=None)
@given(case=case, data=st.data())
def test_a_sweep_over_spans_equals_the_whole_sweep(
    kit: Any, cores: list[int], case: dict[str, Any], data: st.DataObject
) -> None:
    vectors = case["num_elements"] // 16
    cut = data.draw(st.integers(0, vectors)) * 16
    end = case["num_elements"]
    first, second = [(0, cut)] if cut else [], [(cut, end)] if cut < end else []
    with _native.Pool([cores[0], cores[-1], cores[0]]) as pool:
        whole, parts = Run(kit, case, pool), Run(kit, case, pool)
        whole.settle_pending()
        for spans in (second, first):
            if spans:
                parts.settle_pending(spans=spans)
        assert parts.block.bits() == whole.block.bits()


@pytest.mark.parametrize("path", PATHS)
def test_decay_belongs_to_its_range_only(path: str, kit: Any, cores: list[int]) -> None:
    """A decay range begins and ends in the middle of a chunk."""
    block = kit.block(4096 * 2, 4)
    block.ranges[:] = [(0, 48, 0.0, 1.0), (48, 4112, 0.5, 1.0), (4112, 8192, 0.0, 1.0)]
    block.exp_avg[:] = 0
    before = block.master.copy()
    zeros = kit.aligned(8192, before.dtype)
    with _native.Pool([cores[0], cores[-1]], vector_path=path) as pool:
        _native.settle(pool, grads=[zeros], hyper=kit.hyper(lr=0.5), undo=block.undo, **block.state)
    assert (block.master[:48] == before[:48]).all()
    assert (block.master[48:4112] == before[48:4112] * before.dtype.type(0.75)).all()
    assert (block.master[4112:] == before[4112:]).all()
