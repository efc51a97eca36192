"""Random lives of optimizerd's machine on real memory with real sweeps.

A random interpreter plays scheduler, workers, the other node and fate: attempts that are committed,
amended, held or skipped, epochs that break off, and kills between any two effects. Each block gets
from version to version in a way of its own (:class:`UpdatePolicy`), on a worker's device perhaps.
A save reads committed versions meanwhile. Whatever happens, memory must end with the
bytes that the committed records alone lead to, and each save must read those of its version.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from penstock import _native
from penstock.config.training import OptimizerConfig
from penstock.daemons.kit.events import DrainAsked, Exit, SendDrained, SendFailed, SendReady
from penstock.daemons.memory.pinning import PinnedVersion, let_go_of_all
from penstock.daemons.optimizer.effects import ControlWords, read_facts, read_pins
from penstock.daemons.optimizer.kernels import Kernels, RemoteGradients, owned_blocks
from penstock.daemons.optimizer.machine.events import (
    AmendAsked,
    AttemptAsked,
    CancelPulls,
    CommitAsked,
    DeviceUpdated,
    Effect,
    Event,
    GradientsReady,
    PinsSeen,
    Pull,
    Pulled,
    RecoveryAsked,
    RunSweep,
    SendAmended,
    SendBlockStatus,
    SendSettled,
    SettleAsked,
    SkipAsked,
    SweepDone,
    UpdatePolicy,
)
from penstock.daemons.optimizer.machine.machine import OptimizerMachine, OptimizerPhase
from penstock.daemons.optimizer.machine.sweeps import CastWeights, Preview, Sweep, sweep_tag
from penstock.protocol.plan.step import BlockArrays, OptimizerStep
from penstock.shm.control import INVALID_VERSION, CommitRecord, Decision
from penstock.shm.layout import Ownership, Storage
from penstock.shm.memory import NodeMemory
from penstock.shm.table import DType

CASES = 60
STEPS = 4
DECISIONS = (Decision.COMMIT, Decision.COMMIT, Decision.AMEND, Decision.SKIP)
LOSS_SCALES = (1.0, 4.0, 1024.0)
STATE = ("master", "exp_avg", "exp_avg_sq")
EXACT = [policy for policy in UpdatePolicy if policy is not UpdatePolicy.IN_PLACE]


class KilledError(Exception):
    """optimizerd died here."""


class BrokenEpochError(Exception):
    """Another member died here: the epoch breaks off."""


class World:
    """One case. ``fate`` decides everything."""

    loss_scales = LOSS_SCALES
    exact = True

    def __init__(
        self,
        fate: random.Random,
        memory: NodeMemory,
        pool: _native.Pool,
        tools: Any,
        policies: tuple[UpdatePolicy, ...] = EXACT,
    ) -> None:
        self.fate = fate
        self.policies = policies
        self.memory = memory
        self.tools = tools
        self.table = memory.spec.table
        self.control = memory.control
        self.words = ControlWords(memory.control)
        self.numbers = np.random.default_rng(fate.getrandbits(32))
        self.blocks = owned_blocks(memory, self.choose_policy)
        self.remote = RemoteGradients(memory, self.blocks)
        hyper = tools.hyperparameters
        self.pool = pool
        self.config = OptimizerConfig(
            betas=hyper.betas,
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            groups=hyper.groups,
        )
        self.kernels = Kernels(pool, memory, self.config, self.blocks, self.remote)
        self.reference = tools.reference(
            self.table, pool, memory.owned_blocks(), half_up=memory.split_master
        )
        self.reference.initialize(self.numbers)
        self.reference.fill(memory)
        self.kill_probability = fate.choice((0.0, 0.01, 0.05, 0.15))
        self.epoch, self.attempt = 0, 0
        self.record = self.make_record(0, 0, Decision.RESTORE, 1.0, 1.0, 1e-3)
        self.elsewhere: dict[tuple[int, int, int], Any] = {}
        self.elsewhere_ready: dict[tuple[int, int], tuple[int, int]] = {}
        self.updating: dict[int, OptimizerStep] = {}  # blocks whose UPDATE a worker has begun
        self.updates = 0
        self.flushes = 0
        self.kills = 0
        self.saving: PinnedVersion | None = None
        self.unread: dict[int, tuple[bytes, ...]] = {}  # block -> what a save is to find
        self.saves = 0
        self.new_process()

    def choose_policy(self, block: int) -> UpdatePolicy:
        uses = range(self.table.blocks[block].contributions)
        local = all(self.memory.has((block, "grads", 0, k)) for k in uses)
        wanted = {p for p in self.policies if local or not p.by_worker}
        if self.memory.spec.layout.state_copies[block] == 1:
            wanted -= {UpdatePolicy.FLUSH}
        if self.memory.spec.layout.gradient_copies[block] == 1:
            wanted -= {UpdatePolicy.ADVANCE}
        return self.fate.choice(sorted(wanted, key=lambda policy: policy.value))

    # ---- optimizerd ----

    def new_process(self) -> None:
        """A fresh machine; what only the old process knew is gone. Its plan may be another, too,
        but not while a save is under way: another plan comes with another memoryd, which knows of
        none.
        """
        if self.saving is None:
            self.blocks = owned_blocks(self.memory, self.choose_policy)
        self.machine = OptimizerMachine(self.blocks)
        self.running: Sweep | None = None
        self.pulls: list[Pull] = []
        self.sent: list[Effect] = []
        for block in self.blocks:
            self.scribble_spare(block.index)
            for contribution in block.remote:
                for copy in (0, 1):
                    self.scribble(self.remote.array(block.index, contribution, copy))
            if block.contributions:
                for slot in (0, 1):
                    # A sweep that was cut short leaves anything in the slot it wrote.
                    invalid = self.control.slot_version(block.index, slot) == INVALID_VERSION
                    if invalid and not self.holds_state(block.index, slot):
                        self.scribble(self.memory.weights(block.index, slot))

    def scribble_spare(self, block: int) -> None:
        """The copy of the state that does not count may be anything, but what a sweep left there
        that was cut short, or lacks its word.
        """
        intent, version = self.control.interrupted_sweep, self.control.state_version(block)
        spared = intent is not None and intent.block == block
        spared |= self.control.pin(block) == version - 1  # the other copy is read still
        if self.memory.spec.layout.state_copies[block] == 2 and not spared:
            for name in ("master", "exp_avg", "exp_avg_sq"):
                self.scribble(self.memory.state(block, name, version + 1))

    def holds_state(self, block: int, slot: int) -> bool:
        """Whether a slot's bytes are the upper halves of the block's state."""
        version, intent = self.control.state_version(block), self.control.interrupted_sweep
        if intent is not None and intent.block == block:
            completed = _native.undo_state(self.control.undo_area).completed
            if completed == sweep_tag(block, intent.state_version):
                version = intent.state_version  # only the word is missing
        return self.memory.split_master and version % 2 == slot

    def scribble(self, array: Any) -> None:
        array.view(np.uint8)[:] = self.fate.getrandbits(8)

    def perhaps_die(self) -> None:
        if self.fate.random() < self.kill_probability:
            self.kills += 1
            raise KilledError

    def deliver(self, event: Event) -> None:
        effects = self.machine.handle(event)
        self.machine.validate()
        for effect in effects:
            self.perhaps_die()
            self.carry_out(effect)
        self.perhaps_die()
        if self.machine.phase is OptimizerPhase.LIVE:
            self.control.validate(b.index for b in self.blocks)

    def carry_out(self, effect: Effect) -> None:
        assert not isinstance(effect, SendFailed | Exit), effect
        if self.words.write(effect):
            return
        if isinstance(effect, RunSweep):
            assert self.running is None, "two sweeps at once"
            self.running = effect.work
        elif isinstance(effect, Pull):
            self.pulls.append(effect)
        elif isinstance(effect, CancelPulls):
            self.pulls.clear()
        else:
            self.sent.append(effect)

    def step(self) -> bool:
        """Let optimizerd do one thing, if there is one."""
        choices: list[Callable[[], None]] = []
        if self.running is not None:
            choices.append(self.finish_sweep)
        choices += [lambda p=pull: self.finish_pull(p) for pull in self.pulls if self.there(pull)]  # type: ignore[misc]
        choices += [lambda b=b: self.update_on_device(b) for b in self.updatable()]  # type: ignore[misc]
        choices += [lambda b=b: self.read_block(b) for b in self.readable_blocks()]  # type: ignore[misc]
        if self.machine.pins != self.pins():
            choices.append(self.see_pins)
        if not choices:
            return False
        self.fate.choice(choices)()
        return True

    def finish_sweep(self) -> None:
        work, self.running = self.running, None
        assert work is not None
        self.perhaps_die()  # before its first byte
        if self.fate.random() < self.kill_probability and isinstance(work, Preview | CastWeights):
            version = work.version if isinstance(work, CastWeights) else work.update.version
            if isinstance(work, Preview) or not self.memory.split_master:
                assert not self.holds_state(work.block, version % 2)
                self.scribble(self.memory.weights(work.block, version % 2))
            self.kills += 1
            raise KilledError  # amid the weights it writes; amid state: tests of the process
        status = self.kernels.run(work)
        self.perhaps_die()  # after its last
        self.deliver(SweepDone(status=status, seconds=0.5))

    def updatable(self) -> list[int]:
        """Blocks for which a worker's UPDATE has nothing to wait for any more."""
        word = (self.epoch, self.attempt)
        return [
            block
            for block, step in self.updating.items()
            if self.control.state_version(block) == step.version - 1
            and self.control.slot_version(block, step.version % 2) == INVALID_VERSION
            and all(
                self.control.ready(block, k) == word
                for k in range(self.table.blocks[block].contributions)
            )
        ]

    def update_on_device(self, block: int) -> None:
        step = self.updating.pop(block)
        if self.fate.random() < self.kill_probability:
            self.scribble(self.memory.weights(block, step.version % 2))
            self.scribble_spare(block)
            raise BrokenEpochError  # the worker died amid the weights, or amid the flush
        arrays = BlockArrays.of(self.memory, block, self.config)
        status = arrays.preview(self.pool, step, self.config)
        if self.policy_of(block) is UpdatePolicy.FLUSH:
            self.flush(arrays, step)
            self.flushes += 1
        self.perhaps_break()
        self.updates += 1
        self.deliver(
            DeviceUpdated(
                epoch=self.epoch, attempt=self.attempt, block=block, status=status, seconds=0.5
            )
        )

    def policy_of(self, block: int) -> UpdatePolicy:
        return next(b.policy for b in self.blocks if b.index == block)

    def flush(self, arrays: BlockArrays, step: OptimizerStep) -> None:
        """As the native previewer does it."""
        there = arrays.copy_of(step.version)
        there.fill(arrays.copy_of(step.version - 1))
        _native.settle(
            self.pool,
            master=there.master,
            arrays=there.arrays,
            grads=arrays.gradients(step.version),
            hyper=step.hyper(self.config),
            ranges=arrays.ranges,
            undo=self.tools.aligned(_native.undo_bytes(1), np.uint8),
        )

    def stop_updates(self) -> None:
        """Workers drain; those that were writing leave anything."""
        for block in self.updatable():
            if self.fate.random() < 0.5:
                self.scribble_spare(block)
                self.scribble(self.memory.weights(block, self.updating[block].version % 2))
        self.updating.clear()

    def there(self, pull: Pull) -> bool:
        """What the other node's memoryd checks."""
        epoch, attempt = self.elsewhere_ready.get((pull.block, pull.contribution), (0, 0))
        return epoch >= pull.since_epoch and attempt >= pull.attempt

    def finish_pull(self, pull: Pull) -> None:
        self.pulls.remove(pull)
        key = (pull.block, pull.contribution, pull.version % 2)
        self.remote.array(*key)[:] = self.elsewhere[key]
        self.deliver(
            Pulled(
                epoch=pull.epoch,
                attempt=pull.attempt,
                version=pull.version,
                block=pull.block,
                contribution=pull.contribution,
            )
        )

    def until(self, reached: Callable[[], bool], what: str) -> None:
        for _ in range(1000):
            if reached():
                return
            assert self.step() or reached(), f"stuck waiting for {what}: {self.sent[-3:]}"
        raise AssertionError(f"no end waiting for {what}")

    def has_sent(self, message: Effect) -> bool:
        return message in self.sent

    # ---- memoryd ----

    def pins(self) -> dict[int, int]:
        return read_pins(self.control, (b.index for b in self.blocks))

    def see_pins(self) -> None:
        self.deliver(PinsSeen(pins=self.pins()))

    def perhaps_save(self, version: int) -> None:
        """Pin the committed version, while no attempt is under way."""
        if self.saving is not None or self.fate.random() < 0.5:
            return
        self.saving = PinnedVersion(self.memory, version)
        for block in self.reference.arrays:
            if self.control.state_version(block) == version:
                self.unread[block] = self.state_bytes(block, version)
            elif self.exact:
                arrays = self.reference.arrays[block]
                self.unread[block] = tuple(arrays[name].tobytes() for name in STATE)
            else:
                self.unread[block] = ()  # a little off the reference

    def state_bytes(self, block: int, version: int) -> tuple[bytes, ...]:
        master = self.memory.load_master(block, version).tobytes()
        return (master, *(self.memory.state(block, n, version).tobytes() for n in STATE[1:]))

    def readable_blocks(self) -> list[int]:
        saving = self.saving
        return [] if saving is None else [b for b in self.unread if saving.is_there(b)]

    def read_block(self, block: int) -> None:
        assert self.saving is not None
        found, expected = self.state_bytes(block, self.saving.version), self.unread.pop(block)
        if expected:
            assert found == expected, f"block {block} of saved version {self.saving.version}"
        self.saving.check(block)
        self.saving.let_go(block)
        if not self.unread:
            self.saving.close()
            self.saving, self.saves = None, self.saves + 1

    def perhaps_lose_memoryd(self) -> None:
        """In the epoch that follows, its successor knows of no save."""
        if self.fate.random() < 0.1:
            let_go_of_all(self.memory)
            self.saving = None
            self.unread.clear()

    # ---- scheduler and workers ----

    def make_record(
        self,
        version: int,
        attempt: int,
        decision: Decision,
        coefficient: float,
        scale: float,
        lr: float,
    ) -> CommitRecord:
        return CommitRecord(
            version=version,
            attempt=attempt,
            decision=decision,
            coefficient=coefficient,
            inverse_loss_scale=1.0 / scale,
            learning_rate=lr,
            bias_step=max(1, version),
            incarnation=1,
        )

    def begin(self) -> None:
        """Enter a new epoch, over as many dead bodies as it takes."""
        self.stop_updates()
        self.perhaps_lose_memoryd()
        while True:
            self.epoch += 1
            try:
                if self.fate.random() < 0.7:
                    self.deliver(DrainAsked(epoch=self.epoch))
                    drained = SendDrained(epoch=self.epoch)
                    self.until(lambda m=drained: self.has_sent(m), "Drained")  # type: ignore[misc]
                else:
                    self.new_process()
                facts = read_facts(self.control, self.blocks)
                self.deliver(RecoveryAsked(epoch=self.epoch, record=self.record, facts=facts))
                ready = SendReady(epoch=self.epoch)
                self.until(lambda m=ready: self.has_sent(m), "Ready")  # type: ignore[misc]
                assert self.control.committed == self.record.version
                return
            except KilledError:
                self.new_process()

    def life(self) -> None:
        """Run until :data:`STEPS` commits are done and settled; then compare everything."""
        self.begin()
        while self.record.version < STEPS:
            self.survive(self.run_attempt)
        while not self.survive(self.settle):
            pass
        for block in self.memory.owned_blocks():
            assert self.control.readable(block, STEPS)
            assert self.control.state_version(block) == STEPS
            self.reference.assert_weights(self.memory, block, STEPS)
            self.reference.assert_state(self.memory, block)

    def survive(self, action: Callable[[], None]) -> bool:
        """Whether the action came to its end."""
        try:
            action()
            return True
        except KilledError:
            self.new_process()
            self.begin()
        except BrokenEpochError:
            self.begin()
        return False

    def perhaps_break(self) -> None:
        if self.fate.random() < 0.03:
            raise BrokenEpochError

    def settle(self) -> None:
        self.deliver(SettleAsked(epoch=self.epoch, version=self.record.version))
        settled = SendSettled(epoch=self.epoch, version=self.record.version)
        self.until(lambda: self.has_sent(settled), "Settled")
        for block in self.memory.owned_blocks():
            self.reference.assert_state(self.memory, block)

    def run_attempt(self) -> None:
        self.attempt += 1
        self.perhaps_save(self.record.version)
        base, hold = self.record.version, self.fate.random() < 0.35
        decision = self.fate.choice(
            (Decision.COMMIT, Decision.COMMIT, Decision.AMEND, Decision.SKIP)
        )
        scale, lr = self.fate.choice(self.loss_scales), self.fate.choice((0.0, 1e-3, 0.1))
        asked = AttemptAsked(
            epoch=self.epoch,
            attempt=self.attempt,
            base_version=base,
            loss_scale=scale,
            learning_rate=lr,
            hold=hold,
        )
        asking = (PinsSeen(pins=self.pins()), asked)
        todo = self.publications(base + 1, broken=decision is Decision.SKIP)
        early = self.fate.random() < 0.3
        if not early:
            self.ask(*asking)
        if not hold:
            step = OptimizerStep.speculative(version=base + 1, loss_scale=scale, learning_rate=lr)
            devices = [b.index for b in self.blocks if b.policy.by_worker]
            self.updating = {b: step for b in devices if self.table.blocks[b].trainable_elements}
        self.wait_for_weights(base)
        grads: dict[tuple[int, int], Any] = {}
        for block, contribution, values in todo:
            grads[(block, contribution)] = values
            if early and not self.settled(block, base):
                early = False
                self.ask(*asking)
            self.until(lambda b=block: self.settled(b, base), "settle")  # type: ignore[misc]
            self.publish(block, contribution, base + 1, values)
            self.perhaps_break()
            if early and self.fate.random() < 0.5:
                early = False
                self.ask(*asking)
            if self.fate.random() < 0.6:
                self.step()
        if early:
            self.ask(*asking)
        self.until(self.all_reported, "BlockStatus")
        self.check_statuses(grads, finite=decision is not Decision.SKIP)
        self.decide(decision, base + 1, grads, scale, lr, hold)

    def ask(self, pins: PinsSeen, asked: AttemptAsked) -> None:
        self.deliver(pins)
        self.deliver(asked)

    def publications(self, version: int, *, broken: bool) -> Iterator[tuple[int, int, Any]]:
        """Every contribution with its gradients, in random order."""
        pairs = [(b.index, k) for b in self.blocks for k in range(b.contributions)]
        self.fate.shuffle(pairs)
        poisoned = self.fate.choice(pairs) if broken else None
        for block, contribution in pairs:
            count = self.table.blocks[block].trainable_elements
            values = self.numbers.standard_normal(count, np.float32)
            if (block, contribution) == poisoned:
                values[self.fate.randrange(count)] = self.fate.choice((np.inf, np.nan))
            grads = self.tools.aligned(count, np.float32 if self.fp32_grads else np.uint16)
            grads[:] = self.tools.to_gradients(values, self.table.grad_dtype)
            yield block, contribution, grads

    @property
    def fp32_grads(self) -> bool:
        return self.table.grad_dtype is DType.FP32

    def wait_for_weights(self, base: int) -> None:
        """Workers read only what is readable; what they read must be right."""
        owned = self.memory.owned_blocks()
        self.until(lambda: all(self.control.readable(b, base) for b in owned), "weights")
        for block in owned:
            self.reference.assert_weights(self.memory, block, base)

    def settled(self, block: int, base: int) -> bool:
        """Whether the block's next gradients may be written; always where they have two copies."""
        single = self.memory.spec.layout.gradient_copies[block] == 1
        return not single or self.control.state_version(block) == base

    def publish(self, block: int, contribution: int, version: int, values: Any) -> None:
        word = (self.epoch, self.attempt)
        if self.memory.has((block, "grads", 0, contribution)):
            copy = version % self.memory.spec.layout.gradient_copies[block]
            self.memory.grads(block, copy, contribution)[:] = values
            self.control.set_ready(block, contribution, epoch=word[0], attempt=word[1])
            self.deliver(
                GradientsReady(
                    epoch=self.epoch,
                    attempt=self.attempt,
                    block=block,
                    contribution=contribution,
                )
            )
        else:
            self.elsewhere[(block, contribution, version % 2)] = values
            self.elsewhere_ready[(block, contribution)] = word

    def statuses(self) -> dict[int, SendBlockStatus]:
        return {
            m.block: m
            for m in self.sent
            if isinstance(m, SendBlockStatus) and (m.epoch, m.attempt) == (self.epoch, self.attempt)
        }

    def all_reported(self) -> bool:
        return set(self.statuses()) == {b.index for b in self.blocks if b.contributions}

    def check_statuses(self, grads: dict[tuple[int, int], Any], *, finite: bool) -> None:
        statuses = self.statuses()
        assert all(m.status.finite for m in statuses.values()) is finite
        for block, message in statuses.items():
            parts = [grads[(block, k)] for k in range(self.table.blocks[block].contributions)]
            wide = [
                p if self.fp32_grads else (p.astype(np.uint32) << 16).view(np.float32)
                for p in parts
            ]
            if message.status.finite:
                expected = float(np.square(sum(wide), dtype=np.float64).sum())
                assert message.status.sum_squares == pytest.approx(expected, rel=1e-5)

    def decide(
        self,
        decision: Decision,
        version: int,
        grads: dict[tuple[int, int], Any],
        scale: float,
        lr: float,
        hold: bool,
    ) -> None:
        self.perhaps_break()
        if decision is Decision.SKIP:
            self.deliver(SkipAsked(epoch=self.epoch, attempt=self.attempt))
            return
        coefficient = 0.37 if decision is Decision.AMEND else 1.0
        record = self.make_record(version, self.attempt, decision, coefficient, scale, lr)
        if decision is Decision.AMEND and not hold:
            self.deliver(AmendAsked(epoch=self.epoch, attempt=self.attempt, record=record))
            amended = SendAmended(epoch=self.epoch, attempt=self.attempt)
            self.until(lambda: self.has_sent(amended), "Amended")
        self.record = record  # journaled: from here on the commit is the truth
        for block in self.reference.arrays:
            parts = [grads[(block, k)] for k in range(self.table.blocks[block].contributions)]
            self.reference.step(
                block,
                parts,
                lr=lr,
                step=version,
                coefficient=coefficient * record.inverse_loss_scale,
            )
        self.perhaps_break()  # between journal and broadcast
        self.deliver(CommitAsked(epoch=self.epoch, record=record))
        if self.fate.random() < 0.2:
            self.settle()


