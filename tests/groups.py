"""Real control groups of the first generation for tests, which need root; removed afterwards."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

V1_ROOT = Path("/sys/fs/cgroup")


def _writable() -> bool:
    names = ("memory/memory.limit_in_bytes", "cpu/cpu.cfs_quota_us", "cpuset/cpuset.cpus")
    return os.getuid() == 0 and all((V1_ROOT / name).exists() for name in names)


needs_groups = pytest.mark.skipif(
    not _writable(), reason="needs root and control groups of the first generation"
)


@contextlib.contextmanager
def group(controller: str, **limits: int | str) -> Iterator[Path]:
    """A group of its own below the one that this process is in; names have ``_`` for the first
    dot.
    """
    own = next(
        line.split(":", 2)[2]
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if controller in line.split(":")[1].split(",")
    )
    path = V1_ROOT / controller / own.lstrip("/") / f"pn-test-{secrets.token_hex(4)}"
    path.mkdir()
    try:
        if controller == "cpuset":
            (path / "cpuset.mems").write_text((path.parent / "cpuset.mems").read_text())
        for name, value in limits.items():
            (path / name.replace("_", ".", 1)).write_text(str(value))
        yield path
    finally:
        deadline = time.monotonic() + 600.0
        while True:  # the kernel empties a group of ended processes some moments later
            try:
                path.rmdir()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def run_in(
    groups: Sequence[Path],
    program: str | Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
) -> subprocess.CompletedProcess[str]:
    """Runs Python text, or a command, as a process that is in ``groups`` from its first
    instruction on.
    """
    command = [sys.executable, "-c", program] if isinstance(program, str) else list(program)
    joins = "".join(f'echo $$ > "{path}/cgroup.procs" && ' for path in groups)
    return subprocess.run(
        ["/bin/sh", "-c", joins + 'exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **(environ or {})},
        check=False,
    )
