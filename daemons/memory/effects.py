"""Carries out a memoryd's effects and counts them: messages to the scheduler; restores and saves,
on a thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from penstock.daemons.kit.events import Exit, LogLine, SendDrained, SendFailed, SendReady
from penstock.daemons.kit.messages import answer
from penstock.daemons.memory import saving
from penstock.daemons.memory.bases.sharing import Sharing, filling_bases
from penstock.daemons.memory.copies.copying import copy_weights
from penstock.daemons.memory.machine.events import (
    CancelJob,
    Effect,
    Event,
    JobCancelled,
    JobFailed,
    ReplicaSource,
    Restored,
    Saved,
    SendPinned,
    SendRestored,
    SendSaved,
    SourceDamaged,
    StartRestore,
    StartSave,
    UnlinkMemory,
    WrittenFile,
)
from penstock.daemons.memory.metrics import MemoryMetrics
from penstock.daemons.memory.pinning import PinnedVersion
from penstock.daemons.memory.refill import Partner, refill
from penstock.daemons.memory.restore import Filling, restore
from penstock.daemons.memory.snapshot import base_files, load_frozen
from penstock.daemons.memory.states import saved_steps
from penstock.daemons.memory.tensorfile import CancelledError, DamagedError
from penstock.host import world
from penstock.host.errors import ConfigError, ExitCode, PenstockError, StateError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.wire.member import Doing
from penstock.shm.memory import NodeMemory

SETTLE_POLL_S = 0.002
"""Seconds between a save's checks for settled blocks."""

_log = logging.getLogger(__name__)

LoadInitial = Callable[[Callable[[], bool]], None]
Job = Callable[[Callable[[], bool]], Event]


class Sender(Protocol):
    """The sending half of :class:`penstock.protocol.wire.member.MemberLink`."""

    def send(self, message: pb.MemberMessage) -> None:
        """Queues a message."""


