"""Starts preloaders, and requests children from them that become children of this process."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import time
from _posixsubprocess import fork_exec
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from penstock.daemons.preload.fork_request import NAMED_BYTES, ForkRequest
from penstock.daemons.preload.preloaders import QUIET, PreloaderHandle
from penstock.daemons.preload.server import GO, REFUSED, command_line
from penstock.host.process_identity import group_of, is_stopped
from penstock.host.stopping import HEARD_SIGNALS

FORK_WITHIN_S = 20.0
"""Seconds for a fork: about 30 ms, or seconds on a loaded machine. A stopped or dead preloader, and
one with a stopped newborn, is not waited for.
"""
REPORTS_WITHIN_S = 0.1
"""Seconds to wait for a spawned process to begin its program, which takes about 0.5 ms. A longer
time does no harm.
"""
DEAD_WITHIN_S = 5.0
"""Processes that were killed are dead within this, unless the kernel cannot end them."""
_LOOK_EACH_S = 0.1
_REAP_EACH_S = 0.001
_KIND_BYTES = 64
_PR_SET_CHILD_SUBREAPER = 36


class NotForkedError(Exception):
    """The preloader did not do it; the reason is the message. Spawn the process instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildProcess:
    """A child of this process, by a descriptor that no reused pid can deceive."""

    pid: int
    pidfd: int

    @classmethod
    def of(cls, pid: int) -> ChildProcess:
        """Returns the child ``pid``, which is not reaped yet."""
        return cls(pid=pid, pidfd=os.pidfd_open(pid))

    @property
    def stopped(self) -> bool:
        """True if a signal has stopped the process."""
        return is_stopped(self.pid)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; one that is dead already, or reaped, is left alone."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return

    def ended(self, timeout_s: float = 0.0) -> bool:
        """Waits until it has ended; returns whether it has."""
        return bool(select.select([self.pidfd], [], [], timeout_s)[0])

    def reap(self) -> int:
        """Waits for the end of the process, and releases its descriptor; returns the exit code
        (negative: signal).
        """
        result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        os.close(self.pidfd)
        assert result is not None, "waitid without WNOHANG returns a result"
        exited = result.si_code == os.CLD_EXITED
        return result.si_status if exited else -result.si_status


def spawn(
    words: Sequence[str],
    environment: Mapping[str, str],
    streams: Sequence[int] = (),
    kept: Sequence[int] = (),
) -> ChildProcess:
    """Starts a child of the calling thread in its own process group, with stop signals blocked.
    ``streams``: descriptors for stdin, stdout and stderr; default: those of this process. ``kept``:
    further descriptors that stay open in the child.

    It is a plain fork. ``vfork``, and ``posix_spawn`` with it, would suspend this thread until the
    child runs its program, and all other threads with it through the interpreter's lock. If a
    signal stopped the child before that, they would wait for ever. With a fork the child is known
    from its first instruction on. A child that is stopped before its program begins is killed and
    replaced once. A later or second stop is left to its watcher
    (:class:`penstock.host.stopping.StoppedDetector`).

    Raises:
        OSError: the kernel refused, or reported within :data:`REPORTS_WITHIN_S` that it cannot run
            the program.
    """
    for last in (False, True):
        report, theirs = os.pipe()
        with open(report, "rb", buffering=0) as reporting:
            try:
                pid = _fork_exec(words, environment, streams, kept, (report, theirs))
            finally:
                os.close(theirs)
            child = ChildProcess.of(pid)
            # The pipe's other end closes with the exec: any longer a wait would be to block.
            if select.select([reporting], [], [], REPORTS_WITHIN_S)[0]:
                error = reporting.read()
                break
        if last or not child.stopped:
            return child
        child.signal(signal.SIGKILL)
        child.reap()
    if error:
        child.reap()
        number = int(error.split(b":")[1], 16)
        raise OSError(number, os.strerror(number), words[0])
    return child


