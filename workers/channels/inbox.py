"""Received and not yet taken: tensors, and notices about process groups.

The communication thread fills both, the interpreter reads them. Both are bounded for any behaviour
of peers. :class:`Inbox` accepts only transfers that the plan posts on this device, of attempts that
may come, each once. :class:`Notices` keeps small messages for the rest of the epoch: the address of
its process group, and the shapes of transfers through the group.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Literal

import torch

from penstock.host import world
from penstock.host.errors import ProtocolError
from penstock.protocol.plan.instructions import (
    Program,
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
)
from penstock.protocol.wire.frames import GroupAddress, Transfer, TransferKind, TransferShape
from penstock.workers.channels.tensors import Packing
from penstock.workers.data import evaluation_of
from penstock.workers.waiting import POLL_S, Abort, WaitBudget

NamedTensors = dict[str, torch.Tensor]
ShapeKey = tuple[int, str, str, int]
"""Sender, phase, kind and stage: the common key of all transfers of one shape."""
_MAX_PORT = 65535
_MAX_SHAPES = 1 << 14
_RECEIVES: dict[type, str] = {
    RecvActivation: "activation",
    RecvGradient: "gradient",
    RecvCheckpoint: "checkpoint",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferKey:
    """Identity of a transfer within an epoch; fields as in
    :class:`~penstock.protocol.wire.frames.Transfer`.
    """

    phase: Literal["train", "eval"]
    attempt: int
    kind: TransferKind
    stage: int
    micro_batch: int

    @classmethod
    def of(cls, header: Transfer) -> TransferKey:
        """Returns the key of a message."""
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
    """The accepted transfers: ``(phase, kind, stage, micro_batch)`` of every receive and reduction.
    They belong to the epoch's first attempt and evaluation or later ones, with
    ``evaluation_batches`` an evaluation.
    """

    receives: frozenset[tuple[str, str, int, int]]
    first_attempt: int
    first_evaluation: int
    evaluation_batches: int

    @classmethod
    def of(
        cls,
        program: Program,
        evaluation: Program,
        evaluation_batches: int,
        collective: Set[tuple[str, str, int, int]] = frozenset(),
        *,
        first_attempt: int = 1,
        first_evaluation: int = 1,
    ) -> Expected:
        """Returns the transfers that may arrive at a device by its programs, and by collectives
        (:func:`penstock.workers.state.routing.collective_receives`).
        """
        train = {("train", *receive) for receive in _receives(program)}
        evaluate = {("eval", *receive) for receive in _receives(evaluation)}
        return cls(
            receives=frozenset(train | evaluate | collective),
            first_attempt=first_attempt,
            first_evaluation=first_evaluation,
            evaluation_batches=evaluation_batches,
        )


NOTHING = Expected(receives=frozenset(), first_attempt=0, first_evaluation=0, evaluation_batches=0)


def _receives(program: Program) -> list[tuple[str, int, int]]:
    return [
        (_RECEIVES[type(instruction)], instruction.stage, instruction.micro_batch)
        for instruction in program
        if isinstance(instruction, (RecvActivation, RecvGradient, RecvCheckpoint))
    ]


class Inbox:
    """Received tensors, on the host, by :class:`TransferKey`.

    One lock guards all of it: the communication thread puts, the interpreter's thread takes.
    """

    def __init__(self) -> None:
        self._changed = world.condition()
        self._tensors: dict[TransferKey, NamedTensors] = {}
        self._arrivals: dict[TransferKey, float] = {}
        self._seen: set[TransferKey] = set()
        self._run_id = ""
        self._epoch = -1
        self._expected = NOTHING
        self._attempt = self._evaluation = 0

    def open(self, *, run_id: str, epoch: int, expected: Expected) -> None:
        """Empties the inbox and accepts transfers of ``epoch`` from now on."""
        with self._changed:
            self._tensors.clear()
            self._arrivals.clear()
            self._seen.clear()
            self._run_id, self._epoch, self._expected = run_id, epoch, expected
            self._attempt, self._evaluation = expected.first_attempt, expected.first_evaluation

    def close(self) -> None:
        """Empties the inbox and accepts nothing: between Drain and Begin."""
        self.open(run_id="", epoch=-1, expected=NOTHING)

    def begin(self, phase: str, number: int) -> None:
        """Records that this device begins an attempt, or a batch of an evaluation; older tensors
        are dropped.
        """
        with self._changed:
            if phase == "train":
                self._attempt = max(self._attempt, number)
            else:
                self._evaluation = max(self._evaluation, evaluation_of(number)[0])
            self._seen = {key for key in self._seen if self._can_come(key)}
            for key in [key for key in self._tensors if not self._can_come(key)]:
                del self._tensors[key]
            for key in [key for key in self._arrivals if not self._can_come(key)]:
                del self._arrivals[key]

    def refusal(self, header: Transfer) -> str | None:
        """Returns the reason to reject a message, or None; called before its tensors are copied."""
        key = TransferKey.of(header)
        with self._changed:
            if (header.run_id, header.epoch) != (self._run_id, self._epoch):
                return "stale"
            if (key.phase, key.kind, key.stage, key.micro_batch) not in self._expected.receives:
                return "unexpected"
            if not self._can_come(key):
                return "other_attempt"
            return "doubled" if key in self._seen else None

    def put(self, header: Transfer, tensors: NamedTensors) -> None:
        """Keeps the tensors of a message, of any shapes, unless the epoch has ended meanwhile."""
        # Checked again: between refusal() and this line the tensors were copied without the lock.
        with self._changed:
            key = TransferKey.of(header)
            if (header.run_id, header.epoch) != (self._run_id, self._epoch):
                return
            if not self._can_come(key):
                return
            self._tensors[key], self._arrivals[key] = tensors, world.perf_counter()
            # Remembered after take(), so that a message that comes twice is refused.
            self._seen.add(key)
            self._changed.notify_all()

    def _can_come(self, key: TransferKey) -> bool:
        """Returns whether a peer may be as far as ``key``. It waits for this device's end of an
        attempt before it starts the one after the next. An evaluation is forward only, so nothing
        slows it down; it ends like an attempt.
        """
        if key.phase == "train":
            return 0 <= key.attempt - self._attempt <= 1
        evaluation, batch = evaluation_of(key.attempt)
        if batch >= self._expected.evaluation_batches:
            return False
        return 0 <= evaluation - self._evaluation <= 1

    def take(self, key: TransferKey, abort: Abort, timeout_s: float) -> NamedTensors:
        """Waits for a transfer and takes it out: tensors on the host, as they were sent.

        Raises:
            Interrupted: the work was aborted.
            LostMemberError: the transfer did not come in ``timeout_s`` seconds.
        """
        with self._changed:
            if key in self._tensors:
                return self._tensors.pop(key)
            budget = WaitBudget(timeout_s)
            while key not in self._tensors:
                abort.check()
                budget.spend(str(key))
                # put() wakes this at once; the slices are for abort and deadline. The wait releases
                # the lock.
                self._changed.wait(POLL_S)
            return self._tensors.pop(key)

    def arrival_s(self, key: TransferKey) -> float:
        """Returns the arrival time of a transfer that was just taken out
        (``time.perf_counter``).
        """
        with self._changed:
            return self._arrivals.pop(key)

    def leftovers(self, phase: str, attempt: int) -> tuple[TransferKey, ...]:
        """Returns the transfers of an attempt that arrived and were not taken."""
        with self._changed:
            return tuple(k for k in self._tensors if (k.phase, k.attempt) == (phase, attempt))

    def held(self) -> dict[TransferKey, NamedTensors]:
        """Returns the tensors of all that arrived and was not taken."""
        with self._changed:
            return dict(self._tensors)

    def __len__(self) -> int:
        with self._changed:
            return len(self._tensors)


class Notices:
    """Small messages of the epoch, filled by the communication thread, read by the
    interpreter's.
    """

    def __init__(self) -> None:
        self._changed = world.condition()
        self._epoch: tuple[str, int] = ("", -1)
        self._port: int | None = None
        self._packings: dict[ShapeKey, Packing] = {}

    def open(self, *, run_id: str, epoch: int) -> None:
        """Forgets everything and accepts notices of ``epoch`` from now on."""
        with self._changed:
            self._epoch = run_id, epoch
            self._port = None
            self._packings.clear()

    def close(self) -> None:
        """Forgets everything and accepts nothing."""
        self.open(run_id="", epoch=-1)

    def put(self, notice: GroupAddress | TransferShape) -> str | None:
        """Keeps a notice; returns the reason of a rejection, or None.

        Raises:
            ProtocolError: the notice names no possible port, or no possible tensors.
        """
        with self._changed:
            if (notice.run_id, notice.epoch) != self._epoch:
                # An address is sent repeatedly until its receiver has joined.
                return None if isinstance(notice, GroupAddress) else "stale"
            if isinstance(notice, GroupAddress):
                if not 0 < notice.port <= _MAX_PORT:
                    raise ProtocolError(f"GroupAddress.port: {notice.port}")
                self._port = notice.port
            elif len(self._packings) >= _MAX_SHAPES:
                return "full"
            else:
                key = (notice.sender, notice.phase, notice.kind, notice.stage)
                if key in self._packings:
                    return "doubled"
                self._packings[key] = Packing(notice.tensors)
            self._changed.notify_all()
        return None

    def wait_port(self, what: str, abort: Abort, timeout_s: float) -> int:
        """Waits for the port of the process group's store; ``what`` names the wait in errors.

        Raises:
            Interrupted: the work was aborted.
            LostMemberError: no peer named a port in ``timeout_s`` seconds.
        """
        self._wait(lambda: self._port is not None, what, abort, timeout_s)
        assert self._port is not None
        return self._port

    def wait_packing(self, key: ShapeKey, what: str, abort: Abort, timeout_s: float) -> Packing:
        """Waits for the shapes of a kind's transfers; raises like :meth:`wait_port`."""
        self._wait(lambda: key in self._packings, what, abort, timeout_s)
        return self._packings[key]

    def packing(self, key: ShapeKey) -> Packing | None:
        """Returns the shapes of a kind's transfers, None before they are announced."""
        with self._changed:
            return self._packings.get(key)

    def _wait(
        self, condition: Callable[[], bool], what: str, abort: Abort, timeout_s: float
    ) -> None:
        budget = WaitBudget(timeout_s)
        with self._changed:
            while not condition():
                abort.check()
                budget.spend(what)
                self._changed.wait(POLL_S)