@pytest.fixture(scope="module")
def pool() -> Iterator[_native.Pool]:
    with _native.Pool([0]) as pool:
        yield pool


STORAGE = [
    pytest.param(DType.FP32, DType.FP32, id="fp32"),
    pytest.param(DType.BF16, DType.BF16, id="bf16"),
    pytest.param(DType.FP16, DType.BF16, id="fp16"),
]


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
@pytest.mark.parametrize(("weight", "grad"), STORAGE)
def test_any_life_ends_with_the_bytes_of_its_commits(
    weight: DType, grad: DType, remote: bool, new_memory: Any, tools: Any, pool: _native.Pool
) -> None:
    blocks = [
        tools.make_block(0, [40, 16], contributions=2),
        tools.make_block(1, []),
        tools.make_block(2, [4096, 30]),
        tools.make_block(3, [64]),
    ]
    table = tools.make_table(blocks, weight, grad)
    there = 1 if remote else 0
    ownership = Ownership(owner=(0, 0, 0, 0), computed_on=((0, there), (0,), (0,), (0,)))
    memory = new_memory(table, ownership, 0, Storage(flushed=(0, 2)))
    lives = live(lambda fate: World(fate, memory, pool, tools))
    assert sum(world.updates for world in lives) > CASES / 2, "devices must update"
    assert sum(world.flushes for world in lives) > CASES / 4, "devices must flush"
    assert sum(world.saves for world in lives) > CASES / 2, "saves must end"


