"""Bases among rivals. At each call of the kernel of one process, a rival does all of its work.

An audit hook sees the calls of the process. The process is a fork, because a hook stays for good.
"""

from __future__ import annotations

import os
import secrets
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from penstock.shm import base_users
from penstock.shm.base_users import sweep
from penstock.shm.bases import FILLING, Base, BusyBaseError, base_name
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.shm.segment import SegmentMissingError, path_of, unlink

ARRAY_BYTES = 32
CONTENT = bytes(range(ARRAY_BYTES))
_WATCHED = ("os.", "fcntl.", "mmap.", "ctypes.")

Act = Callable[[], Any]


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rival that waits for a lock of the interrupted process would wait in vain."""
    monkeypatch.setattr(base_users, "_PATIENCE_S", 0.0)


@pytest.fixture
def digest() -> Iterator[bytes]:
    """A base of this test alone; its files are removed."""
    drawn = secrets.token_bytes(32)
    yield drawn
    for ending in ("", FILLING, ".stalled"):
        unlink(base_name(drawn) + ending)


@pytest.fixture
def shared(spec: MemorySpec, digest: bytes) -> Iterator[MemorySpec]:
    """A node that has block 0's frozen weights in the base; its memory is removed."""
    memory = replace(spec, bases=((0, digest),))
    yield memory
    for kind in SegmentKind:
        unlink(memory.name(kind))


def made(digest: bytes) -> Base:
    """Fills and completes a base."""
    base = Base.claim(digest, ARRAY_BYTES, "rival")
    assert base is not None
    os.pwrite(base.descriptor, CONTENT, 0)
    assert base.seal()
    return base


def interrupted(at: int, act: Act, rival: Act, check: Callable[[Any], None]) -> bool:
    """Runs ``act`` in a fork, where the rival works before call number ``at`` (from 1) of the
    kernel; then checks the result. Returns False if ``act`` has fewer calls.
    """
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert os.WIFEXITED(status) and os.WEXITSTATUS(status) in (0, 3), status
        return os.WEXITSTATUS(status) == 0
    code = 1
    try:
        calls, is_on = 0, True

        def watch(event: str, arguments: Any) -> None:
            nonlocal calls, is_on
            if is_on and (event == "open" or event.startswith(_WATCHED)):
                calls += 1
                if calls == at:
                    is_on = False
                    rival()

        sys.addaudithook(watch)
        result = act()
        is_on = False
        if calls >= at:
            check(result)
        code = 0 if calls >= at else 3
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def is_named(base: Base) -> bool:
    """Returns whether the base's name leads to its file."""
    try:
        return os.path.samestat(os.stat(path_of(base_name(base.digest))), os.fstat(base.descriptor))
    except FileNotFoundError:
        return False


def test_an_adopted_base_is_the_one_with_the_name(digest: bytes) -> None:
    """The rival removes the base, or replaces the file by another one, at any instant. A file that
    has lost its name may be removed under its user.
    """

    def replaced() -> None:
        sweep()
        if Base.adopt(digest, ARRAY_BYTES) is None:
            made(digest).close()

    def adopt() -> Base | None:
        try:
            return Base.adopt(digest, ARRAY_BYTES, compares=True)
        except (BusyBaseError, SegmentMissingError):
            return None

    def check(base: Base | None) -> None:
        assert base is None or is_named(base)
        assert base is None or os.pread(base.descriptor, ARRAY_BYTES, 0) == CONTENT

    for rival in (sweep, replaced):
        at = 1
        made(digest).close()
        while interrupted(at, adopt, rival, check):
            sweep()
            made(digest).close()
            at += 1
        assert at > 3
        sweep()


class Run:
    """A run that takes the base, and then loses its processes: the name in its control segment
    alone keeps the base.
    """

    def __init__(self, spec: MemorySpec, digest: bytes) -> None:
        self._spec, self._digest = spec, digest
        self._memory: NodeMemory | None = None
        self.has_base = False

    def begin(self) -> None:
        """Names the base and takes it, unless another process has the lock for a moment."""
        self._memory = NodeMemory.create(self._spec)
        self._take()

    def end(self) -> None:
        """Takes the base if the first try met a lock."""
        if not self.has_base:
            self._take()
        assert self.has_base

    def _take(self) -> None:
        assert self._memory is not None
        try:
            base = Base.adopt(self._digest, ARRAY_BYTES)
        except BusyBaseError:
            return
        self._memory.hold(0, made(self._digest) if base is None else base)
        self._memory.close()
        self.has_base = True


def test_a_base_stays_once_a_run_has_named_it(shared: MemorySpec, digest: bytes) -> None:
    """The rival names and takes the base at each instant of a removal."""
    at, kept = 1, 0
    made(digest).close()
    run = Run(shared, digest)

    def check(_: Any) -> None:
        run.end()
        base = Base.adopt(digest, ARRAY_BYTES)
        assert base is not None, "it was removed under memory that names it"
        assert os.pread(base.descriptor, ARRAY_BYTES, 0) == CONTENT

    while interrupted(at, sweep, run.begin, check):
        kept += 1
        for kind in SegmentKind:
            unlink(shared.name(kind))
        sweep()
        made(digest).close()
        at += 1
    assert kept > 5


def test_a_base_is_complete_at_each_instant_of_its_filling(digest: bytes) -> None:
    """A rival that adopts at any instant has all bytes or none. So has one that claims as well."""

    def adopt() -> None:
        try:
            base = Base.adopt(digest, ARRAY_BYTES, compares=True)
        except BusyBaseError:
            return
        assert base is None or os.pread(base.descriptor, ARRAY_BYTES, 0) == CONTENT
        sweep()
        if base is not None:
            assert is_named(base), "the rival has locked it"
            base.close()

    def claim() -> None:
        try:
            base = Base.claim(digest, ARRAY_BYTES, "rival")
        except BusyBaseError:
            return
        if base is not None:
            os.pwrite(base.descriptor, CONTENT, 0)
            assert base.seal()
            base.close()

    def fill() -> Base | None:
        base = Base.claim(digest, ARRAY_BYTES, "first")
        if base is None:
            return None
        os.pwrite(base.descriptor, CONTENT, 0)
        if not base.seal():
            base.close()
        return base

    def check(base: Base | None) -> None:
        other = Base.adopt(digest, ARRAY_BYTES, compares=True)
        assert base is None or base.descriptor < 0 or is_named(base)
        assert other is not None or base is None, "one of both has made it"
        assert not os.path.exists(path_of(base_name(digest) + FILLING))

    for rival in (adopt, claim):
        at = 1
        while interrupted(at, fill, rival, check):
            sweep()
            assert not os.path.exists(path_of(base_name(digest)))
            at += 1
        assert at > 8
        sweep()