class JobThread:
    """Runs one job at a time; its answer comes out of :meth:`answer`.

    A job asks again and again whether it is cancelled, every few MiB and while the loader works:
    that is its progress. What it waits for in :meth:`wait` is another member's work, and to ask
    once more after that is none.
    """

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[Event] = world.queue()
        self._cancel = world.event()
        self._thread: threading.Thread | None = None
        self._progress = 0
        self._waits = self._has_waited = False
        self.waited_s = 0.0
        """Seconds that the job has waited for other members."""

    def start(self, name: str, job: Job) -> None:
        """Starts ``job(cancelled)``; the previous job must have answered."""
        self.join()
        self._cancel.clear()
        self.waited_s = 0.0
        self._thread = world.thread(target=self._run, args=(job,), name=name)
        self._thread.start()

    def cancel(self) -> None:
        """Asks the job to stop soon."""
        self._cancel.set()

    def answer(self) -> Event | None:
        """Returns how the job ended, once."""
        try:
            return self._answers.get_nowait()
        except queue.Empty:
            return None

    def doing(self) -> Doing:
        """Returns the activity for heartbeats; called on their thread."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return Doing(waiting=True, progress=self._progress)
        return Doing(activity=thread.name, waiting=self._waits, progress=self._progress)

    @property
    def running(self) -> bool:
        """True while a job runs."""
        return self._thread is not None and self._thread.is_alive()

    def stopping(self) -> bool:
        """Returns whether the job is cancelled; to ask is no progress."""
        return self._cancel.is_set()

    def wait(self) -> bool:
        """Waits for a moment, on a job's thread; returns whether the job is cancelled."""
        self._waits, started_s = True, world.monotonic()
        cancelled = self._cancel.wait(SETTLE_POLL_S)
        self._waits = False
        self._has_waited = True
        self.waited_s += world.monotonic() - started_s
        return cancelled

    def join(self) -> None:
        """Waits for the end of the job."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, job: Job) -> None:
        self._answers.put(_outcome(job, self._cancelled))  # the loop takes it on its own thread

    def _cancelled(self) -> bool:
        if self._has_waited:  # nothing was done since
            self._has_waited = False
        else:
            self._progress += 1  # of several threads at a time: what counts is that it changes
        return self._cancel.is_set()


class MemoryEffects:
    """Carries out what the machine decides, on the machine's thread."""

    def __init__(
        self,
        *,
        memory: NodeMemory,
        link: Sender,
        metrics: MemoryMetrics,
        load_initial: LoadInitial,
        cores: Sequence[int],
        jobs: JobThread,
        state_dir: Path,
        sharing: Sharing | None = None,
        partner: Partner | None = None,
    ) -> None:
        """Creates the effects. ``state_dir``: folder of the run's saved states. ``sharing``: of
        memory with bases. ``partner``: the node with a replica of this memory, if any.
        """
        self._memory = memory
        self._link = link
        self._metrics = metrics
        self._load_initial = load_initial
        self._cores = cores
        self._state_dir = state_dir
        self._sharing = sharing
        self._partner = partner
        self._base: dict[int, WrittenFile] = {}  # jobs use it, one at a time
        self.jobs = jobs
        self.exit: Exit | None = None

    def carry_out(self, effects: Sequence[Effect]) -> Sequence[Event]:
        """Carries out effects in order. Jobs answer later, so no event follows at once."""
        for effect in effects:
            _HANDLERS[type(effect)](self, effect)
        return ()

    def close(self) -> None:
        """Ends the running job, if any."""
        self.jobs.cancel()
        self.jobs.join()

    def _send_drained(self, effect: SendDrained) -> None:
        control = self._memory.control
        memory = pb.MemoryState(
            incarnation=control.incarnation,
            committed=control.committed,
            generation=control.generation,
            lost_attempt=control.lost_attempt,
            tokens=control.tokens,
        )
        self._link.send(answer(effect, memory))

    def _send_restored(self, effect: SendRestored) -> None:
        restored = pb.Restored(
            epoch=effect.epoch, incarnation=effect.incarnation, damaged=effect.damaged
        )
        self._link.send(pb.MemberMessage(restored=restored))

    def _send(self, effect: SendReady | SendFailed) -> None:
        self._link.send(answer(effect))

    def _send_pinned(self, effect: SendPinned) -> None:
        pinned = pb.Pinned(epoch=effect.epoch, number=effect.number, version=effect.version)
        self._link.send(pb.MemberMessage(pinned=pinned))

    def _send_saved(self, effect: SendSaved) -> None:
        if effect.error:
            _log.error("save of version %d failed: %s", effect.version, effect.error)
        files = [
            pb.SavedFile(
                name=file.name,
                bytes=file.num_bytes,
                sha256=file.sha256,
                base=file.base,
                reused=file.reused,
            )
            for file in effect.files
        ]
        saved = pb.Saved(
            epoch=effect.epoch,
            number=effect.number,
            version=effect.version,
            files=files,
            error=effect.error,
            write_seconds=effect.seconds,
        )
        self._link.send(pb.MemberMessage(saved=saved))

    def _start_restore(self, effect: StartRestore) -> None:
        filling = Filling(
            incarnation=effect.incarnation,
            version=effect.version,
            source=Path(effect.source) if effect.source else None,
        )

        def job(cancelled: Callable[[], bool]) -> Event:
            started_s = world.monotonic()
            self._base.clear()
            if effect.replica is None:
                restore(
                    self._memory,
                    filling,
                    self._load_initial,
                    cancelled,
                    self._cores,
                    self._sharing,
                )
                self._base |= {} if filling.source is None else base_files(filling.source)
            else:
                self._refill(effect.replica, cancelled)
            seconds = world.monotonic() - started_s
            self._metrics.job_done("restore", seconds)
            _log.info("restored %s in %.2f s", filling, seconds)
            return Restored()

        self.jobs.start("restore", job)

    def _refill(self, replica: ReplicaSource, cancelled: Callable[[], bool]) -> None:
        if self._partner is None:
            raise ConfigError(
                "memory.mirror is none, but the scheduler orders a refill from a replica"
            )
        refill(
            self._memory,
            self._partner,
            replica.address,
            replica.record,
            replica.generation,
            self._load_frozen,
            cancelled,
            self._cores,
        )

    def _load_frozen(self, cancelled: Callable[[], bool]) -> None:
        """Fills frozen weights from a saved state, or as at a first start if there is none."""
        for version, directory in reversed(saved_steps(self._state_dir)):
            try:
                with filling_bases(
                    self._memory, self._sharing, cancelled, initial=False
                ) as beating:
                    load_frozen(self._memory, directory, version, beating)
                return
            except StateError as error:
                _log.warning("no frozen weights from a saved state: %s", error)
        with filling_bases(self._memory, self._sharing, cancelled, initial=True) as beating:
            self._load_initial(beating)

    def _start_save(self, effect: StartSave) -> None:
        """Starts a save, or a copy of the weights. Its pins are set before this returns, so that
        the next attempt may be announced.
        """
        name, write = ("copy", copy_weights) if effect.weights_only else ("save", saving.save)
        try:
            pinned = PinnedVersion(self._memory, effect.version)
        except StateError as error:
            self.jobs.start(name, partial(_fail, error))
            return

        def job(cancelled: Callable[[], bool]) -> Event:
            started_s = world.monotonic()
            files = write(
                pinned,
                Path(effect.directory),
                cancelled,
                base=self._base,
                wait=self.jobs.wait,
                stopping=self.jobs.stopping,
            )
            waited_s = self.jobs.waited_s
            seconds = world.monotonic() - started_s - waited_s
            self._metrics.job_done(name, seconds)
            _log.info(
                "%s version %d in %.2f s, after %.2f s for blocks to be settled",
                "copied" if effect.weights_only else "saved",
                effect.version,
                seconds,
                waited_s,
            )
            return Saved(files=files, seconds=seconds)

        self.jobs.start(name, job)

    def _cancel_job(self, effect: CancelJob) -> None:
        self.jobs.cancel()

    def _unlink(self, effect: UnlinkMemory) -> None:
        self._memory.unlink()

    def _say(self, effect: LogLine) -> None:
        _log.log(logging.WARNING if effect.warning else logging.INFO, "%s", effect.text)

    def _exit(self, effect: Exit) -> None:
        _log.info("ending with code %d: %s", effect.code, effect.reason)
        self.exit = effect


