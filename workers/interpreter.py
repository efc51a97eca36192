"""Runs a program: one handler per instruction, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.host import world
from penstock.host.errors import ExitCode, PenstockError
from penstock.protocol.plan.instructions import Instruction, Opcode, Program
from penstock.workers.attempt import Attempt
from penstock.workers.epoch import EpochContext, Job, PairSums
from penstock.workers.handlers import HANDLERS, Handler
from penstock.workers.telemetry.timing import Tally
from penstock.workers.telemetry.usage import DeviceMemoryError, MemoryPeak, refused_bytes
from penstock.workers.waiting import Interrupted

_EVENTS_IN_ERRORS = 5


class InstructionError(PenstockError):
    """The error of a failed instruction: names the instruction, its place in the run, and the
    instructions before it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """``loss_sum`` over ``loss_tokens`` counted tokens with a loss from this device (0: none).
    ``right_tokens`` of them are predicted right; counted in evaluations. ``pairs``: sums over pairs
    of answers; None without pairs.

    ``wall_s`` runs from the first instruction to the last offload; ``tail_s`` from the end of the
    last compute instruction to that of everything, offloads and updates of blocks included (0
    where nothing was computed). ``held_bytes`` at the end, and ``peak``: of the device's
    memory, where it was measured.
    """

    loss_sum: float
    loss_tokens: int
    wall_s: float
    tail_s: float
    tally: Tally
    held_bytes: float | None = None
    peak: MemoryPeak | None = None
    right_tokens: int = 0
    pairs: PairSums | None = None


def run_job(
    context: EpochContext, job: Job, program: Program, handlers: Mapping[Opcode, Handler] = HANDLERS
) -> JobResult:
    """Executes a program on one global batch. At the return, or an error, the device holds nothing
    of it.

    Raises:
        Interrupted: the abort flag was set. InstructionError: an instruction failed.
            UnusedWorkError: the program left work behind.
    """
    attempt = Attempt(context, job)
    start = world.perf_counter()
    try:
        with context.meter.attempt():
            for instruction in program:
                _execute(instruction, attempt, handlers[instruction.opcode])
        attempt.finish()
        attempt.record_peak(context.meter.peak)
        measured = context.meter.peak is not None
        held_bytes = context.meter.usage(attempt).total_bytes if measured else None
        end, computed_at = world.perf_counter(), attempt.tally.computed_at
        return JobResult(
            loss_sum=attempt.loss_sum,
            loss_tokens=attempt.loss_tokens,
            right_tokens=attempt.right_tokens,
            pairs=attempt.pairs,
            wall_s=end - start - attempt.update_s,
            tail_s=end - computed_at if computed_at else 0.0,
            tally=attempt.tally,
            held_bytes=held_bytes,
            peak=context.meter.peak,
        )
    except BaseException:
        context.abort.set("an instruction failed")  # background work must not be waited for
        raise
    finally:
        context.progress.rest()
        attempt.drop()


def _execute(instruction: Instruction, attempt: Attempt, handler: Handler) -> None:
    attempt.context.abort.check()
    attempt.context.progress.begin(instruction, attempt.job.phase, attempt.job.number)
    attempt.timeline.begin()
    try:
        handler(instruction, attempt)
        attempt.context.meter.executed(instruction, attempt)
    except Interrupted:
        raise
    except Exception as error:
        # A handler may fail because the abort closed its parts; then the abort is the reason.
        attempt.context.abort.check()
        raise _failure(instruction, attempt, error) from error
    attempt.timeline.end(instruction, attempt.tally)


def _failure(instruction: Instruction, attempt: Attempt, error: Exception) -> InstructionError:
    context, job = attempt.context, attempt.job
    before = ", ".join(repr(str(executed)) for executed in context.trace.last(_EVENTS_IN_ERRORS))
    error = _shortage(attempt, error) or error
    failure = InstructionError(
        f"worker.{context.device_index}: run {context.run_id}, membership {context.epoch},"
        f" {job.phase} {job.number}: {str(instruction)!r} failed: {type(error).__name__}: {error}"
        f" (before it: {before or 'nothing'})"
    )
    failure.exit_code = (
        error.exit_code if isinstance(error, PenstockError) else ExitCode.LOST_MEMBERS
    )
    return failure


def _shortage(attempt: Attempt, error: Exception) -> DeviceMemoryError | None:
    """Returns an error with remedies if an allocator has run out of memory; else ``None``."""
    context = attempt.context
    refused = refused_bytes(error)
    if refused is None:
        return None
    return DeviceMemoryError(
        context.plan.programs[context.device_index],
        context.meter.usage(attempt),
        wanted_bytes=refused,
        limit_bytes=context.meter.limit_bytes,
    )
