"""One stored activation: present, elsewhere, or to be made again.

A slot stands for one storage, however many views of it were saved. It lives as long as the
autograd graph (or an operator to be run again) refers to it, so that memory is freed while the
backward proceeds, as without a store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class SavedActivationError(RuntimeError):
    """What a forward kept is used while it is not there. A valid plan does not do that."""


class Arrival(Protocol):
    """A point behind copies."""

    def wait(self) -> None:
        """What the compute stream does from now on comes after the copies."""


class Maker(Protocol):
    """Makes dropped slots again."""

    def make(self) -> None:
        """Fill the slot, and those of the same block."""


class StorageSlot:
    """The bytes of one storage.

    ``movable``: an activation, which counts and may be swapped; otherwise a reference to something
    that outlives the forward. ``label`` names it in errors.
    """

    __slots__ = (
        "__weakref__", "_arrival", "_elsewhere", "_storage", "device", "label", "maker", "movable",
        "num_bytes", "order",
    )  # fmt: skip

    def __init__(
        self, storage: torch.UntypedStorage, *, order: int, label: str, movable: bool
    ) -> None:
        self.order = order
        self.label = label
        self.movable = movable
        self.device = storage.device
        self.num_bytes = storage.nbytes()
        self.maker: Maker | None = None
        self._storage: torch.UntypedStorage | None = storage
        self._elsewhere: torch.Tensor | None = None
        self._arrival: Arrival | None = None

    @property
    def present(self) -> bool:
        """The bytes are on the device, or on their way to it."""
        return self._storage is not None

    @property
    def elsewhere(self) -> bool:
        """Swapped out."""
        return self._storage is None and self._elsewhere is not None

    def bytes_now(self) -> torch.UntypedStorage:
        """The storage; made again if it was dropped, after its arrival if it was swapped.

        Raises:
            SavedActivationError: it is out, or was discarded.
        """
        if self._storage is None and self.maker is not None:
            self.maker.make()
        self.check()
        assert self._storage is not None
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = self._elsewhere = None
        return self._storage

    def check(self) -> None:
        """Raise if the bytes are neither here nor can be made.

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
        """Do not hold the bytes; ``maker`` can make them."""
        self._storage, self.maker = None, maker

    def fill(self, storage: torch.UntypedStorage) -> None:
        """The bytes are here again (or in another place); nobody needs to make them."""
        self._storage, self.maker = storage, None

    def take(self) -> None:
        """Somebody else has the bytes now and changes them."""
        self._storage = None

    def move_out(self, elsewhere: torch.Tensor, copy: Callable[..., None]) -> None:
        """Start copying to ``elsewhere``, flat bytes; the storage is let go of at once."""
        copy(elsewhere, as_bytes(self.bytes_now()))
        self._storage, self._elsewhere = None, elsewhere

    @property
    def left_with(self) -> Arrival | None:
        """The point behind the copy that :meth:`move_out` started."""
        return self._arrival if self.elsewhere else None

    def move_in(self, copy: Callable[..., None]) -> None:
        """Start copying back into new memory of the device."""
        assert self._elsewhere is not None
        target = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        copy(target, self._elsewhere)
        self._storage = target.untyped_storage()

    def arrives_with(self, arrival: Arrival) -> None:
        """The copy started last is over then. The first use waits for it; till then the bytes
        elsewhere are left alone.
        """
        self._arrival = arrival

    def discard(self) -> None:
        """Free everything; using it is an error from now on."""
        self._storage = self.maker = self._elsewhere = self._arrival = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """A tensor over a slot."""

    slot: StorageSlot
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        """The tensor, without a graph.

        Raises:
            SavedActivationError: see :meth:`StorageSlot.bytes_now`.
        """
        storage = self.slot.bytes_now()
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.size, self.stride
        )

    def check(self) -> None:
        """Raise if :meth:`tensor` cannot work."""
        self.slot.check()


@dataclass(frozen=True, slots=True)
class Opaque:
    """A tensor without plain strided memory, kept as it is."""

    value: torch.Tensor

    def tensor(self) -> torch.Tensor:
        """The tensor."""
        return self.value

    def check(self) -> None:
        """Always there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blank:
    """A tensor of which only the shape is needed: nothing is held."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Blank:
        """The tensor's shape."""
        return cls(
            dtype=tensor.dtype, device=tensor.device, size=tensor.size(), stride=tensor.stride()
        )

    def tensor(self) -> torch.Tensor:
        """Uninitialized memory."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def check(self) -> None:
        """Always possible."""


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as flat uint8."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a plain strided tensor; None for sparse, quantized and wrapped ones."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_quantized:
        return None
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.untyped_storage()
