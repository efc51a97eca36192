"""What a decoder is to the fuzzers: bytes in, a value or an error of ours out, within bounds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.host.errors import PenstockError
from tests.fuzz.census import ROOT

MAX_CPU_S = 2.0
"""Of one input of at most :data:`MAX_INPUT_BYTES`, on a machine that is busy."""
MAX_MEMORY_BYTES = 64 << 20
"""More than before, in all that is done with a decoder."""
MAX_INPUT_BYTES = 1 << 16

Line = tuple[str, int]
"""A file of the package, and a line in it."""
Decoder = Callable[[bytes], object]
Open = Callable[[Path], AbstractContextManager[Decoder]]


class Form(Enum):
    """What an input is made of, so that it can be changed in its own terms, too."""

    RAW = "raw"
    JSON = "json"
    LINES = "lines of json"
    MSGPACK = "msgpack"
    FRAMES = "frames, each behind two bytes of length; the first is msgpack"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One decoder with all that it needs. ``open`` gives the function in a folder of its own;
    ``covers``: the functions of the package that turn the bytes into values, by dotted name;
    ``allowed``: errors that may come out; ``seeds``: inputs as Penstock itself writes them.
    """

    name: str
    open: Open
    covers: tuple[str, ...]
    seeds: Callable[[], Sequence[bytes]]
    form: Form = Form.RAW
    allowed: tuple[type[Exception], ...] = (PenstockError,)
    examples: int = 60
    """Changed inputs that the gate tries."""
    keeps: bool = True
    """Whether found inputs are good for later; not where seeds are drawn anew, as keys are."""


def plainly(function: Callable[[bytes], object]) -> Open:
    """Returns ``open`` of a function that needs nothing."""

    @contextmanager
    def opened(folder: Path) -> Iterator[Decoder]:
        del folder
        yield function

    return opened


def from_file(name: str, function: Callable[[Path], object]) -> Open:
    """Returns ``open`` of a function that reads the file ``name`` of the folder it is given."""

    @contextmanager
    def opened(folder: Path) -> Iterator[Decoder]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)

        def read(data: bytes) -> object:
            path.write_bytes(data)
            return function(folder)

        yield read

    return opened


class Broken(AssertionError):
    """A decoder did what none may do; says with which input."""


def attempt(target: Target, decode: Decoder, data: bytes) -> None:
    """Decode one input.

    Raises:
        Broken: another error than the allowed ones came out, or it took too long.
    """
    begun_s = time.thread_time()
    try:
        decode(data)
    except target.allowed:
        pass
    except Exception as error:
        raise Broken(f"{target.name}: {error!r} from {shown(data)}") from error
    if (took_s := time.thread_time() - begun_s) > MAX_CPU_S:
        raise Broken(f"{target.name}: {took_s:.1f} s of a core for {shown(data)}")


def shown(data: bytes, limit: int = 2000) -> str:
    """Returns an input as it stands in a corpus, cut short."""
    text = repr(data)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(data)} bytes)"


@contextmanager
def watched(entered: set[str]) -> Iterator[None]:
    """Note which functions of the package are entered, by dotted name."""

    def note(frame: FrameType, event: str, argument: object) -> None:
        del argument
        if event == "call" and (file := _own_file(frame.f_code.co_filename)):
            module = file.removesuffix(".py").replace("/", ".")
            entered.add(f"{module.removesuffix('.__init__')}.{frame.f_code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def lines_of(target: Target, decode: Decoder, data: bytes) -> set[Line]:
    """Returns which lines of the package an input reaches, whatever comes out."""
    reached = set[Line]()

    def note(frame: FrameType, event: str, argument: object) -> Any:
        del argument
        if (file := _own_file(frame.f_code.co_filename)) is None:
            return None
        if event == "line":
            reached.add((file, frame.f_lineno))
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        with suppress(Broken):
            attempt(target, decode, data)
    finally:
        sys.settrace(before)
    return reached


def _own_file(name: str) -> str | None:
    """Returns the path of a file of the package in the repository."""
    file = name.replace("/src/penstock/", "/")
    prefix = f"{ROOT}/"
    if not file.startswith(prefix) or file.startswith(f"{prefix}tests/"):
        return None
    return file.removeprefix(prefix)


@contextmanager
def bounded_memory(name: str) -> Iterator[None]:
    """Refuse that this process takes much more memory at any time inside.

    Raises:
        Broken: it did.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what is there now
    before = _memory("VmRSS:")
    yield
    grown = _memory("VmHWM:") - before
    if grown > MAX_MEMORY_BYTES:
        raise Broken(f"{name}: {grown >> 20} MiB of memory")


def _memory(key: str) -> int:
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index(key) + 1]) * 1024
