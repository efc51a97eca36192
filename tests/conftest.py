"""A leak check around every test: memory, child processes, threads, descriptors, cores, signals."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from zmq.utils.garbage import gc as garbage_collector

from penstock.daemons.node.preparing import tool
from penstock.daemons.preload.preloaders import TORCH
from penstock.daemons.preload.starting import Preloading
from penstock.protocol.run.names import FOLDER_PREFIX
from penstock.protocol.wire.local_names import left_folders
from penstock.shm.segment import SHM_ROOT, Segment
from tests.forked import Forking
from tests.shelf import Shelf

T = TypeVar("T")

APART = frozenset(
    {"client", "data", "metrics", "models", "native", "planner", "protocol", "scheduler"}
)
NOT_APART = frozenset({"test_doctor.py", "test_life_of_a_run.py", "test_loader.py"})
"""Folders whose tests create no segments, and files there that do."""

FORKS_TOOLS = frozenset({"client", "node"})
"""Folders with many tests that prepare runs or estimate models."""

FORKS_RUNS = frozenset({"system"})
"""Folders with many tests that start runs."""

APART_KEY = pytest.StashKey[bool]()
"""Whether this process of tests has a /dev/shm of its own."""

MADE_ONCE = frozenset({"plain_run", "clipped_run", "emulated_run"})
"""Fixtures that take a whole run."""

GRACE_S = 60.0
"""Seconds for what ends on its own a moment later (a closed channel's socket, a killed child),
also on a machine that is busy with other work. Only a test with a leak waits for all of them.
"""

KEPT_BY_LIBRARIES = (
    "anon_inode:[eventfd]",
    "anon_inode:[eventpoll]",
    "/dev/null",
    "/dev/urandom",
    "/dev/nvidia",
)
"""gRPC, ZeroMQ and CUDA keep theirs for the life of the process once they were used."""


def open_descriptors() -> Counter[str]:
    """What this process's descriptors point at; sockets and pipes count by kind."""
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
        kind = target.partition("[")[0] if target.startswith(("socket:", "pipe:")) else target
        if not kind.startswith(KEPT_BY_LIBRARIES) and not kind.startswith("/proc/"):
            found[kind] += 1
    return found


def signal_handlers() -> dict[int, Any]:
    """Returns the handler of each signal that children inherit or that Python sets."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {number: handler for number, handler in handlers.items() if handler is not None}


def restore_signal_handlers(handlers: dict[int, Any]) -> dict[int, Any]:
    """Sets the handlers as they were. Returns those that differed."""
    current = signal_handlers()
    changed = {
        number: current[number] for number in handlers if current[number] != handlers[number]
    }
    for number in changed:
        signal.signal(number, handlers[number])
    return changed


def child_processes() -> set[int]:
    """Children of this process, zombies too."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(map(int, (task / "children").read_text().split()))
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread ended meanwhile
    return found


def segments() -> set[str]:
    """Names of Penstock's segments on this machine, those of other runs and users too."""
    return {name for name in os.listdir(SHM_ROOT) if name.startswith("penstock-")}


class Made:
    """The register of the segments that this process of tests and its children make.

    A foreign run may start, end or leave memory behind at any time during a test, so a new name
    alone says nothing. A segment is one of ours in three cases. This process or a fork of it has
    created the segment. The segment's run has its directory below ``folder``, the tests' temporary
    folder. Or all segments are ours, because /dev/shm is (``apart``). A program that a test
    executes and that creates segments therefore gets the id of a run directory in ``tmp_path``.
    """

    def __init__(self, folder: Path, *, apart: bool) -> None:
        self._folder = folder
        self._apart = apart
        self._register = folder / "segments.txt"  # a file, for forks write to it as well

    @contextmanager
    def watching(self) -> Iterator[Made]:
        """Note each segment that this process and its forks create meanwhile."""
        create = Segment.create

        def noted(name: str, *arguments: Any, **options: Any) -> Segment:
            with self._register.open("a") as register:
                register.write(f"{name.lstrip('/')}\n")
            return create(name, *arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Segment, "create", noted)
            yield self

    def among(self, names: set[str]) -> set[str]:
        """Returns those of ``names`` that are ours."""
        if self._apart or not names:
            return names
        noted = self._register.read_text().split() if self._register.exists() else ()
        ours = tuple(f"penstock-{run_id}-" for run_id in self.run_ids())
        return names.intersection(noted) | {name for name in names if name.startswith(ours)}

    def run_ids(self) -> Iterator[str]:
        """Yields the runs whose directories are below the folder."""
        for path in self._folder.rglob("run.json"):
            try:
                # A test may have damaged its run directory, or have put a FIFO there.
                content = json.loads(path.read_bytes()) if path.is_file() else None
            except (OSError, ValueError, RecursionError):
                continue
            if isinstance(content, dict) and isinstance(content.get("run_id"), str):
                yield content["run_id"]


def settle(probe: Callable[[], T]) -> T:
    """Call ``probe`` until it finds nothing or the grace is over; what it found last."""
    deadline = time.monotonic() + GRACE_S
    found = probe()
    while found and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
        found = probe()
    return found


def pytest_configure() -> None:
    """Hypothesis measures no time: neither of an example, nor of how long one takes to draw."""
    slow = [HealthCheck.too_slow]
    settings.register_profile("untimed", deadline=None, suppress_health_check=slow)
    settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much ``make soak`` does, and what it repeats."""
    parser.addoption("--soak-faults", type=int, default=2500, help="faults in all runs of the soak")
    parser.addoption("--soak-seed", type=int, default=None, help="seed of the faults (random)")


@pytest.fixture(scope="session", autouse=True)
def zero_copy_thread() -> Iterator[None]:
    """pyzmq's thread that frees frames sent without a copy: one a process, for good."""
    garbage_collector.start()
    yield
    garbage_collector.stop()


@pytest.fixture(scope="session", autouse=True)
def token_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder for caches of tokens; the user's own stays untouched, also by longer fixtures."""
    folder = tmp_path_factory.mktemp("caches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "session"))
        patch.setenv("HF_HUB_OFFLINE", "1")  # a missing path asks no Hub
        yield folder


@pytest.fixture(autouse=True)
def token_cache(
    token_caches: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty cache of tokens for each test, made when the test keeps tokens. All tests share the
    measurements of models, as all runs of a user do.
    """
    name = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    monkeypatch.setenv("XDG_CACHE_HOME", str(token_caches / name))
    shared = token_caches / "session" / "penstock-sharing"
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    (token_caches / name).mkdir(exist_ok=True)
    with suppress(FileExistsError):
        (token_caches / name / shared.name).symlink_to(shared)


@pytest.fixture(scope="session", autouse=True)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Made]:
    """The register of what the tests of this process make."""
    apart = request.config.stash.get(APART_KEY, False)
    with Made(tmp_path_factory.getbasetemp(), apart=apart).watching() as register:
        yield register
        # Tests kill whole nodes, whose next start would empty their folders of sockets.
        ours = tuple(f"{FOLDER_PREFIX}{run_id}-" for run_id in register.run_ids())
        for folder in left_folders():
            if ours and folder.name.startswith(ours):
                shutil.rmtree(folder)


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """One for all processes of tests."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shelf"
    root.mkdir(exist_ok=True)
    return Shelf(root)


@pytest.fixture(scope="session")
def plain_run(
    tmp_path_factory: pytest.TempPathFactory, shelf: Shelf, forking: Forking
) -> Iterator[Path]:
    """A run of 1F1B that nobody disturbs, traced; tests copy what they change."""
    from tests.system.conftest import PLAIN, trained

    changes = {**PLAIN, "observability": {"trace": True}}
    yield from trained(tmp_path_factory.mktemp("plain"), shelf, forking, changes)


@pytest.fixture(scope="session")
def clipped_run(
    tmp_path_factory: pytest.TempPathFactory, shelf: Shelf, forking: Forking
) -> Iterator[Path]:
    """A run of SPipe that nobody disturbs, with clipping in some steps but not in all."""
    from tests.system.conftest import CLIPPED, metrics, trained

    for run_dir in trained(tmp_path_factory.mktemp("clipped"), shelf, forking, CLIPPED):
        assert {m["decision"] for m in metrics(run_dir)} == {"commit", "amend"}
        yield run_dir


@pytest.fixture(scope="session")
def preloaded_tools() -> Iterator[Preloading]:
    """Yields one preloader that forks processes of preparation, as ``penstock train`` has: each
    would import torch otherwise.
    """
    with Preloading(TORCH, os.environ) as starter:
        yield starter


@pytest.fixture(scope="session")
def forking(preloaded_tools: Preloading) -> Forking:
    """Returns what forks whole runs. Tests of cold starts spawn theirs."""
    return Forking(preloaded_tools)


def shares_memory(path: Path) -> bool:
    """Whether tests of a file may create segments."""
    return path.parent.name not in APART or path.name in NOT_APART


def mount_own_shared_memory() -> bool:
    """Give this thread, and what it starts, a /dev/shm of its own; false where it must not."""
    new_mounts, recursive, private = 0x20000, 0x4000, 0x40000  # CLONE_NEWNS, MS_REC, MS_PRIVATE
    libc = ctypes.CDLL(None)
    return (
        libc.unshare(new_mounts) == 0
        and libc.mount(None, b"/", None, recursive | private, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"mode=1777") == 0
    )


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``-n``: each process of tests has its own /dev/shm. Without the right to mount one,
    tests that create segments run one after the other, beside the others. Tests that look at the
    same run are in one process, so that the run is made once.
    """
    if not hasattr(config, "workerinput"):
        return
    config.stash[APART_KEY] = apart = mount_own_shared_memory()
    for item in items:
        if not apart:
            group = "segments" if shares_memory(item.path) else str(item.path)
            item.add_marker(pytest.mark.xdist_group(group))
        elif shared := MADE_ONCE.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(min(shared)))


@pytest.fixture
def own_signals() -> Iterator[None]:
    """A test may set signal handlers: they are put back."""
    handlers = signal_handlers()
    yield
    restore_signal_handlers(handlers)


@pytest.fixture
def tools_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Has tools forked in the folders :data:`FORKS_TOOLS`, and only there. A forked process has the
    search path of the preloader, not the search path of its test.
    """
    folder = request.node.path.parent.name
    if folder in FORKS_RUNS:  # the preloader is no leak of the first test
        request.getfixturevalue("preloaded_tools")
    if folder not in FORKS_TOOLS:
        yield
        return
    starter = request.getfixturevalue("preloaded_tools")
    with mock.patch.object(tool, "Spawning", lambda: starter):
        yield


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, made: Made, tools_forked: None) -> Iterator[None]:
    """Fail a test that leaves a segment, a child process, a thread or a descriptor behind, or cores
    taken away: the tests after it would have one less to train on. Or signals that it ignores: the
    runs of the tests after it would inherit that, and train on after a hang-up.
    """
    shares = shares_memory(request.node.path)
    names, children = segments(), child_processes()
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    cores, handlers = os.sched_getaffinity(0), signal_handlers()
    yield
    changed = restore_signal_handlers(handlers)
    changed.pop(signal.SIGALRM, None)  # pytest-timeout's, which it drops when a test fails
    problems: dict[str, object] = {
        "child processes": settle(lambda: child_processes() - children),
        "threads": settle(lambda: {t for t in threading.enumerate() if t not in threads}),
        "descriptors": settle(lambda: dict(open_descriptors() - descriptors)),
        "cores taken away": cores - os.sched_getaffinity(0),
        "signal handlers": changed,
    }
    os.sched_setaffinity(0, cores)
    if shares:
        problems["segments"] = settle(lambda: made.among(segments() - names))
    leaks = {what: found for what, found in problems.items() if found}
    assert not leaks, f"the test left behind: {leaks}"
