"""SPipe's numbers: schedules in units, every run at hand predicted, memory, and our plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.papers.spipe_cluster import figures, ours, schedules, zero3
from bench.papers.spipe_cluster.command import bed_of, main, predicted
from bench.papers.spipe_cluster.fit import gpu_residuals, tail_residuals, zero3_residuals
from bench.papers.spipe_cluster.measured import (
    FIGURE_9,
    MeasuredRun,
    Workload,
    figure_9,
    measured,
    read_rows,
)
from bench.papers.spipe_cluster.systems import SYSTEMS, predict, schedule_of
from bench.papers.spipe_cluster.testbed import CONSTANTS, TEST_BEDS, constants
from penstock.host.errors import ConfigError
from penstock.planner.schedule.schedule import lower
from penstock.planner.validate.check import validate

pytestmark = pytest.mark.xdist_group("SPipe's runs")
"""What they simulate is kept by the process that has it."""

SMALLEST = Workload(billions=10, sequence=1024, nodes=1, micro_batch=2, mini_batch=16)


@pytest.mark.parametrize(
    ("devices", "micro_batches", "forward", "backward", "mobius", "spipe_units"),
    [
        (4, 4, 8, 16, 33.0, 27.0),
        (2, 2, 4, 8, 15.0, 13.0),
        (4, 8, 8, 16, 57.0, 51.0),
        (8, 16, 16, 32, 117.0, 103.0),
    ],
)
def test_units_of_figures_2_and_8(
    devices: int,
    micro_batches: int,
    forward: int,
    backward: int,
    mobius: float,
    spipe_units: float,
) -> None:
    sizes = (devices, micro_batches, forward)
    assert schedules.pipeline_units("mobius", *sizes, forward) == mobius
    assert schedules.pipeline_units("spipe", *sizes, backward) == spipe_units


def test_the_file_has_48_runs_of_pipelines_and_8_of_deepspeed() -> None:
    assert len(measured()) == 16
    assert measured()[SMALLEST]["SPipe"] == MeasuredRun(iteration_s=8.171, gpu_s=6.013)
    assert sum(name in runs for runs in measured().values() for name in SYSTEMS) == 48
    assert sum(row.system == "DeepSpeed" and row.run is not None for row in figure_9()) == 8


def test_the_papers_cut_is_equal_layers_with_embedding_and_head_outside() -> None:
    layout = schedule_of(SYSTEMS["Mobius"], 48, 4, 8).layout
    assert [len(stage.blocks) for stage in layout.forward] == [7, 6, 6, 6, 6, 6, 6, 7]
    assert layout.num_blocks == 50


@pytest.mark.parametrize("system", figures.NAMES)
def test_iterations_of_figure_9(system: str) -> None:
    assert figures.mean_error(system) < (0.2 if system == zero3.NAME else 0.04)
    if system != zero3.NAME:
        assert figures.mean_error(system, "tail_error") < 0.05


@pytest.mark.parametrize("system", ["Mobius", "SPipe"])
def test_iterations_of_figure_12(system: str) -> None:
    assert figures.mean_error(system, figure=12) < 0.04
    assert figures.mean_error(system, "tail_error", figure=12) < 0.05


def test_rows_of_deepspeed_are_within_a_fifth() -> None:
    errors = [one.error for one in figures.compared(9) if one.row.system == zero3.NAME]
    assert max(abs(error) for error in errors if error is not None) < 0.2


def test_what_ran_fits_and_what_did_not_does_not() -> None:
    """Mobius, 40B with 8 sequences a micro-batch, is the file's only pipeline out of GPU memory;
    DeepSpeed's runs ran out of host memory, but for two at 2048 tokens.
    """
    for one in (*figures.compared(9), *figures.compared(12)):
        long = one.row.workload.nodes == 8 and one.row.workload.sequence == 2048
        if not (one.row.system == zero3.NAME and long):
            assert one.prediction.fits == (one.row.run is not None), one.row
    for billions, nodes in ((19, 1), (69, 4)):  # section 5.3
        workload = Workload(
            billions=billions, sequence=1024, nodes=nodes, micro_batch=8, mini_batch=32 * nodes
        )
        assert not predict(SYSTEMS["Mobius"], workload).fits
        assert predict(SYSTEMS["SPipe"], workload).fits


@pytest.mark.parametrize(("system", "usage"), figures.FIGURE_11.items())
def test_memory_of_figure_11(system: str, usage: figures.Usage) -> None:
    assert figures.peak_share(system) == pytest.approx(usage.peak_share, abs=0.1)


def test_the_tail_is_as_long_for_all_micro_batches() -> None:
    """Section 5.3: the CPU step's speed-up does not depend on the size of micro-batches."""
    tails = [
        one.prediction.tail_s
        for one in figures.compared(12)
        if one.row.system == "SPipe" and one.row.workload.billions == 40
    ]
    assert max(tails) < 1.05 * min(tails)


