"""``penstock trace`` on traces whose times are known: those of a simulation, written as the
processes of a run write them. What is measured must be that simulation, and so must be the
simulation with costs fitted from it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from penstock.client.main import app
from penstock.client.views.report import timing
from penstock.client.views.report.blocks import Picture, Words
from penstock.client.views.trace.comparison import TraceOutputs, make_trace_report
from penstock.client.views.trace.trace_report import DeviceMemory, memory_lines, typical_of
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.render import Caption, png
from penstock.planner.schedule.schedule import lower
from penstock.planner.simulate import Simulation, Span, simulate
from penstock.planner.traces.fitted import Fit
from penstock.planner.traces.measured import MeasuredAttempt, measure, overlapping, short_label
from penstock.planner.traces.overlap import Overlap, overlap
from penstock.planner.traces.traced import Peak, TracedRun
from penstock.protocol.plan.instructions import OffloadGradients, parse_instruction
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.semantics import Lane
from penstock.protocol.run.trace import TraceEvent, TraceLane, TraceLog
from penstock.protocol.run.trace_reading import read_traces

NUM_BLOCKS = 8
BLOCK = BlockCost(
    forward_s=0.01,
    recompute_s=0.011,
    backward_input_s=0.012,
    backward_weight_s=0.008,
    output_bytes=0.003,
    parameters=0.004,
    gradient_bytes=0.002,
)
"""Bytes and parameters in seconds: the cluster's rates are 1."""
CLUSTER = Cluster(devices_per_node=2, offload_bandwidth=1.0, peer_bandwidth=1.0, optimizer_rate=1.0)
LAUNCH_S = 0.05
"""From an attempt's announcement to the first computation."""
DECISION_S = 0.02
COMPUTE = {"F", "R", "B", "BI", "BW"}


def make_plan(scheme: str, **changes: Any) -> Plan:
    request = ScheduleRequest(scheme=scheme, num_devices=2, num_microbatches=4, **changes)
    return lower(build_schedule(request, [1.0] * NUM_BLOCKS))


PLANS = {
    "1f1b": make_plan("1f1b"),
    "gpipe": make_plan("gpipe"),
    "interleaved": make_plan("interleaved", stages_per_device=2),
    "chimera": make_plan("chimera"),
    "zb-h1": make_plan("zb-h1"),
    "spipe": make_plan("spipe", forward_stages=4, backward_stages=8, recompute="full"),
}


def simulated(plan: Plan, slower: float = 1.0) -> Simulation:
    block = dataclasses.replace(
        BLOCK, forward_s=slower * BLOCK.forward_s, recompute_s=slower * BLOCK.recompute_s
    )
    costs = Costs(blocks=(block,) * NUM_BLOCKS, instruction_s=0.001)
    return simulate(plan, costs, CLUSTER, stops_early=True)


