"""Takes each wait of the device code away, one at a time, and sees whether the checker finds it.

    python -m tests.streams.removals [--only workers/channels/nccl.py:153 ...] [--jobs 2]

A removal is found when any scenario (:mod:`.scenarios`) reports a race or other bytes, or hangs.
Ends with 1 if one was not found that :data:`REDUNDANT` does not explain.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = (
    "models/torch_device.py",
    "models/saved_activations/tensor_slots.py",
    "models/saved_activations/store.py",
    "workers/platforms/cuda/clock.py",
    "workers/platforms/cuda/device.py",
    "workers/platforms/cuda/update.py",
    "workers/channels/nccl.py",
)
WAITS = frozenset(
    {
        "wait_event", "wait_stream", "synchronize", "keep_for", "wait", "wait_for_all_but",
        "_wait_for", "follow",
    }
)  # fmt: skip
"""Methods that order one thing behind another, when they are called for that alone."""

LIKELY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "saved_activations": ("swapped", "to a peer"),
        "torch_device": ("swapped", "to a peer"),
        "nccl": ("nccl", "nccl, streamed"),
        "clock": ("aborted early",),
        "device": ("streamed", "aborted", "nccl, streamed"),
        "update": ("updates", "broken updates", "residents", "flushes", "updates in 16 bits"),
    }
)
"""Scenarios that are tried first, by a part of the file's name."""

OUTSIDE: Mapping[str, str] = MappingProxyType(
    {
        "make_groups": "within NCCL, which is not there",
        "GpuDevice.synchronize": "between measurements of a profile, not in a step",
    }
)
"""Functions whose waits are not tried, and why."""

LIMIT_S = 300

_CLOCK = "for the clock: it reads the host's time and the device's at one moment; orders nothing"
REDUNDANT: Mapping[str, str] = MappingProxyType(
    {
        "stream.synchronize()": _CLOCK,
        "self._zero.synchronize()": _CLOCK,
        "self._offloads.wait_for_all_but(at_most)": "bounds memory: sums that have not left are not"
        " used again, others are allocated",
    }
)
"""Waits that nothing here can tell from none, by their text, and why they stay."""


@dataclass(frozen=True, slots=True)
class Site:
    """A statement that only waits."""

    source: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}"

    @property
    def module(self) -> str:
        """The name that it is imported by."""
        return "penstock." + self.source.removesuffix(".py").replace("/", ".")


def is_wait(node: ast.AST) -> bool:
    """Whether a node of the syntax is such a statement."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in WAITS
    )


def sites() -> list[Site]:
    """Returns all of them, in order."""
    return [
        Site(source, node.lineno, ast.unparse(node))
        for source in SOURCES
        for name, node in _statements(ast.parse((ROOT / source).read_text()))
        if is_wait(node) and name not in OUTSIDE
    ]


def _statements(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Returns all statements in order, with the function or method that they are in."""
    for node in ast.iter_child_nodes(tree):
        name = within
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            name = f"{within}.{node.name}".lstrip(".")
        if isinstance(node, ast.stmt):
            yield name, node
        yield from _statements(node, name)


class _Loader(SourceFileLoader):
    """A module without one statement."""

    def __init__(self, name: str, path: str, line: int) -> None:
        super().__init__(name, path)
        self._line = line

    def get_code(self, fullname: str) -> CodeType:
        """Never from a cache."""
        tree = ast.parse(self.get_data(self.path), self.path)
        for node in ast.walk(tree):
            for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
                if isinstance(body, list):
                    body[:] = [self._replaced(statement) for statement in body]
        code: CodeType = compile(tree, self.path, "exec")
        return code

    def _replaced(self, statement: ast.stmt) -> ast.stmt:
        if is_wait(statement) and statement.lineno == self._line:
            return ast.copy_location(ast.Pass(), statement)
        return statement


class Without(MetaPathFinder):
    """Finds the module of a site, without it."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Of this one module."""
        if name != self._site.module:
            return None
        file = str(ROOT / self._site.source)
        loader = _Loader(name, file, self._site.line)
        return importlib.util.spec_from_file_location(name, file, loader=loader)


def _try(site: Site | None, answer: Any) -> None:
    """In a process of its own: send the first scenario that finds it, or nothing."""
    os.setpgid(0, 0)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    if site is not None:
        sys.meta_path.insert(0, Without(site))
    import torch

    torch.set_num_threads(1)
    from tests.streams.scenarios import SCENARIOS

    source = "" if site is None else site.source
    likely = [name for part, names in LIKELY.items() if part in source for name in names]
    for name in dict.fromkeys([*likely, *SCENARIOS]):
        try:
            SCENARIOS[name]("late")
        except BaseException as error:
            answer.send((name, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
            os._exit(0)
    answer.send(None)
    os._exit(0)


def attempt(site: Site | None) -> tuple[str, str] | None:
    """Returns which scenario finds that a site is missing, and what it says."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(site, there))
    process.start()
    there.close()
    try:
        if not here.poll(LIMIT_S):
            return "hang", f"not over in {LIMIT_S} s"
        found: tuple[str, str] | None = here.recv()
        return found
    except EOFError:
        return "crash", "the process died"
    finally:
        try:
            os.killpg(process.pid or 0, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.join()


def _said(site: Site) -> tuple[Site, bool, str]:
    began = time.monotonic()
    found = attempt(site)
    seconds = f"{time.monotonic() - began:4.0f} s"
    if found is not None:
        return site, True, f"found    {site}  {site.text}  {seconds}  {found[0]}: {found[1]}"
    why = REDUNDANT.get(site.text)
    word = "NOT FOUND" if why is None else "redundant"
    return site, why is not None, f"{word} {site}  {site.text}  {seconds}  {why or ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try all, print a line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="FILE:LINE")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the sites, try none")
    options = parser.parse_args(arguments)
    chosen = [site for site in sites() if not options.only or str(site) in options.only]
    if options.list:
        sys.stdout.writelines(f"{site}  {site.text}\n" for site in chosen)
        return 0
    preload()
    whole = attempt(None)
    assert whole is None, f"something is found with all waits in place: {whole}"
    right = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for _, good, line in pool.map(_said, chosen):
            right += good
            sys.stdout.write(line[:400] + "\n")
            sys.stdout.flush()
    sys.stdout.write(f"{right} of {len(chosen)} found or explained\n")
    return 0 if right == len(chosen) else 1


def preload() -> None:
    """What takes long to import, and none of ours."""
    for name in ("torch", "torch.utils._pytree", "transformers", "zmq", "prometheus_client"):
        importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