@pytest.mark.parametrize(
    ("over", "file"), [("Mobius", 1.311), ("Megatron", 1.263), ("DeepSpeed", 4.536)]
)
def test_average_speedups(over: str, file: float) -> None:
    assert figures.measured_speedup(over) == pytest.approx(file, abs=5e-4)
    assert figures.simulated_speedup(over) == pytest.approx(file, rel=0.04)


def test_the_other_cluster_is_predicted_from_its_data_sheet() -> None:
    """Matrix products are slower there, PCIe and memory faster: the speed-ups of section 5.2."""
    for over, paper in (("Mobius", 1.22), ("Megatron", 1.20), ("DeepSpeed", 4.26)):
        assert figures.simulated_speedup(over, "3090") == pytest.approx(paper, rel=0.08)


@pytest.mark.slow
def test_no_constant_alone_fits_better() -> None:
    """The committed constants are those of the fit: each is at a minimum of its residuals."""
    known = constants()
    parts = {
        ("efficiency", "small_tokens", "blocking_s", "peer_bandwidth"): gpu_residuals,
        ("step_bytes",): lambda k: tail_residuals(k, by_stage=False),
        ("stage_rate",): lambda k: tail_residuals(k, by_stage=True),
        ("gather_bandwidth",): lambda k: zero3_residuals(k, slow=False),
        ("gather_bandwidth_32",): lambda k: zero3_residuals(k, slow=True),
    }
    for names, residuals in parts.items():
        least = sum(one**2 for one in residuals(known))
        for name in names:
            for factor in (0.8, 1.25):
                other = replace(known, **{name: getattr(known, name) * factor})
                assert sum(one**2 for one in residuals(other)) > 0.99 * least, name


def test_one_workload_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--predict --cluster v100 --system spipe --billions 10 --json".split()
    assert main(arguments) == 0
    made = json.loads(capsys.readouterr().out)
    assert set(made) == {"iteration_s", "gpu_s", "tail_s", "peak_gb", "fits"}
    assert made["iteration_s"] == pytest.approx(made["gpu_s"] + made["tail_s"])
    assert made["fits"] is True


def test_rows_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = FIGURE_9.read_text().splitlines()
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([*lines[:5], ",,,,,,,,,", ""]))
    assert main(["--csv", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("10 ") >= 4 and "mean error, all (4 runs)" in printed
    assert main(["--csv", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["system"] for row in answer["rows"]] == ["DeepSpeed", *SYSTEMS]
    assert set(answer["mean_errors"]) == {"error", "gpu_error", "tail_error"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("system,cluster\nSPipe,v100\n", "no 'model_billion'"),
        (
            "system,cluster,model_billion,micro_batch,mini_batch,nodes,sequence,iteration_ms,gpu_ms"
            "\nSPipe,v100,ten,2,16,1,1024,1,1\n",
            "line 2: model_billion = 'ten': expected a whole number",
        ),
        (
            "system,cluster,model_billion,micro_batch,mini_batch,nodes,sequence,iteration_ms,gpu_ms"
            "\nSPipe,v100,10,3,16,1,1024,1,1\n",
            "expected a multiple of micro_batch = 3",
        ),
    ],
)
def test_files_that_make_no_sense_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_rows(path)
    assert main(["--csv", str(path)]) == 2


def test_unknown_systems_models_and_clusters_are_refused() -> None:
    bed = TEST_BEDS["v100"]
    with pytest.raises(ConfigError, match="system = 'gpipe': expected one of mobius, "):
        predicted("gpipe", SMALLEST, bed)
    with pytest.raises(ConfigError, match="billions = 11: expected one of 10, 19, "):
        predicted("spipe", Workload(**{**_fields(SMALLEST), "billions": 11}), bed)
    with pytest.raises(ConfigError, match="needs a multiple of micro_batch x GPUs = 8"):
        predicted("deepspeed", Workload(**{**_fields(SMALLEST), "mini_batch": 12}), bed)
    with pytest.raises(ConfigError, match="cluster = 'a100': expected one of v100, 3090"):
        bed_of("a100")
    assert bed_of("spipe-v100") is bed


def _fields(workload: Workload) -> dict[str, int]:
    return {name: getattr(workload, name) for name in workload.__slots__}


def test_constants_are_those_of_the_file() -> None:
    assert constants().step_bytes == json.loads(CONSTANTS.read_text())["step_bytes"]


def test_our_plan_with_full_recomputation() -> None:
    validate(lower(ours.full_schedule(SMALLEST)))
    for one in ours.recorded():
        assert one.best_s <= one.full_s
        assert one.peak_bytes <= ours.LIMIT_BYTES
        assert one.kernels_none_s < one.best_s


def test_a_recorded_plan_is_what_is_found_now() -> None:
    recorded = next(
        one
        for one in ours.recorded()
        if (one.billions, one.sequence, one.blocking) == (10, 1024, True)
    )
    now = ours.find(SMALLEST, blocking=True)
    assert now.best == recorded.best
    assert now.best_s == pytest.approx(recorded.best_s, rel=1e-3)
    assert now.mobius_s == pytest.approx(recorded.mobius_s, rel=1e-3)
