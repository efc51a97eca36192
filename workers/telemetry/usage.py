"""The uses of a device's memory, the interface that measures them, and the error when memory is
exhausted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

import torch

from penstock.config.values import human_bytes
from penstock.host.errors import CapacityError
from penstock.protocol.plan.instructions import Forward, Instruction, Keep, Program

_WANTED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


class Use(StrEnum):
    """The uses of bytes.

    ``ACTIVATIONS``: tensors kept by forwards for their backwards, and workspace of computations
    where the two are indistinguishable. ``TRANSFERS``: tensors that arrived, are expected, or wait
    to be taken.
    """

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    DEFERRED = "deferred weight gradients"
    TRANSFERS = "transfers"
    WORKSPACE = "workspace"
    STATE = "optimizer state"
    CONSTANTS = "masks and rotary tables"


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes by use."""

    by_use: Mapping[Use, float]

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return sum(self.by_use.values())

    def __str__(self) -> str:
        parts = [f"{use} {human_bytes(self.by_use[use])}" for use in Use if self.by_use.get(use)]
        return ", ".join(parts) or "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """The peak memory of a device in an attempt. ``during`` and ``at_s`` (``time.perf_counter``)
    are set only if single instructions are measured.
    """

    num_bytes: float
    usage: Usage
    during: Instruction | None = None
    at_s: float | None = None


AttemptT = TypeVar("AttemptT", contravariant=True)


class Meter(Protocol[AttemptT]):
    """Measures the memory of a device in one attempt after the other. It counts actual memory, so
    that a comparison with the plan's numbers is possible
    (:mod:`penstock.planner.memory.footprint`).
    """

    def attempt(self) -> AbstractContextManager[None]:
        """Measures the attempt that runs inside."""

    def received(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Counts tensors of any shape that were taken from the channel, and now belong to the
        attempt.
        """

    def executed(self, instruction: Instruction, attempt: AttemptT) -> None:
        """Counts an instruction that has run.

        Raises:
            DeviceMemoryError: it took more memory than the device has.
        """

    def usage(self, attempt: AttemptT) -> Usage:
        """Returns the current uses, as far as they are known."""

    @property
    def limit_bytes(self) -> float | None:
        """Bytes that the device has, if known."""

    @property
    def peak(self) -> MemoryPeak | None:
        """The peak of the latest attempt, if it was measured."""


class DeviceMemoryError(CapacityError):
    """The error of a device with less memory than an instruction needs. Exit code 3."""

    def __init__(
        self,
        program: Program,
        usage: Usage,
        *,
        wanted_bytes: float | None,
        limit_bytes: float | None,
    ) -> None:
        """Makes the error. ``wanted_bytes``: the refused bytes beyond ``usage``, if known."""
        shortage = f": {human_bytes(wanted_bytes)} more are needed" if wanted_bytes else ""
        limit = "" if limit_bytes is None else f" of {human_bytes(limit_bytes)}"
        super().__init__(
            f"device out of memory{shortage}; in use are {human_bytes(usage.total_bytes)}{limit}"
            f" ({usage}); what would help: {_help(program)}"
        )


def _help(program: Program) -> str:
    keeps = {i.keep for i in program if isinstance(i, Forward)}
    advice = ["a smaller train.micro_batch", "more stages or devices (cluster.workers)"]
    if Keep.ALL in keeps or Keep.SELECTIVE in keeps:
        advice.insert(0, "schedule.recompute = full")
    return f"{', '.join(advice)}, or memory.device_limit if the device has more than it says"


def refused_bytes(error: Exception) -> float | None:
    """Returns the bytes that an allocator of torch or Python refused. 0: the error does not name
    them. ``None``: the error is of another kind.
    """
    text = str(error)
    refused = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in text
    )
    if not refused:
        return None
    match = _WANTED.search(text)
    return float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
