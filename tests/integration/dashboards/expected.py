"""What panels must show: which may be empty and why, and what a fault changes.

Panels that are not named have an answer in a clean run on CPUs, finite numbers throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.integration.dashboards.answers import Answer

NEEDS_GPUS = "needs devices whose peak and limits are known: answers in the emulated run"
NEEDS_FAULTS = "nothing to show unless something went wrong"

EMPTY_WHEN_CLEAN: Mapping[str, str] = {
    "overview: Alerts": NEEDS_FAULTS,
    "overview: Firing alerts": NEEDS_FAULTS,
    "recovery: Mean recovery": NEEDS_FAULTS,
    "recovery: Recovery": NEEDS_FAULTS,
    "recovery: Restarts by process": NEEDS_FAULTS,
    "recovery: Fenced processes": NEEDS_FAULTS,
}
"""Panels that no clean run has an answer to, by meaning; a faulty one must have."""

NEVER_HERE: Mapping[str, str] = {
    "node: Share of the interface's speed": "loopback interfaces state no speed",
}
"""Panels that a machine of these tests cannot answer."""

Shown = Callable[[Answer, Answer], bool]
"""Given the answers of the clean and of the faulty run on CPUs: whether the fault shows."""


def _grows(name: str = "") -> Shown:
    return lambda clean, faulty: faulty.greatest(name) > clean.greatest(name)


def _sum(answer: Answer, name: str) -> float:
    return sum(sum(line.values) for line in answer.lines if line.name == name)


def _present(clean: Answer, faulty: Answer) -> bool:
    return not clean.lines and bool(faulty.lines)


def _silent(answer: Answer) -> int:
    """How often a process was seen silent that had answered before."""
    return sum(
        value == 0.0 and 1.0 in line.values[:index]
        for line in answer.lines
        for index, value in enumerate(line.values)
    )


def _falls_silent(clean: Answer, faulty: Answer) -> bool:
    """On a machine that is busy otherwise, processes of a clean run may be late, too."""
    return _silent(faulty) > _silent(clean)


def _missing_again(answer: Answer) -> int:
    """How often members were seen missing after all had been there."""
    missing = answer.line("missing").values
    return sum(value > 0.0 and 0.0 in missing[:index] for index, value in enumerate(missing))


def _more(name: str, than: float) -> Shown:
    """A line that is nothing when clean, and over a value at some time when faulty."""
    return lambda clean, faulty: clean.greatest(name) == 0.0 and faulty.greatest(name) > than


def _phase(name: str) -> Shown:
    return lambda clean, faulty: _sum(clean, name) < _sum(faulty, name)


CHANGES: Mapping[str, tuple[str, Shown]] = {
    "overview: Decisions": ("clipping", _more("amend", 0.0)),
    "overview: Gradient norm": (
        "clipping",
        lambda clean, faulty: (
            clean.line("limit").values[-1] > clean.greatest("gradient norm")
            and faulty.line("limit").values[-1] < faulty.greatest("gradient norm")
        ),
    ),
    "overview: Processes": ("stopped worker", _falls_silent),
    "overview: Alerts": ("killed and stopped processes", _present),
    "overview: Firing alerts": ("killed and stopped processes", _present),
    "time: Time outside of computation": ("pause", _more("paused", 0.0)),
    "recovery: Broken attempts": ("killed and stopped processes", _grows()),
    "recovery: Restarts": ("killed and stopped processes", _grows()),
    "recovery: Mean recovery": ("killed and stopped processes", _present),
    "recovery: Recovery": ("killed and stopped processes", _present),
    "recovery: Since the last commit": ("killed and stopped processes", _grows()),
    "recovery: Since the last save": ("saves that fail", _grows()),
    "recovery: Members by state": (
        "killed worker",
        lambda clean, faulty: _missing_again(faulty) > _missing_again(clean),
    ),
    "recovery: Phases": ("pause", _phase("paused")),
    "recovery: Processes": ("stopped worker", _falls_silent),
    "recovery: Broken attempts by cause": (
        "killed worker",
        _more("lost_member", 0.0),
    ),
    "recovery: Memberships": ("killed worker", _grows()),
    "recovery: Restarts by process": ("killed worker", _present),
    "recovery: Fenced processes": ("stopped worker", _present),
    "recovery: Share of decisions": ("clipping", _more("amend", 0.5)),
    "recovery: Saves": ("saves that fail", _more("failed", 0.0)),
    "node: Processes that answer": ("stopped worker", _falls_silent),
}
"""By panel: the fault, and how it shows beside the clean run. Resources that are short (slow
devices, links, cores) are the diagnosis' business, tests/integration/diagnosis."""

CHANGES_BY_OVERFLOWS: Mapping[str, Shown] = {
    "overview: Decisions": _more("skip", 0.0),
    "recovery: Share of decisions": _more("skip", 0.1),
    "recovery: Loss scale": lambda clean, faulty: (
        not any(line.name == "floor" for line in clean.lines)
        and len(set(faulty.line("loss scale").values)) > len(set(clean.line("loss scale").values))
        and faulty.line("floor").values[-1] == 1.0
    ),
}
"""What the run shows whose gradients overflow again and again."""
