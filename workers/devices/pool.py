"""Buffers that are used again: large host memory is slow at first touch."""

from __future__ import annotations

import threading

import torch


class BufferPool:
    """Flat host tensors by type and length; as many as were ever in use at once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor."""
        with self._lock:
            free = self._free.get((dtype, num_elements))
            if free:
                return free.pop()
        return torch.empty(num_elements, dtype=dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Return a tensor taken before; nobody uses it any more."""
        with self._lock:
            self._free.setdefault((tensor.dtype, tensor.numel()), []).append(tensor)

    def clear(self) -> None:
        """Free the unused ones."""
        with self._lock:
            self._free.clear()
