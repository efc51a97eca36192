"""Tensors received from peers, by what they are, until the instruction that needs them takes them.

Filled by the communication thread, emptied by the interpreter. Bounded: only transfers that the
plan posts on this device are accepted, each at most once an attempt, and no more than a fixed
number in all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

import torch

from penstock.protocol.frames import Transfer, TransferKind
from penstock.protocol.instructions import (
    Program,
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
)
from penstock.workers.waiting import POLL_S, Abort, Patience

NamedTensors = dict[str, torch.Tensor]

_RECEIVES: dict[type, str] = {
    RecvActivation: "activation",
    RecvGradient: "gradient",
    RecvCheckpoint: "checkpoint",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferKey:
    """Identity of a transfer within an epoch; fields as in
    :class:`~penstock.protocol.frames.Transfer`.
    """

    phase: Literal["train", "eval"]
    attempt: int
    kind: TransferKind
    stage: int
    micro_batch: int

    @classmethod
    def of(cls, header: Transfer) -> TransferKey:
        """The key of a message."""
        return cls(
            phase=header.phase,
            attempt=header.attempt,
            kind=header.kind,
            stage=header.stage,
            micro_batch=header.micro_batch,
        )

    def __str__(self) -> str:
        return (
            f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"
            f" ({self.phase} {self.attempt})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What may arrive: ``(phase, kind, stage, micro_batch)`` of every receive and reduction, and a
    bound on messages kept.
    """

    receives: frozenset[tuple[str, str, int, int]]
    limit: int

    @classmethod
    def of(
        cls,
        program: Program,
        evaluation: Program,
        evaluation_batches: int,
        collective: Set[tuple[str, str, int, int]] = frozenset(),
    ) -> Expected:
        """From a device's programs, and what collectives bring
        (:func:`penstock.workers.collectives.collective_receives`).

        A peer may be one attempt ahead, and a whole evaluation ahead: evaluation is forward only,
        so nothing comes back to slow it down.
        """
        train = {("train", *receive) for receive in _receives(program)}
        evaluate = {("eval", *receive) for receive in _receives(evaluation)}
        train |= {received for received in collective if received[0] == "train"}
        evaluate |= {received for received in collective if received[0] == "eval"}
        limit = 2 * len(train) + (1 + evaluation_batches) * len(evaluate)
        return cls(receives=frozenset(train | evaluate), limit=limit)


def _receives(program: Program) -> list[tuple[str, int, int]]:
    return [
        (_RECEIVES[type(instruction)], instruction.stage, instruction.micro_batch)
        for instruction in program
        if isinstance(instruction, (RecvActivation, RecvGradient, RecvCheckpoint))
    ]


class Inbox:
    """Received tensors by :class:`TransferKey`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tensors: dict[TransferKey, NamedTensors] = {}
        self._arrivals: dict[TransferKey, float] = {}
        self._run_id = ""
        self._epoch = -1
        self._expected = Expected(receives=frozenset(), limit=0)

    def open(self, *, run_id: str, epoch: int, expected: Expected) -> None:
        """Empty it and accept what belongs to ``epoch`` from now on."""
        with self._changed:
            self._tensors.clear()
            self._arrivals.clear()
            self._run_id, self._epoch, self._expected = run_id, epoch, expected

    def close(self) -> None:
        """Empty it and accept nothing: between Drain and Begin."""
        self.open(run_id="", epoch=-1, expected=Expected(receives=frozenset(), limit=0))

    def refusal(self, header: Transfer) -> str | None:
        """Why a message is not wanted, or None; asked before its tensors are copied."""
        key = TransferKey.of(header)
        with self._changed:
            if (header.run_id, header.epoch) != (self._run_id, self._epoch):
                return "stale"
            if (key.phase, key.kind, key.stage, key.micro_batch) not in self._expected.receives:
                return "unexpected"
            if key in self._tensors:
                return "doubled"
            return "full" if len(self._tensors) >= self._expected.limit else None

    def put(self, header: Transfer, tensors: NamedTensors) -> None:
        """Keep the tensors of a message unless the epoch ended meanwhile."""
        with self._changed:
            if (header.run_id, header.epoch) == (self._run_id, self._epoch):
                key = TransferKey.of(header)
                self._tensors[key], self._arrivals[key] = tensors, time.perf_counter()
                self._changed.notify_all()

    def take(self, key: TransferKey, abort: Abort, timeout_s: float) -> NamedTensors:
        """Wait for a transfer and take it out.

        Raises:
            Interrupted: aborted. LostMemberError: it did not come in time.
        """
        with self._changed:
            if key in self._tensors:
                return self._tensors.pop(key)
            patience = Patience(timeout_s)
            while key not in self._tensors:
                abort.check()
                patience.spend(str(key))
                self._changed.wait(POLL_S)
            return self._tensors.pop(key)

    def arrival_s(self, key: TransferKey) -> float:
        """When a transfer that was just taken out had arrived (``time.perf_counter``)."""
        with self._changed:
            return self._arrivals.pop(key)

    def leftovers(self, phase: str, attempt: int) -> tuple[TransferKey, ...]:
        """What arrived for an attempt and was not taken."""
        with self._changed:
            return tuple(k for k in self._tensors if (k.phase, k.attempt) == (phase, attempt))

    def held(self) -> tuple[NamedTensors, ...]:
        """What arrived and was not taken."""
        with self._changed:
            return tuple(self._tensors.values())

    def __len__(self) -> int:
        with self._changed:
            return len(self._tensors)
