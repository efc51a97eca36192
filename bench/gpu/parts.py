"""The parts of the ladder, in their order, and how one is run.

All together take 25 minutes, none more than eight.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from bench.gpu import install
from bench.gpu.results import Outcome, PartResults, Status
from bench.gpu.running import Measurement, measure

LEAST_S = 3.0
"""What is left of a part's time must be more than that for another measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """``module`` of :mod:`bench.gpu.measures`; ``within_s``: seconds that all of it may take."""

    module: str
    within_s: float

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """In their order: what matters most comes first."""
        found: tuple[Measurement, ...] = import_module(
            f"bench.gpu.measures.{self.module}"
        ).MEASUREMENTS
        return found


PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "probe": Part(module="probe", within_s=60),
        "correctness": Part(module="correctness", within_s=330),
        "copies": Part(module="copies", within_s=60),
        "kernels": Part(module="kernels", within_s=120),
        "models": Part(module="models", within_s=480),
        "baselines": Part(module="baselines", within_s=315),
        "faults": Part(module="faults", within_s=135),
    }
)


def run_part(
    name: str,
    folder: Path,
    *,
    device: str,
    tiny: bool,
    gpu: str | None = None,
    only: Collection[str] = (),
    patience: float = 1.0,
    pins: bool = True,
) -> PartResults:
    """Runs the measurements of a part (``only`` those named, if any); writes the file after each.

    What the file has of others stays: a part may be repeated in pieces. ``gpu``: its name;
    ``patience``: all times are so many times as long; ``pins``: runs pin shared memory.
    """
    part, path, commit = PARTS[name], folder / f"{name}.json", install.commit()
    results = PartResults(part=name, device=device, tiny=tiny, gpu=gpu)
    if path.exists():
        old = PartResults.read(path)
        if (old.device, old.tiny) == (device, tiny):
            results.measurements |= old.measurements
    ends_s = time.monotonic() + patience * part.within_s
    for one in part.measurements:
        if only and one.name not in only:
            continue
        left_s = ends_s - time.monotonic()
        if left_s > LEAST_S:
            within_s = min(left_s, patience * one.deadline_s)
            outcome = measure(one, device=device, tiny=tiny, within_s=within_s, pins=pins)
        else:
            outcome = Outcome(status=Status.SKIPPED, error="the part's time was over")
        results.measurements[one.name] = replace(outcome, gpu=gpu, commit=commit)
        results.write(folder)
        _say(f"{name}: {one.name}: {outcome.status} in {outcome.seconds:.1f} s {outcome.error}")
    return results


def gpu_name() -> str | None:
    """Returns what the driver calls the first one, None if there is none. Asked in a process of its
    own: this one must stay without CUDA, so that it can be forked.
    """
    program = "import torch; print(torch.cuda.get_device_name(0))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    return done.stdout.strip() or None


def _say(line: str) -> None:
    sys.stdout.write(line.rstrip()[:400] + "\n")
    sys.stdout.flush()
