"""Fork requests as messages, and the transformation of a forked child into the requested process.

The child must equal the result of ``python -m MODULE ARGUMENTS`` run by the client. So this module
resets descriptors, signals, process group, environment, directory, cores, random numbers and
command line.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from penstock.host.stopping import HEARD_SIGNALS, STOP_ORDER
from penstock.protocol.run.process import die_with_parent

PYTHON_MODULE = (sys.executable, "-P", "-m")
"""First words of a module's command line. ``-P``: Python ignores the current folder, because a
user's random.py there would hide Python's own.
"""
STREAMS = 3
"""stdin, stdout and stderr are the first descriptors of every request."""
NAMED_BYTES = 4096
"""Room for the command line of a child: the preloader's own is so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """A process to be: ``module`` with ``arguments``, as a child of ``parent_pid``.

    ``inherits``: kinds of preloaders that the new process itself is to own, forked before anything
    else happens in it.
    """

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str
    cores: tuple[int, ...]
    parent_pid: int
    inherits: tuple[str, ...] = ()

    @classmethod
    def here(
        cls,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        inherits: tuple[str, ...] = (),
    ) -> ForkRequest:
        """Returns a process like one that this process would spawn."""
        return cls(
            module=module,
            arguments=tuple(arguments),
            environment=dict(environment),
            directory=os.getcwd(),
            cores=tuple(sorted(os.sched_getaffinity(0))),
            parent_pid=os.getpid(),
            inherits=inherits,
        )

    def to_bytes(self) -> bytes:
        """Returns the request as it travels."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, data: bytes) -> ForkRequest:
        """Returns the request in a message. Only the client has the socket, so its content is
        trusted.
        """
        fields = json.loads(data)
        fields |= {name: tuple(fields[name]) for name in ("arguments", "cores", "inherits")}
        return cls(**fields)

    @property
    def words(self) -> tuple[str, ...]:
        """The command line."""
        return (*PYTHON_MODULE, self.module, *self.arguments)


def become_child(request: ForkRequest, descriptors: Sequence[int]) -> list[int]:
    """Makes the calling process, a fresh fork, one like a spawned child of ``request.parent_pid``.

    Only ``descriptors`` stay open: those for the standard streams first, the rest as they are.
    Returns the rest. Ends the process if the parent is gone. It stays in the preloader's process
    group, with which it is killed, until its owner knows its pid and gives it one of its own.
    """
    die_with_parent(request.parent_pid)
    rest = _keep_only(descriptors)
    for number in (signal.SIGTERM, signal.SIGCHLD, STOP_ORDER):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # As if born so: until the process listens; it obeys its parent only.
    signal.pthread_sigmask(signal.SIG_SETMASK, HEARD_SIGNALS)
    os.sched_setaffinity(0, request.cores)
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment)
    _open_streams()
    _reseed()
    gc.enable()
    show_command_line(request.words)
    return rest


def _open_streams() -> None:
    """Opens new streams, because the preloader's streams may have buffered output of its own."""
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = open(
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )


def _reseed() -> None:
    """Draws new seeds for generators that were seeded at import, so that children differ. (The
    standard library does so after every fork; torch starts from a constant.)
    """
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _keep_only(descriptors: Sequence[int]) -> list[int]:
    """Puts the streams into place, and closes all but them and the rest of ``descriptors``."""
    rest = list(descriptors[STREAMS:])
    for stream, descriptor in enumerate(descriptors[:STREAMS]):
        os.dup2(descriptor, stream)
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= STREAMS and int(name) not in rest:
            try:
                os.close(int(name))
            except OSError:
                continue  # the descriptor of the listing itself
    return rest


def show_command_line(words: Sequence[str]) -> None:
    """Writes ``words`` where ``/proc/PID/cmdline`` shows them, as much as there is room for.

    The kernel shows the bytes between two addresses of this process: they are the ones that it was
    started with, and stay writable.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    # The last byte stays zero: else the kernel takes the whole for one word.
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def run_module(request: ForkRequest) -> NoReturn:
    """Runs the module as ``python -m`` does, and ends the process as Python would end it."""
    code = 1
    try:
        sys.argv[:] = [request.module, *request.arguments]
        sys.orig_argv[:] = request.words
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ending:
        code = _exit_code(ending.code)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1
