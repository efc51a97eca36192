"""Runs the short-lived processes that need torch, and turns what they say into our errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from penstock.protocol.errors import (
    CapacityError,
    ConfigError,
    ExitCode,
    LostMemberError,
    PenstockError,
)

TIMEOUT_S = 3600.0
"""Tokenizing a large corpus takes long; a process that hangs should still end some day."""


def run_tool(module: str, *arguments: str, log: Path) -> None:
    """Run ``python -m module arguments`` to its end.

    Raises:
        ConfigError, CapacityError: its last ``penstock: …`` line on stderr, by its exit code.
        LostMemberError: it did not end in time.
        PenstockError: it failed otherwise; what it said is in ``log``.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise LostMemberError(f"{module}: no end after {TIMEOUT_S:g} s") from error
    if done.returncode == 0:
        return
    said = done.stderr.strip()
    complaints = [line for line in said.splitlines() if line.startswith("penstock: ")]
    if not complaints:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(said + "\n", encoding="utf-8")
        last = said.splitlines()[-1] if said else "it said nothing"
        raise PenstockError(f"{module} ended with code {done.returncode}: {last} (see {log})")
    kind = CapacityError if done.returncode == ExitCode.NO_MEMORY else ConfigError
    raise kind(complaints[-1].removeprefix("penstock: "))
