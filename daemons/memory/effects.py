"""What a memoryd does and counts: messages to the scheduler; restores and saves, on a thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.daemons.kit.events import Exit, Say, SendDrained, SendFailed, SendReady
from penstock.daemons.kit.messages import answer
from penstock.daemons.memory import snapshot
from penstock.daemons.memory.machine.events import (
    CancelJob,
    Effect,
    Event,
    JobCancelled,
    JobFailed,
    Restored,
    Saved,
    SendRestored,
    SendSaved,
    StartRestore,
    StartSave,
    UnlinkMemory,
)
from penstock.daemons.memory.metrics import MemoryMetrics
from penstock.daemons.memory.restore import Filling, restore
from penstock.daemons.memory.tensorfile import CancelledError
from penstock.protocol.errors import ExitCode, PenstockError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.wire.member import Doing
from penstock.shm.memory import NodeMemory

_log = logging.getLogger(__name__)

LoadInitial = Callable[[Callable[[], bool]], None]
Job = Callable[[Callable[[], bool]], Event]


class Sender(Protocol):
    """The sending half of :class:`penstock.protocol.wire.member.MemberLink`."""

    def send(self, message: pb.MemberMessage) -> None:
        """Queue a message."""


class JobThread:
    """Runs one job at a time; its answer comes out of :meth:`answer`.

    A job asks again and again whether it is cancelled, every few MiB and while it waits for the
    loader: that is its progress.
    """

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        self._progress = 0

    def start(self, name: str, job: Job) -> None:
        """Start ``job(cancelled)``; the one before must have answered."""
        self.join()
        self._cancel.clear()
        self._thread = threading.Thread(target=self._run, args=(job,), name=name)
        self._thread.start()

    def cancel(self) -> None:
        """Ask the job to stop soon."""
        self._cancel.set()

    def answer(self) -> Event | None:
        """Returns how the job ended, once."""
        try:
            return self._answers.get_nowait()
        except queue.Empty:
            return None

    def doing(self) -> Doing:
        """For heartbeats, on their thread."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return Doing(waiting=True, progress=self._progress)
        return Doing(activity=thread.name, progress=self._progress)

    @property
    def running(self) -> bool:
        """Whether a job is under way."""
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end of the job."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, job: Job) -> None:
        self._answers.put(_outcome(job, self._cancelled))  # the loop takes it on its own thread

    def _cancelled(self) -> bool:
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
    ) -> None:
        self._memory = memory
        self._link = link
        self._metrics = metrics
        self._load_initial = load_initial
        self._cores = cores
        self.jobs = jobs
        self.exit: Exit | None = None

    def carry_out(self, effects: Sequence[Effect]) -> Sequence[Event]:
        """Carry out effects in order. Jobs answer later: no event follows at once."""
        for effect in effects:
            _HANDLERS[type(effect)](self, effect)
        return ()

    def close(self) -> None:
        """End the running job, if any."""
        self.jobs.cancel()
        self.jobs.join()

    def _send_drained(self, effect: SendDrained) -> None:
        control = self._memory.control
        memory = pb.MemoryState(incarnation=control.incarnation, committed=control.committed)
        self._link.send(answer(effect, memory))

    def _send_restored(self, effect: SendRestored) -> None:
        restored = pb.Restored(epoch=effect.epoch, incarnation=effect.incarnation)
        self._link.send(pb.MemberMessage(restored=restored))

    def _send(self, effect: SendReady | SendFailed) -> None:
        self._link.send(answer(effect))

    def _send_saved(self, effect: SendSaved) -> None:
        if effect.error:
            _log.error("save of version %d failed: %s", effect.version, effect.error)
        files = [
            pb.SavedFile(name=file.name, bytes=file.num_bytes, sha256=file.sha256)
            for file in effect.files
        ]
        saved = pb.Saved(
            epoch=effect.epoch, version=effect.version, files=files, error=effect.error
        )
        self._link.send(pb.MemberMessage(saved=saved))

    def _start_restore(self, effect: StartRestore) -> None:
        filling = Filling(
            incarnation=effect.incarnation,
            version=effect.version,
            source=Path(effect.source) if effect.source else None,
        )

        def job(cancelled: Callable[[], bool]) -> Event:
            started_s = time.monotonic()
            restore(self._memory, filling, self._load_initial, cancelled, self._cores)
            seconds = time.monotonic() - started_s
            self._metrics.job_done("restore", seconds)
            _log.info("restored %s in %.2f s", filling, seconds)
            return Restored()

        self.jobs.start("restore", job)

    def _start_save(self, effect: StartSave) -> None:
        def job(cancelled: Callable[[], bool]) -> Event:
            started_s = time.monotonic()
            files = snapshot.save(self._memory, Path(effect.directory), effect.version, cancelled)
            seconds = time.monotonic() - started_s
            self._metrics.job_done("save", seconds)
            _log.info("saved version %d in %.2f s", effect.version, seconds)
            return Saved(files=files)

        self.jobs.start("save", job)

    def _cancel_job(self, effect: CancelJob) -> None:
        self.jobs.cancel()

    def _unlink(self, effect: UnlinkMemory) -> None:
        self._memory.unlink()

    def _say(self, effect: Say) -> None:
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
    except PenstockError as error:
        return JobFailed(error=str(error), exit_code=error.exit_code)
    except OSError as error:
        return JobFailed(error=f"memoryd: {error}", exit_code=ExitCode.BAD_CONFIG)
    except Exception as error:
        _log.exception("job failed")
        return JobFailed(error=f"memoryd: {error!r}", exit_code=ExitCode.LOST_MEMBERS)


_HANDLERS: dict[type, Callable[[MemoryEffects, Any], None]] = {
    SendDrained: MemoryEffects._send_drained,
    SendRestored: MemoryEffects._send_restored,
    SendReady: MemoryEffects._send,
    SendSaved: MemoryEffects._send_saved,
    SendFailed: MemoryEffects._send,
    StartRestore: MemoryEffects._start_restore,
    StartSave: MemoryEffects._start_save,
    CancelJob: MemoryEffects._cancel_job,
    UnlinkMemory: MemoryEffects._unlink,
    Say: MemoryEffects._say,
    Exit: MemoryEffects._exit,
}
