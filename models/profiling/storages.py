"""Bytes of live tensors of one thread's work on a CPU: each storage once, from its operator to the
end of its last reference.

torch keeps no statistics of host memory. A dispatch mode sees the results of operators. The holder
names all other tensors: weights and gradient sums in shared memory or in pools, tensors received by
another thread. Memory inside kernels is invisible. The ledger costs some 10 µs an operator, so it
serves tests and ``observability.memory``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from penstock.models.saved_activations.op_log import tensors_in
from penstock.models.torch_internals import TorchDispatchMode, key_of


class StorageLedger:
    """The live storages by use, and the peak of their bytes. Any thread may use it.

    References to storages are weak: each stops counting when its last reference goes.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection may run callbacks inside any of its methods
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, str]] = {}
        self._by_use: dict[str, int] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        self.at_peak: dict[str, int] = {}

    @property
    def by_use(self) -> dict[str, int]:
        """Bytes of live storages by use; uses without any are left out."""
        with self._lock:
            return {use: count for use, count in self._by_use.items() if count}

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Returns whether the storage, of any device and size, is counted."""
        return key_of(storage) in self._live

    def made(self, storage: torch.UntypedStorage, use: str) -> None:
        """Counts the bytes of a new storage for ``use`` from now on. Records the peak if this makes
        one.
        """
        with self._lock:
            self._enter(storage, use)
            if self.live_bytes > self.peak_bytes:
                self.peak_bytes, self.at_peak = self.live_bytes, dict(self._by_use)

    def adopt(self, storage: torch.UntypedStorage, use: str) -> None:
        """Counts the bytes of a storage for this use.

        An uncounted storage is assumed to exist since the last :meth:`restart`: the peak grows by
        all of its bytes.
        """
        with self._lock:
            if self.knows(storage):
                self.count_for(key_of(storage), use)
                return
            self._enter(storage, use)
            self.peak_bytes += storage.nbytes()
            self.at_peak[use] = self.at_peak.get(use, 0) + storage.nbytes()

    def count_for(self, key: int, use: str) -> None:
        """Counts the storage with this key, if there is one, for another use."""
        with self._lock:
            if key in self._live:
                reference, num_bytes, before = self._live[key]
                self._live[key] = reference, num_bytes, use
                self._add(before, -num_bytes)
                self._add(use, num_bytes)

    def release(self, storage: torch.UntypedStorage) -> None:
        """Stops counting a storage that a pool still refers to."""
        self._freed(key_of(storage), None)

    def restart(self) -> int:
        """Resets the peak to the bytes that live now; returns those bytes."""
        with self._lock:
            self.peak_bytes, self.at_peak = self.live_bytes, dict(self._by_use)
            return self.live_bytes

    def _enter(self, storage: torch.UntypedStorage, use: str) -> None:
        key, num_bytes = key_of(storage), storage.nbytes()
        # The callback runs when the last tensor over the storage goes, on the thread that drops it.
        self._live[key] = weakref.ref(storage, partial(self._freed, key)), num_bytes, use
        self._add(use, num_bytes)

    def _freed(self, key: int, reference: object) -> None:
        with self._lock:
            known = self._live.get(key)
            # This may be the callback of a storage that is gone, while a new one has its address.
            if known is None or (reference is not None and known[0] is not reference):
                return
            del self._live[key]
            self._add(known[2], -known[1])

    def _add(self, use: str, num_bytes: int) -> None:
        self.live_bytes += num_bytes
        self._by_use[use] = self._by_use.get(use, 0) + num_bytes


class StorageMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Counts results of this thread's operators with new memory, in ``ledger`` for ``use``."""

    def __init__(self, ledger: StorageLedger, use: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._ledger = ledger
        self._use = use

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if not self._ledger.knows(storage) and not _among(storage, args, kwargs):
                self._ledger.made(storage, self._use)
        return result


def _among(storage: torch.UntypedStorage, args: Any, kwargs: Any) -> bool:
    """Returns whether the result of an operator is a view of one of its arguments, or the argument
    itself.
    """
    given = tensors_in((args, kwargs))
    return any(key_of(tensor.untyped_storage()) == key_of(storage) for tensor in given)