def _fork_exec(
    words: Sequence[str],
    environment: Mapping[str, str],
    streams: Sequence[int],
    kept: Sequence[int],
    report: tuple[int, int],
) -> int:
    """Returns the pid of a child that has done nothing yet. Between fork and exec no line of Python
    runs in it: another thread may have held any lock. ``report``: a pipe that the exec closes; what
    comes through it before is the error, as ``subprocess`` reads it.
    """
    stdin, stdout, stderr = streams or (-1, -1, -1)
    program = os.fsencode(words[0])
    folders = [] if os.path.dirname(program) else os.get_exec_path(environment)
    start: Callable[..., int] = fork_exec  # its arguments differ between versions of Python
    # Python 3.14 takes a plain fork only where a uid is to be set, though it be the process's own.
    uid, no_vfork = (_settable_uid(), ()) if sys.version_info >= (3, 14) else (None, (False,))
    # The child inherits the mask: stop signals wait until it listens; it obeys this process only.
    before = signal.pthread_sigmask(signal.SIG_SETMASK, HEARD_SIGNALS)
    try:
        return start(
            [os.fsencode(word) for word in words],
            tuple(os.path.join(os.fsencode(folder), program) for folder in folders) or (program,),
            False,
            tuple(sorted((*kept, report[1]))),
            None,
            [os.fsencode(f"{name}={value}") for name, value in environment.items()],
            *(stdin, -1, -1, stdout, -1, stderr, *report),
            *(True, False, 0),  # SIGPIPE as a shell has it; no session, but a group of its own
            *(None, None, uid, -1),
            None,
            *no_vfork,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _settable_uid() -> int | None:
    """Returns this process's user; None where a filter of system calls (a unit of systemd has one)
    refuses to set even that.
    """
    try:
        os.setreuid(-1, -1)
    except PermissionError:
        return None
    return os.getuid()


class Preloader:
    """A preloaded process of this one. Use from the thread that started it, the main thread.

    ``process``: to be watched, killed and reaped by the owner.
    """

    def __init__(self, kind: str, process: ChildProcess, requests: socket.socket) -> None:
        self.process = process
        self._kind = kind
        self._requests = requests
        self._became: set[str] = set()
        self._ended = False

    @classmethod
    def start(cls, kind: str, environment: Mapping[str, str]) -> Preloader:
        """Starts one that imports what ``kind`` stands for. It is of use when it is ``warm``.

        Raises:
            OSError: the kernel would not.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.set_inheritable(True)
        words = [*command_line(kind, os.getpid()), "--socket", str(theirs.fileno())]
        words += ["--room", "." * max(0, NAMED_BYTES - len(" ".join(words)))]
        try:
            return cls(kind, spawn(words, {**environment, **QUIET}), mine)
        except OSError:
            mine.close()
            raise
        finally:
            theirs.close()

    @classmethod
    def adopt(cls, handle: PreloaderHandle) -> Preloader:
        """Returns one that this process owns since its start."""
        line = socket.socket(fileno=handle.descriptor)
        preloader = cls(handle.kind, ChildProcess.of(handle.pid), line)
        preloader._became = {handle.kind} if handle.warm else set()
        return preloader

    def hand_over(self) -> PreloaderHandle:
        """Returns the preloader for another part of this process, which adopts it."""
        os.close(self.process.pidfd)
        pid, descriptor = self.process.pid, self._requests.detach()
        return PreloaderHandle(kind=self._kind, descriptor=descriptor, pid=pid, warm=self.is_warm)

    @property
    def announces(self) -> int:
        """Descriptor that becomes readable when the preloader progresses, is ready, or is gone."""
        return self._requests.fileno()

    @property
    def is_warm(self) -> bool:
        """True if it was ready at the last call of :meth:`warm`."""
        return self._kind in self._became

    @property
    def is_gone(self) -> bool:
        """True if it has closed its socket, or has been ended."""
        return self._ended or "" in self._became

    def warm(self, timeout_s: float = 0.0, kind: str = "") -> bool:
        """Waits until all is imported, or what ``kind`` stands for; returns whether it is. A
        preloader that is stopped is not waited for.
        """
        deadline_s, needed = time.monotonic() + timeout_s, kind or self._kind
        while not self.is_gone and not {needed, self._kind} & self._became:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self._requests], [], [], min(left_s, _LOOK_EACH_S))[0]:
                if left_s <= _LOOK_EACH_S or self.process.stopped:
                    return False
                continue
            try:
                self._became.add(self._requests.recv(_KIND_BYTES).decode())
            except OSError:
                self._became.add("")
        return not self.is_gone

    def fork(
        self,
        request: ForkRequest,
        streams: Sequence[int],
        kept: Sequence[int] = (),
        within_s: float = FORK_WITHIN_S,
    ) -> ChildProcess:
        """Returns a new child of this process. ``streams``: its stdin, stdout and stderr; it has
        the descriptors ``kept`` open as long as it lives.

        Raises:
            NotForkedError: with the reason. Nothing was started then, or it is dead and reaped;
                this preloader is killed, and left for its owner to reap.
        """
        if not self._became:
            raise NotForkedError("it is not ready")
        with adopting_orphans():
            try:
                return self._forked(request.to_bytes(), streams, kept, within_s)
            except (OSError, ValueError) as error:
                self._kill()
                raise NotForkedError(f"no answer: {error}") from error
            except NotForkedError:
                self._kill()
                raise

    def _forked(
        self, request: bytes, streams: Sequence[int], kept: Sequence[int], within_s: float
    ) -> ChildProcess:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with mine:
            with theirs:
                descriptors = [*streams, theirs.fileno(), *kept]
                socket.send_fds(self._requests, [request], descriptors, socket.MSG_DONTWAIT)
            # Ours is closed now, so that the end of the child is the end of the line.
            self._wait_for(mine, within_s)
            answer = mine.recv(1024)
            if not answer or answer.startswith(REFUSED):
                reason = answer.removeprefix(REFUSED).decode(errors="replace")
                raise NotForkedError(reason or "it ended, or its child did")
            child = ChildProcess.of(int(answer))
            try:
                # Out of the preloader's group: from now on it does not die with it.
                os.setpgid(child.pid, child.pid)
                mine.send(GO)
            except OSError:
                child.signal(signal.SIGKILL)
                child.reap()
                raise
            return child

    def _wait_for(self, line: socket.socket, within_s: float) -> None:
        """Waits until something comes over a request's socket.

        Raises:
            NotForkedError: nothing came, or the preloader is stopped, or what it has forked is.
        """
        deadline_s = time.monotonic() + within_s
        while not select.select([line], [], [], _LOOK_EACH_S)[0]:
            if self.process.stopped:
                raise NotForkedError("it is stopped")
            if any(is_stopped(pid) for pid in group_of(self.process.pid)):
                raise NotForkedError("its new child is stopped")
            if time.monotonic() >= deadline_s:
                raise NotForkedError(f"no answer for {within_s:g} s")

    def _kill(self) -> None:
        """Kills the preloader together with unacknowledged newborns, which are still in its group.
        Its orphans are children of this process now, which reaps them. A stopped newborn would
        otherwise hold its descriptors, the node's lock among them, for ever.
        """
        if self._ended:
            return
        self.process.signal(signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + DEAD_WITHIN_S
        while newborns := [pid for pid in group_of(self.process.pid) if pid != self.process.pid]:
            for pid in newborns:
                with suppress(ChildProcessError):  # its parent, which was killed, is not dead yet
                    os.waitpid(pid, os.WNOHANG)
            if time.monotonic() >= deadline_s:
                return
            time.sleep(_REAP_EACH_S)

    def close(self) -> None:
        """Closes the socket, which ends the process."""
        self._requests.close()

    def end(self) -> None:
        """Kills and reaps the process, and hangs up; harmless when that is done already."""
        if self._ended:
            return
        self._ended = True
        self.process.signal(signal.SIGKILL)
        self.process.reap()
        self.close()


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Takes orphans among this process's descendants as its children inside the block."""
    libc = ctypes.CDLL(None, use_errno=True)

    def take_in(whether: int) -> None:
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, whether, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")

    take_in(1)
    try:
        yield
    finally:
        take_in(0)
