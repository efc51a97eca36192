"""SGD, Lion and Adagrad against torch or float64; every optimizer's sweeps against each other; the
arithmetic inverse, and what it loses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from penstock import _ceiling, _native
from penstock._native import WeightsDtype
from penstock.config.optimizers import OPTIMIZERS, OptimizerName

NUM_ELEMENTS = 4096 + 48
NUM_STEPS = 5
LR, BETA1, BETA2, EPS, DECAY = 3e-3, 0.9, 0.95, 1e-10, 0.1
PATHS = _native.available_vector_paths()


def hyper(optimizer: OptimizerName, step: int, **changes: Any) -> _native.Hyper:
    """The constants above."""
    usual = {"lr": LR, "beta1": BETA1, "beta2": BETA2, "eps": EPS, "coefficient": 0.25}
    return _native.Hyper(**(usual | changes), step=step, optimizer=optimizer)


def block_of(kit: Any, optimizer: OptimizerName, seed: int) -> Any:
    """A block at the start of training, one decay for all."""
    block = kit.block(NUM_ELEMENTS, seed)
    block.ranges[:] = [(0, NUM_ELEMENTS, DECAY, 1.0)]
    block.exp_avg[:] = 0
    block.exp_avg_sq[:] = 0
    return block


def state(block: Any, optimizer: OptimizerName) -> dict[str, Any]:
    """The block's arguments, with as many arrays as the optimizer has."""
    count = len(OPTIMIZERS[optimizer].state_arrays)
    return {**block.state, "arrays": [block.exp_avg, block.exp_avg_sq][:count]}


