"""The store of one stage and micro-batch between BACKWARD_INPUT and BACKWARD_WEIGHT.

An entry is one use of parameters in the forward, with what its weight gradients need: the gradient
of its output and the input it saved. Weights themselves are let go as soon as BACKWARD_INPUT has
passed: BACKWARD_WEIGHT reads none, so their buffers may hold another stage by then. Entries are
made by :mod:`penstock.models.split`, which watches the forward.

Gradients are bit-equal to those of an unsplit backward: the kernels are the same, and a parameter's
contributions are added up in autograd's order (the latest use first) before they reach ``.grad``.
Only a parameter with three or more uses of which some are split and some not may be summed up in
another order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

SavedTensorHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsplit:
    """A use of parameters whose gradients BACKWARD_INPUT computes, and why."""

    function: str
    reason: str


class DeferredWeights:
    """Deferred weight gradients of one stage for one micro-batch: one forward, one backward."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._records: list[ParameterRecord] = []
        self._kept: list[Kept] = []
        self._unsplit: Counter[Unsplit] = Counter()
        self.anchor = torch.zeros((), requires_grad=True)
        """Stands for what needs no gradient, where autograd wants something that does."""

    @property
    def bytes(self) -> int:
        """Memory that the store keeps alive, weights and gradient sums apart; each storage once."""
        held = {
            storage.data_ptr(): storage.nbytes()
            for tensor in self._held()
            for storage in (tensor.untyped_storage(),)
        }
        return sum(held.values())

    @property
    def unsplit(self) -> dict[Unsplit, int]:
        """What was left to BACKWARD_INPUT, and how often."""
        return dict(self._unsplit)

    def run(self) -> None:
        """Add the weight gradients to ``.grad``; what an entry kept is freed right after its use.

        Raises:
            RuntimeError: BACKWARD_INPUT has not run.
        """
        entries, records = self._take()
        units = _units(entries)
        del entries
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
        self._kept.clear()

    def discard(self) -> None:
        """Forget everything: the micro-batch is given up."""
        self._entries.clear()
        self._records.clear()
        self._kept.clear()

    def seal(self) -> None:
        """BACKWARD_INPUT is over: drop the entries that it did not reach, with the weights they
        refer to.
        """
        self._entries = [entry for entry in self._entries if entry.reached]

    def append(self, entry: Entry) -> None:
        """Take the next entry, in the order of the forward."""
        self._entries.append(entry)
        for record in entry.records:
            record.uses += 1

    def record_of(self, parameter: torch.Tensor) -> ParameterRecord:
        """A new record of a parameter."""
        record = ParameterRecord(parameter)
        self._records.append(record)
        return record

    def keep(self, tensor: torch.Tensor, hooks: SavedTensorHooks | None) -> Kept:
        """Pack a tensor that entries share."""
        self._kept.append(Kept(tensor, hooks))
        return self._kept[-1]

    def note_unsplit(self, unsplit: Unsplit) -> None:
        """Remember that a use of parameters is left to BACKWARD_INPUT."""
        self._unsplit[unsplit] += 1

    def take_products(self) -> dict[tuple[int, int], ProductEntry]:
        """Take out the products whose parameters have no other use, by their gradients' place."""
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

    def _held(self) -> Iterator[torch.Tensor]:
        for entry in self._entries:
            yield from entry.held()
        for kept in self._kept:
            yield from kept.held()
        for record in self._records:
            yield from record.waiting


def run_together(stores: Sequence[DeferredWeights], *, concatenate: bool = False) -> None:
    """BACKWARD_WEIGHT of several micro-batches of one stage, in the given order.

    ``concatenate``: one matrix product per Linear over all micro-batches' rows (2BP, section 3)
    instead of one each: fewer kernels, a copy of inputs and gradients, other rounding. Without it,
    and for everything but Linear, bits are those of one run after the other.
    """
    if concatenate and len(stores) > 1:
        found: defaultdict[tuple[int, int], list[ProductEntry]] = defaultdict(list)
        for store in stores:
            for place, entry in store.take_products().items():
                found[place].append(entry)
        while found:
            _, entries = found.popitem()
            for record, gradient in ProductEntry.joined(entries).gradients():
                record.accumulate(gradient)
    for store in stores:
        store.run()


