"""The child processes of a node: started, signalled, watched and reaped.

Children are started with ``posix_spawn`` from the main thread (their parent-death signal follows
the thread), each in its own process group (Ctrl-C in a terminal reaches the supervisor only), and
are watched, killed and reaped through their pidfd, so that a reused pid is never hit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.protocol.run.stopping import HEARD_SIGNALS
from penstock.shm.process import is_stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to start: ``name`` is the member name (or ``schedulerd``), ``argv[0]`` a path.

    ``is_helper``: the run goes on without it.
    """

    name: str
    argv: tuple[str, ...]
    is_helper: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    pid: int
    pidfd: int


class Children:
    """The running children. Use from the main thread only."""

    def __init__(self, specs: tuple[ProcessSpec, ...], environment: Mapping[str, str]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._environment = dict(environment)
        self._running: dict[str, _Running] = {}

    @property
    def pidfds(self) -> dict[int, str]:
        """Descriptor that becomes readable when the child of that name dies."""
        return {running.pidfd: name for name, running in self._running.items()}

    @property
    def stopped(self) -> frozenset[str]:
        """Names of those that a signal has stopped."""
        return frozenset(name for name, child in self._running.items() if is_stopped(child.pid))

    def start(self, name: str) -> int:
        """Start a child; its pid.

        Raises:
            OSError: the kernel would not.
        """
        argv = self._specs[name].argv
        pid = os.posix_spawn(
            argv[0],
            argv,
            self._environment,
            setpgroup=0,
            setsigmask=HEARD_SIGNALS,  # until the child listens; it obeys this process only
            setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGPIPE),
        )
        self._running[name] = _Running(pid=pid, pidfd=os.pidfd_open(pid))
        return pid

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal; a child that is dead already is left to :meth:`reap`."""
        running = self._running.get(name)
        if running is None:
            return
        try:
            signal.pidfd_send_signal(running.pidfd, number)
        except ProcessLookupError:
            return  # dead, not reaped yet

    def reap(self, name: str) -> tuple[int, int]:
        """Wait for a child whose pidfd is readable; its pid and exit code (negative: signal)."""
        running = self._running.pop(name)
        result = os.waitid(os.P_PIDFD, running.pidfd, os.WEXITED)
        os.close(running.pidfd)
        assert result is not None, "waitid without WNOHANG returns a result"
        exited = result.si_code == os.CLD_EXITED
        return running.pid, result.si_status if exited else -result.si_status

    def kill_all(self) -> None:
        """SIGKILL and reap what is left."""
        for name in tuple(self._running):
            self.signal(name, signal.SIGKILL)
        for name in tuple(self._running):
            self.reap(name)
