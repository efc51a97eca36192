"""Part of ``penstock trace``: the most memory that devices held, beside what the plan reckons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.planner.configured import config_prices
from penstock.planner.memory.footprint import device_peaks
from penstock.planner.render.units import format_bytes
from penstock.planner.traces.measured import MeasuredAttempt
from penstock.planner.traces.traced import Peak
from penstock.protocol.run.rundir import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One device: the greatest of its measured peaks, and the planned one, in bytes."""

    device: int
    measured: Peak
    planned_bytes: float

    @property
    def error(self) -> float:
        """The planned peak relative to the measured one, minus 1."""
        return self.planned_bytes / self.measured.num_bytes - 1.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the peaks for ``--json``."""
        return {
            "device": self.device,
            "measured_bytes": self.measured.num_bytes,
            "during": self.measured.during or None,
            "planned_bytes": self.planned_bytes,
            "error": self.error,
        }


def compare_memory(
    run: RunDirectory, attempts: Sequence[MeasuredAttempt], profile: Path | None
) -> tuple[DeviceMemory, ...]:
    """Returns the peaks of the devices whose memory was measured.

    Raises:
        ConfigError: the profile is of another model.
    """
    plan = attempts[0].plan
    measured = {device: _greatest(attempts, device) for device in range(plan.num_devices)}
    if not any(measured.values()):
        return ()
    planned = device_peaks(plan, config_prices(run.config, run.table, profile).costs)
    return tuple(
        DeviceMemory(device=device, measured=peak, planned_bytes=planned[device].total_bytes)
        for device, peak in measured.items()
        if peak is not None
    )


def _greatest(attempts: Sequence[MeasuredAttempt], device: int) -> Peak | None:
    peaks = (attempt.trace.devices[device].peak for attempt in attempts)
    found = [peak for peak in peaks if peak is not None and peak.num_bytes]
    return max(found, key=lambda peak: peak.num_bytes, default=None)


def memory_lines(devices: Sequence[DeviceMemory]) -> Iterator[str]:
    """Yields the rows of a table for people; none where nothing was measured."""
    if not devices:
        return
    yield f"{'peak of memory':<22}{'measured':>12}{'planned':>12}"
    for found in devices:
        texts = map(format_bytes, (found.measured.num_bytes, found.planned_bytes))
        during = f"   ({found.measured.during})" if found.measured.during else ""
        yield (
            f"{f'  device {found.device}':<22}"
            + "".join(f"{text:>12}" for text in texts)
            + f"   error {found.error:+.1%}{during}"
        )
