"""Carries out what mirrord's machine orders: words of the replica, settles, pulls, messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.daemons.kit.events import Exit, LogLine, SendReady
from penstock.daemons.kit.messages import answer
from penstock.daemons.mirror.machine.events import (
    CancelSeeds,
    Effect,
    Event,
    MirroredBlock,
    Seed,
    SendMirrored,
    SendReplica,
    SetHeld,
    SetIncarnation,
    UnlinkReplica,
    VoidBlock,
    VoidReplica,
)
from penstock.daemons.mirror.machine.replica import COPIES
from penstock.daemons.mirror.metrics import MirrorMetrics
from penstock.daemons.mirror.sweeps import mirrored_blocks
from penstock.daemons.optimizer.effects import ControlWords, PullOrders, SweepThread
from penstock.daemons.optimizer.machine.events import CancelPulls, Pull, RunSweep, SendSettled
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.control import INVALID_VERSION
from penstock.shm.memory import NodeMemory

_log = logging.getLogger(__name__)


class SeedOrders(Protocol):
    """Methods of :class:`~penstock.daemons.mirror.seeds.Seeder` for :class:`MirrorEffects`."""

    def order(self, seed: Seed) -> None:
        """Queues a seed."""

    def cancel(self) -> None:
        """Cancels all seeds ordered so far."""


class ReplicaWords:
    """Writes the words of a replica's control segment."""

    def __init__(self, replica: NodeMemory) -> None:
        self._control = replica.control
        self._common = ControlWords(replica.control)
        self._blocks = {block.index: block for block in mirrored_blocks(replica)}
        control = replica.control
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            VoidReplica: lambda e: self._void(),
            VoidBlock: lambda e: self._void_block(self._blocks[e.block]),
            SetIncarnation: lambda e: control.set_incarnation(e.incarnation),
            SetHeld: lambda e: control.set_held(e.block, e.copy, e.contribution, e.attempt),
        }

    def write(self, effect: Any) -> bool:
        """Carries out an effect on a word; returns False if it is of another kind."""
        handler = self._handlers.get(type(effect))
        if handler is None:
            return self._common.write(effect)
        handler(effect)
        return True

    def _void(self) -> None:
        # First: from now on, even after a kill, every reader finds an empty replica.
        self._control.set_incarnation(0)
        self._control.clear_history()
        for block in self._blocks.values():
            self._void_block(block)

    def _void_block(self, block: MirroredBlock) -> None:
        self._control.set_state_version(block.index, INVALID_VERSION)
        for copy in range(COPIES):
            for k in range(block.contributions):
                self._control.set_held(block.index, copy, k, 0)


class MirrorEffects:
    """Carries out effects; ``exit`` is set once the machine wants to end the process."""

    def __init__(
        self,
        *,
        replica: NodeMemory,
        sweeps: SweepThread,
        pulls: PullOrders,
        seeds: SeedOrders,
        metrics: MirrorMetrics,
        send: Callable[[pb.MemberMessage], None],
    ) -> None:
        self.exit: Exit | None = None
        self._words = ReplicaWords(replica)
        self._control = replica.control
        self._metrics = metrics
        self._send = send
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            RunSweep: lambda e: sweeps.order(e.work),
            Pull: pulls.order,
            CancelPulls: lambda e: pulls.cancel(),
            Seed: seeds.order,
            CancelSeeds: lambda e: seeds.cancel(),
            SendMirrored: self._send_mirrored,
            SendReplica: self._send_replica,
            SendReady: lambda e: send(answer(e)),
            SendSettled: self._send_settled,
            UnlinkReplica: lambda e: replica.unlink(),
            LogLine: self._say,
            Exit: self._exit,
        }

    def carry_out(self, effects: Sequence[Effect]) -> Sequence[Event]:
        """Carries out effects in order. Sweeps, pulls and seeds answer later."""
        for effect in effects:
            if not self._words.write(effect):
                self._handlers[type(effect)](effect)
        return ()

    def _send_mirrored(self, effect: SendMirrored) -> None:
        self._metrics.mirrored(effect.blocks_missing)
        mirrored = pb.Mirrored(
            epoch=effect.epoch, attempt=effect.attempt, blocks_missing=effect.blocks_missing
        )
        self._send(pb.MemberMessage(mirrored=mirrored))

    def _send_replica(self, effect: SendReplica) -> None:
        state = pb.ReplicaState(
            incarnation=effect.incarnation,
            committed=effect.committed,
            attempt=effect.attempt,
            complete=effect.complete,
            tokens=self._control.tokens,
        )
        self._send(pb.MemberMessage(drained=pb.Drained(epoch=effect.epoch, replica=state)))

    def _send_settled(self, effect: SendSettled) -> None:
        settled = pb.Settled(epoch=effect.epoch, version=effect.version)
        self._send(pb.MemberMessage(settled=settled))

    def _say(self, effect: LogLine) -> None:
        _log.log(logging.WARNING if effect.warning else logging.INFO, "%s", effect.text)

    def _exit(self, effect: Exit) -> None:
        _log.info("ending with code %d: %s", effect.code, effect.reason)
        self.exit = effect
