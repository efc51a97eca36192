"""Cases of Obscura's evaluation, and the quantities that its claims are about."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.papers.obscura.testbed import PaperCase, SimulatedRun, dapple_plus

SIZES = {"13B": 40, "18B": 56, "23B": 72, "28B": 88}


def case(family: str, size: str, batch: int = 32) -> PaperCase:
    """Returns a model on eight A100."""
    return PaperCase(family=family, layers=SIZES[size], num_stages=8, num_microbatches=batch)


def small(family: str, layers: int) -> PaperCase:
    """Returns a model on four A800 without NVLink."""
    return PaperCase(
        family=family, layers=layers, num_stages=4, num_microbatches=32, gpu="A800-PCIE-80"
    )


def gain(one: SimulatedRun, reference: SimulatedRun) -> float:
    """Returns by how many percent a run is faster than another."""
    return 100.0 * (reference.seconds / one.seconds - 1.0)


def gains(
    cases: Sequence[PaperCase],
    system: Callable[[PaperCase], SimulatedRun],
    reference: Callable[[PaperCase], SimulatedRun] = dapple_plus,
) -> str:
    """Returns the least and the largest gain over several cases."""
    values = [gain(system(one), reference(one)) for one in cases]
    if len(values) == 1:
        return f"{values[0]:+.1f} %"
    return f"{min(values):+.1f} to {max(values):+.1f} %"


def gigabytes(run: SimulatedRun) -> list[float]:
    """Returns the peaks of all stages."""
    return [peak / 1e9 for peak in run.peak_bytes]


def stages(names: Sequence[int]) -> str:
    """Returns ``0-2``, or ``none``."""
    return f"{names[0]}-{names[-1]}" if names else "none"