class ParameterRecord:
    """A parameter of the stage: where its gradient goes.

    Holds the gradient array that was bound when the forward ran, else (none bound, or hooks that
    want to see the gradient) the parameter.
    """

    __slots__ = (
        "__weakref__",
        "_gradient",
        "_parameter",
        "caught",
        "edge",
        "place",
        "uses",
        "waiting",
    )

    def __init__(self, parameter: torch.Tensor) -> None:
        hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        self._gradient = None if hooks else parameter.grad
        self._parameter = parameter if self._gradient is None else None
        self.place = id(parameter) if self._gradient is None else self._gradient.data_ptr()
        self.edge: GradientEdge | None = None
        """Where graphs of the store end."""
        self.caught = False
        """Whether a leaf of the main graph stands for the parameter."""
        self.uses = 0
        """How many entries have gradients for it."""
        self.waiting: list[torch.Tensor] = []

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Add to ``.grad`` as autograd does: converted to its type, then added in place."""
        if self._gradient is not None:
            self._gradient.add_(gradient.to(self._gradient.dtype))
        else:
            assert self._parameter is not None
            torch.autograd.backward([self._parameter], [gradient])

    def receive(self, gradient: torch.Tensor) -> None:
        """A gradient that BACKWARD_INPUT made; it waits if others follow that belong to one sum."""
        if self.uses or (self.caught and self.edge is not None):
            self.waiting.append(gradient)
        else:
            self.accumulate(gradient)


class Kept:
    """A tensor that waits for BACKWARD_WEIGHT, packed by the saved-tensor hooks around the forward
    (a swap, for example), if any.
    """

    __slots__ = ("_packed", "_unpack", "_version")

    def __init__(self, tensor: torch.Tensor, hooks: SavedTensorHooks | None) -> None:
        self._packed = tensor if hooks is None else hooks[0](tensor)
        self._unpack = None if hooks is None else hooks[1]
        self._version = tensor._version

    def get(self) -> torch.Tensor:
        """The tensor; raises RuntimeError if it was changed in place meanwhile."""
        if self._unpack is not None:
            return self._unpack(self._packed)
        tensor: torch.Tensor = self._packed
        if tensor._version != self._version:
            raise RuntimeError(
                "a tensor needed for a weight gradient was changed in place: shape"
                f" {tuple(tensor.shape)}, version {tensor._version}, expected {self._version}"
            )
        return tensor

    def held(self) -> Iterator[torch.Tensor]:
        """What it keeps alive."""
        if isinstance(self._packed, torch.Tensor):
            yield self._packed


class Lent:
    """Weights that a use saved: real until BACKWARD_INPUT has passed, then only their shape."""

    __slots__ = ("_shape", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._shape = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def get(self) -> torch.Tensor:
        """The weights, or memory of their shape, which no weight gradient reads."""
        if self._tensor is not None:
            return self._tensor
        size, stride, dtype, device = self._shape
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def forget(self) -> None:
        """Let go of the weights."""
        self._tensor = None


class GraphEntry:
    """A use of parameters with a small autograd graph of its own.

    The graph ends at ``inputs`` (edges of the activations that went in) and at the edges of
    ``records``; it saved ``kept`` and ``lent``. ``derived``: it reaches a parameter through tensors
    that other entries may share.
    """

    __slots__ = ("_edges", "_roots", "_seeds", "derived", "inputs", "kept", "lent", "records")

    def __init__(self, records: tuple[ParameterRecord, ...], *, derived: bool) -> None:
        self.records = records
        self.derived = derived
        self.inputs: list[GradientEdge] = []
        self.kept: list[Kept] = []
        self.lent: list[Lent] = []
        self._edges: list[GradientEdge] = []
        self._roots: list[GradientEdge] = []
        self._seeds: list[torch.Tensor] = []

    @property
    def reached(self) -> bool:
        """Whether BACKWARD_INPUT brought a gradient."""
        return bool(self._roots)

    def attach(self, edges: Iterable[GradientEdge]) -> None:
        """The edges of its outputs."""
        self._edges = list(edges)

    def receive(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Keep the gradients of the outputs; returns those of the inputs."""
        pairs = [(e, g) for e, g in zip(self._edges, gradients, strict=True) if g is not None]
        self._roots = [edge for edge, _ in pairs]
        self._seeds = [gradient for _, gradient in pairs]
        found: list[torch.Tensor | None] = [None] * len(self.inputs)
        if self.inputs and pairs:
            found = list(
                torch.autograd.grad(
                    self._roots, self.inputs, self._seeds, retain_graph=True, allow_unused=True
                )
            )
        for lent in self.lent:
            lent.forget()
        self.lent.clear()
        self.inputs, self._edges = [], []
        return found

    def roots(self) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Where its half of the backward starts, and the gradients there."""
        return self._roots, self._seeds

    def held(self) -> Iterator[torch.Tensor]:
        """What it keeps alive."""
        yield from self._seeds
        for kept in self.kept:
            yield from kept.held()


class ProductEntry:
    """``rows @ weight.T + bias`` (or ``rows @ weight``) with parameters that nothing else touched.

    ``rows`` has shape (..., inputs), the gradient (..., outputs).
    """

    __slots__ = ("_bias", "_gradient", "_rows", "_transposed", "_weight", "records")

    def __init__(
        self,
        rows: Kept | None,
        weight: ParameterRecord | None,
        bias: ParameterRecord | None,
        *,
        transposed: bool,
        gradient: torch.Tensor | None = None,
    ) -> None:
        self._rows, self._weight, self._bias = rows, weight, bias
        self._transposed = transposed
        self._gradient = gradient
        self.records = tuple(filter(None, (weight, bias)))

    @property
    def reached(self) -> bool:
        """Whether BACKWARD_INPUT brought a gradient."""
        return self._gradient is not None

    @property
    def place(self) -> tuple[int, int]:
        """Where its gradients go: equal for the same Linear in other micro-batches."""
        weight, bias = self._weight, self._bias
        return (0 if weight is None else weight.place, 0 if bias is None else bias.place)

    def receive(self, gradient: torch.Tensor) -> None:
        """Keep the gradient of the product."""
        self._gradient = gradient

    def gradients(self) -> Iterator[tuple[ParameterRecord, torch.Tensor]]:
        """Gradients of weight and bias, by the kernels of addmm's derivative."""
        assert self._gradient is not None
        gradient = self._gradient.reshape(-1, self._gradient.shape[-1])
        if self._bias is not None:
            yield self._bias, self._gradient.sum_to_size(gradient.shape[1])
        if self._weight is not None:
            assert self._rows is not None
            rows = self._rows.get()
            rows = rows.reshape(-1, rows.shape[-1])
            product = rows.t().mm(gradient) if self._transposed else gradient.t().mm(rows)
            yield self._weight, product

    def held(self) -> Iterator[torch.Tensor]:
        """What it keeps alive."""
        if self._gradient is not None:
            yield self._gradient
        if self._rows is not None:
            yield from self._rows.held()

    @staticmethod
    def joined(entries: Sequence[ProductEntry]) -> ProductEntry:
        """The same product over the rows of several micro-batches."""
        first = entries[0]
        if len(entries) == 1:
            return first
        rows, gradients = [], []
        for entry in entries:
            assert entry._gradient is not None
            gradients.append(entry._gradient.reshape(-1, entry._gradient.shape[-1]))
            if entry._rows is not None:
                kept = entry._rows.get()
                rows.append(kept.reshape(-1, kept.shape[-1]))
        return ProductEntry(
            Kept(torch.cat(rows), None) if rows else None,
            first._weight,
            first._bias,
            transposed=first._transposed,
            gradient=torch.cat(gradients),
        )