class FakeRun:
    """A run directory of a plan, traced; ``write`` adds attempts that go as simulated."""

    def __init__(
        self, path: Path, plan: Plan, simulation: Simulation | None = None, nodes: str = "a"
    ) -> None:
        self.path = path
        self.plan = plan
        self.simulation = simulation or simulated(plan)
        self.nodes = nodes
        self.now_s = 1000.0
        (path / "run.json").write_text("{}")
        (path / "plan.json").write_text(plan.to_json())
        (path / "resolved.yaml").write_text(
            yaml.safe_dump(
                {
                    "run": {"name": "fake", "dir": str(path)},
                    "model": {"hf": {"model_type": "llama"}},
                    "data": {"path": "@stdlib", "tokenizer": "byte", "sequence_length": 8},
                    "train": {"steps": 1, "global_batch": 4, "micro_batch": 1},
                    "cluster": {"workers": 2},
                }
            )
        )
        members = [f"worker.{d}" for d in range(plan.num_devices)]
        members += [*(f"optimizerd.{node}" for node in nodes), "schedulerd"]
        self.logs = {member: TraceLog.of_run(path, member, every=1) for member in members}

    def write(self, attempt: int, *, decided: bool = True, share: float = 1.0) -> None:
        """Of an attempt that is broken off after a ``share`` of its time, what ended before."""
        zero_s = self.now_s + LAUNCH_S
        end_s = zero_s + share * self.simulation.makespan_s
        events = {
            f"optimizerd.{name}": list(self._passes(attempt, zero_s, node))
            for node, name in enumerate(self.nodes)
        }
        for device in range(self.plan.num_devices):
            events[f"worker.{device}"] = list(self._device(device, attempt, zero_s))
        for member, found in events.items():
            for event in found:
                if share == 1.0 or event.end_s < end_s:
                    self.logs[member].add(event)
        what = "attempt" if decided else "broken"
        self._scheduled(what, attempt, self.now_s, end_s)
        if decided:
            self._scheduled("commit", attempt, end_s, end_s + DECISION_S)
        self.now_s = end_s + DECISION_S
        for log in self.logs.values():
            log.flush()

    def _scheduled(self, text: str, attempt: int, start_s: float, end_s: float) -> None:
        self.logs["schedulerd"].add(
            TraceEvent(
                lane=TraceLane.SCHEDULER,
                text=text,
                attempt=attempt,
                start_s=start_s,
                end_s=end_s,
            )
        )

    def _device(self, device: int, attempt: int, zero_s: float) -> Iterator[TraceEvent]:
        """Instructions that do not compute take no time; compute instructions wait until the
        simulation starts them.
        """
        spans = self.simulation.spans
        times = {s.label: s for s in spans if s.lane is Lane.COMPUTE and s.place == device}
        texts = {short_label(i): str(i) for i in self.plan.programs[device]}
        clock_s = 0.0

        def event(lane: TraceLane, text: str, start_s: float, end_s: float) -> TraceEvent:
            waited_s = max(0.0, times[label(text)].start_s - start_s) if lane == "compute" else 0.0
            return TraceEvent(
                lane=lane,
                text=text,
                attempt=attempt,
                start_s=zero_s + start_s,
                end_s=zero_s + end_s,
                waited_s=waited_s,
            )

        for instruction in self.plan.programs[device]:
            if instruction.opcode.value in COMPUTE:
                end_s = times[short_label(instruction)].end_s
                yield event(TraceLane.COMPUTE, str(instruction), clock_s, end_s)
                clock_s = end_s
            else:
                yield event(TraceLane.ISSUE, str(instruction), clock_s, clock_s)
            if isinstance(instruction, OffloadGradients):
                yield from self._published(device, instruction, event)
        for span in spans:
            if span.lane is Lane.FETCH and span.place == device:
                text = texts[span.label]
                yield event(TraceLane.FETCH, text, self._read_from_s(span), span.end_s)
            elif span.lane is Lane.LINK and span.peer == device:
                yield event(TraceLane.ARRIVAL, span.label, span.end_s, span.end_s)
            elif span.lane is Lane.REDUCE and span.peer == device:
                text = span.label.replace("RD", "reduction") + " 0"
                yield event(TraceLane.ARRIVAL, text, span.end_s, span.end_s)

    def _read_from_s(self, fetch: Span) -> float:
        """When a fetch began to read what another node owns; or by itself, if there is nothing."""
        reads = (
            s.start_s
            for s in self.simulation.spans
            if (s.lane, s.place, s.label) == (Lane.REDUCE, fetch.place, fetch.label)
        )
        return min(reads, default=fetch.start_s)

    def _published(self, device: int, offload: OffloadGradients, event: Any) -> Iterator[Any]:
        found = [
            s
            for s in self.simulation.spans
            if s.lane is Lane.OFFLOAD and s.label == f"OG {offload.stage}"
        ]
        if not found:  # its sums went to another device
            return
        stage = self.plan.backward_stages[offload.stage]
        contribution = sum(s.start == 0 for s in self.plan.backward_stages[: offload.stage + 1]) - 1
        for block, span in zip(stage.blocks, found, strict=True):
            yield event(TraceLane.OFFLOAD, f"{block} {contribution}", span.end_s, span.end_s)

    def _passes(self, attempt: int, zero_s: float, node: int) -> Iterator[TraceEvent]:
        blocks = {s: list(stage.blocks) for s, stage in enumerate(self.plan.backward_stages)}
        for span in self.simulation.spans:
            if (
                span.lane is Lane.OPTIMIZER and span.place == node
            ):  # in the order in which blocks are published
                block = blocks[int(span.label.split()[1])].pop(0)
                yield TraceEvent(
                    lane=TraceLane.OPTIMIZER,
                    text=f"advance {block}",
                    attempt=attempt,
                    start_s=zero_s + span.start_s,
                    end_s=zero_s + span.end_s,
                )

    @property
    def attempts(self) -> tuple[MeasuredAttempt, ...]:
        return measure(TracedRun.of(read_traces(self.path), list(self.nodes)), self.plan).attempts


