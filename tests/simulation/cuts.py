"""A sweep that a kill cuts short, as ``native/undo.h`` says what that leaves.

The real sweep runs to its end; then memory is put together from the bytes before and after it: the
vectors before the cut are new, those behind it old, the one at the cut old, half written or new,
and the undo area is armed with the old values of the last two vectors.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np

from penstock.daemons.mirror.sweeps import ReplicaSweeps
from penstock.daemons.optimizer.kernels import Kernels
from penstock.daemons.optimizer.machine.sweeps import (
    Advance,
    CastWeights,
    FinishHold,
    FinishSettle,
    Hold,
    Preview,
    Settle,
)
from penstock.shm.memory import Halves

VECTOR = 16
PIECE_BYTES = 576
HEADER_BYTES = 64


def cut(
    kernels: Kernels | ReplicaSweeps, work: Any, run: Any, dice: random.Random
) -> tuple[bool, Any]:
    """Run ``work`` and leave what a kill in its middle would; returns whether it was cut, and the
    sweep's status where it was not.
    """
    if isinstance(kernels, ReplicaSweeps):
        arrays = _replica_arrays(kernels._blocks[work.block])
    else:
        arrays = kernels._arrays[work.block]
    if arrays.split and not isinstance(work, Settle | Advance | Hold | Preview):
        return False, run(kernels, work)  # tests/native cuts those
    upper = _upper(work) if arrays.split else None
    written, read = _states(arrays, work)
    targets = [*arrays.weights, *written]
    before = [array.copy() for array in (*arrays.weights, *read)]
    undo = np.frombuffer(kernels._undo, dtype=np.uint8)
    undo_before = undo.copy()
    status = run(kernels, work)
    after = [target.copy() for target in targets]
    if isinstance(work, Preview | CastWeights):
        at = VECTOR * dice.randrange(len(targets[0]) // VECTOR)
        for target, old, new in zip(targets, before, after, strict=True):
            target[:] = old
            target[:at] = new[:at]
        return True, None
    return _cut_state(arrays, targets, before, after, undo, undo_before, dice, upper), status


def _states(arrays: Any, work: Any) -> tuple[list[Any], list[Any]]:
    """Returns the arrays of state that a sweep writes, and those that have what it leads on: the
    same ones, but where a block has two copies. Then the later version goes to the other one, which
    gets the earlier state first, unless the sweep had begun before.
    """
    first = list(arrays.states[0].all)
    if len(arrays.states) == 1 or isinstance(work, Preview | CastWeights):
        return first, first
    version = _settled(work).version
    written = list(arrays.copy_of(version).all)
    begun = isinstance(work, FinishSettle | FinishHold)
    return written, written if begun else list(arrays.copy_of(version - 1).all)


def _replica_arrays(block: Any) -> Any:
    """Returns a replica's block as if it were an owner's: no weights, a whole master."""
    state = SimpleNamespace(all=[block.master, *block.arrays])
    return SimpleNamespace(states=[state], weights=[], split=False)


def _cut_state(
    arrays: Any,
    targets: list[Any],
    before: list[Any],
    after: list[Any],
    undo: Any,
    undo_before: Any,
    dice: random.Random,
    upper: int | None,
) -> bool:
    state = int(undo_before[:8].view(np.uint64)[0])
    capacity = (len(undo) - HEADER_BYTES) // (2 * PIECE_BYTES)
    table = 0 if state == 0 else 1 - ((state - 1) & 1)
    header = undo[:HEADER_BYTES].view(np.uint64)
    if header[5 + table] != 1:
        return False
    if state:
        _put_back(undo_before, (state - 1) & 1, capacity, before, len(arrays.weights))
    place = HEADER_BYTES + table * capacity * PIECE_BYTES
    piece = undo[place : place + PIECE_BYTES]
    start, end = (int(word) for word in piece[:16].view(np.uint64))
    at = start + VECTOR * dice.randrange(max(1, (end - start) // VECTOR))
    stage = dice.randrange(4)  # nothing of it saved, saved, half written, written
    for target, old, new in zip(targets, before, after, strict=True):
        target[:] = old
        target[:at] = new[:at]
        if stage == 3 or (stage == 2 and dice.random() < 0.5):
            target[at : at + VECTOR] = new[at : at + VECTOR]
        elif stage == 2:
            half = at + dice.randrange(VECTOR)
            target[at:half] = new[at:half]
    piece[64:] = 0
    for vector in (at - VECTOR, at):
        if vector >= start and (vector < at or stage > 0):
            _save(piece, vector, before, len(arrays.weights), upper)
    header[0] = 1 + table
    header[2] = undo_before[16:24].view(np.uint64)[0]
    return True


def _upper(work: Any) -> int:
    """Returns the slot whose weights are the upper halves of a split master."""
    return int((_settled(work).version - 1) % 2)


def _settled(work: Any) -> Any:
    """Returns the step that a sweep takes into the state."""
    return work.pending if isinstance(work, Advance) else work.update


def _save(piece: Any, vector: int, before: list[Any], num_weights: int, upper: int | None) -> None:
    slot = 64 + 256 * ((vector // VECTOR) & 1)
    part = slice(vector, vector + VECTOR)
    master, *rest = before[num_weights:]
    old = master[part]
    if upper is not None:
        old = Halves(high=before[upper][part], low=master[part]).load()
    piece[slot : slot + 64] = np.ascontiguousarray(old).view(np.uint8)
    for number, array in enumerate(rest):
        start = slot + 64 * (1 + number)
        piece[start : start + 64] = np.ascontiguousarray(array[part]).view(np.uint8)
    piece[slot + 192 : slot + 200] = np.array([vector + 1], dtype=np.uint64).view(np.uint8)


def _put_back(undo: Any, table: int, capacity: int, before: list[Any], num_weights: int) -> None:
    """What the repair did before the sweep went on."""
    place = HEADER_BYTES + table * capacity * PIECE_BYTES
    piece = undo[place : place + PIECE_BYTES]
    positions = [int(piece[64 + 256 * n + 192 :][:8].view(np.uint64)[0]) for n in (0, 1)]
    newest = int(positions[1] > positions[0])
    if not positions[newest]:
        return
    vector, slot = positions[newest] - 1, 64 + 256 * newest
    for number, array in enumerate(before[num_weights:]):
        saved = piece[slot + 64 * number : slot + 64 * (number + 1)].copy()
        array[vector : vector + VECTOR] = saved.view(np.float32)
