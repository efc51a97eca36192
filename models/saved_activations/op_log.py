"""The op log: the recorded kernels of one block, and their second run.

The log stores the slots and weights that a kernel reads and its other arguments. It stores the
state of the random generator if the kernel draws numbers. Nothing else runs again: no Python code
of the model, no kept operator. :mod:`.recorder` records.

Torch's own selective checkpoints are not used. They run the block's Python code again, and only at
the first use. They cache the output of every kept kernel, even if the backward never reads it. They
also hold the weights' memory.
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
    """A kernel with its arguments, without the tensors among them.

    ``random_state``: the state of ``random_device``'s generator before the kernel ran, a flat uint8
    tensor on the host. It has 5,056 bytes for a CPU and 16 for a GPU; None if the kernel draws no
    numbers.
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
        """Returns the record of the call that follows; tensors among its arguments are not held.
        ``random``: the kernel draws numbers from the generator of ``device``.
        """
        # Before the kernel runs: the kernel advances the generator.
        state = torch_device(device).generator().get_state() if random else None
        return cls(
            kernel=kernel,
            args=_mapped(args, _without_tensor),
            kwargs=_mapped(kwargs, _without_tensor),
            random_device=device,
            random_state=state,
        )

    def repeat(self, tensors: Iterator[torch.Tensor]) -> Any:
        """Calls the kernel with ``tensors`` and the random numbers of the first run. Returns the
        results, with their first shapes and dtypes.

        ``tensors`` come in the order of :func:`tensors_in`. Their shapes, strides and dtypes are
        those of the first run, so the same kernel gives the same bits.
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
    """A recorded kernel of ``operator``. It lives as long as a slot that it makes is needed.

    ``makes``: the slot of each returned tensor; None if no slot needs the tensor or it is not new.
    ``changes``: the slots of changed storages, each with the slot of the result.
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
        """Runs the kernel and fills its slots.

        Raises:
            SavedActivationError: the kernel reads a tensor that is not present.
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
        entry = self._made.get(key_of(storage))
        return None if entry is None else entry[1]

    @property
    def kernels(self) -> list[RecordedKernel]:
        """The recorded kernels with results that are still needed, in their first order."""
        return [node for reference in self._nodes if (node := reference()) is not None]

    def add(self, node: RecordedKernel) -> None:
        """Appends the next kernel in the order of the forward."""
        self._nodes.append(weakref.ref(node))

    def enter(self, storage: torch.UntypedStorage, slot: StorageSlot) -> None:
        """Records that a recorded kernel made the present contents of ``storage``, held by
        ``slot``.
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
        """Records that no recorded kernel makes the present contents of ``storage``."""
        self._made.pop(key_of(storage), None)

    def close(self) -> None:
        """Forgets kernels with unreferenced results: the block is over."""
        self._made.clear()
        self._nodes = deque(node for node in self._nodes if node() is not None)

    def run_again(self) -> int:
        """Makes all dropped tensors that are still needed; returns the number of kernels run.

        Kernels run in the recorded order, so that changes in place happen as in the forward.

        Raises:
            SavedActivationError: a kernel reads a tensor that is swapped out, or a weight that is
                not bound. No kernel has run then.
        """
        nodes = deque(self.kernels)
        for node in nodes:
            for view in node.reads:
                view.check()
        self._nodes.clear()
        count = len(nodes)
        # Each node is freed right after its run, with the slots that only this node read. A tensor
        # between two dropped operators is freed as soon as the second one has read it.
        with torch.no_grad():
            while nodes:
                nodes.popleft().run()
        return count

    def forget(self) -> None:
        """Forgets all kernels; no tensor can be made again."""
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
    """Starts the generator from ``state`` inside; afterwards it continues from its former state."""
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


def _fill(slot: weakref.ref[StorageSlot], storage: torch.UntypedStorage) -> None:
    target = slot()
    if target is not None:
        target.fill(storage)
