"""Bounds of CPU time and memory for work on files of strangers.

:func:`limited` ends Python code with an error, and the process goes on. Code of a library may never
return to Python, or end the process from inside. The process of such code therefore states the
possible cause of its death beforehand, in the words that its parent shows (:class:`Bounds`). The
system ends the process.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.host.errors import ConfigError, PenstockError, reason
from penstock.host.limits.cgroup import tightest_memory
from penstock.host.trust import printable

_LEAST_BYTES = 4 << 30
_READING_S = 120.0
"""CPU seconds to read a folder, in addition to those for its bytes."""
_HEADER_BYTES, _HEADER_BYTES_PER_S = 64 << 20, 500_000
"""Most bytes of a file that are interpreted one by one (a pickle), and the lowest speed."""
_COPIED_BYTES_PER_S = 20e6
"""Lowest speed of numbers that are converted, hashed, written and read back."""
_MOST_FILES = 100_000
_MATCHING_S, _NAME_S, _SHOWN = 10.0, 2e-5, 200
"""CPU seconds to match names, and for each pattern and name; characters of shown patterns."""
_AGAIN_S = 1.0
"""CPU seconds after which an error is raised again: a destructor may have swallowed the first."""


class _OvertimeError(BaseException):
    """The CPU seconds of one block are over. No handler of a library may catch this error."""


@dataclass(slots=True)
class Bounds:
    """The bounds of a process. If it is not ``alone``, only errors of other languages become Python
    errors. ``last_words`` is the work that the process has named last.
    """

    alone: bool = False
    last_words: str = ""

    def limit_memory(self, room: int | None = None) -> None:
        """Limits the process to the machine's free memory, so that an allocation fails before the
        system kills other processes. ``room``: fewer bytes that are enough.
        """
        if self.alone:
            free = tightest_memory().available
            room = max(_LEAST_BYTES, free if room is None else min(room, free))
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            room = room if hard == resource.RLIM_INFINITY else min(room, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (room, hard))

    @contextmanager
    def within(self, what: str, cpu_s: float) -> Iterator[None]:
        """Runs code inside for at most ``cpu_s`` CPU seconds; ``what`` names the work in errors.

        Raises:
            ConfigError: it ran out of memory, or panicked.
        """
        if self.alone:
            self._say_last_words(what)
            # Unhandled, and by the process's own time: the signal must end a call that never
            # returns, and another load on the machine does not count.
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            yield
        except PenstockError:
            raise
        except MemoryError as error:
            raise ConfigError(f"{what}: takes more memory than there is") from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise ConfigError(f"{what}: {reason(Exception(str(error)))}") from error
        finally:
            if self.alone:
                signal.setitimer(signal.ITIMER_PROF, 0.0)

    @contextmanager
    def reading(self, *folders: Path, copies: bool = False) -> Iterator[None]:
        """Runs code inside that reads files of strangers, in CPU time and memory that follow from
        their sizes. ``copies``: all numbers are converted and written, too.

        Raises:
            ConfigError: the code takes too long, or more memory than there is.
        """
        sizes = list(islice(_sizes(folders), _MOST_FILES))
        cpu_s = _READING_S + sum(min(n, _HEADER_BYTES) for n in sizes) / _HEADER_BYTES_PER_S
        if copies:
            cpu_s += sum(sizes) / _COPIED_BYTES_PER_S
        self.limit_memory(_LEAST_BYTES + 2 * sum(sizes))
        what = f"{folders[0]}: reading it"
        # The first bound names the seconds; the second one ends calls that never return.
        with self.within(what, 1.2 * cpu_s), limited(what, cpu_s):
            yield

    def _say_last_words(self, what: str) -> None:
        if what != self.last_words:  # once for all documents
            self.last_words = what
            sys.stderr.write(
                f"penstock: {printable(what)}: the process was ended from outside, or took far more"
                " CPU time than it should, or more memory than there is\n"
            )
            sys.stderr.flush()


@contextmanager
def limited(
    what: str, cpu_s: float, room: int | None = None, *, remedy: str = ""
) -> Iterator[None]:
    """Runs Python code inside for at most ``cpu_s`` CPU seconds, and with ``room`` more bytes of
    memory. ``what`` names the work in errors. Blocks may nest. Bounds nothing on other threads than
    the main one, which alone gets signals.

    Raises:
        ConfigError: the code takes longer, or more memory.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    memory = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        with _timed(what, cpu_s, remedy):
            try:
                _limit_memory(memory, room)
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_DATA, memory)
    except MemoryError as error:
        raise ConfigError(f"{what}: takes more memory than there is{remedy}") from error


@contextmanager
def _timed(what: str, cpu_s: float, remedy: str) -> Iterator[None]:
    """Runs code inside for at most ``cpu_s`` CPU seconds, or the rest of the outer block's."""
    outer_s, _ = signal.getitimer(signal.ITIMER_VIRTUAL)
    if 0 < outer_s <= cpu_s:
        yield
        return
    overtime = _OvertimeError()

    def end(number: int, frame: Any) -> None:
        raise overtime

    start_s, before = time.process_time(), signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s, _AGAIN_S)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    except _OvertimeError as error:
        if error is not overtime:
            raise
        raise ConfigError(f"{what}: takes over {cpu_s:,.0f} s of CPU time{remedy}") from error
    finally:
        signal.signal(signal.SIGVTALRM, before)
        if outer_s:
            left_s = outer_s - (time.process_time() - start_s)
            signal.setitimer(signal.ITIMER_VIRTUAL, max(left_s, 1e-6), _AGAIN_S)


def matching(
    key: str, patterns: str | Collection[str], names: int = 1
) -> AbstractContextManager[None]:
    """Returns a bound for regular expressions, which may take years for a name. ``key`` has them as
    its value; ``names``: number of names to match with each.
    """
    shown = repr(patterns if isinstance(patterns, str) else list(patterns))
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    count = 1 if isinstance(patterns, str) else len(patterns)
    remedy = "; give names, or a simpler regular expression"
    return limited(
        f"{key} = {shown}: matching names", _MATCHING_S + _NAME_S * count * names, remedy=remedy
    )


def _limit_memory(memory: tuple[int, int], room: int | None) -> None:
    if room is None:
        return
    pages = int(Path("/proc/self/statm").read_bytes().split()[5])
    most = pages * os.sysconf("SC_PAGE_SIZE") + room
    limits = [each for each in memory if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([most, *limits]), memory[1]))


def _sizes(folders: Iterable[Path]) -> Iterator[int]:
    """Yields the sizes of the files in folders."""
    for folder in folders:
        if folder.is_file():
            yield folder.stat().st_size
        for place, _, names in os.walk(folder):
            for name in names:
                try:
                    yield os.stat(os.path.join(place, name)).st_size
                except OSError:
                    continue  # The read that needs the file reports this error.