Entry = GraphEntry | ProductEntry


class _GraphUnit:
    """Graph entries that must run in one backward, because they share nodes."""

    def __init__(self, entries: list[GraphEntry]) -> None:
        self._entries = entries
        self.records = tuple(dict.fromkeys(r for entry in entries for r in entry.records))

    def gradients(self) -> Iterator[tuple[ParameterRecord, torch.Tensor | None]]:
        """Gradients of all parameters; None where none arrived."""
        roots, seeds = [], []
        for entry in self._entries:
            starts, gradients = entry.roots()
            roots += starts
            seeds += gradients
        self._entries.clear()
        edges = [record.edge for record in self.records if record.edge is not None]
        found = torch.autograd.grad(roots, edges, seeds, allow_unused=True)
        yield from zip(self.records, found, strict=True)


_Unit = _GraphUnit | ProductEntry


def _units(entries: Sequence[Entry]) -> list[_Unit]:
    """Entries in the order of the forward, those with shared nodes together at the latest's place.

    Only tensors derived from parameters are shared, so two such entries with a parameter in common
    may share some.
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
    """Adds up a parameter's contributions and hands on the sum with the last one."""

    def __init__(self, expected: Iterable[ParameterRecord]) -> None:
        self._missing = Counter(expected)
        self._sums: dict[ParameterRecord, torch.Tensor] = {}

    def expect(self, record: ParameterRecord, contributions: int) -> None:
        """More will come."""
        if contributions:
            self._missing[record] += contributions

    def add(self, record: ParameterRecord, gradient: torch.Tensor | None) -> None:
        """One contribution; None if the use turned out to have none."""
        before = self._sums.pop(record, None)
        if before is not None:
            # Not in place: a gradient may be the very tensor that another entry keeps.
            gradient = before if gradient is None else before + gradient
        self._missing[record] -= 1
        if gradient is None:
            return
        if self._missing[record]:
            self._sums[record] = gradient
        else:
            record.accumulate(gradient)