TORCH: dict[OptimizerName, Callable[..., torch.optim.Optimizer]] = {
    OptimizerName.ADAMW: partial(torch.optim.AdamW, betas=(BETA1, BETA2), eps=EPS),
    OptimizerName.ADAM: partial(torch.optim.Adam, betas=(BETA1, BETA2), eps=EPS),
    OptimizerName.SGD: partial(torch.optim.SGD, momentum=BETA1),
    OptimizerName.ADAGRAD: partial(torch.optim.Adagrad, eps=EPS),
}
"""torch's, where it has one."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("optimizer", [name for name in OptimizerName if name != "lion"])
def test_groups_match_those_of_torch(
    path: str, optimizer: OptimizerName, kit: Any, cores: list[int]
) -> None:
    """Ranges with learning rates and decays of their own; one ends inside a chunk."""
    block = block_of(kit, optimizer, 2)
    groups = [(0, 32, 0.3, 5.0), (32, 2064, 0.0, 0.1), (2064, 4096, 0.1, 0.1)]
    block.ranges[:] = [*groups, (4096, NUM_ELEMENTS, 0.1, 1.0)]
    parameters, theirs = [], []
    for start, end, decay, rate in block.ranges:
        parameters.append(torch.nn.Parameter(torch.from_numpy(block.master[start:end].copy())))
        theirs.append({"params": parameters[-1:], "lr": LR * rate, "weight_decay": decay})
    each = TORCH[optimizer](theirs)
    with _native.Pool([cores[0]], vector_path=path) as pool:
        for step in range(1, NUM_STEPS + 1):
            grads = kit.gradients(NUM_ELEMENTS, step, bf16=False)
            for (start, end, *_), parameter in zip(block.ranges, parameters, strict=True):
                parameter.grad = torch.from_numpy(grads[0][start:end] * np.float32(0.25))
            each.step()
            arguments = {"hyper": hyper(optimizer, step), **state(block, optimizer)}
            _native.settle(pool, grads=grads, undo=block.undo, **arguments)
    expected = torch.cat([parameter.detach() for parameter in parameters]).numpy()
    np.testing.assert_allclose(block.master, expected, rtol=2e-6, atol=2e-6)


def lion(master: Any, momentum: Any, grad: Any) -> None:
    """Algorithm 2 of Chen et al., in float64."""
    direction = np.sign(BETA1 * momentum + (1 - BETA1) * grad)
    master *= 1 - LR * DECAY
    master -= LR * direction
    momentum *= BETA2
    momentum += (1 - BETA2) * grad


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("optimizer", [OptimizerName.SGD, OptimizerName.ADAGRAD])
def test_steps_match_torch(path: str, optimizer: OptimizerName, kit: Any, cores: list[int]) -> None:
    block = block_of(kit, optimizer, 1)
    parameter = torch.nn.Parameter(torch.from_numpy(block.master.copy()))
    theirs = TORCH[optimizer]([parameter], lr=LR, weight_decay=DECAY)
    with _native.Pool([cores[0]], vector_path=path) as pool:
        for step in range(1, NUM_STEPS + 1):
            grads = kit.gradients(NUM_ELEMENTS, step, bf16=False)
            parameter.grad = torch.from_numpy(grads[0] * np.float32(0.25))
            theirs.step()
            _native.settle(
                pool,
                grads=grads,
                hyper=hyper(optimizer, step),
                undo=block.undo,
                **state(block, optimizer),
            )
    np.testing.assert_allclose(block.master, parameter.detach().numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("path", PATHS)
def test_lion_matches_float64(path: str, kit: Any, cores: list[int]) -> None:
    block = block_of(kit, OptimizerName.LION, 2)
    master, momentum = block.master.astype(np.float64), np.zeros(NUM_ELEMENTS)
    with _native.Pool([cores[0]], vector_path=path) as pool:
        for step in range(1, NUM_STEPS + 1):
            grads = kit.gradients(NUM_ELEMENTS, step, bf16=False)
            grads[0][5] = 0.0  # with a momentum of 0: no direction
            lion(master, momentum, grads[0].astype(np.float64) * 0.25)
            _native.settle(
                pool,
                grads=grads,
                hyper=hyper(OptimizerName.LION, step),
                undo=block.undo,
                **state(block, OptimizerName.LION),
            )
    np.testing.assert_allclose(block.master, master, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(block.exp_avg, momentum, rtol=1e-5, atol=1e-7)


def sweeps(
    kit: Any, pool: _native.Pool, optimizer: OptimizerName, way: str
) -> tuple[tuple[bytes, ...], bytes]:
    """State after one step and weights after another, in one of the ways there."""
    block = kit.block(NUM_ELEMENTS, 3)
    first = kit.gradients(NUM_ELEMENTS, 4, bf16=True, count=2)
    second = kit.gradients(NUM_ELEMENTS, 5, bf16=True, count=2)
    weights = kit.weights(NUM_ELEMENTS, WeightsDtype.FLOAT16)
    out = {"weights": weights, "weights_dtype": WeightsDtype.FLOAT16}
    arrays, undo = state(block, optimizer), {"undo": block.undo}
    one, two = hyper(optimizer, 3), hyper(optimizer, 4)
    if way == "advance":
        _native.advance(
            pool,
            pending_grads=first,
            pending_hyper=one,
            grads=second,
            hyper=two,
            **out,
            **undo,
            **arrays,
        )
        return block.bits(), weights.tobytes()
    if way == "settle":
        _native.settle(pool, grads=first, hyper=one, **undo, **arrays)
    elif way == "in place":
        _native.step_in_place(pool, grads=first, hyper=one, **out, **arrays)
    else:
        _native.hold(pool, grads=first, hyper=one, **out, **undo, **arrays)
        kept = weights.copy()
        _native.cast_weights(pool, master=block.master, **out)
        assert kept.tobytes() == weights.tobytes()
    _native.preview(pool, grads=second, hyper=two, **out, **arrays)
    return block.bits(), weights.tobytes()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_ways_and_paths_give_the_same_bits(
    optimizer: OptimizerName, kit: Any, cores: list[int]
) -> None:
    found = set()
    for path in PATHS:
        with _native.Pool([cores[0], cores[-1]], vector_path=path) as pool:
            for way in ("advance", "settle", "in place", "hold"):
                found.add(sweeps(kit, pool, optimizer, way))
    assert len(found) == 1


@pytest.mark.parametrize("path", PATHS)
def test_gradients_in_fp16(path: str, kit: Any, cores: list[int]) -> None:
    """All bit patterns of finite numbers; exact, so equal to the same numbers in fp32."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves = kit.aligned_copy(np.where(bits & 0x7C00 == 0x7C00, 0, bits).astype(np.uint16))
    wide = kit.aligned_copy(halves.view(np.float16).astype(np.float32))
    blocks = [kit.block(1 << 16, 6) for _ in range(2)]
    with _native.Pool([cores[0]], vector_path=path) as pool:
        for block, grads in zip(blocks, (halves.view(np.float16), wide), strict=True):
            _native.settle(pool, grads=[grads], hyper=kit.hyper(), undo=block.undo, **block.state)
        infinite = kit.aligned_copy(np.full(16, np.inf, np.float16))
        assert not _native.gradient_status(pool, grads=[infinite]).finite
    assert blocks[0].bits() == blocks[1].bits()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("path", PATHS)
