"""Starts, signals, watches and reaps the child processes of a node.

A preloaded process of the node (:mod:`penstock.daemons.preload`) forks the children; without one
they are spawned. Both happen on the main thread, because the parent-death signal follows the
thread. Each child has its own process group, so Ctrl-C in a terminal reaches the supervisor only.
Children are watched, killed and reaped through their pidfd: a reused pid is never hit.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.daemons.preload.client import ChildProcess, NotForkedError, Preloader, spawn
from penstock.daemons.preload.fork_request import PYTHON_MODULE, ForkRequest
from penstock.daemons.preload.preloaders import take_inherited

_log = logging.getLogger(__name__)
_STREAMS = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process to start. ``name`` is the member name (or ``schedulerd``), ``argv[0]`` a path.

    ``is_helper``: the run continues without it. ``preloads``: the kind, if the process is a
    preloader (it has no ``argv``). ``preloader``: the name of the preloader that forks it; ``argv``
    is ``python -m MODULE …`` then. ``inherits``: kinds of preloaders that a forked process
    inherits.
    """

    name: str
    argv: tuple[str, ...] = ()
    is_helper: bool = False
    preloads: str = ""
    preloader: str = ""
    inherits: tuple[str, ...] = ()


class Children:
    """The running children. Use from the main thread only.

    ``kept``: descriptors that children hold as long as they live.
    """

    def __init__(
        self,
        specs: tuple[ProcessSpec, ...],
        environment: Mapping[str, str],
        kept: Sequence[int] = (),
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._environment = dict(environment)
        self._inherited = take_inherited(self._environment)
        self._kept = tuple(kept)
        self._running: dict[str, ChildProcess] = {}
        self._preloaders: dict[str, Preloader] = {}

    @property
    def pidfds(self) -> dict[int, str]:
        """Descriptor that becomes readable when the child of that name dies."""
        return {running.pidfd: name for name, running in self._running.items()}

    @property
    def warming(self) -> dict[int, str]:
        """Descriptor that becomes readable when the preloader of that name is ready, or gone."""
        return {
            preloader.announces: name
            for name, preloader in self._preloaders.items()
            if not preloader.is_warm
        }

    @property
    def stopped(self) -> frozenset[str]:
        """Names of those that a signal has stopped."""
        return frozenset(name for name, child in self._running.items() if child.stopped)

    def start(self, name: str) -> int:
        """Starts a child; returns its pid.

        Raises:
            OSError: the kernel would not.
        """
        spec = self._specs[name]
        if spec.preloads:
            child = self._start_preloader(spec)
        else:
            child = self._forked(spec) or spawn(spec.argv, self._environment)
        self._running[name] = child
        return child.pid

    def warmed(self, name: str) -> bool:
        """Returns whether a preloader is ready. One that hung up before is no longer asked."""
        preloader = self._preloaders[name]
        if preloader.warm():
            return True
        if preloader.is_gone:
            self._drop(name)
        return False

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal. A child that is already dead is left to :meth:`reap`."""
        running = self._running.get(name)
        if running is not None:
            running.signal(number)

    def reap(self, name: str) -> tuple[int, int]:
        """Waits for a child with a readable pidfd; returns its pid and exit code (negative:
        signal).
        """
        self._drop(name)
        running = self._running.pop(name)
        return running.pid, running.reap()

    def kill_all(self) -> None:
        """Kills (SIGKILL) and reaps the remaining children."""
        for name in tuple(self._running):
            self.signal(name, signal.SIGKILL)
        for name in tuple(self._running):
            self.reap(name)

    def _start_preloader(self, spec: ProcessSpec) -> ChildProcess:
        handle = self._inherited.pop(spec.preloads, None)
        preloader = (
            Preloader.start(spec.preloads, self._environment)
            if handle is None
            else Preloader.adopt(handle)
        )
        self._preloaders[spec.name] = preloader
        return preloader.process

    def _forked(self, spec: ProcessSpec) -> ChildProcess | None:
        """Returns a child that the preloader has forked; None: it has not."""
        preloader = self._preloaders.get(spec.preloader)
        if preloader is None or not preloader.is_warm:
            return None
        module, *arguments = spec.argv[len(PYTHON_MODULE) :]
        request = ForkRequest.here(module, arguments, self._environment, spec.inherits)
        try:
            return preloader.fork(request, _STREAMS, self._kept)
        except NotForkedError as error:
            # It is killed: another one is started when it is dead.
            _log.warning("%s did not fork %s: %s", spec.preloader, spec.name, error)
            return None

    def _drop(self, name: str) -> None:
        preloader = self._preloaders.pop(name, None)
        if preloader is not None:
            preloader.close()
