"""The scheduler's machine and optimizerd's on real memory with real sweeps, in one thread.

A worker is played: gradients are a function of the attempt's data position. Every run is compared
with the classic in-place step over what was committed: as if it had waited for each decision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock import _native
from penstock.daemons.optimizer.effects import OptimizerEffects, read_facts
from penstock.daemons.optimizer.kernels import Kernels, RemoteGradients, owned_blocks
from penstock.daemons.optimizer.machine.events import (
    Event,
    GradientsReady,
    RecoveryAsked,
    SettleAsked,
    SweepDone,
)
from penstock.daemons.optimizer.machine.machine import OptimizerMachine
from penstock.daemons.optimizer.machine.sweeps import Sweep
from penstock.daemons.optimizer.service import EVENTS
from penstock.daemons.scheduler.machine.events import JournalDecision, Send
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.control import CommitRecord, Decision
from penstock.shm.memory import NodeMemory
from tests.optimizer.conftest import Reference, to_gradients
from tests.scheduler.conftest import Driver, make_config, make_rules

OPTIMIZERD = "optimizerd.a"

Gradients = Callable[[int, int], Any]
"""(number of the attempt's data, block) -> unscaled gradients, fp32 (elements,)"""


class Joint:
    """One run. ``records``: what was journaled; ``sweeps``: kinds of all sweeps, in order."""

    def __init__(
        self,
        memory: NodeMemory,
        pool: _native.Pool,
        gradients: Gradients,
        **sections: Mapping[str, Any],
    ) -> None:
        train = {"steps": 10**6, **sections.pop("train", {})}
        config = make_config(train=train, **{k: dict(v) for k, v in sections.items()})
        self.memory, self.gradients = memory, gradients
        self.records: list[CommitRecord] = []
        self.scales: list[float] = []
        self.sweeps: list[str] = []
        self.reference = Reference(memory.spec.table, pool, memory.owned_blocks())
        self.reference.initialize(np.random.default_rng(7))
        self.reference.fill(memory)
        blocks = owned_blocks(memory)
        self.blocks = [b.index for b in blocks if b.contributions]
        self.driver = Driver(make_rules(config, blocks=tuple(self.blocks)))
        self.kernels = Kernels(
            pool, memory, config.optimizer, blocks, RemoteGradients(memory, blocks)
        )
        self._machine = OptimizerMachine(blocks)
        self._down: deque[pb.SchedulerMessage] = deque()
        self._up: deque[pb.MemberMessage] = deque()
        self._orders: deque[Sweep] = deque()
        self._effects = OptimizerEffects(
            control=memory.control,
            sweeps=self,  # type: ignore[arg-type]  # order() is all that is asked of it
            pulls=None,
            send=self._up.append,
        )
        self._begin(blocks)

    def _begin(self, blocks: Any) -> None:
        self.driver.begin()
        record = self.driver.machine.mirror.record
        assert record is not None
        self.memory.control.set_incarnation(record.incarnation)
        facts = read_facts(self.memory.control, blocks)
        self._feed(RecoveryAsked(epoch=self.driver.epoch, record=record, facts=facts))
        self._up.clear()  # Ready: the driver has said so
        self._collect()

    def order(self, work: Sweep) -> None:
        """A sweep is to run."""
        self._orders.append(work)

    def run(self, commits: int) -> None:
        """Attempts until ``commits`` are made; then settle, and compare every byte."""
        while self.driver.machine.mirror.version < commits:
            self.attempt()
        self._feed(SettleAsked(epoch=self.driver.epoch, version=commits))
        self._carry_on()
        for block in self.blocks:
            self.reference.assert_weights(self.memory, block, commits)
            self.reference.assert_state(self.memory, block)

    def attempt(self) -> CommitRecord:
        """One attempt; the record of its decision."""
        self._carry_on()
        driver, control = self.driver, self.memory.control
        mirror = driver.machine.mirror
        epoch, attempt, version = driver.epoch, driver.attempt, mirror.version
        assert mirror.position is not None
        self.scales.append(mirror.position.loss_scale)
        number = mirror.position.data_position // driver.rules.config.train.global_batch
        for block in reversed(self.blocks):
            assert control.readable(block, version), "workers read it"
            self.reference.assert_weights(self.memory, block, version)
            with np.errstate(over="ignore"):
                scaled = self.gradients(number, block) * np.float32(self.scales[-1])
                values = to_gradients(scaled, self.memory.spec.table.grad_dtype)
            self.memory.grads(block, (version + 1) % 2, 0)[:] = values
            control.set_ready(block, 0, epoch=epoch, attempt=attempt)
            self._feed(GradientsReady(epoch=epoch, attempt=attempt, block=block, contribution=0))
            self._carry_on()
        for worker in driver.rules.workers:
            driver.done(worker)
            self._collect()
        self._carry_on()
        assert self.records[-1].attempt == attempt
        return self.records[-1]

    def content(self, *, slot: int) -> bytes:
        """Master, state arrays, and the weights in a slot."""
        names = ("master", "exp_avg", "exp_avg_sq")
        return b"".join(
            part.tobytes()
            for block in self.blocks
            for part in (
                *(self.memory.state(block, name) for name in names),
                self.memory.weights(block, slot),
            )
        )

    def _carry_on(self) -> None:
        """Until nothing moves any more."""
        while True:
            if self._down:
                message = self._down.popleft()
                kind = str(message.WhichOneof("body"))
                self._feed(EVENTS[kind](getattr(message, kind)))
            elif self._orders:
                work = self._orders.popleft()
                self.sweeps.append(work.name)
                self._feed(SweepDone(status=self.kernels.run(work), seconds=0.0))
            elif self._up:
                answer = self._up.popleft()
                kind = str(answer.WhichOneof("body"))
                self.driver.say(OPTIMIZERD, **{kind: getattr(answer, kind)})
                self._collect()
            else:
                return

    def _feed(self, event: Event) -> None:
        self._effects.carry_out(self._machine.handle(event))
        self._machine.validate()
        assert self._effects.exit is None, self._effects.exit

    def _collect(self) -> None:
        """Take what the scheduler's machine just ordered."""
        for effect in self.driver.effects:
            if isinstance(effect, JournalDecision):
                self._journal(effect.record)
            elif isinstance(effect, Send) and effect.member == OPTIMIZERD:
                self._down.append(effect.message)
        self.driver.effects = []

    def _journal(self, record: CommitRecord) -> None:
        self.records.append(record)
        if record.decision is Decision.SKIP:
            return
        for block in self.blocks:
            self.reference.step(
                block,
                [self.memory.grads(block, record.version % 2, 0)],
                lr=record.learning_rate,
                step=record.bias_step,
                coefficient=record.coefficient * record.inverse_loss_scale,
            )
