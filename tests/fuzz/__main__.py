"""``python -m tests.fuzz``: list the decoders, fuzz one on, repeat an input.

Fuzzing is guided by coverage (atheris, the extra ``fuzz``): inputs that reach new lines are changed
further, and those that add coverage are kept in the corpus. A process of its own fuzzes, since
libFuzzer ends it; this one makes its folders and takes what it found.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.census import ROOT
from tests.fuzz.corpus import keep, kept
from tests.fuzz.mutating import Mutator
from tests.fuzz.table import EXCUSED, TARGETS
from tests.fuzz.target import MAX_INPUT_BYTES, Line, Target, attempt, lines_of, shown

MAX_KEPT_BYTES = 2500
"""Of a target: the shortest inputs that add coverage."""


def main(words: list[str] | None = None) -> int:
    """Entry point; returns the exit code: 1 where a decoder is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the decoders, and the functions that each target covers")
    run = commands.add_parser("run", help="fuzz, guided by coverage")
    run.add_argument("names", nargs="+", metavar="NAME", help="decoders, or all")
    run.add_argument("--minutes", type=float, default=1.0, help="for each")
    repeat = commands.add_parser("repeat", help="decode an input of a failed test")
    repeat.add_argument("name", choices=sorted(TARGETS))
    repeat.add_argument("number", type=int, help="of the example")
    options = parser.parse_args(words)
    if options.command == "list":
        return _list()
    if options.command == "repeat":
        return _repeat(TARGETS[options.name], options.number)
    names = sorted(TARGETS) if options.names == ["all"] else options.names
    return max(_run(TARGETS[name], options.minutes) for name in names)


def _list() -> int:
    for name, target in sorted(TARGETS.items()):
        print(f"{name:20} {', '.join(target.covers)}")
    print(f"{len(TARGETS)} decoders; {len(EXCUSED)} functions are excused, with reasons")
    return 0


def _repeat(target: Target, number: int) -> int:
    data = Mutator(target.form, _inputs(target)).example(target.name, number)
    print(shown(data, 10_000))
    with tempfile.TemporaryDirectory() as folder, target.open(Path(folder)) as decode:
        attempt(target, decode, data)
    return 0


def _inputs(target: Target) -> list[bytes]:
    return [*target.seeds(), *kept(target.name)]


def _run(target: Target, minutes: float) -> int:
    if importlib.util.find_spec("atheris") is None:
        print("coverage-guided fuzzing needs atheris: pip install 'penstock[fuzz]'")
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("found", "known", "broken", "again"):
            (folder / part).mkdir()
        for number, data in enumerate(_inputs(target)):
            (folder / "known" / str(number)).write_bytes(data)
        options = [f"-max_total_time={minutes * 60:.0f}", f"-max_len={MAX_INPUT_BYTES}"]
        bounds = ["-timeout=10", "-rss_limit_mb=2048", f"-artifact_prefix={folder}/broken/"]
        code = _fuzz(target, [*options, *bounds, f"{folder}/found", f"{folder}/known"])
        broken = [path.read_bytes() for path in (folder / "broken").iterdir()]
        for data in broken:
            print(f"{target.name}: BROKEN by {shown(data, 10_000)}")
        if target.keeps:
            found = [path.read_bytes() for path in (folder / "found").iterdir()]
            _keep(target, found, broken, folder)
    return 1 if broken else code


def _fuzz(target: Target, options: list[str]) -> int:
    command = [sys.executable, "-m", "tests.fuzz.guided", target.name, *options]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    lines = done.stderr.splitlines()
    last = [line for line in lines if "cov: " in line or "Error" in line][-1:]
    print(f"{target.name}: {' '.join(last)}", flush=True)
    return 0 if done.returncode == 0 else 1


def _keep(target: Target, found: list[bytes], broken: list[bytes], folder: Path) -> None:
    """Keep the shortest inputs that reach lines which seeds do not, and what broke something."""
    reached, chosen, kept_bytes = set[Line](), [*broken, *kept(target.name)], 0
    logging.disable(logging.CRITICAL)
    with target.open(folder / "again") as decode:
        for data in target.seeds():
            reached |= lines_of(target, decode, data)
        for data in sorted(found, key=len):
            more = lines_of(target, decode, data) - reached
            kept_bytes += len(repr(data)) if more else 0
            if more and kept_bytes <= MAX_KEPT_BYTES:
                chosen.append(data)
                reached |= more
    if chosen:
        keep(target.name, chosen)


if __name__ == "__main__":
    sys.exit(main())
