"""Recorded kernels of one block, and running exactly these again.

Of a kernel the tape remembers which slots and weights it reads, its other arguments, and the state
of the random generator if it draws numbers. Nothing else runs again: no Python code of the model,
no operator that was kept. :mod:`.recorder` records.

Torch's own selective checkpoints are not used: they run the block's Python code again, at the first
use only, cache the output of every kept kernel whether the backward reads it or not, and hold the
weights' memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.models.saved_activations.saved_tensors import SavedTensor
from penstock.models.saved_activations.tensor_slots import StorageSlot
from penstock.models.torch_device import torch_device
from penstock.models.torch_internals import StorageWeakRef, key_of

_PRUNE_EVERY = 64


class _Hole:
    """The place of a tensor among recorded arguments."""


_HOLE = _Hole()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """A kernel with its arguments but for the tensors.

    ``random_state`` is that of the generator of ``random_device`` before the kernel ran, a flat
    uint8 tensor on the host (5,056 bytes for a CPU's, 16 for a GPU's); None if it draws nothing.
    """

    kernel: Callable[..., Any]
    args: Any
    kwargs: Any
    random_device: torch.device
    random_state: torch.Tensor | None

    @classmethod
    def of(
        cls,
        kernel: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        device: torch.device,
        random: bool,
    ) -> RecordedCall:
        """Returns the record of the call that is about to be made; tensors among the arguments are
        not held. ``random``: the kernel draws numbers from the generator of ``device``.
        """
        # Before the kernel runs: it moves the generator on.
        state = torch_device(device).generator().get_state() if random else None
        return cls(
            kernel=kernel,
            args=_mapped(args, _without_tensor),
            kwargs=_mapped(kwargs, _without_tensor),
            random_device=device,
            random_state=state,
        )

    def repeat(self, tensors: Iterator[torch.Tensor]) -> Any:
        """Call the kernel with these tensors and the random numbers of the first time; returns its
        results, of the shapes and dtypes that they had.

        ``tensors`` come in the order of :func:`tensors_in`, with the shapes, strides and dtypes of
        the first time: the same kernel then gives the same bits.
        """

        def with_tensor(item: Any) -> Any:
            return next(tensors) if item is _HOLE else item

        args, kwargs = _mapped(self.args, with_tensor), _mapped(self.kwargs, with_tensor)
        if self.random_state is None:
            return self.kernel(*args, **kwargs)
        with _state(torch_device(self.random_device).generator(), self.random_state):
            return self.kernel(*args, **kwargs)


@dataclass(slots=True, weakref_slot=True, kw_only=True)
class RecordedKernel:
    """A kernel of ``operator`` that was recorded. It lives as long as a slot that it makes is
    needed.

    ``makes``: the slot of each tensor that it returns (None: nobody's, or not new). ``changes``:
    slots whose storage it changed, and the slots that stand for the result.
    """

    log: OpLog
    operator: str
    call: RecordedCall
    reads: Sequence[SavedTensor]
    makes: list[weakref.ref[StorageSlot] | None] = field(default_factory=list)
    changes: list[tuple[StorageSlot, weakref.ref[StorageSlot]]] = field(default_factory=list)

    def make(self) -> None:
        """Runs all recorded kernels again that the block still needs."""
        self.log.run_again()

    def run(self) -> None:
        """Run the kernel and fill its slots.

        Raises:
            SavedActivationError: a kernel reads something that is not there.
        """
        result = self.call.repeat(iter([view.tensor() for view in self.reads]))
        for before, after in self.changes:
            # The kernel has changed this storage in place: the bytes are those of ``after`` now,
            # and the slot before must not offer them any more.
            storage = before.bytes_now()
            before.take()
            _fill(after, storage)
        for slot, made in zip(self.makes, tensors_in(result), strict=True):
            if slot is not None:
                _fill(slot, made.untyped_storage())


class OpLog:
    """The recorded kernels of one block in one forward."""

    def __init__(self) -> None:
        self._nodes: deque[weakref.ref[RecordedKernel]] = deque()
        self._made: dict[int, tuple[StorageWeakRef, StorageSlot]] = {}
        self._since_prune = 0

    def made(self, storage: torch.UntypedStorage) -> StorageSlot | None:
        """Returns the slot of a storage that a recorded kernel made; None if none did."""
        found = self._made.get(key_of(storage))
        return None if found is None else found[1]

    @property
    def kernels(self) -> list[RecordedKernel]:
        """The recorded kernels whose results are still needed, in the order in which they ran."""
        return [node for reference in self._nodes if (node := reference()) is not None]

    def add(self, node: RecordedKernel) -> None:
        """Append the next kernel, in the order in which they ran."""
        self._nodes.append(weakref.ref(node))

    def enter(self, storage: torch.UntypedStorage, slot: StorageSlot) -> None:
        """Note that a recorded kernel made what this storage has now, and that ``slot`` stands for
        it.
        """
        # The weak reference also keeps the address from being used for another storage.
        self._made[key_of(storage)] = (StorageWeakRef(storage), slot)  # type: ignore[no-untyped-call]
        self._since_prune += 1
        if self._since_prune >= _PRUNE_EVERY:
            self._since_prune = 0
            self._made = {
                place: (storage_ref, slot)
                for place, (storage_ref, slot) in self._made.items()
                if not storage_ref.expired()  # type: ignore[no-untyped-call]
            }

    def leave(self, storage: torch.UntypedStorage) -> None:
        """Note that no recorded kernel makes what this storage has now."""
        self._made.pop(key_of(storage), None)

    def close(self) -> None:
        """Forget kernels whose results nothing refers to: the block is over."""
        self._made.clear()
        self._nodes = deque(node for node in self._nodes if node() is not None)

    def run_again(self) -> int:
        """Make everything dropped that is still needed; returns the number of kernels run.

        In the recorded order, so that changes in place happen as in the forward.

        Raises:
            SavedActivationError: a kernel reads something that is swapped out, or a weight that is
                not bound; nothing has run then.
        """
        nodes = deque(self.kernels)
        for node in nodes:
            for view in node.reads:
                view.check()
        self._nodes.clear()
        count = len(nodes)
        # Each node goes right after its run, and with it the slots that only it read: what lies
        # between two dropped operators is freed as soon as the second one has it.
        with torch.no_grad():
            while nodes:
                nodes.popleft().run()
        return count

    def forget(self) -> None:
        """Forget all kernels: nothing will be made again."""
        self._nodes.clear()
        self._made.clear()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors, of any shape and dtype, in nested lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the same nesting of lists, tuples and dictionaries with every item changed."""
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    return change(value)


def _without_tensor(item: Any) -> Any:
    return _HOLE if isinstance(item, torch.Tensor) else item


@contextmanager
def _state(generator: torch.Generator, state: torch.Tensor) -> Iterator[None]:
    """Let the generator start from ``state`` inside; afterwards it goes on where it was."""
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


def _fill(slot: weakref.ref[StorageSlot], storage: torch.UntypedStorage) -> None:
    found = slot()
    if found is not None:
        found.fill(storage)
