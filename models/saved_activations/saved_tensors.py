"""All saved tensors of one forward: each storage once, apart from weights and constants."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch

from penstock.models.saved_activations.tensor_slots import Opaque, SlotView, StorageSlot, storage_of
from penstock.models.saved_activations.weights import BoundWeights
from penstock.models.torch_internals import key_of


class SavedTensor(Protocol):
    """A saved tensor: a view of a slot, a view of a weight, or a tensor that is simply held."""

    def tensor(self) -> torch.Tensor:
        """Returns the tensor without a graph, with its saved shape, strides and dtype. A dropped
        tensor is made again, and a copy is waited for.

        Raises:
            SavedActivationError: the tensor is not available.
        """

    def check(self) -> None:
        """Raises if the tensor is not available; changes nothing.

        Raises:
            SavedActivationError: as :meth:`tensor`.
        """


class SavedTensors:
    """The slots of one forward, by storage. Weak references: a slot lives as long as a graph or a
    recorded kernel needs it.

    ``constants`` are tensors of any shape that outlive the forward; they are referred to, not
    counted and not swapped. ``rebind``: weights are found again, not held.
    """

    def __init__(
        self, weights: BoundWeights, constants: Iterable[torch.Tensor], *, rebind: bool
    ) -> None:
        self.block: int | None = None
        self._weights = weights
        self._rebind = rebind
        # Addresses identify constants: constants live on, so none of their addresses is reused
        # meanwhile.
        self._constants = {tensor.untyped_storage().data_ptr() for tensor in constants}
        self._slots: list[weakref.ref[StorageSlot]] = []
        # Keys are addresses of storage objects. No address is reused while its slot holds the
        # storage. A slot drops its storage after the forward (swaps) or after forget_place.
        self._held: weakref.WeakValueDictionary[int, StorageSlot] = weakref.WeakValueDictionary()
        self._num_slots = 0

    def view(self, tensor: torch.Tensor) -> SavedTensor:
        """Returns the later location of the tensor, of any shape and dtype.

        The tensor's memory is held from now on, except that of a weight which is found again.
        """
        storage = storage_of(tensor)
        if storage is None:
            return Opaque(tensor)
        weight = self._weights.find(tensor, self.block)
        if weight is not None and self._rebind:
            return weight
        slot = self._held.get(key_of(storage))
        if slot is None:
            movable = weight is None and storage.data_ptr() not in self._constants
            slot = self.new_slot(storage, _maker(tensor), movable=movable)
            self._held[key_of(storage)] = slot
        return view_of(slot, tensor)

    def held(self, storage: torch.UntypedStorage) -> StorageSlot | None:
        """Returns the slot that holds this storage; None if there is no such slot."""
        return self._held.get(key_of(storage))

    def forget_place(self, storage: torch.UntypedStorage) -> None:
        """Forgets the slot of the storage: the slot holds a copy of the bytes now."""
        self._held.pop(key_of(storage), None)

    def new_slot(
        self, storage: torch.UntypedStorage, label: str, *, movable: bool = True
    ) -> StorageSlot:
        """Returns a new slot over this storage, of any bytes; only the caller refers to the slot.

        ``label`` names the bytes in errors.
        """
        where = "" if self.block is None else f" of block {self.block}"
        slot = StorageSlot(
            storage,
            order=self._num_slots,
            label=f"saved tensor {self._num_slots}{where}, {label}",
            movable=movable,
        )
        self._num_slots += 1
        self._slots.append(weakref.ref(slot))
        return slot

    def slots(self) -> list[StorageSlot]:
        """Returns the slots still needed, in the order in which they were first saved or made."""
        alive = [slot for reference in self._slots if (slot := reference()) is not None]
        self._slots = [weakref.ref(slot) for slot in alive]
        return alive


def view_of(slot: StorageSlot, tensor: torch.Tensor) -> SlotView:
    """Returns the view of ``slot`` that ``tensor``, of any shape and dtype, is of its storage."""
    return SlotView(
        slot=slot,
        dtype=tensor.dtype,
        size=tensor.size(),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
    )


def _maker(tensor: torch.Tensor) -> str:
    made_by = tensor.grad_fn
    what = "input" if made_by is None else f"output of {made_by.name()}"
    return f"{what} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
