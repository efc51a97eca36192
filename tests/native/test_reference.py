"""The optimizer against float64 NumPy and torch.optim, over several steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock import _native

NUM_STEPS = 6
LR, BETA1, BETA2, EPS, DECAY = 3e-3, 0.9, 0.95, 1e-8, 0.1
KINDS = {True: "adamw", False: "adam"}


def float64_step(
    state: list[NDArray[np.float64]], grad: NDArray[np.float64], step: int, *, adamw: bool
) -> None:
    """Kingma & Ba, Algorithm 1; Loshchilov & Hutter, Algorithm 2 (``adamw``)."""
    master, exp_avg, exp_avg_sq = state
    if adamw:
        master *= 1 - LR * DECAY
    else:
        grad = grad + DECAY * master
    exp_avg *= BETA1
    exp_avg += (1 - BETA1) * grad
    exp_avg_sq *= BETA2
    exp_avg_sq += (1 - BETA2) * grad**2
    corrected = exp_avg_sq / (1 - BETA2**step)
    master -= LR * exp_avg / (1 - BETA1**step) / (np.sqrt(corrected) + EPS)


@pytest.mark.parametrize("path", _native.available_vector_paths())
@pytest.mark.parametrize("adamw", [True, False])
@pytest.mark.parametrize("bf16", [True, False])
def test_steps_match_float64(
    path: str, adamw: bool, bf16: bool, kit: Any, cores: list[int]
) -> None:
    num_elements = 4096 + 16 * 3
    block = kit.block(num_elements, 7)
    block.ranges[:] = [(0, num_elements, DECAY, 1.0)]
    block.exp_avg[:] = 0
    block.exp_avg_sq[:] = 0
    exact = [array.astype(np.float64) for array in block.each]
    with _native.Pool([cores[0], cores[-1]], vector_path=path) as pool:
        for step in range(1, NUM_STEPS + 1):
            grads = kit.gradients(num_elements, step, bf16=bf16, count=2)
            floats = [
                (g.astype(np.uint32) << 16).view(np.float32) if bf16 else g.copy() for g in grads
            ]
            total = (floats[0] + floats[1]).astype(np.float64)
            hyper = _native.Hyper(
                lr=LR,
                beta1=BETA1,
                beta2=BETA2,
                eps=EPS,
                step=step,
                coefficient=0.25,
                optimizer=KINDS[adamw],
            )
            status = _native.gradient_status(pool, grads=grads)
            _native.settle(pool, grads=grads, hyper=hyper, undo=block.undo, **block.state)
            float64_step(exact, total * 0.25, step, adamw=adamw)
            assert status.finite
            assert status.sum_squares == pytest.approx(float(np.sum(total**2)), rel=1e-14)
    for found, expected in zip(block.each, exact, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("adamw", [True, False])
def test_steps_match_torch(adamw: bool, pool: _native.Pool, kit: Any) -> None:
    num_elements = 4096 * 3
    block = kit.block(num_elements, 8)
    block.ranges[:] = [(0, 4096, DECAY, 1.0), (4096, num_elements, 0.0, 1.0)]
    block.exp_avg[:] = 0
    block.exp_avg_sq[:] = 0
    decayed = torch.nn.Parameter(torch.from_numpy(block.master[:4096].copy()))
    plain = torch.nn.Parameter(torch.from_numpy(block.master[4096:].copy()))
    groups = [
        {"params": [decayed], "weight_decay": DECAY},
        {"params": [plain], "weight_decay": 0.0},
    ]
    kind = torch.optim.AdamW if adamw else torch.optim.Adam
    optimizer = kind(groups, lr=LR, betas=(BETA1, BETA2), eps=EPS)
    weights = kit.weights(num_elements, _native.WeightsDtype.FLOAT32)
    for step in range(1, NUM_STEPS + 1):
        (grad,) = kit.gradients(num_elements, step, bf16=False)
        decayed.grad = torch.from_numpy(grad[:4096].copy())
        plain.grad = torch.from_numpy(grad[4096:].copy())
        optimizer.step()
        hyper = _native.Hyper(
            lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, step=step, optimizer=KINDS[adamw]
        )
        _native.step_in_place(
            pool,
            grads=[grad],
            weights=weights,
            weights_dtype=_native.WeightsDtype.FLOAT32,
            hyper=hyper,
            **block.state,
        )
    expected = torch.cat([decayed.detach(), plain.detach()]).numpy()
    np.testing.assert_allclose(block.master, expected, rtol=2e-6, atol=1e-6)
    assert weights.tobytes() == block.master.tobytes()


def test_bias_corrections_of_late_steps_match_torch(pool: _native.Pool, kit: Any) -> None:
    """Powers of the betas are taken by repeated squaring: check a step far from the start."""
    block = kit.block(64, 9)
    block.ranges[:] = [(0, 64, 0.0, 1.0)]
    (grad,) = kit.gradients(64, 1, bf16=False)
    parameter = torch.nn.Parameter(torch.from_numpy(block.master.copy()))
    parameter.grad = torch.from_numpy(grad.copy())
    optimizer = torch.optim.AdamW([parameter], lr=LR, betas=(0.9, 0.999), eps=EPS, weight_decay=0)
    optimizer.state[parameter] = {
        "step": torch.tensor(1233.0),
        "exp_avg": torch.from_numpy(block.exp_avg.copy()),
        "exp_avg_sq": torch.from_numpy(block.exp_avg_sq.copy()),
    }
    optimizer.step()
    hyper = _native.Hyper(lr=LR, beta1=0.9, beta2=0.999, eps=EPS, step=1234)
    _native.settle(pool, grads=[grad], hyper=hyper, undo=block.undo, **block.state)
    np.testing.assert_allclose(block.master, parameter.detach().numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("path", _native.available_vector_paths())
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 15, 4095, 4096, 8191 + 16])
def test_one_bad_gradient_is_noticed_and_state_stays(
    path: str, bad: float, place: int, kit: Any, cores: list[int]
) -> None:
    num_elements = 4096 * 2 + 16
    block = kit.block(num_elements, 3)
    (grad,) = kit.gradients(num_elements, 1, bf16=False)
    weights = kit.weights(num_elements, _native.WeightsDtype.BFLOAT16)
    before = block.bits()
    grad[place] = bad
    with _native.Pool([cores[0], cores[-1]], vector_path=path) as pool:
        status = _native.preview(
            pool,
            grads=[grad],
            hyper=kit.hyper(),
            weights=weights,
            weights_dtype=_native.WeightsDtype.BFLOAT16,
            **block.state,
        )
        assert not status.finite
        assert not np.isfinite(status.sum_squares)
        assert not _native.gradient_status(pool, grads=[grad]).finite
    assert block.bits() == before


def test_overflow_in_the_sum_of_contributions_is_noticed(pool: _native.Pool, kit: Any) -> None:
    grads = [kit.aligned_copy(np.full(16, 3e38, np.float32)) for _ in range(2)]
    alone = _native.gradient_status(pool, grads=grads[:1])
    assert alone.finite
    assert alone.sum_squares == pytest.approx(16 * 9e76, rel=1e-6)
    assert not _native.gradient_status(pool, grads=grads).finite