def _outcome(job: Job, cancelled: Callable[[], bool]) -> Event:
    """Returns the job's own answer, or its exception as one."""
    try:
        return job(cancelled)
    except CancelledError:
        return JobCancelled()
    except DamagedError as error:
        return SourceDamaged(error=str(error))
    except PenstockError as error:
        return JobFailed(error=str(error), exit_code=error.exit_code)
    except OSError as error:
        return JobFailed(error=f"memoryd: {error}", exit_code=ExitCode.BAD_CONFIG)
    except Exception as error:
        _log.exception("job failed")
        return JobFailed(error=f"memoryd: {error!r}", exit_code=ExitCode.LOST_MEMBERS)


def _fail(error: PenstockError, cancelled: Callable[[], bool]) -> Event:
    raise error


_HANDLERS: dict[type, Callable[[MemoryEffects, Any], None]] = {
    SendDrained: MemoryEffects._send_drained,
    SendRestored: MemoryEffects._send_restored,
    SendReady: MemoryEffects._send,
    SendPinned: MemoryEffects._send_pinned,
    SendSaved: MemoryEffects._send_saved,
    SendFailed: MemoryEffects._send,
    StartRestore: MemoryEffects._start_restore,
    StartSave: MemoryEffects._start_save,
    CancelJob: MemoryEffects._cancel_job,
    UnlinkMemory: MemoryEffects._unlink,
    LogLine: MemoryEffects._say,
    Exit: MemoryEffects._exit,
}
