"""Events for an optimizerd's machine, and machines at points that many tests start from."""

from __future__ import annotations

from penstock.daemons.kit.events import SendReady
from penstock.daemons.optimizer.machine.events import (
    AttemptAsked,
    BlockWords,
    GradientsReady,
    MemoryFacts,
    OwnedBlock,
    RecoveryAsked,
    SendBlockStatus,
    SetEpoch,
    SetSlot,
    SweepDone,
    UndoWords,
)
from penstock.daemons.optimizer.machine.machine import OptimizerMachine
from penstock.protocol.plan.step import OptimizerStep, SweepStatus
from penstock.shm.control import INVALID_VERSION, CommitRecord, Decision, SweepIntent

OK = SweepStatus(finite=True, sum_squares=2.0)
DONE = SweepDone(status=OK, seconds=0.25)
QUIET = SweepDone(status=None, seconds=0.25)
IDLE_UNDO = UndoWords(armed=False, tag=0, completed=0)
ONE_BLOCK = (OwnedBlock(index=0, contributions=1),)
TWO_BLOCKS = (OwnedBlock(index=0, contributions=1), OwnedBlock(index=3, contributions=1))


def record(version: int, attempt: int, coefficient: float = 1.0, **more: object) -> CommitRecord:
    """A commit with loss scale 4 and learning rate 0.5."""
    fields: dict[str, object] = {
        "version": version,
        "attempt": attempt,
        "decision": Decision.COMMIT,
        "coefficient": coefficient,
        "inverse_loss_scale": 0.25,
        "learning_rate": 0.5,
        "bias_step": version,
        "incarnation": 1,
    }
    return CommitRecord(**{**fields, **more})  # type: ignore[arg-type]


def update(version: int, coefficient: float = 0.25) -> OptimizerStep:
    """What :func:`record` promises."""
    return OptimizerStep(
        version=version, coefficient=coefficient, learning_rate=0.5, bias_step=version
    )


def facts(
    committed: int,
    blocks: dict[int, tuple[int, int, int]],
    *,
    interrupted: SweepIntent | None = None,
    undo: UndoWords = IDLE_UNDO,
    found: CommitRecord | None = None,
) -> MemoryFacts:
    """``blocks``: state version, version in slot 0, version in slot 1."""
    return MemoryFacts(
        incarnation=1,
        committed=committed,
        record=found or record(committed, 10 * committed),
        next_record=None,
        interrupted=interrupted,
        undo=undo,
        blocks={b: BlockWords(state_version=s, slots=(x, y)) for b, (s, x, y) in blocks.items()},
    )


def begin(found: MemoryFacts, commit: CommitRecord | None = None, epoch: int = 1) -> RecoveryAsked:
    """A Begin with the commit that memory has, or with ``commit``."""
    commit = commit or record(found.committed, 10 * found.committed)
    return RecoveryAsked(epoch=epoch, record=commit, facts=found)


def attempt(number: int, base: int, *, hold: bool = False, epoch: int = 1) -> AttemptAsked:
    """An attempt with the loss scale and learning rate of :func:`record`."""
    return AttemptAsked(
        epoch=epoch,
        attempt=number,
        base_version=base,
        loss_scale=4.0,
        learning_rate=0.5,
        hold=hold,
    )


def ready(number: int, block: int = 0, contribution: int = 0, epoch: int = 1) -> GradientsReady:
    """A contribution of an attempt."""
    return GradientsReady(epoch=epoch, attempt=number, block=block, contribution=contribution)


def status(number: int, block: int = 0) -> SendBlockStatus:
    """What is sent when DONE follows."""
    return SendBlockStatus(epoch=1, attempt=number, block=block, status=OK, seconds=0.25)


def invalid(block: int, slot: int) -> SetSlot:
    """The word before the first write into a slot."""
    return SetSlot(block=block, slot=slot, version=INVALID_VERSION)


def live(
    state: int = 4,
    committed: int = 5,
    blocks: tuple[OwnedBlock, ...] = ONE_BLOCK,
    *,
    together: bool = False,
) -> OptimizerMachine:
    """A machine in epoch 1 at ``committed`` (odd: its weights are in slot 1)."""
    machine = OptimizerMachine(blocks, together=together)
    words = {b.index: (state, committed - 1, committed) for b in blocks}
    assert machine.handle(begin(facts(committed, words))) == [SetEpoch(epoch=1), SendReady(epoch=1)]
    machine.validate()
    return machine


def reported(*, hold: bool = False) -> OptimizerMachine:
    """A machine at 5 that has reported the only block of attempt 51."""
    machine = live(state=5)
    machine.handle(attempt(51, 5, hold=hold))
    machine.handle(ready(51))
    assert machine.handle(DONE)[-1] == status(51)
    return machine
