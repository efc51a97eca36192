"""The store of one stage and micro-batch between BACKWARD_INPUT and BACKWARD_WEIGHT.

An entry is one use of parameters in the forward
(:mod:`penstock.models.split_backward.deferred_entries`). It holds the inputs of its weight
gradients: the gradient of its output and the input that it saved.
:mod:`penstock.models.split_backward.split` watches the forward and makes the entries.

Gradients are bit-equal to those of an unsplit backward. The kernels are the same, and a parameter's
gradients are added up in autograd's order (the latest use first) before they reach ``.grad``. The
order may differ only for a parameter with three or more uses, of which some are split and some not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from penstock.models.split_backward.deferred_entries import (
    DeferredTensor,
    Entry,
    GraphEntry,
    ParameterRecord,
    ProductEntry,
    record_of_trained,
)
from penstock.models.split_backward.products import Receive


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsplit:
    """A use of parameters with gradients from BACKWARD_INPUT, and the reason."""

    function: str
    reason: str


class DeferredWeights:
    """Deferred weight gradients of one stage for one micro-batch: one forward, one backward.

    A forward fills the store, the backward seals it, and :meth:`run` empties it, one after the
    other: nothing is locked.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._records: list[ParameterRecord] = []
        self._unsplit: Counter[Unsplit] = Counter()
        self.shared: list[DeferredTensor] = []
        """Tensors saved by graphs that several entries may share."""
        self.anchor = torch.zeros((), requires_grad=True)
        """A tensor that requires a gradient, passed to autograd in place of one that does not."""

    @property
    def bytes(self) -> int:
        """Bytes that the store keeps alive, without weights and gradient sums; each storage
        once.
        """
        held = {
            storage.data_ptr(): storage.nbytes()
            for tensor in self.held()
            for storage in (tensor.untyped_storage(),)
        }
        return sum(held.values())

    @property
    def unsplit(self) -> dict[Unsplit, int]:
        """Numbers of parameter uses that were left to BACKWARD_INPUT."""
        return dict(self._unsplit)

    def run(self) -> None:
        """Adds the weight gradients to ``.grad``, latest use first, as autograd does.

        An entry's tensors are freed right after their use.

        Raises:
            RuntimeError: BACKWARD_INPUT has not run.
        """
        entries, records = self._take()
        units = _units(entries)
        del entries  # so that each unit's tensors have no other reference when it is popped
        sums = _Sums(record for unit in units for record in unit.records)
        for record in records:
            sums.expect(record, len(record.waiting))
        while units:
            for record, gradient in units.pop().gradients():
                sums.add(record, gradient)
        # BACKWARD_INPUT summed up the unsplit uses of a parameter that is also split.
        for record in records:
            while record.waiting:
                sums.add(record, record.waiting.pop())
        self.shared.clear()

    def discard(self) -> None:
        """Frees everything, because the micro-batch is dropped."""
        self._entries.clear()
        self._records.clear()
        self.shared.clear()

    def seal(self) -> None:
        """Drops the entries that BACKWARD_INPUT did not reach, with the weights that they refer to.
        BACKWARD_INPUT is over; gradients go to the current ``.grad``.
        """
        self._entries = [entry for entry in self._entries if entry.reached]
        for record in self._records:
            record.settle()

    def append(self, entry: Entry) -> None:
        """Takes the next entry, in the order of the forward."""
        self._entries.append(entry)
        for record in entry.records:
            record.uses += 1

    def record_of(self, parameter: torch.Tensor) -> ParameterRecord:
        """Returns a new record of a parameter, of any shape, that this forward uses."""
        record = ParameterRecord(parameter)
        self._records.append(record)
        return record

    def product(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, transposed: bool
    ) -> Receive:
        """Returns the receiver of output gradient and input of the forward's next product: the sink
        of compiled layers (:class:`penstock.models.split_backward.products.Sink`).
        """
        records = [record_of_trained(leaf) for leaf in (weight, bias)]
        self._records += filter(None, records)
        entry = ProductEntry(None, *records, transposed=transposed)
        self.append(entry)
        return entry.take

    def note_unsplit(self, unsplit: Unsplit) -> None:
        """Records that a use of parameters is left to BACKWARD_INPUT."""
        self._unsplit[unsplit] += 1

    def take_products(self) -> dict[tuple[int, int], ProductEntry]:
        """Removes the products with parameters that have no other use; returns them by the place of
        their gradients.
        """
        uses = Counter(record for entry in self._entries for record in entry.records)
        taken = {
            entry.place: entry
            for entry in self._entries
            if isinstance(entry, ProductEntry)
            and entry.reached
            and all(uses[r] == 1 and not r.waiting for r in entry.records)
        }
        chosen = {id(entry) for entry in taken.values()}
        self._entries = [entry for entry in self._entries if id(entry) not in chosen]
        return taken

    def _take(self) -> tuple[list[Entry], list[ParameterRecord]]:
        if self._entries and not any(entry.reached for entry in self._entries):
            raise RuntimeError("BACKWARD_WEIGHT before BACKWARD_INPUT: no gradients are stored")
        entries, records = self._entries, self._records
        self._entries, self._records = [], []
        return [entry for entry in entries if entry.reached], records

    def held(self) -> Iterator[torch.Tensor]:
        """Yields the tensors, of any shape, that the store keeps alive; some may share storages."""
        for entry in self._entries:
            yield from entry.held()
        for saved in self.shared:
            yield from saved.held()
        for record in self._records:
            yield from record.waiting


