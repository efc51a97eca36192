"""Pictures: what stands where, in text, SVG and PNG."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from penstock.planner.render import ABSTRACT, SECONDS, Caption, chart, png, svg, timeline
from penstock.planner.render.chart import NARROW, compared
from penstock.planner.render.drawing import Anchor, LineSegment, Rectangle, Text, ink_on, shade
from penstock.planner.simulate import DeviceTimes, Span
from penstock.protocol.plan.semantics import Lane

SVG = "{http://www.w3.org/2000/svg}"


def span(
    lane: Lane, place: int, label: str, start: float, end: float, peer: int | None = None
) -> Span:
    return Span(lane=lane, place=place, label=label, start_s=start, end_s=end, peer=peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picturable:
    """What a picture needs of a simulation."""

    makespan_s: float
    pipeline_s: float
    devices: tuple[DeviceTimes, ...]
    spans: tuple[Span, ...]

    @property
    def optimizer_tail_s(self) -> float:
        return self.makespan_s - self.pipeline_s

    @property
    def bubble_ratio(self) -> float:
        idle_s = sum(device.idle_s for device in self.devices)
        return idle_s / self.pipeline_s / len(self.devices)


def simulation(spans: Sequence[Span], num_devices: int) -> Picturable:
    """As the simulator would sum it up."""
    compute = [s for s in spans if s.lane is Lane.COMPUTE]
    pipeline_s = max(s.end_s for s in compute)
    busy = [
        sum(s.end_s - s.start_s for s in compute if s.place == device)
        for device in range(num_devices)
    ]
    return Picturable(
        makespan_s=max(s.end_s for s in spans),
        pipeline_s=pipeline_s,
        devices=tuple(DeviceTimes(busy_s=b, idle_s=pipeline_s - b) for b in busy),
        spans=tuple(spans),
    )


TWO_DEVICES = simulation(
    [
        span(Lane.COMPUTE, 0, "F 0 0", 0, 1),
        span(Lane.COMPUTE, 0, "F 0 1", 1, 2),
        span(Lane.LINK, 0, "activation 0 0", 1, 1.5, peer=1),
        span(Lane.LINK, 0, "activation 0 1", 1.25, 2.0, peer=1),
        span(Lane.COMPUTE, 1, "F 1 0", 1.5, 2.5),
        span(Lane.COMPUTE, 1, "BI 1 0", 3, 4),
        span(Lane.COMPUTE, 1, "BW 1 0,1", 4, 6),
        span(Lane.FETCH, 1, "FW 1 forward", 0, 1),
        span(Lane.OFFLOAD, 1, "OG 1", 6, 6),
        span(Lane.OPTIMIZER, 0, "U 1", 6, 8),
    ],
    num_devices=2,
)


def test_timeline_names_micro_batches_where_a_device_has_one_stage() -> None:
    assert timeline(TWO_DEVICES, width=48, abstract=True) == (
        "device 0    |F0ffffF1ffff....................................|\n"
        "device 1    |.........F0ffff...BI0bbbBW0+bbbbbbbb............|\n"
        "optimizer 0 |....................................U1uuuuuuuuuu|\n"
        "F0 is the forward of micro-batch 0, BI backward of inputs, BW of weights,"
        " U optimizer of a stage; '.' idle\n"
    )


def test_timeline_names_stages_where_a_device_has_several() -> None:
    spans = [
        span(Lane.COMPUTE, 0, "F 0 0", 0, 1),
        span(Lane.COMPUTE, 0, "F 2 0", 1, 2),
        span(Lane.COMPUTE, 0, "B 2 0", 2, 3),
    ]
    wide, narrow, narrowest = (
        timeline(simulation(spans, 1), width=width).splitlines()[0] for width in (12, 6, 3)
    )
    assert wide == "device 0    |F0:0F2:0B2:0|"
    assert narrow == "device 0    |F0F2B2|"
    assert narrowest == "device 0    |FFB|"


def test_timeline_of_nothing() -> None:
    nothing = Picturable(
        makespan_s=0.0, pipeline_s=0.0, devices=(DeviceTimes(busy_s=0.0, idle_s=0.0),), spans=()
    )
    assert timeline(nothing, width=10).splitlines()[0] == "device 0    |.|"


def test_chart_has_a_box_a_span_in_the_lane_of_its_resource() -> None:
    drawing = chart(TWO_DEVICES, Caption(heading="two devices", unit=ABSTRACT))
    boxes = [s for s in drawing.shapes if isinstance(s, Rectangle) and s.title]
    rows = sorted({box.y for box in boxes})
    # Compute and two tracks of sends; compute and fetch; the optimizer. Offloads took no time.
    assert [[b.title for b in boxes if b.y == y] for y in rows] == [
        [
            "forward, stage 0, micro-batch 0: 0 to 1 (1)",
            "forward, stage 0, micro-batch 1: 1 to 2 (1)",
        ],
        ["send activation, stage 0, micro-batch 0, to device 1: 1 to 1.5 (0.5)"],
        ["send activation, stage 0, micro-batch 1, to device 1: 1.25 to 2 (0.75)"],
        [
            "forward, stage 1, micro-batch 0: 1.5 to 2.5 (1)",
            "backward, input (p1), stage 1, micro-batch 0: 3 to 4 (1)",
            "backward, weights (p2), stage 1, micro-batch 0,1: 4 to 6 (2)",
        ],
        ["fetch weights, stage 1: 0 to 1 (1)"],
        ["optimizer, stage 1: 6 to 8 (2)"],
    ]
    forward, fetch = boxes[0], boxes[-2]
    assert fetch.width == forward.width == pytest.approx(1260 / 8)
    idle = [s for s in drawing.shapes if isinstance(s, Rectangle) and s.hatched]
    assert [box.width for box in idle[:2]] == [pytest.approx(1260 * 6 / 8)] * 2


def test_chart_says_what_matters() -> None:
    drawing = chart(TWO_DEVICES, Caption(heading="two devices", unit=ABSTRACT))
    texts = [s.text for s in drawing.shapes if isinstance(s, Text)]
    assert texts[:2] == ["two devices", "makespan 8   ·   bubbles 50.0%   ·   optimizer tail 2"]
    assert {"device 0", "device 1", "optimizer 0", "idle 66.7%", "idle 33.3%"} < set(texts)
    assert {"forward", "fetch weights", "optimizer", "idle", "last computation"} < set(texts)
    assert "recompute" not in texts
    assert [s.dashed for s in drawing.shapes if isinstance(s, LineSegment)].count(True) == 1


def test_a_narrow_comparison_keeps_all_texts_inside() -> None:
    heading = "measured, attempt 41, the typical one of 57: 1f1b: 2 devices, 4 micro-batches"
    caption = Caption(heading=heading, unit=ABSTRACT)
    drawing = compared((TWO_DEVICES, caption), (TWO_DEVICES, Caption()), NARROW)
    texts = [s for s in drawing.shapes if isinstance(s, Text)]
    assert [s.text for s in texts if s.bold and s.text] == [heading[:44], heading[45:]]
    shift = {Anchor.START: 0.0, Anchor.MIDDLE: 0.5, Anchor.END: 1.0}
    starts = [s.x - shift[s.anchor] * s.width for s in texts]
    assert min(starts) >= 0.0 and drawing.width == 470.0
    ends = [start + s.width for start, s in zip(starts, texts, strict=True)]
    assert max(ends) <= drawing.width
    boxes = [s for s in drawing.shapes if isinstance(s, Rectangle)]
    assert max(box.x + box.width for box in boxes) <= NARROW.labels + NARROW.chart


def test_boxes_too_narrow_for_the_largest_number_have_none() -> None:
    spans = [span(Lane.COMPUTE, 0, f"F 0 {m}", m, m + 1) for m in range(160)]
    texts = [s.text for s in chart(simulation(spans, 1)).shapes if isinstance(s, Text)]
    assert "1" not in texts


def test_very_narrow_neighbours_become_one_box() -> None:
    spans = [span(Lane.COMPUTE, 0, f"F 0 {m}", m, m + 1) for m in range(20_000)]
    boxes = [s for s in chart(simulation(spans, 1)).shapes if isinstance(s, Rectangle) and s.title]
    assert len(boxes) == 1
    assert boxes[0].width == pytest.approx(1260)
    assert boxes[0].title.splitlines()[1].startswith("… 20000 in all, the last: forward")


def test_shades_go_from_light_to_dark() -> None:
    blue = "#4285d6"
    assert shade(blue, 0, 1) == blue
    shades = [shade(blue, index, 3) for index in range(3)]
    assert shades == ["#8ab3e6", "#4285d6", "#3368a7"]
    assert [ink_on(colour) for colour in shades] == ["#222222", "#ffffff", "#ffffff"]


def test_ticks_are_round() -> None:
    assert ABSTRACT.ticks(27.0, at_most=6) == tuple((float(t), str(t)) for t in range(0, 26, 5))
    assert SECONDS.ticks(0.0031, at_most=4)[1:] == (
        (pytest.approx(0.001), "1"),
        (pytest.approx(0.002), "2"),
        (pytest.approx(0.003), "3 ms"),
    )
    assert [text for _, text in SECONDS.ticks(1.1, at_most=6)][:3] == ["0.0", "0.2", "0.4"]
    assert SECONDS.ticks(0.0, at_most=6) == ((0.0, "0"),)
    assert [SECONDS.format(t) for t in (0.0, 2.5e-6, 0.012, 3.0)] == [
        "0 s",
        "2.5 µs",
        "12 ms",
        "3 s",
    ]


def test_svg_is_a_document_with_titles() -> None:
    root = ElementTree.fromstring(svg(TWO_DEVICES, Caption(heading="a < b")))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert len(titles) == 9 and titles[0] == "forward, stage 0, micro-batch 0: 0 s to 1 s (1 s)"
    assert "a < b" in {text.text for text in root.iter(f"{SVG}text")}


@pytest.fixture(scope="module")
def fonts() -> None:
    """matplotlib keeps the fonts it has used open; before any test is watched for leaks."""
    png(TWO_DEVICES, Caption(heading="bold"))


@pytest.mark.usefixtures("fonts")
def test_png_is_as_large_as_the_chart() -> None:
    drawing, data = chart(TWO_DEVICES), png(TWO_DEVICES)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (int(drawing.width * 1.5), int(drawing.height * 1.5))
