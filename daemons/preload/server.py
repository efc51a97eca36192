"""The preloaded process: one thread that waits for requests and forks.

A request arrives over a socket that only the client has. It comes with descriptors: the standard
streams, one end of a socket for this request alone, and descriptors for the child to keep (the
node's lock). Two forks make the child a child of the client. The intermediate process exits at
once, and orphans go to the nearest ancestor that adopts them
(:func:`penstock.daemons.preload.client.adopting_orphans`). The child sends its pid over the
request's socket and continues only after the client has acknowledged it. So no child runs that the
client has abandoned.

A preloader of kind ``torch`` also reports when it has imported the modules of a node. The node is
forked from it at once, and the node's preloaders import the remaining modules in parallel.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from penstock.daemons.preload.fork_request import (
    PYTHON_MODULE,
    STREAMS,
    ForkRequest,
    become_child,
    run_module,
    show_command_line,
)
from penstock.daemons.preload.preloaders import (
    MODULES,
    QUIET,
    STAGES,
    PreloaderHandle,
    export_handles,
)
from penstock.host.stopping import STOP_ORDER, STOP_SIGNALS
from penstock.protocol.run.process import die_with_parent

MAX_REQUEST_BYTES = 1 << 20
MAX_DESCRIPTORS = 16
REFUSED, GO = b"refused: ", b"go"
ORPHANED_WITHIN_S = 5.0
"""The process between is dead within this, or the machine is not able to do anything."""
LISTENS_S = 0.3
"""Between two kinds an owner that waits for the first one is given so long to ask."""
YIELD_TO_CHILD_S = 10.0
"""Seconds that a preloader pauses its imports while an inherited one imports the same modules: both
would compete for the cores.
"""


def command_line(kind: str, parent_pid: int) -> tuple[str, ...]:
    """Returns the command line of a preloader; what starts one adds to it."""
    options = ("--kind", kind, "--parent-pid", str(parent_pid))
    return (*PYTHON_MODULE, "penstock.daemons.preload.main", *options)


def serve(requests: socket.socket, kind: str) -> None:
    """Imports the modules of ``kind``, and forks on request, until the client closes the socket.
    Reports each kind that the process has become. Never returns in a child.
    """
    listen_to_owner_only()
    gc.disable()  # imported objects stay, and scanning them repeatedly takes 0.7 s
    with suppress(ConnectionError):  # the owner has hung up while this process had things to say
        _import_and_answer(requests, kind)


def _import_and_answer(requests: socket.socket, kind: str) -> None:
    patience_s: float | None = 0.0
    for become in _imports(kind):
        if become:
            # Collections in children would copy pages for nothing. There is none before it: that
            # takes 0.3 s, finds little, and leaves holes in pages that children share.
            gc.freeze()
            requests.send(become.encode())
            patience_s = None if become == kind else LISTENS_S
        while select.select([requests], [], [], patience_s)[0]:
            data, descriptors, _, _ = socket.recv_fds(
                requests, MAX_REQUEST_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            if not data:
                return
            request = ForkRequest.of(data)
            try:
                answer(request, requests, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            if patience_s is not None:
                patience_s = YIELD_TO_CHILD_S if kind in request.inherits else 0.0
        patience_s = 0.0


def _imports(kind: str) -> Iterator[str]:
    """Imports a module at a time; yields the kind that the process has become, or an empty text."""
    for stage in STAGES[kind]:
        left = [module for module in MODULES[stage] if module not in sys.modules]
        for module in left:
            importlib.import_module(module)
            yield ""
        if left or stage == kind:  # an inherited preloader has been the others before
            yield stage


def listen_to_owner_only() -> None:
    """Blocks signals of other processes for ever; the client's stop order ends this process at
    once.
    """
    signal.signal(STOP_ORDER, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, STOP_SIGNALS)


def answer(request: ForkRequest, requests: socket.socket, descriptors: Sequence[int]) -> None:
    """Forks a child for one request, unless that would not be safe. Never returns in the child."""
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        # Locks that another thread holds would stay locked in the child for ever.
        with socket.socket(fileno=os.dup(descriptors[STREAMS])) as line:
            names = ", ".join(sorted(set(_names_of_threads(threads))))
            line.send(REFUSED + f"there are {len(threads)} threads ({names})".encode())
        return
    between = os.fork()
    if not between:
        _fork_again(request, requests, descriptors)
    os.waitpid(between, 0)


def _names_of_threads(numbers: Sequence[str]) -> Iterator[str]:
    for number in numbers:
        with suppress(OSError):  # it has ended meanwhile
            yield Path(f"/proc/self/task/{number}/comm").read_text().strip()


def _fork_again(
    request: ForkRequest, requests: socket.socket, descriptors: Sequence[int]
) -> NoReturn:
    try:
        between = os.getpid()
        if os.fork():
            os._exit(0)
        requests.detach()  # by its number it is closed with the others
        _run_child(request, between, descriptors)
    except Exception as error:
        os.write(2, f"a preloaded process cannot become {request.words}: {error!r}\n".encode())
    finally:
        os._exit(1)


def _run_child(request: ForkRequest, between: int, descriptors: Sequence[int]) -> NoReturn:
    deadline_s = time.monotonic() + ORPHANED_WITHIN_S
    while os.getppid() == between and time.monotonic() < deadline_s:
        time.sleep(0.0005)
    number, *_ = become_child(request, descriptors)
    line = socket.socket(fileno=number)
    line.send(str(os.getpid()).encode())
    if line.recv(len(GO)) != GO:
        os._exit(1)  # the owner has given this request up
    line.close()
    export_handles([_fork_preloader(kind) for kind in request.inherits])
    run_module(request)


def _fork_preloader(kind: str) -> PreloaderHandle:
    """Returns a preloader of the calling process, forked from it."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        try:
            mine.close()
            die_with_parent(parent)
            os.setpgid(0, 0)
            show_command_line(command_line(kind, parent))
            os.environ.update(QUIET)
            serve(theirs, kind)
        finally:
            os._exit(0)
    theirs.close()
    return PreloaderHandle(kind=kind, descriptor=mine.detach(), pid=pid)
