"""The storage of one saved activation: on the device, elsewhere, or to be made again.

A slot stands for one storage and for all saved views of it. The slot lives as long as the autograd
graph, or an operator that runs again, refers to it. So memory is freed while the backward proceeds,
as without a store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.models.torch_device import Arrival


class SavedActivationError(RuntimeError):
    """The error of a saved activation or a weight that is needed and absent; no valid plan does
    that.
    """


class Maker(Protocol):
    """An object that makes the bytes of dropped slots again."""

    def make(self) -> None:
        """Fills the calling slot and all other slots of the same block that are still needed."""


class StorageSlot:
    """The bytes of one storage, of any device.

    ``movable``: True for an activation, which counts and may be swapped. False for a reference to
    memory that outlives the forward. ``order`` numbers the slots of a forward from 0; ``label``
    names the slot in errors. ``saved``: True if the backward reads the slot; otherwise only kernels
    that run again read it.

    States: ``_storage`` is set (present), ``_elsewhere`` alone is set (swapped out), ``maker`` is
    set (dropped), or none of them (discarded).
    """

    __slots__ = (
        "__weakref__", "_arrival", "_elsewhere", "_storage", "device", "label", "maker", "movable",
        "num_bytes", "order", "saved",
    )  # fmt: skip

    def __init__(
        self, storage: torch.UntypedStorage, *, order: int, label: str, movable: bool
    ) -> None:
        self.order = order
        self.label = label
        self.movable = movable
        self.saved = False
        self.device = storage.device
        self.num_bytes = storage.nbytes()
        self.maker: Maker | None = None
        self._storage: torch.UntypedStorage | None = storage
        self._elsewhere: torch.Tensor | None = None
        self._arrival: Arrival | None = None

    @property
    def present(self) -> bool:
        """True if the bytes are on the device, or on their way to it."""
        return self._storage is not None

    @property
    def elsewhere(self) -> bool:
        """True if the bytes are swapped out, and not on their way back."""
        return self._storage is None and self._elsewhere is not None

    def bytes_now(self) -> torch.UntypedStorage:
        """Returns the storage, of ``num_bytes`` bytes.

        Dropped bytes are made again. For swapped bytes, the compute stream waits for the copy back.

        Raises:
            SavedActivationError: the bytes are swapped out, or were discarded.
        """
        if self._storage is None and self.maker is not None:
            self.maker.make()
        self.check()
        assert self._storage is not None
        if self._arrival is not None:
            self._arrival.wait()
            # The copy back is ordered, not over. The memory elsewhere can be released all the same:
            # its next user copies into it after the compute stream (CopyStream.copy), so after this
            # copy.
            self._arrival = self._elsewhere = None
        return self._storage

    def check(self) -> None:
        """Raises if the bytes are neither present nor can be made; changes nothing.

        Raises:
            SavedActivationError: as :meth:`bytes_now`.
        """
        if self._storage is None and self.maker is None:
            why = (
                "is swapped out; bring it back (SWAP_IN) before its recomputation or backward"
                if self._elsewhere is not None
                else "was discarded"
            )
            raise SavedActivationError(f"{self.label} ({self.num_bytes} bytes) {why}")

    def drop(self, maker: Maker) -> None:
        """Releases the bytes, which ``maker`` can make again."""
        # They are freed during the forward, as soon as the model's code has released its tensors.
        self._storage, self.maker = None, maker

    def fill(self, storage: torch.UntypedStorage) -> None:
        """Takes ``storage``, which has the same bytes: they were made again, or copied."""
        self._storage, self.maker = storage, None

    def take(self) -> None:
        """Gives the bytes to another slot; a kernel of that slot changes the storage in place."""
        self._storage = None

    def move_out(self, elsewhere: torch.Tensor, copy: Callable[..., None]) -> None:
        """Starts to copy to ``elsewhere``, flat uint8 of shape (num_bytes,), and releases the
        storage.

        Raises:
            SavedActivationError: as :meth:`bytes_now`.
        """
        copy(elsewhere, as_bytes(self.bytes_now()))
        # The copy may still read the storage: the copy stream has recorded its use with the
        # allocator.
        self._storage, self._elsewhere = None, elsewhere

    @property
    def left_with(self) -> Arrival | None:
        """The end of the copy that :meth:`move_out` started, while the bytes are out."""
        return self._arrival if self.elsewhere else None

    def move_in(self, copy: Callable[..., None]) -> None:
        """Starts to copy the bytes back into new memory of the device.

        The bytes count as present at once. Their use must wait for :meth:`arrives_with`.
        """
        assert self._elsewhere is not None
        target = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        copy(target, self._elsewhere)
        self._storage = target.untyped_storage()

    def arrives_with(self, arrival: Arrival) -> None:
        """Records the end of the copy that was started last. The first use waits for it; the bytes
        elsewhere stay unchanged until then.
        """
        self._arrival = arrival

    def discard(self) -> None:
        """Frees everything; a later use of the slot is an error."""
        self._storage = self.maker = self._elsewhere = self._arrival = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """A strided tensor over a slot; ``offset`` and ``stride`` count elements of ``dtype``."""

    slot: StorageSlot
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        """Returns the tensor, of shape ``size``, without a graph; nothing is copied.

        Raises:
            SavedActivationError: see :meth:`StorageSlot.bytes_now`.
        """
        storage = self.slot.bytes_now()
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.size, self.stride
        )

    def check(self) -> None:
        """Raises as :meth:`tensor` would; nothing is made or waited for."""
        self.slot.check()


@dataclass(frozen=True, slots=True)
class Opaque:
    """A tensor without plain strided memory (sparse, quantized, wrapped), held as it is."""

    value: torch.Tensor

    def tensor(self) -> torch.Tensor:
        """Returns the same tensor that was saved."""
        return self.value

    def check(self) -> None:
        """Does nothing: the tensor is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blank:
    """A tensor of which a kernel needs shape and type, not the values: no memory is held."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Blank:
        """Returns the blank of a tensor's shape, strides, dtype and device."""
        return cls(
            dtype=tensor.dtype, device=tensor.device, size=tensor.size(), stride=tensor.stride()
        )

    def tensor(self) -> torch.Tensor:
        """Returns uninitialized memory of that shape, strides and dtype."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def check(self) -> None:
        """Does nothing: memory can always be allocated."""


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns all of a storage as a flat uint8 tensor, of shape (bytes,); nothing is copied."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Returns the memory of a plain strided tensor of any shape and dtype.

    None for sparse, quantized and wrapped tensors. None also for tensors that are conjugated or
    negated lazily: their values are not the bytes of a storage.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_quantized:
        return None
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.untyped_storage()


def chosen(slots: Sequence[StorageSlot], fraction: float) -> list[StorageSlot]:
    """Returns whole slots with together at least ``fraction`` of the bytes of ``slots``.

    The largest come first, the older first among equals; the last one is the smallest that
    suffices. The same forward gives the same slots.
    """
    missing_bytes = fraction * sum(slot.num_bytes for slot in slots)
    left = sorted(slots, key=lambda slot: (-slot.num_bytes, slot.order))
    taken: list[StorageSlot] = []
    while missing_bytes > 0 and left:
        enough = [slot for slot in left if slot.num_bytes >= missing_bytes]
        slot = enough[-1] if enough else left[0]
        left.remove(slot)
        taken.append(slot)
        missing_bytes -= slot.num_bytes
    return taken
