"""Carries out what the machine decided, in order, on the machine's thread."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from penstock.daemons.kit.events import EffectFailed, Exit, LogLine
from penstock.daemons.scheduler.effect_times import EffectTimes
from penstock.daemons.scheduler.journal import Journal
from penstock.daemons.scheduler.machine.events import (
    Accept,
    AppendMetrics,
    Beat,
    CompleteSave,
    Disconnect,
    Effect,
    Event,
    FindSaved,
    JournalDecision,
    JournalEpoch,
    JournalEvaluation,
    JournalGenerations,
    JournalNumerics,
    JournalTokens,
    NoteEnd,
    PrepareSave,
    Refuse,
    Reply,
    ReplyError,
    SavedFound,
    SaveFinished,
    SavePrepared,
    Send,
)
from penstock.daemons.scheduler.metrics import SchedulerMetrics
from penstock.daemons.scheduler.metrics_file import MetricsFile
from penstock.daemons.scheduler.saved import SavedStates
from penstock.daemons.scheduler.service import SchedulerServer
from penstock.daemons.scheduler.trace import DecisionTrace
from penstock.host import world
from penstock.host.errors import PenstockError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.names import SCHEDULERD
from penstock.protocol.run.run_result import RunEnd

_log = logging.getLogger("penstock.scheduler")


class DiskThread:
    """Does slow disk work apart from the machine's thread, one job at a time."""

    def __init__(self, put: Callable[[Event], None]) -> None:
        """Starts the thread. Results are queued as events through ``put``."""
        self._put = put
        self._pool = world.executor(1, "saved-states")

    def run(self, work: Callable[[], Event], failed: Callable[[str], Event]) -> None:
        """Queues ``work``, which returns an event. ``failed`` makes the event of an error."""
        self._pool.submit(self._run, work, failed)

    def close(self) -> None:
        """Waits for the running job, and drops all other jobs."""
        self._pool.shutdown(cancel_futures=True)

    def _run(self, work: Callable[[], Event], failed: Callable[[str], Event]) -> None:
        try:
            event = work()
        except PenstockError as error:
            event = failed(str(error))
        except Exception as error:
            _log.exception("cannot finish what a save needs of the disk")
            event = failed(repr(error))
        self._put(event)


