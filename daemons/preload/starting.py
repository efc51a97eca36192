"""Starts ``python -m MODULE`` for commands: forked by a preloader that the command keeps, or
spawned.
"""

from __future__ import annotations

import os
import time
from collections.abc import MutableMapping, Sequence
from types import TracebackType
from typing import Protocol

from penstock.daemons.preload.client import ChildProcess, NotForkedError, Preloader, spawn
from penstock.daemons.preload.fork_request import ForkRequest
from penstock.daemons.preload.preloaders import export_handles, take_inherited

WARM_UP_S = 30.0
"""Seconds that a first start waits for the preloader's imports: a spawned process would take about
as long.
"""
RETRY_S = 5.0
"""A preloader that is lost is started again so much later."""


class Starter(Protocol):
    """Starts processes of this one, with stop signals blocked until they listen."""

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        streams: Sequence[int],
        kept: Sequence[int] = (),
        inherits: tuple[str, ...] = (),
        needs: str = "",
    ) -> ChildProcess:
        """Starts ``python -m module arguments``.

        ``streams``: its stdin, stdout and stderr. ``kept``: descriptors that stay open for its
        lifetime. ``inherits``: kinds of preloaders that the process inherits, if it is forked.
        ``needs``: the kind with sufficient imports to fork it; default: all imports of the
        preloader.
        """

    def look(self) -> None:
        """Mends what has been lost; to be called now and then."""


class Spawning:
    """Starts every process from nothing."""

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        streams: Sequence[int],
        kept: Sequence[int] = (),
        inherits: tuple[str, ...] = (),
        needs: str = "",
    ) -> ChildProcess:
        """Spawns the process; see :class:`Starter`. It inherits no preloaders."""
        return spawn(
            ForkRequest.here(module, arguments, os.environ).words, os.environ, streams, kept
        )

    def look(self) -> None:
        """Does nothing: there is no preloader."""


class Preloading:
    """Keeps one preloader, and has it fork. Use from the main thread; :meth:`close` in any case.

    ``environment``: of the preloader; takes out of it the preloaders that this process inherits,
    and keeps the one of its kind instead of starting one.
    """

    def __init__(self, kind: str, environment: MutableMapping[str, str]) -> None:
        self._kind = kind
        inherited = take_inherited(environment).get(kind)
        self._environment = dict(environment)
        self._preloader = None if inherited is None else Preloader.adopt(inherited)
        self._patience_s = WARM_UP_S
        self._start_at_s = 0.0
        self.look()

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        streams: Sequence[int],
        kept: Sequence[int] = (),
        inherits: tuple[str, ...] = (),
        needs: str = "",
    ) -> ChildProcess:
        """Forks the process, or spawns it; see :class:`Starter`."""
        if self._preloader is not None and self._preloader.warm(self._patience_s, needs):
            request = ForkRequest.here(module, arguments, os.environ, inherits)
            try:
                return self._preloader.fork(request, streams, kept)
            except NotForkedError:
                self._end()
        return Spawning().start(module, arguments, streams, kept)

    def look(self) -> None:
        """Replaces a preloader that is dead or stopped."""
        now_s = time.monotonic()
        if self._preloader is not None and (
            self._preloader.process.stopped or self._preloader.process.ended()
        ):
            self._end()
        if self._preloader is None and now_s >= self._start_at_s:
            self._start_at_s = now_s + RETRY_S
            self._preloader = Preloader.start(self._kind, self._environment)

    @property
    def process(self) -> ChildProcess | None:
        """The preloader, if there is one now."""
        return None if self._preloader is None else self._preloader.process

    def hand_over(self) -> None:
        """Gives the preloader to the node that this process becomes, as if it was born with it."""
        if self._preloader is not None:
            export_handles([self._preloader.hand_over()])
            self._preloader = None

    def close(self) -> None:
        """Ends the preloader."""
        if self._preloader is not None:
            self._preloader.end()
            self._preloader = None

    def _end(self) -> None:
        self.close()
        self._patience_s = 0.0  # from now on no start waits for a preloader
        self._start_at_s = time.monotonic() + RETRY_S

    def __enter__(self) -> Preloading:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
