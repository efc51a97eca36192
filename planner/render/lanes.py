"""The spans of a simulation, sorted into the rows of a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.planner.simulate import DeviceTimes, Span
from penstock.protocol.plan.semantics import Lane

MAX_TRACKS = 3
"""Spans of one row that overlap are drawn below each other, in at most so many tracks."""

_FAMILY = {"F": "forward", "R": "backward", "B": "backward", "BI": "backward", "BW": "backward"}


class Picturable(Protocol):
    """The part of a :class:`~penstock.planner.simulate.Simulation` that a picture needs. All times
    are in seconds.
    """

    @property
    def makespan_s(self) -> float:
        """When everything has ended."""

    @property
    def pipeline_s(self) -> float:
        """When the last compute instruction has ended."""

    @property
    def optimizer_tail_s(self) -> float:
        """Seconds of the optimizer after that."""

    @property
    def bubble_ratio(self) -> float:
        """The share of the pipeline's time in which devices do not compute."""

    @property
    def devices(self) -> tuple[DeviceTimes, ...]:
        """Seconds in which each device computes, and in which it does not."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """Everything that occupies something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartRow:
    """One resource: a stream of a device, its sends, or the optimizer of a node.

    Updates on a device are in its compute row, as they occupy the compute stream. ``tracks`` are
    spans by start; none overlaps another of its track, but in the last one.
    """

    lane: Lane
    place: int
    tracks: tuple[tuple[Span, ...], ...]


def rows_of(simulation: Picturable) -> tuple[ChartRow, ...]:
    """Returns the rows of the devices, the compute stream of each above its copies and links, then
    those of the nodes.

    Rows without a span that takes time are left out, but for compute streams.
    """
    by_lane: dict[tuple[Lane, int], list[Span]] = defaultdict(list)
    for device in range(len(simulation.devices)):
        by_lane[Lane.COMPUTE, device] = []
    for span in simulation.spans:
        if span.end_s > span.start_s:
            lane = Lane.COMPUTE if span.lane == "update" else span.lane
            by_lane[lane, span.place].append(span)
    lanes = list(Lane)

    def position(key: tuple[Lane, int]) -> tuple[bool, int, bool, int]:
        lane, place = key
        return lane is Lane.OPTIMIZER, place, lane is not Lane.COMPUTE, lanes.index(lane)

    return tuple(
        ChartRow(lane=lane, place=place, tracks=_tracks(by_lane[lane, place]))
        for lane, place in sorted(by_lane, key=position)
    )


def _tracks(spans: Iterable[Span]) -> tuple[tuple[Span, ...], ...]:
    tracks: list[list[Span]] = [[]]
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        slack = 1e-9 * (span.end_s - span.start_s)
        free = (t for t in tracks if not t or t[-1].end_s <= span.start_s + slack)
        track = next(free, None)
        if track is None:
            track = tracks[-1]
            if len(tracks) < MAX_TRACKS:
                tracks.append(track := [])
        track.append(span)
    return tuple(map(tuple, tracks))


def numbers_of(span: Span) -> tuple[int | None, str]:
    """Returns stage (or block) and micro-batches of a span's label: ``F 3 0`` is stage 3,
    ``"0"``.
    """
    words = span.label.split()[1:]
    stage = int(words[0]) if words and words[0].isdigit() else None
    batches = words[1] if len(words) > 1 and words[1][:1].isdigit() else ""
    return stage, batches


def shades_of(spans: Sequence[Span]) -> dict[tuple[str, int], tuple[int, int]]:
    """Returns, by ``(code, stage)`` of a device's work, the index of the stage among the device's,
    and their number.

    Forward and backward stages are counted apart. A device's second forward stage has the same
    shade whether it is stage 4 of 8, or the first of Chimera's other direction.
    """
    stages: dict[str, set[int]] = defaultdict(set)
    codes: set[tuple[str, int]] = set()
    for span in spans:
        code, stage = span.label.split(" ", 1)[0], numbers_of(span)[0]
        if stage is not None and code in _FAMILY:
            stages[_FAMILY[code]].add(stage)
            codes.add((code, stage))
    order = {family: sorted(members) for family, members in stages.items()}
    return {
        (code, stage): (order[_FAMILY[code]].index(stage), len(order[_FAMILY[code]]))
        for code, stage in codes
    }