class SchedulerEffects:
    """Carries out effects. ``exit`` is set when the machine has ended.

    ``myself``: the scheduler's own entry among the members of a status. ``inputs``: checksum of the
    prepared files. The machine does not know both.
    """

    def __init__(
        self,
        *,
        run_dir: Path,
        service: SchedulerServer,
        journal: Journal,
        saved: SavedStates,
        disk_thread: DiskThread,
        metrics_file: MetricsFile,
        metrics: SchedulerMetrics,
        times: EffectTimes,
        trace: DecisionTrace,
        myself: pb.MemberStatus,
        inputs: str,
    ) -> None:
        self._myself = myself
        self._inputs = inputs
        self.exit: Exit | None = None
        self._run_dir = run_dir
        self._service = service
        self._journal = journal
        self._saved = saved
        self._disk_thread = disk_thread
        self._metrics_file = metrics_file
        self._metrics = metrics
        self._times = times
        self._trace = trace

    def carry_out(self, effects: Sequence[Effect]) -> Sequence[Event]:
        """Runs effects in order; returns the events that they caused.

        After an error, the rest of the list is dropped: a commit without a journal row is never
        announced.
        """
        events: list[Event] = []
        for effect in effects:
            self._times.begins(effect)
            self._trace.begins(effect)
            try:
                event = self._HANDLERS[type(effect)](self, effect)
            except PenstockError as error:
                _log.exception("cannot carry out %s", type(effect).__name__)
                return [*events, EffectFailed(code=error.exit_code, error=str(error))]
            if event is not None:
                events.append(event)
        self._times.done()
        self._trace.done()
        return events

    def _accept(self, effect: Accept) -> None:
        self._service.accept(effect.stream, effect.member)

    def _refuse(self, effect: Refuse) -> None:
        self._service.refuse(effect.stream, effect.reason)

    def _disconnect(self, effect: Disconnect) -> None:
        self._service.disconnect(effect.stream)

    def _send(self, effect: Send) -> None:
        self._service.send(effect.member, effect.message)

    def _beat(self, effect: Beat) -> None:
        self._service.beat()

    def _journal_epoch(self, effect: JournalEpoch) -> None:
        self._journal.begin_epoch(effect)

    def _journal_decision(self, effect: JournalDecision) -> None:
        self._journal.decide(effect)

    def _journal_evaluation(self, effect: JournalEvaluation) -> None:
        self._journal.evaluate(effect)

    def _journal_generations(self, effect: JournalGenerations) -> None:
        self._journal.replace(effect)

    def _journal_tokens(self, effect: JournalTokens) -> None:
        self._journal.recognise(effect)

    def _journal_numerics(self, effect: JournalNumerics) -> None:
        self._journal.follow(effect)

    def _append_metrics(self, effect: AppendMetrics) -> None:
        self._metrics_file.append(effect.metrics_json)
        self._metrics.line(effect.metrics_json)

    def _prepare_save(self, effect: PrepareSave) -> None:
        def prepare() -> Event:
            self._saved.prepare(Path(effect.directory))
            return SavePrepared(number=effect.number)

        self._disk_thread.run(
            prepare, lambda error: SavePrepared(number=effect.number, error=error)
        )

    def _complete_save(self, effect: CompleteSave) -> None:
        finished = partial(SaveFinished, number=effect.number, version=effect.version)

        def complete() -> Event:
            directory = self._saved.complete(effect)
            self._metrics.saved(world.wall())
            return finished(directory=str(directory))

        self._disk_thread.run(complete, lambda error: finished(directory="", error=error))

    def _find_saved(self, effect: FindSaved) -> None:
        def find() -> Event:
            newest = self._saved.newest(effect.below)
            error = f"no saved state is older than step {effect.below}" if newest is None else ""
            return SavedFound(saved=newest, error=error)

        self._disk_thread.run(find, lambda error: SavedFound(saved=None, error=error))

    def _reply(self, effect: Reply | ReplyError) -> None:
        if isinstance(effect, Reply) and isinstance(effect.reply, pb.StatusReply):
            self._complete(effect.reply)
        self._service.answer(effect)

    def bid_farewell(self, status: pb.StatusReply) -> None:
        """Sends the end of the run to status watchers; takes a second at most."""
        self._complete(status)
        self._service.bid_farewell(status)

    def _complete(self, status: pb.StatusReply) -> None:
        status.members.insert(0, self._myself)
        status.inputs = self._inputs

    def _say(self, effect: LogLine) -> None:
        extra = {"cause": effect.cause} if effect.cause else None
        level = logging.WARNING if effect.warning else logging.INFO
        _log.log(level, "%s", effect.text, extra=extra)
        if effect.warning:
            sys.stderr.write(f"{SCHEDULERD}: {effect.text}\n")
            sys.stderr.flush()

    def _note_end(self, effect: NoteEnd) -> None:
        self._metrics.ended(effect.code)
        try:
            self._metrics_file.catch_up()  # after the note, no later scheduler does it
        finally:
            write_run_result(self._run_dir, effect)

    def _exit(self, effect: Exit) -> None:
        self.exit = effect

    _HANDLERS: ClassVar[Mapping[type, Callable[[SchedulerEffects, Any], Event | None]]] = {
        Accept: _accept,
        Refuse: _refuse,
        Disconnect: _disconnect,
        Send: _send,
        Beat: _beat,
        JournalEpoch: _journal_epoch,
        JournalDecision: _journal_decision,
        JournalEvaluation: _journal_evaluation,
        JournalGenerations: _journal_generations,
        JournalTokens: _journal_tokens,
        JournalNumerics: _journal_numerics,
        AppendMetrics: _append_metrics,
        PrepareSave: _prepare_save,
        CompleteSave: _complete_save,
        FindSaved: _find_saved,
        Reply: _reply,
        ReplyError: _reply,
        LogLine: _say,
        NoteEnd: _note_end,
        Exit: _exit,
    }


def write_run_result(run_dir: Path, end: NoteEnd) -> None:
    """Writes the run's result. Without room on the disk, only connected members learn the end."""
    note = RunEnd(
        reason=end.reason,
        code=end.code,
        keep_memory=end.keep_memory,
        failed=end.failed,
        written_s=world.wall(),
    )
    try:
        note.write(run_dir)
    except PenstockError:
        _log.exception("cannot write the run's result")