def label(text: str) -> str:
    """The label of an instruction by its text."""
    return short_label(parse_instruction(text))


@pytest.fixture(params=list(PLANS))
def run(request: pytest.FixtureRequest, tmp_path: Path) -> FakeRun:
    found = FakeRun(tmp_path, PLANS[request.param])
    for attempt in range(1, 4):
        found.write(attempt)
    return found


@pytest.fixture
def simple(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path, PLANS["1f1b"])


def penstock(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_what_is_measured_is_what_happened(run: FakeRun) -> None:
    simulation = run.simulation
    last = run.attempts[-1]
    assert len(run.attempts) == 3
    close = pytest.approx
    assert last.makespan_s == close(simulation.makespan_s, abs=1e-5)
    assert last.pipeline_s == close(simulation.pipeline_s, abs=1e-5)
    assert [d.busy_s for d in last.devices] == close(
        [d.busy_s for d in simulation.devices], abs=1e-4
    )
    assert last.bubble_ratio == close(simulation.bubble_ratio, abs=1e-4)
    assert overlapping(last.spans) is None
    first = run.attempts[0]
    assert first.step_s == close(LAUNCH_S + simulation.makespan_s + DECISION_S, abs=1e-5)
    assert first.between_s == close(LAUNCH_S + DECISION_S, abs=2e-5)
    assert last.step_s is None, "nothing follows"


def test_every_span_is_where_the_simulation_has_it(run: FakeRun) -> None:
    def by_lane(spans: Any) -> dict[Any, list[tuple[str, float, float]]]:
        found = defaultdict(list)
        for s in spans:
            if s.lane is not Lane.OPTIMIZER and s.end_s > s.start_s:
                key = s.lane, s.place, s.peer
                found[key].append((s.label, round(s.start_s, 4), round(s.end_s, 4)))
        return {key: sorted(values) for key, values in found.items()}

    measured = by_lane(run.attempts[0].spans)
    wanted = by_lane(run.simulation.spans)
    assert {k: [v[0] for v in vs] for k, vs in measured.items()} == {
        k: [v[0] for v in vs] for k, vs in wanted.items()
    }
    for key, values in measured.items():
        for (_, start, end), (_, wanted_start, wanted_end) in zip(values, wanted[key], strict=True):
            assert end == pytest.approx(wanted_end, abs=2e-4)
            if key[0] is not Lane.LINK:  # simulated ones start when the receive is posted
                assert start == pytest.approx(wanted_start, abs=2e-4)


def test_sums_on_their_way_to_another_device_are_spans(tmp_path: Path) -> None:
    request = ScheduleRequest(scheme="chimera", num_devices=2, num_microbatches=4)
    schedule = build_schedule(request, [1.0] * NUM_BLOCKS)
    run = FakeRun(tmp_path, lower(dataclasses.replace(schedule, reduces_gradients=True)))
    run.write(1)

    def sums(spans: Any) -> list[tuple[str, int, int | None, float]]:
        found = (s for s in spans if s.lane is Lane.REDUCE)
        return [(s.label, s.place, s.peer, round(s.end_s, 4)) for s in found]

    assert sums(run.attempts[0].spans) == sums(run.simulation.spans)
    assert [s[:3] for s in sums(run.simulation.spans)] == [("RD 3", 0, 1), ("RD 2", 1, 0)]


def test_fitted_costs_give_the_simulation_back(run: FakeRun) -> None:
    """The one fitted transfer time is exact, too: all have the same size."""
    fit = Fit.of(run.attempts, 2)
    again = simulate(run.plan, fit.costs, fit.cluster, stops_early=True)
    assert again.makespan_s == pytest.approx(run.simulation.makespan_s, rel=1e-3)
    assert again.pipeline_s == pytest.approx(run.simulation.pipeline_s, rel=1e-3)
    assert again.bubble_ratio == pytest.approx(run.simulation.bubble_ratio, abs=1e-3)
    assert fit.overhead_s == pytest.approx(0.0, abs=1e-6)
    assert fit.latency_s == pytest.approx(0.003, abs=1e-5)


@pytest.mark.parametrize("weight_bytes", [0.016, 0.128])
def test_what_crosses_the_nics_of_two_nodes_is_fitted_once(
    tmp_path: Path, weight_bytes: float
) -> None:
    """Reads of weights that the other node owns, which messages queue with; NICs of half the rate
    of links within a node.
    """
    request = ScheduleRequest(
        scheme="spipe", num_devices=4, num_microbatches=8, forward_stages=4, backward_stages=8
    )
    plan = lower(build_schedule(request, [1.0] * NUM_BLOCKS))
    cluster = dataclasses.replace(CLUSTER, fetch_bandwidth=4.0, nic_bandwidth=0.5)
    block = dataclasses.replace(BLOCK, weight_bytes=weight_bytes)
    costs = Costs(blocks=(block,) * NUM_BLOCKS, instruction_s=0.001)
    run = FakeRun(tmp_path, plan, simulate(plan, costs, cluster, stops_early=True), "ab")
    for attempt in range(1, 4):
        run.write(attempt)
    fit = Fit.of(run.attempts, 2)
    again = simulate(plan, fit.costs, fit.cluster, stops_early=True)
    assert again.makespan_s == pytest.approx(run.simulation.makespan_s, rel=0.01)


def test_fitted_amounts_are_bytes_and_parameters_of_the_fitted_machine(run: FakeRun) -> None:
    """An amount divided by its rate is the measured time, to the last bit, also when simulated."""
    fit = Fit.of(run.attempts, 2)
    costs, cluster = fit.costs, fit.cluster
    assert {b.output_bytes / cluster.peer_bandwidth for b in costs.blocks} == {fit.latency_s}
    assert all(b.output_bytes > 1.0 for b in costs.blocks), "bytes, not seconds"
    sweeps = [block.parameters / cluster.optimizer_rate for block in costs.blocks]
    assert sweeps == [fit.sweeps[b] + fit.sweep_hop_s for b in range(len(costs.blocks))]
    names = ("output_bytes", "weight_bytes", "gradient_bytes", "parameters")
    rates = ("fetch_bandwidth", "offload_bandwidth", "peer_bandwidth", "nic_bandwidth")
    rates = (*rates, "optimizer_rate", "device_optimizer_rate")
    in_seconds = tuple(
        dataclasses.replace(block, **{name: getattr(block, name) / 2**30 for name in names})
        for block in costs.blocks
    )
    ones = dataclasses.replace(cluster, **dict.fromkeys(rates, 1.0))  # type: ignore[arg-type]
    scaled = simulate(run.plan, costs, cluster, stops_early=True)
    plain = simulate(
        run.plan, dataclasses.replace(costs, blocks=in_seconds), ones, stops_early=True
    )
    assert scaled.times.ends.tolist() == plain.times.ends.tolist()


@pytest.fixture(scope="session")
def fonts() -> None:
    """matplotlib keeps the fonts it has used open; before any test is watched for leaks."""
    png(simulated(PLANS["1f1b"]), Caption(heading="bold"))


@pytest.mark.usefixtures("fonts")
def test_report_and_files(simple: FakeRun, tmp_path: Path) -> None:
    for attempt in range(1, 9):
        simple.write(attempt)
    files = [tmp_path / name for name in ("out.json", "out.svg", "out.png")]
    options = [text for file in files for text in (f"--{file.suffix[1:]}", str(file))]
    options[0] = "--out"
    code, out, err = penstock("trace", str(tmp_path), *options, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["attempts"] == [4, 5, 6, 7, 8], "three to warm up"
    assert report["error"] == pytest.approx(0.0, abs=1e-3)
    assert report["opcodes"]["FORWARD"]["count"] == 8
    assert report["opcodes"]["FORWARD"]["median_seconds"] == pytest.approx(0.041, abs=1e-4)
    svg = files[1].read_text()
    assert "measured, attempt" in svg and "simulated with its own costs" in svg
    assert files[2].read_bytes().startswith(b"\x89PNG")
    code, out, err = penstock("trace", str(tmp_path))
    assert "error +0.0%" in out or "error -0.0%" in out
    assert "attempts 4 to 8: 5 (5 commit)" in out


def told_and_drawn(folder: Path) -> tuple[float, float, float, list[float]]:
    """Returns what a report says of a run, in ms: the simulated and the measured attempt, the
    signed percentage between them; then the two times that the picture has as text.
    """
    traced = make_trace_report(folder, None, None, TraceOutputs())
    facts: Any = SimpleNamespace(traced=traced, run=SimpleNamespace(path=folder))
    chapter = timing.simulated(facts)
    words = next(block.text for block in chapter.blocks if isinstance(block, Words))
    [picture] = [str(block.image) for block in chapter.blocks if isinstance(block, Picture)]
    found = re.search(
        r"takes ([\d.]+) ms, ([\d.]+)% (more|less) than .* takes ([\d.]+) ms\.", words
    )
    assert found is not None, words
    simulated_ms, percent, which, measured_ms = found.groups()
    sign = 1.0 if which == "more" else -1.0
    drawn = re.findall(r">(?:makespan|takes) ([\d.]+) ms", picture)
    assert f"attempt {traced.typical.number}, the typical one of" in picture
    return float(simulated_ms), float(measured_ms), sign * float(percent), [*map(float, drawn)]


def test_a_report_compares_the_two_steps_that_its_picture_draws(simple: FakeRun) -> None:
    """Two of four steps are slower, so no step takes the median; the first, a slow one, is drawn.
    The last attempt is quick and has no next one, so costs are fitted to quick ones.
    """
    quick, slow = simple.simulation, simulated(simple.plan, slower=1.5)
    for attempt in range(1, 9):
        simple.simulation = slow if attempt in (4, 6) else quick
        simple.write(attempt)
    simulated_ms, measured_ms, percent, drawn = told_and_drawn(simple.path)
    assert drawn == [measured_ms, simulated_ms], "the measured step is above its simulation"
    assert percent == pytest.approx(100.0 * (simulated_ms / measured_ms - 1.0), abs=0.06)
    assert percent < -1.0
    report = json.loads(penstock("trace", str(simple.path), "--json")[1])
    assert 100.0 * report["typical_error"] == pytest.approx(percent, abs=0.06)
    assert report["where_the_step_went"]["attempt"] == report["typical_attempt"]


def test_the_typical_step_is_the_one_nearest_to_the_median(simple: FakeRun) -> None:
    """An attempt that no other follows has no known step, however near its makespan is."""
    for attempt, slower in enumerate((1.0, 1.1, 1.3, 1.2, 1.4, 1.2), start=1):
        simple.simulation = simulated(simple.plan, slower)
        simple.write(attempt)
    attempts = simple.attempts
    assert [attempt.step_s is None for attempt in attempts] == [False] * 5 + [True]
    assert typical_of(attempts).number == 4
    assert typical_of(attempts[2:]).number == 3
    assert typical_of(attempts[5:]).number == 6


def test_chrome_trace(run: FakeRun, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, _, err = penstock("trace", str(tmp_path), "--attempt", "2", "--out", str(out))
    assert code == 0, err
    events = json.loads(out.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(names.values()) == {"device 0", "device 1", "optimizer a", "scheduler"}
    for device, program in enumerate(run.plan.programs):
        executed = [
            e["args"]["what"]
            for e in sorted(spans, key=lambda e: float(e["ts"]))
            if e["pid"] == device + 1 and e["tid"] == 1 and e["cat"] != "wait"
        ]
        assert executed == [str(i) for i in program if i.opcode.value in COMPUTE]
    check_lanes(spans)
    sends = sum(i.opcode.value in ("SA", "SG", "SC") for p in run.plan.programs for i in p)
    assert arrows_of(events) == {
        "announcement": 2,
        "send": sends,
        "tensor": sends,
        "gradients": NUM_BLOCKS,
    }


def test_arrows_lead_from_sweeps_to_the_weights_that_the_next_attempt_loads(
    tmp_path: Path,
) -> None:
    """Attempt 1 has none before it; what it loads has nothing to come from."""
    run = FakeRun(tmp_path, PLANS["spipe"])
    for attempt in range(1, 4):
        run.write(attempt)
    out = tmp_path / "out.json"
    code, _, err = penstock("trace", str(tmp_path), "--out", str(out))
    assert code == 0, err
    fetches = sum(i.opcode.value == "FW" for p in run.plan.programs for i in p)
    assert arrows_of(json.loads(out.read_text())["traceEvents"])["weights"] == 2 * fetches > 0


LINKS = range(10, 100)
ARROWS = {
    "announcement": ((2000, (1,)), (1, (1, 2))),
    "send": ((1, (2,)), (1, LINKS)),
    "tensor": ((1, LINKS), (1, (1,))),
    "gradients": ((1, (4,)), (1000, (1,))),
    "weights": ((1000, (1,)), (1, (1, 3))),
}
"""First process and lanes of both ends, by name."""


def arrows_of(events: list[dict[str, Any]]) -> Counter[str]:
    """How many arrows of each name there are. Each has two ends, forwards in time, that lie in
    slices of the lanes that they should.
    """
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"], end["bp"]) == (end["name"], end["cat"], "e")
        assert start["ts"] <= end["ts"], start
        for one, (first, lanes) in zip((start, end), ARROWS[start["name"]], strict=True):
            assert one["pid"] // 1000 == first // 1000 and one["tid"] in lanes, one
            assert any(a - 0.11 <= one["ts"] <= b + 0.11 for a, b in slices[one["pid"], one["tid"]])
    return Counter(start["name"] for start in starts.values())


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_an_attempt_broken_off_anywhere_is_drawn_as_far_as_it_went(
    run: FakeRun, tmp_path: Path, share: float
) -> None:
    run.write(4, decided=False, share=share)
    run.write(5)
    out = tmp_path / "out.json"
    code, text, err = penstock("trace", str(tmp_path), "--out", str(out), "--json")
    assert code == 0, err
    assert json.loads(text)["left_out"] == {"broken off": 1}
    spans = [e for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "X"]
    check_lanes(spans)
    drawn = {e["args"]["attempt"] for e in spans if "attempt" in e["args"] and e["pid"] < 1000}
    assert drawn >= {1, 2, 3, 5} and (4 in drawn or share == 0.0)


def check_lanes(spans: list[dict[str, Any]]) -> None:
    """Nothing overlaps within a lane."""
    lanes = defaultdict(list)
    for event in spans:
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for found in lanes.values():
        for (_, end), (start, _) in pairwise(sorted(found)):
            assert start >= end - 0.21, "tenths of microseconds, rounded"


def test_attempts_that_are_not_of_the_plan_are_left_out(simple: FakeRun, tmp_path: Path) -> None:
    simple.write(1, decided=False)
    simple.write(2)
    other = FakeRun(tmp_path, PLANS["gpipe"])
    other.now_s = simple.now_s
    other.write(3)
    (tmp_path / "plan.json").write_text(simple.plan.to_json())
    code, out, err = penstock("trace", str(tmp_path), "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["attempts"] == [2]
    assert report["left_out"] == {"broken off": 1, "of another plan": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attempt", "9"], "attempt 9 is not in the trace: traced are attempts 1 to 2"),
        (["--attempts", "5:"], "is not in the trace: traced are attempts 1 to 2"),
        (["--attempts", "2:1"], "--attempts 2:1: the end is before the start"),
        (["--attempts", "two"], "--attempts two: expected A:B, such as 10:20, 10: or :20"),
        (["--attempt", "1", "--attempts", "1:2"], "give only one of the two"),
        (["--attempt", "2"], "no complete attempt of the plan in plan.json to compare (1 broken"),
        (["--svg", "no/such/place.svg"], "no/such/place.svg: cannot write it"),
    ],
)
def test_errors_name_what_is_wrong(
    simple: FakeRun, tmp_path: Path, options: list[str], message: str
) -> None:
    simple.write(1)
    simple.write(2, decided=False)
    code, _, err = penstock("trace", str(tmp_path), *options)
    assert (code, message in err) == (2, True), err


def test_a_run_without_a_trace_says_how_to_get_one(tmp_path: Path) -> None:
    code, _, err = penstock("trace", str(tmp_path))
    assert (code, "no run directory" in err) == (2, True)
    (tmp_path / "run.json").write_text("{}")
    code, _, err = penstock("trace", str(tmp_path))
    assert (code, "--set observability.trace=true" in err) == (2, True)


def test_overlap_of_intervals() -> None:
    work = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]
    cover = [(2.5, 5.5), (0.5, 1.0), (5.75, 9.0)]
    assert overlap(work, cover) == Overlap(seconds=4.0, hidden_s=1.75)
    assert overlap([], cover).share is None


def test_labels_are_those_of_simulations() -> None:
    for plan in PLANS.values():
        simulation = simulated(plan)
        wanted = {s.label for s in simulation.spans if s.lane is Lane.COMPUTE}
        found = {short_label(i) for p in plan.programs for i in p if i.opcode.value in COMPUTE}
        assert found == wanted


def test_memory_is_measured_beside_planned() -> None:
    event = TraceEvent(lane=TraceLane.MEMORY, text="2097152 B 3 0", attempt=1, start_s=1, end_s=1)
    found = DeviceMemory(device=0, measured=Peak.of(event), planned_bytes=2202010.0)
    assert list(memory_lines([found])) == [
        "peak of memory            measured     planned",
        "  device 0                 2.0 MiB     2.1 MiB   error +5.0%   (B 3 0)",
    ]
    assert list(memory_lines([])) == []
