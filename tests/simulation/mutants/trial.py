"""The simulation against one mutant, in a process with a deadline."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.simulation.mutants import overlay
from tests.simulation.mutants.mutant import ROOT, Mutant

SLACK_S = 60.0
"""What a simulation may take beyond its minutes: to start, and to end its last seed."""
_SAID_BYTES = 4000
_SEED = re.compile(r"\bseed\W{1,2}(\d+)", re.IGNORECASE)


class Verdict(StrEnum):
    """``FOUND``: a violation was reported. ``CRASHED``: the simulation itself fell over, as where
    its undisturbed run already fails. ``STUCK``: it did not end. ``MISSED``: all seeds passed.
    ``UNCLEAN``: the seed that found it fails without it, too, so nothing is known.
    """

    FOUND = "found"
    CRASHED = "crashed"
    STUCK = "stuck"
    MISSED = "missed"
    UNCLEAN = "unclean"

    @property
    def is_found(self) -> bool:
        """Whether nobody could overlook it."""
        return self in (Verdict.FOUND, Verdict.CRASHED, Verdict.STUCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeds:
    """Which lives a mutant is tried in: seeds from ``first`` on, for ``minutes``."""

    first: int = 0
    minutes: float = 1.0

    @property
    def command(self) -> list[str]:
        """The simulation's command; it ends with the first violation."""
        return [
            *(sys.executable, "-m", "tests.simulation", "run", "--stop-at-first"),
            *("--seeds", f"{self.first}:", "--minutes", f"{self.minutes:g}"),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How a mutant fared. ``seed``: that found it, if the simulation said so; ``said``: its last
    words.
    """

    mutant: str
    origin: str
    verdict: Verdict
    seconds: float
    seed: int | None = None
    said: str = ""

    def to_fields(self) -> dict[str, Any]:
        """Returns a JSON object."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Trial:
        """Returns what :meth:`to_fields` gave."""
        return cls(**{**fields, "verdict": Verdict(fields["verdict"])})


def try_mutant(mutant: Mutant, seeds: Seeds, command: list[str] | None = None) -> Trial:
    """Run the simulation, or ``command``, with the fault in it.

    Raises:
        OutdatedError, SyntaxError: it cannot be planted.
    """
    source = mutant.source()
    with tempfile.TemporaryDirectory(prefix="penstock-mutant-") as name:
        overlay.write(Path(name), mutant.module, source, ROOT)
        start_s = time.monotonic()
        code, said = _run(command or seeds.command, Path(name), 60.0 * seeds.minutes + SLACK_S)
        seconds = time.monotonic() - start_s
    found = _SEED.search(said)
    return Trial(
        mutant=mutant.name,
        origin=mutant.origin,
        verdict=_verdict(code, said),
        seconds=round(seconds, 1),
        seed=int(found[1]) if found and code == 1 else None,
        said=said[-_SAID_BYTES:].strip(),
    )


def passes_without(seed: int) -> bool:
    """Returns whether the simulation has nothing to say of a seed when no fault is planted."""
    command = [sys.executable, "-m", "tests.simulation", "run", "--seeds", f"{seed}:{seed + 1}"]
    code, _ = _run(command, None, SLACK_S)
    return code == 0


def _verdict(code: int | None, said: str) -> Verdict:
    if code is None:
        return Verdict.STUCK
    if code == 0:
        return Verdict.MISSED
    return Verdict.FOUND if code == 1 and _SEED.search(said) else Verdict.CRASHED


def _run(command: list[str], folder: Path | None, timeout_s: float) -> tuple[int | None, str]:
    """Returns exit code (None after the deadline) and output; ``folder``: the overlay's. Whatever
    the command started is killed with it.
    """
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    if folder is not None:
        environment["PYTHONPATH"] = str(folder)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
        return process.returncode, said.decode(errors="replace")
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.communicate()
