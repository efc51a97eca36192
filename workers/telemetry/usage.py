"""What a device's memory is used for, how it is asked for that, and what to say when there is no
more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

import torch

from penstock.host.errors import CapacityError
from penstock.planner.render.units import format_bytes
from penstock.protocol.plan.instructions import Forward, Instruction, Keep, Program

_WANTED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


class Use(StrEnum):
    """What bytes are for. ``ACTIVATIONS``: what forwards keep for their backwards, and what
    computing needs while it runs, where the two cannot be told apart. ``TRANSFERS``: tensors that
    came, are expected, or wait for whoever takes them.
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
        parts = [f"{use} {format_bytes(self.by_use[use])}" for use in Use if self.by_use.get(use)]
        return ", ".join(parts) or "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """The most that a device held in an attempt; ``during`` and ``at_s`` (``time.perf_counter``)
    only where whoever measures sees single instructions.
    """

    num_bytes: float
    usage: Usage
    during: Instruction | None = None
    at_s: float | None = None


AttemptT = TypeVar("AttemptT", contravariant=True)


class Meter(Protocol[AttemptT]):
    """Measures the memory of a device in one attempt after the other. What is there is counted, so
    that it can be compared with what a plan says (:mod:`penstock.planner.memory.footprint`).
    """

    def attempt(self) -> AbstractContextManager[None]:
        """An attempt runs inside."""

    def received(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Tensors of any shape were taken from the channel, and are the attempt's from now on."""

    def executed(self, instruction: Instruction, attempt: AttemptT) -> None:
        """An instruction has run.

        Raises:
            DeviceMemoryError: it took more than there is.
        """

    def usage(self, attempt: AttemptT) -> Usage:
        """Returns what is in use now, as far as it can be known."""

    @property
    def limit_bytes(self) -> float | None:
        """What there is, where that is known."""

    @property
    def peak(self) -> MemoryPeak | None:
        """Of the latest attempt, if it was measured."""


class DeviceMemoryError(CapacityError):
    """A device has less memory than an instruction needs. Exit code 3."""

    def __init__(
        self,
        program: Program,
        usage: Usage,
        *,
        wanted_bytes: float | None,
        limit_bytes: float | None,
    ) -> None:
        """``wanted_bytes``: what could not be had beyond ``usage``, where that is known."""
        wanted = f": {format_bytes(wanted_bytes)} more are needed" if wanted_bytes else ""
        limit = "" if limit_bytes is None else f" of {format_bytes(limit_bytes)}"
        super().__init__(
            f"device out of memory{wanted}; in use are {format_bytes(usage.total_bytes)}{limit}"
            f" ({usage}); what would help: {_help(program)}"
        )


def _help(program: Program) -> str:
    keeps = {i.keep for i in program if isinstance(i, Forward)}
    advice = ["a smaller train.micro_batch", "more stages or devices (cluster.workers)"]
    if Keep.ALL in keeps or Keep.SELECTIVE in keeps:
        advice.insert(0, "schedule.recompute = full")
    return f"{', '.join(advice)}, or memory.device_limit if the device has more than it says"


def refused_bytes(error: Exception) -> float | None:
    """How many bytes an allocator of torch or Python could not give; 0 if it does not say, ``None``
    if the error is another.
    """
    text = str(error)
    refused = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in text
    )
    if not refused:
        return None
    found = _WANTED.search(text)
    return float(found[1]) * _UNITS[found[2].lower()] if found else 0.0
