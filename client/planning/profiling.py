"""``penstock profile``: measures in a process of its own, because that needs torch."""

from __future__ import annotations

from collections.abc import Callable
from math import isinf
from pathlib import Path

from penstock.daemons.node.preparing.tool import run_tool
from penstock.host.errors import ConfigError
from penstock.protocol.plan.profile import Profile, load_profile


def measure(
    config: Path, settings: tuple[str, ...], out: Path, progress: Callable[[str], None]
) -> Profile:
    """Measures the model and machine of a configuration, writes ``out``, and reads it back.

    ``progress`` gets the name of each measurement.

    Raises:
        ConfigError, CapacityError: bad configuration, or ``out`` cannot be written.
        LostMemberError: the process did not end in time.
        PenstockError: the process failed otherwise.
    """
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: its directory does not exist")
    changes = (word for setting in settings for word in ("--set", setting))
    arguments = (str(config), "--out", str(out), *changes)
    run_tool("penstock.models.profiling.profile", *arguments, progress=progress)
    return load_profile(out)


def summary(profile: Profile, out: Path) -> str:
    """Describes what was measured, for people: a line per kind of block, then the machine."""
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
