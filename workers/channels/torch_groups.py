"""What this package uses of ``torch.distributed``, in one place because its stubs lack much of it.

No default group is made, and nothing is read from the environment.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore, Work

__all__ = ["PointToPoint", "PrefixStore", "Store", "TCPStore", "Work"]


class PointToPoint(Protocol):
    """The methods of ``ProcessGroupGloo`` and ``ProcessGroupNCCL`` that move tensors."""

    def rank(self) -> int:
        """Of this process."""

    def size(self) -> int:
        """Number of ranks."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """Start to send one tensor."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """Start to receive one tensor."""

    def abort(self) -> None:
        """End what is under way; Gloo's does nothing for transfers."""
