"""Whatever is speculated, the bytes are those of a run that waits for every decision."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from penstock import _native
from penstock.shm.control import Decision
from penstock.shm.layout import Ownership
from penstock.shm.memory import NodeMemory
from penstock.shm.table import DType
from tests.optimizer.conftest import make_block, make_table
from tests.optimizer.joint import Gradients, Joint

MODES = ("auto", "always", "never")
SIZES = (80, 48)
SPECULATED, WAITED = {"preview", "advance"}, {"gradient_status", "hold"}


@pytest.fixture(scope="module")
def pool() -> Iterator[_native.Pool]:
    with _native.Pool([0]) as pool:
        yield pool


@pytest.fixture
def new_run(new_memory: Any, pool: _native.Pool) -> Iterator[Callable[..., Joint]]:
    """Makes a run on memory of its own, or on one that an ended run leaves."""
    memories: dict[tuple[DType, DType], NodeMemory] = {}
    runs: list[Joint] = []

    def make(gradients: Gradients, weight: DType, grad: DType, **sections: Any) -> Joint:
        if (weight, grad) not in memories:
            blocks = [make_block(i, [size]) for i, size in enumerate(SIZES)] + [make_block(2, [])]
            table = make_table(blocks, weight, grad)
            ownership = Ownership(owner=(0, 0, 0), computed_on=((0,), (0,), (0,)))
            memories[weight, grad] = new_memory(table, ownership)
        optimizer = {"lr": 0.01, "grad_dtype": grad.value, **sections.pop("optimizer", {})}
        model = {"dtype": weight.value}
        memory = memories[weight, grad]
        runs.append(Joint(memory, pool, gradients, model=model, optimizer=optimizer, **sections))
        return runs[-1]

    yield make
    for run in runs:
        run.kernels.close()


def normed(norm: Callable[[int], float]) -> Gradients:
    """Random gradients whose global norm is that of the attempt's number."""

    def gradients(number: int, block: int) -> Any:
        parts = [np.random.default_rng((number, b)).standard_normal(n) for b, n in enumerate(SIZES)]
        whole = math.sqrt(sum(np.square(part).sum() for part in parts))
        return (parts[block] * (norm(number) / whole)).astype(np.float32)

    return gradients


def decisions(run: Joint) -> Counter[Decision]:
    return Counter(record.decision for record in run.records)


def test_200_steps_of_fp16_from_a_loss_scale_of_2_to_32(new_run: Callable[..., Joint]) -> None:
    """fp16 ends below 65520 = 2^16 - 16: the element 1/8 overflows at scales from 2^19 on. So 14
    skips come down to 2^18; from there each 20 commits lead to 2^19 and a skip, except the last.
    """

    def gradients(number: int, block: int) -> Any:
        values = np.random.default_rng((number, block)).uniform(-0.1, 0.1, SIZES[block])
        values *= 0.1 if number % 2 else 1.0
        values[5] = 0.125 if block == number % 2 else 0.0
        return values.astype(np.float32)

    optimizer = {"initial_loss_scale": 2.0**32, "loss_scale_growth_interval": 20}
    ends = []
    for mode in MODES:
        run = new_run(
            gradients,
            DType.FP16,
            DType.FP16,
            optimizer={"speculate": mode, **optimizer},
            train={"clip_grad_norm": 0.3},
        )
        run.run(200)
        ends.append(run.content(slot=0))
        assert run.scales[:15] == [2.0**n for n in range(32, 17, -1)]
        assert set(run.scales[15:]) == {2.0**18, 2.0**19}
        counts = decisions(run)
        assert counts[Decision.SKIP] == 14 + 9
        assert 80 < counts[Decision.AMEND] < 120, "every second attempt is clipped"
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize(
    ("rate", "clipped"),
    [
        pytest.param(lambda n: True, 60, id="every-step"),
        pytest.param(lambda n: False, 0, id="never"),
        pytest.param(lambda n: n % 2 == 0, 30, id="half"),
        pytest.param(lambda n: n % 40 < 24, 44, id="in-bursts"),
    ],
)
def test_clipping_has_the_bits_of_the_waiting_run(
    rate: Callable[[int], bool], clipped: int, new_run: Callable[..., Joint]
) -> None:
    ends, sweeps = [], {}
    for mode in MODES:
        gradients = normed(lambda n: 3.0 if rate(n) else 0.5)
        run = new_run(gradients, DType.BF16, DType.BF16, optimizer={"speculate": mode})
        run.run(60)
        assert decisions(run)[Decision.AMEND] == clipped
        ends.append(run.content(slot=0))
        sweeps[mode] = set(run.sweeps)
    assert ends[0] == ends[1] == ends[2]
    assert not sweeps["always"] & WAITED
    assert not sweeps["never"] & SPECULATED
    assert bool(sweeps["auto"] & WAITED) is (clipped > 30), "11 of 20 begin a hold"
    assert sweeps["auto"] & SPECULATED


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_step_one_amended_after_skips_of_one_bad_element(
    mode: str, scale: float, new_run: Callable[..., Joint]
) -> None:
    """Infinite or undefined in one element of one block: not a byte of the state has changed."""
    bad = {0: (0, math.inf), 1: (1, -math.inf), 2: (0, math.nan), 5: (1, math.nan)}
    usual = normed(lambda n: 3.0)

    def gradients(number: int, block: int) -> Any:
        values = usual(number, block)
        if number in bad and bad[number][0] == block:
            values[17] = bad[number][1]
        return values

    run = new_run(
        gradients,
        DType.FP16,
        DType.FP32,
        optimizer={
            "speculate": mode,
            "initial_loss_scale": scale,
            "loss_scale_min": scale,
        },
    )
    before = run.content(slot=0)
    for _ in range(3):
        assert run.attempt().decision is Decision.SKIP
        assert run.content(slot=0) == before
    assert run.attempt().decision is Decision.AMEND
    assert run.records[-1].version == 1
    assert run.records[-1].inverse_loss_scale == 1 / scale
    run.run(6)
    assert [r.decision for r in run.records].count(Decision.SKIP) == 4
