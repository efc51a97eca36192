"""``penstock profile``: measures in a process of its own, because that needs torch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isinf
from pathlib import Path
from typing import IO

from penstock.protocol.errors import (
    CapacityError,
    ConfigError,
    ExitCode,
    LostMemberError,
    PenstockError,
)
from penstock.protocol.plan.profile import Profile
from penstock.protocol.plan.profile_file import load_profile

TIMEOUT_S = 3600.0
"""Measuring takes a minute or so; large models on slow machines take longer."""

_MODULE = "penstock.models.profiling.profile"
_COMPLAINT = "penstock: "


def measure(
    config: Path, settings: tuple[str, ...], out: Path, progress: Callable[[str], None]
) -> Profile:
    """Measure the model and machine of a configuration, write ``out``, and read it back.

    ``progress`` hears what is being measured.

    Raises:
        ConfigError: bad configuration, or ``out`` cannot be written.
        LostMemberError: it did not end in time.
        PenstockError: the process failed otherwise.
    """
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: its directory does not exist")
    arguments = [str(config), "--out", str(out)]
    for setting in settings:
        arguments += ["--set", setting]
    said: list[str] = []
    with _child(arguments) as process:
        assert process.stderr is not None
        for line in _lines(process.stderr):
            said.append(line)
            if line.startswith("measuring "):
                progress(line)
        code = process.wait()
    if code:
        _complain(code, said)
    return load_profile(out)


@contextmanager
def _child(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The measuring process; killed when it takes too long, or when nobody waits for it."""
    process = subprocess.Popen(
        [sys.executable, "-m", _MODULE, *arguments, "--parent-pid", str(os.getpid())],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.kill()

    timer = threading.Timer(TIMEOUT_S, expire)
    timer.start()
    try:
        with process:
            try:
                yield process
            finally:
                process.kill()
    finally:
        timer.cancel()
        timer.join()
    if expired.is_set():
        raise LostMemberError(f"{_MODULE}: no end after {TIMEOUT_S:g} s")


def _lines(stream: IO[str]) -> Iterator[str]:
    for line in stream:
        yield line.rstrip("\n")


def _complain(code: int, said: list[str]) -> None:
    complaints = [line for line in said if line.startswith(_COMPLAINT)]
    if complaints:
        kind = CapacityError if code == ExitCode.NO_MEMORY else ConfigError
        raise kind(complaints[-1].removeprefix(_COMPLAINT))
    last = said[-1] if said else "it said nothing"
    raise PenstockError(f"{_MODULE} ended with code {code}: {last}")


def summary(profile: Profile, out: Path) -> str:
    """What was measured, for people: a line per kind of block, then the machine."""
    lines = [
        f"{profile.device}; sequences of {profile.sequence_length} tokens, micro-batches of"
        f" {profile.micro_batch}; times in ms per micro-batch",
        "",
        f"{'kind':<28} {'forward':>9} {'recompute':>9} {'p1':>9} {'p2':>9} {'kept':>11}",
    ]
    for name, kind in profile.kinds.items():
        fits = (kind.forward_s, kind.recompute_s, kind.backward_input_s, kind.backward_weight_s)
        times = " ".join(f"{1e3 * fit.at(profile.tokens):>9.3f}" for fit in fits)
        kept = kind.activation_bytes.at(profile.tokens) / 2**20
        lines.append(f"{name[:28]:<28} {times} {kept:>7.2f} MiB")
    machine = profile.machine
    lines += [
        "",
        f"copies to the device {_bandwidth(machine.fetch_bandwidth)}, from it"
        f" {_bandwidth(machine.offload_bandwidth)}; between devices"
        f" {_bandwidth(machine.peer_bandwidth)} after {1e6 * machine.latency_s:.0f} µs",
        f"optimizer, million parameters a second: advance {machine.advance_rate / 1e6:.0f},"
        f" preview {machine.preview_rate / 1e6:.0f}, settle {machine.settle_rate / 1e6:.0f},"
        f" in place {machine.in_place_rate / 1e6:.0f}; on a device"
        f" {machine.device_update_rate / 1e6:.0f}",
        "",
        f"written to {out}: penstock plan CONFIG --costs {out}, penstock tune CONFIG --costs {out}",
    ]
    return "\n".join(lines)


def _bandwidth(value: float) -> str:
    return "not needed" if isinf(value) else f"{value / 1e9:.2f} GB/s"
