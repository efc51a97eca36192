"""Savings of a block's activations by dropping operators, for every set of operators.

Savings do not add up. A dropped tensor is made again from another one. If the backward does not
read that other tensor, it is kept for this purpose alone (the input of a dropout, for example). If
the operator that makes it is dropped too, it is no longer kept. One forward that drops everything
shows all facts: kernels that would run again, their inputs, and the backward's inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from penstock.models.saved_activations import SavedActivations
from penstock.models.saved_activations.op_log import RecordedKernel
from penstock.models.saved_activations.tensor_slots import SlotView, StorageSlot

NeededBy = tuple[tuple[str, ...], ...]
"""Sets of operators, sorted: all of one set must be dropped for something to be read again."""

_Sets = frozenset[frozenset[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropMeasure:
    """Bytes of one micro-batch.

    ``saved`` by operator: its outputs that the backward reads. ``sources`` by operator and
    :data:`NeededBy`: its outputs that are kept only to make dropped ones again.
    """

    saved: Mapping[str, float]
    sources: Mapping[tuple[str, NeededBy], float]


def measure_drops(activations: SavedActivations, given: Iterable[int]) -> DropMeasure:
    """Returns the savings of dropping, from a forward of one block that has dropped all operators.
    ``given`` are addresses of storages that the block received and did not make: its input.
    """
    needs = _needs(activations.kernels)
    addresses = frozenset(given)
    saved: defaultdict[str, float] = defaultdict(float)
    sources: defaultdict[tuple[str, NeededBy], float] = defaultdict(float)
    for slot in activations.slots:
        operator = _maker(slot)
        if slot.present and slot.bytes_now().data_ptr() in addresses:
            continue
        if slot.saved:
            saved[operator] += slot.num_bytes
        elif needed_by := _sorted(needs.get(slot, frozenset()), without=operator):
            sources[operator, needed_by] += slot.num_bytes
    saved.pop("", None)  # belongs to no operator, so it cannot be dropped
    return DropMeasure(saved=dict(saved), sources=dict(sources))


def _needs(kernels: list[RecordedKernel]) -> dict[StorageSlot, _Sets]:
    """Returns the slots that kernels read, and the sets of operators that need each."""
    needs: dict[StorageSlot, _Sets] = {}
    for kernel in reversed(kernels):
        readers: set[frozenset[str]] = set()
        for slot in _made(kernel):
            readers |= {frozenset()} if slot.saved else needs.get(slot, frozenset())
        asking = {names | {kernel.operator} for names in readers}
        for view in kernel.reads:
            if isinstance(view, SlotView):
                needs[view.slot] = _smallest({*needs.get(view.slot, ()), *asking})
    return needs


def _made(kernel: RecordedKernel) -> Iterator[StorageSlot]:
    references = [*kernel.makes, *(after for _, after in kernel.changes)]
    for reference in references:
        slot = None if reference is None else reference()
        if slot is not None:
            yield slot


def _smallest(sets: set[frozenset[str]]) -> _Sets:
    """Returns the minimal sets: each has no proper subset among ``sets``."""
    return frozenset(one for one in sets if not any(other < one for other in sets))


def _sorted(sets: _Sets, *, without: str) -> NeededBy:
    """Returns the sets without an operator: if the source itself is dropped, it is not kept."""
    return tuple(sorted(tuple(sorted(names)) for names in sets if without not in names))


def _maker(slot: StorageSlot) -> str:
    return slot.maker.operator if isinstance(slot.maker, RecordedKernel) else ""