def run_together(stores: Sequence[DeferredWeights], *, concatenate: bool = False) -> None:
    """Runs BACKWARD_WEIGHT of several micro-batches of one stage, in the given order.

    ``concatenate``: one matrix product per Linear over all micro-batches' rows (2BP, arXiv
    2405.18047, section 3) instead of one for each micro-batch. It takes fewer kernels and a copy of
    inputs and gradients, and rounds differently. Without it, and for everything but Linear, bits
    are those of one run after the other.

    Raises:
        RuntimeError: BACKWARD_INPUT of a micro-batch has not run.
    """
    if concatenate and len(stores) > 1:
        products: defaultdict[tuple[int, int], list[ProductEntry]] = defaultdict(list)
        for store in stores:
            for place, entry in store.take_products().items():
                products[place].append(entry)
        while products:
            _, entries = products.popitem()
            for record, gradient in ProductEntry.joined(entries).gradients():
                record.accumulate(gradient)
    for store in stores:
        store.run()


class _GraphUnit:
    """Graph entries that must run in one backward, because they share nodes."""

    def __init__(self, entries: list[GraphEntry]) -> None:
        self._entries = entries
        self.records = tuple(dict.fromkeys(r for entry in entries for r in entry.records))

    def gradients(self) -> Iterator[tuple[ParameterRecord, torch.Tensor | None]]:
        """Yields the gradients of all parameters, of their shapes; None where none arrived."""
        roots, seeds = [], []
        for entry in self._entries:
            starts, gradients = entry.roots()
            roots += starts
            seeds += gradients
        self._entries.clear()
        edges = [record.edge for record in self.records if record.edge is not None]
        parameter_gradients = torch.autograd.grad(roots, edges, seeds, allow_unused=True)
        yield from zip(self.records, parameter_gradients, strict=True)


_Unit = _GraphUnit | ProductEntry


def _units(entries: Sequence[Entry]) -> list[_Unit]:
    """Returns entries in the order of the forward. Those with shared nodes are together, at the
    place of the latest. Only tensors derived from parameters are shared, so two such entries with a
    parameter in common may share nodes.
    """
    groups: list[tuple[set[ParameterRecord], list[GraphEntry]]] = []
    places: dict[int, int] = {}
    for position, entry in enumerate(entries):
        if not isinstance(entry, GraphEntry) or not entry.derived:
            continue
        records, members = set(entry.records), [entry]
        for group in [g for g in groups if not records.isdisjoint(g[0])]:
            groups.remove(group)
            records |= group[0]
            members = group[1] + members
        groups.append((records, members))
        places[id(entry)] = position
    at = {places[id(members[-1])]: _GraphUnit(members) for _, members in groups}
    units: list[_Unit] = []
    for position, entry in enumerate(entries):
        if position in at:
            units.append(at[position])
        elif isinstance(entry, ProductEntry):
            units.append(entry)
        elif not entry.derived:
            units.append(_GraphUnit([entry]))
    return units


class _Sums:
    """Adds up a parameter's gradients, in the compute dtype, and hands the sum on with the
    last.
    """

    def __init__(self, expected: Iterable[ParameterRecord]) -> None:
        self._missing = Counter(expected)
        self._sums: dict[ParameterRecord, torch.Tensor] = {}

    def expect(self, record: ParameterRecord, count: int) -> None:
        """Adds to the number of expected gradients."""
        if count:
            self._missing[record] += count

    def add(self, record: ParameterRecord, gradient: torch.Tensor | None) -> None:
        """Takes one gradient of the parameter's shape; None if the use had none."""
        before = self._sums.pop(record, None)
        if before is not None:
            # Not in place: another entry may keep the same tensor. Autograd adds up the same way,
            # so the rounding is equal.
            gradient = before if gradient is None else before + gradient
        self._missing[record] -= 1
        if gradient is None:
            return
        if self._missing[record]:
            self._sums[record] = gradient
        else:
            record.accumulate(gradient)
