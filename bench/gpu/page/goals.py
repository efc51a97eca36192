"""What was hoped for before any GPU was at hand, beside what came."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.gpu.measures.baselines import FSDP, FSDP_ONCE, PLAIN
from bench.gpu.results import Outcome, PartResults, Status

Results = Mapping[str, PartResults]
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """``text`` for people; whether the goal is reached."""

    text: str
    reached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """``find`` returns None where the figures are not there."""

    text: str
    find: Callable[[Results], Found | None]


def outcome_of(results: Results, part: str, name: str) -> Outcome | None:
    """Returns a measurement that has figures, None where there is none."""
    known = results[part].measurements.get(name) if part in results else None
    if known is None or known.status not in (Status.DONE, Status.LATE) or not known.figures:
        return None
    return known


def figure(results: Results, part: str, name: str, key: str) -> float | None:
    """Returns a number of a measurement, None where there is none."""
    known = outcome_of(results, part, name)
    value = None if known is None else known.figures.get(key)
    return None if value is None else float(value)


def _beside_resident(results: Results) -> Found | None:
    ours = figure(results, "models", "4 B streamed", "tokens_per_s")
    theirs = figure(results, "baselines", f"4 B {PLAIN}", "tokens_per_s")
    if ours is None or theirs is None:
        return None
    return Found(text=f"{ours / theirs:.1%}", reached=ours >= 0.95 * theirs)


def _tflops(results: Results) -> Found | None:
    names = [name for name in results["models"].measurements] if "models" in results else []
    known = {
        name: value
        for name in names
        if "streamed" in name
        and (value := figure(results, "models", name, "model_tflops")) is not None
    }
    if not known:
        return None
    best = max(known, key=lambda name: known[name])
    return Found(text=f"{known[best]:.0f} ({best})", reached=known[best] >= 400)


def _beside_fsdp(results: Results) -> Found | None:
    ours = figure(results, "models", "4 B streamed", "tokens_per_s")
    theirs = [figure(results, "baselines", f"4 B {n}", "tokens_per_s") for n in (FSDP, FSDP_ONCE)]
    known = [rate for rate in theirs if rate is not None]
    if ours is None or not known:
        return None
    return Found(text=f"{ours / max(known):.2f} times", reached=ours >= 2.5 * max(known))


def _seven(results: Results) -> Found | None:
    used = figure(results, "models", "7 B streamed", "host_bytes")
    if used is None:
        return None
    return Found(text=f"{used / GIB:.0f} GiB", reached=used <= 128 * GIB)


GOALS = (
    Goal(
        text="4 B streamed, 64 K tokens a step, clipping on, fp32 masters: 95 % of the plain"
        " resident loop",
        find=_beside_resident,
    ),
    Goal(text="400 model TFLOP/s at 8 K tokens a micro-batch", find=_tflops),
    Goal(text="2.5 times FSDP2 with CPU offload, the faster of two ways", find=_beside_fsdp),
    Goal(text="7 B within 128 GiB of host memory (split master, settled early)", find=_seven),
)