def test_the_inverse_comes_close_and_no_closer(
    optimizer: OptimizerName, path: str, kit: Any, cores: list[int]
) -> None:
    """Not exact: this is why a preview leaves the state alone."""
    block = kit.block(NUM_ELEMENTS, 7)
    if optimizer is OptimizerName.ADAGRAD:
        block.exp_avg[:] = np.abs(block.exp_avg)  # a sum of squares
    before = block.copy()
    grads = kit.gradients(NUM_ELEMENTS, 8, bf16=True)
    arguments = {"grads": grads, "hyper": hyper(optimizer, 3), **state(block, optimizer)}
    weights = kit.weights(NUM_ELEMENTS, WeightsDtype.BFLOAT16)
    with _native.Pool([cores[0]], vector_path=path) as pool:
        _native.step_in_place(
            pool, weights=weights, weights_dtype=WeightsDtype.BFLOAT16, **arguments
        )
        assert block.bits() != before.bits()
        _native.invert(pool, undo=block.undo, **arguments)
    for found, wanted in zip(block.each, before.each, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    assert block.bits() != before.bits()


def test_an_infinite_gradient_destroys_what_the_inverse_should_bring_back(
    kit: Any, pool: _native.Pool
) -> None:
    block = kit.block(64, 9)
    before = block.copy()
    (grad,) = kit.gradients(64, 10, bf16=False)
    grad[17] = np.inf
    arguments = {"grads": [grad], "hyper": hyper(OptimizerName.ADAMW, 3), **block.state}
    weights = kit.weights(64, WeightsDtype.FLOAT32)
    _native.step_in_place(pool, weights=weights, weights_dtype=WeightsDtype.FLOAT32, **arguments)
    _native.invert(pool, undo=block.undo, **arguments)
    lost = ~np.isfinite(block.exp_avg)
    assert lost.nonzero()[0].tolist() == [17]
    assert np.isfinite(before.exp_avg).all()


def test_the_ceiling_of_a_benchmark_moves_the_same_arrays(kit: Any, cores: list[int]) -> None:
    """Its kernels read and write every array of every sweep, and leave the undo area alone."""
    block = kit.block(64, 11)
    before = block.copy()
    (grad,) = kit.gradients(64, 12, bf16=False)
    scalars = {"lr": LR, "beta1": BETA1, "beta2": BETA2, "eps": EPS, "step": 1}
    with _ceiling.Pool([cores[0]]) as pool:
        hyper = _ceiling.Hyper(**scalars)
        _ceiling.settle(pool, grads=[grad], hyper=hyper, undo=block.undo, **block.state)
    for found, old in zip(block.each, before.each, strict=True):
        np.testing.assert_array_equal(found, old + grad)
    assert block.undo[64 + 64 :].tobytes() == before.undo[64 + 64 :].tobytes()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_kernels_know_the_optimizers_of_the_table(optimizer: OptimizerName, kit: Any) -> None:
    """By name; what the table says of decay and bias correction shows in one step from zero."""
    assert hyper(optimizer, 1).optimizer == optimizer.value
    with pytest.raises(ValueError, match="expected one of .*" + optimizer.value):
        _native.Hyper(lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, step=1, optimizer="rmsprop")
    traits, block = OPTIMIZERS[optimizer], block_of(kit, optimizer, 13)
    decayed, first = block.master * np.float32(1 - LR * DECAY), block.master.copy()
    zeros = [kit.aligned(NUM_ELEMENTS, np.float32)]
    with _native.Pool([0]) as pool:
        arguments = {"undo": block.undo, **state(block, optimizer)}
        _native.settle(pool, grads=zeros, hyper=hyper(optimizer, 1), **arguments)
        untouched = bool((block.exp_avg == 0).all())
    assert untouched is traits.decouples_decay, "coupled decay is a gradient"
    assert (block.master.tobytes() == decayed.tobytes()) is traits.decouples_decay
    assert block.master.tobytes() != first.tobytes()