@pytest.mark.parametrize(
    ("single", "remote"), [(False, False), (True, True)], ids=["two-local", "single-remote"]
)
def test_split_masters_end_with_the_bits_of_whole_ones(
    single: bool, remote: bool, new_memory: Any, tools: Any, pool: _native.Pool
) -> None:
    """``single``: gradients that nobody else computes have one copy. The reference's masters are
    whole, its weights rounded half up.
    """
    blocks = [tools.make_block(0, [40, 16], contributions=2), tools.make_block(1, [4096, 30])]
    there = 1 if remote else 0
    memory = new_memory(
        tools.make_table(blocks, DType.BF16, DType.BF16),
        Ownership(owner=(0, 0), computed_on=((0, there), (0,))),
        0,
        Storage(split_master=True, single_gradients=(0, 1) if single else ()),
    )
    copies = memory.spec.layout.gradient_copies
    assert copies == ((2 if remote else 1, 1) if single else (2, 2))
    policies = (UpdatePolicy.SETTLE_EARLY, UpdatePolicy.ADVANCE)
    live(lambda fate: World(fate, memory, pool, tools, policies))


def live(new_world: Callable[[random.Random], World]) -> list[World]:
    """So many lives."""
    lives, first = [], random.randrange(10**6)
    print(f"seeds from {first}")
    for seed in range(first, first + CASES):
        world = new_world(random.Random(seed))
        lives.append(world)
        try:
            world.life()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            let_go_of_all(world.memory)
            world.kernels.close()
    assert sum(world.kills for world in lives) > CASES, "the kills must hit"
    return lives
