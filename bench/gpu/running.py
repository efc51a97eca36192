"""A measurement in a process of its own: deadline, output, shared memory, and what it leaves.

The process is a fork, so that it need not import torch again, and leads a session of its own. It
says figures as it finds them (:meth:`Task.say`): those count even if it is killed later. Where the
kernel allows it, it has a mount namespace with a /dev/shm as large as the machine's memory: nothing
that it leaves there outlives its processes, and the machine's own stays as it is.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu.results import LOG_CHARACTERS, Outcome, Status

_NEW_MOUNTS, _RECURSIVE, _PRIVATE = 0x20000, 0x4000, 0x40000
_END_S = 10.0
_SHM = Path("/dev/shm")
SHM_NOTE = "own_shm"
"""Name of the figure that says whether the process had a /dev/shm of its own."""


class SkippedError(Exception):
    """The measurement is not for this machine; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a measurement may use. ``folder`` is removed after it; ``ends_s``: its deadline, on
    ``time.monotonic``. ``pins``: whether runs pin shared memory.
    """

    device: str
    tiny: bool
    folder: Path
    ends_s: float
    pins: bool = True

    @property
    def cuda(self) -> bool:
        """Whether it is to measure a GPU."""
        return self.device == "cuda"

    @property
    def left_s(self) -> float:
        """Seconds until it is killed."""
        return self.ends_s - time.monotonic()

    def say(self, **figures: Any) -> None:
        """Adds figures, which JSON can hold, to those of the measurement; later ones win."""
        with (self.folder / "figures").open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")

    def need_gpu(self) -> None:
        """Ends the measurement where there is none.

        Raises:
            SkippedError: the device is the CPU.
        """
        if not self.cuda:
            raise SkippedError("no GPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """``run`` says what it finds. ``deadline_s``: when it is killed. ``shares_shm``: it looks at
    the machine's own /dev/shm.
    """

    name: str
    deadline_s: float
    run: Callable[[Task], None]
    shares_shm: bool = False


def measure(
    measurement: Measurement, *, device: str, tiny: bool, within_s: float, pins: bool = True
) -> Outcome:
    """Runs the measurement up to a time limit, to one of the four ends."""
    started_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"gpu-{measurement.name.replace(' ', '-')}-"))
    ends_s = started_s + within_s
    task = Task(device=device, tiny=tiny, folder=folder, ends_s=ends_s, pins=pins)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(measurement, task))
    try:
        process.start()
        try:
            process.join(within_s)
            late = process.exitcode is None
        finally:  # also where the whole ladder is interrupted
            _end(process.pid, folder)
            process.join(_END_S)
        error = _text(folder / "error")
        status = Status.LATE if late else Status.DONE
        if not late and process.exitcode:
            status = Status.FAILED
            error = error or f"it ended with exit code {process.exitcode}"
        if not late and (folder / "skipped").exists():
            status, error = Status.SKIPPED, _text(folder / "skipped")
        if late:
            error = f"killed after {within_s:.0f} s"
        log = "" if status in (Status.DONE, Status.SKIPPED) else _text(folder / "log")
        return Outcome(
            status=status,
            seconds=round(time.monotonic() - started_s, 2),
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            figures=_figures(folder),
            error=error,
            log=log[-LOG_CHARACTERS:],
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _child(measurement: Measurement, task: Task) -> None:
    os.setsid()
    with (task.folder / "log").open("ab") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    raise_memlock()
    if not measurement.shares_shm and not own_shared_memory():
        task.say(**{SHM_NOTE: False})
    try:
        measurement.run(task)
    except SkippedError as reason:
        (task.folder / "skipped").write_text(str(reason), encoding="utf-8")
    except BaseException as error:
        traceback.print_exc()
        (task.folder / "error").write_text(f"{type(error).__name__}: {error}"[:2000])
        sys.stdout.flush()
        os._exit(1)  # threads of libraries must not hold up an end
    sys.stdout.flush()
    os._exit(0)


def raise_memlock() -> bool:
    """Lets this process lock, and so register, as much memory as it likes; false if it may not."""
    try:
        infinite = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (infinite, infinite))
        return True
    except (ValueError, OSError):
        return False


def own_shared_memory() -> bool:
    """Gives this process, and what it starts, a /dev/shm of its own; false where that is refused.

    As large as the machine's memory: what a run may have is another question. Of huge pages, where
    the kernel has them: a hundred GB of small ones are made in a minute or more, of huge ones in
    seconds.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    apart = libc.unshare(_NEW_MOUNTS) == 0
    apart = apart and libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None) == 0
    return apart and any(
        libc.mount(b"tmpfs", str(_SHM).encode(), b"tmpfs", 0, options) == 0
        for options in (b"size=100%,huge=always", b"size=100%")
    )


def _end(leader: int | None, folder: Path) -> None:
    """Kills the session of a measurement, and what names its folder: daemons have sessions of their
    own.
    """
    assert leader is not None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    until_s = time.monotonic() + _END_S
    while (left := processes_naming(folder)) and time.monotonic() < until_s:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def processes_naming(folder: Path) -> list[int]:
    """Returns the processes, but this one, whose command lines have a path in the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def _figures(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in _text(folder / "figures").splitlines():
        with suppress(ValueError):  # the last line, of one that was killed
            found |= json.loads(line)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
