"""``penstock plan --scheme`` and ``penstock simulate``: figures, files, and errors that help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.client.main import app
from penstock.client.planning.outputs import blocks_text
from penstock.planner.cost.catalogue import GPUS, MODELS
from penstock.planner.passes import PASSES
from penstock.planner.schemes import SCHEMES

KEYS = (
    "scheme devices micro_batches makespan bubble_ratio device_busy device_bubble_ratio"
    " optimizer_tail peak_memory_bytes lower_bound instructions num_instructions"
).split()


def penstock(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def planned(arguments: str) -> dict[str, Any]:
    """What ``penstock plan … --json`` says."""
    code, out, err = penstock("plan", *arguments.split(), "--json")
    assert code == 0, err
    return dict(json.loads(out))


def test_json_has_the_figures_of_1f1b() -> None:
    report = planned("--scheme 1f1b --devices 2 --micro-batches 4")
    assert [key for key in KEYS if key not in report] == []
    assert {key: report[key] for key in KEYS if key != "instructions"} == {
        "scheme": "1f1b",
        "devices": 2,
        "micro_batches": 4,
        "makespan": 15.0,
        "bubble_ratio": pytest.approx(0.2),
        "device_busy": [12.0, 12.0],
        "device_bubble_ratio": [pytest.approx(0.2)] * 2,
        "optimizer_tail": 0.0,
        "peak_memory_bytes": [2.0, 1.0],
        "lower_bound": 15.0,
        "num_instructions": sum(map(len, report["instructions"])),
    }
    computed = [i for i in report["instructions"][1] if i.split()[0] in ("F", "B")]
    assert computed[:4] == ["F 1 0 keep=all", "B 1 0", "F 1 1 keep=all", "B 1 1"]


@pytest.mark.parametrize(
    ("arguments", "makespan"),
    [
        # Mario, figure 2.
        ("--scheme 1f1b", 21.0),
        ("--scheme 1f1b --recompute full", 28.0),
        ("--scheme 1f1b --passes apply-checkpoint", 28.0),
        ("--scheme 1f1b --passes apply-checkpoint,overlap-recompute", 25.0),
        ("--scheme 1f1b --passes apply-checkpoint,overlap-recompute,remove-redundancy", 23.0),
        ("--scheme 1f1b --passes mario", 22.0),
        # SPipe, figures 2 and 8: shares of a forward stage.
        ("--scheme mobius --stages-per-device 2 --costs unit:f=1,b=1,r=1", 33.0),
        ("--scheme mobius --forward-stages 8 --costs unit:b=1 --recompute-after checkpoint", 30.0),
        ("--scheme spipe --forward-stages 8 --backward-stages 16 --costs unit:f=1,b=1,r=1", 27.0),
        # The last stage's gradients are there at 15, then one optimizer takes 5 for each stage.
        ("--scheme gpipe --costs unit:f=1,p1=1,p2=1,o=5", 35.0),
    ],
)
def test_makespans_of_the_papers(arguments: str, makespan: float) -> None:
    assert planned(f"--devices 4 --micro-batches 4 {arguments}")["makespan"] == makespan


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_can_be_planned_by_name(scheme: str) -> None:
    report = planned(f"--scheme {scheme} --devices 2 --micro-batches 4")
    assert report["lower_bound"] <= report["makespan"]
    assert report["scheme"] == scheme and len(report["instructions"]) == 2


def test_report_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "88")
    code, out, _ = penstock("plan", "--scheme", "1f1b", "--devices", "2", "--micro-batches", "2")
    assert code == 0
    assert out == (
        "1f1b: 2 devices, 2 micro-batches, 2 stages; costs: unit\n"
        "forward stages   0-0@0  1-1@1   (blocks@device)\n"
        "backward stages  0-0@0  1-1@1   (blocks@device)\n"
        "\n"
        "device 0    |F0ffffffF1ffffff................B0bbbbbbbbbbbbbb........"
        "B1bbbbbbbbbbbbbb|\n"
        "device 1    |........F0ffffffB0bbbbbbbbbbbbbbF1ffffffB1bbbbbbbbbbbbbb"
        "................|\n"
        "F0 is the forward of micro-batch 0, B backward; '.' idle\n"
        "\n"
        "makespan 9: computing 9, optimizer tail 0; bubbles 33.3%\n"
        "lower bound 9: no order of this work is faster\n"
        "\n"
        "device          busy        idle  bubbles         kept\n"
        "0                  6           3    33.3%            2\n"
        "1                  6           3    33.3%            1\n"
        "(kept: activations, those of one forward stage and micro-batch are 1)\n"
    )


def test_a_search_says_how_far_an_order_is_from_the_best_one() -> None:
    arguments = "--scheme chimera --devices 4 --micro-batches 8"
    assert planned(f"{arguments} --search 30")["search"] == {
        "makespan": 30.0,
        "best": 27.0,
        "lower_bound": 27.0,
        "optimal": True,
        "at_least": pytest.approx(1 / 9),
        "at_most": pytest.approx(1 / 9),
    }
    _, text, _ = penstock("plan", *arguments.split(), "--search", "30")
    assert "computes in 27 (proved optimal); this schedule in 30, 11.1% more" in text
    assert planned(f"{arguments} --passes reorder")["makespan"] == 27.0


def test_instructions_are_shown_side_by_side_when_asked_for() -> None:
    arguments = ("plan", "--scheme", "gpipe", "--devices", "2", "--micro-batches", "1")
    code, out, _ = penstock(*arguments, "--show", "instructions")
    assert code == 0
    assert "\n   5  OG 0                OG 1\n" in out
    code, _, err = penstock(*arguments, "--show", "everything")
    assert (code, err) == (2, "penstock: --show 'everything': accepted is instructions\n")


def test_analytic_costs_give_seconds_and_bytes() -> None:
    report = planned(
        "--scheme 1f1b --devices 4 --micro-batches 4 --costs analytic:A100-80:llama2-7b"
        " --recompute selective --drop cmb --memory 80G"
    )
    assert 0.1 < report["makespan"] < 10.0
    assert 1e9 < max(report["peak_memory_bytes"]) < 80 * 2**30
    dropped = [i for i in report["instructions"][0] if i.startswith("F 0 0")]
    assert dropped == ["F 0 0 keep=selective drop=mul,norm,silu"]


def test_files_are_written_and_simulated_again(tmp_path: Path) -> None:
    plan, svg, png = (tmp_path / name for name in ("plan.json", "plan.svg", "again.svg"))
    first = planned(f"--scheme zb-h1 --devices 3 --micro-batches 5 --out {plan} --svg {svg}")
    assert json.loads(plan.read_text())["num_devices"] == 3
    assert "zb-h1: 3 devices, 5 micro-batches, 3 stages" in svg.read_text()
    code, out, _ = penstock("simulate", str(plan), "--json", "--svg", str(png))
    again = json.loads(out)
    assert code == 0 and png.read_text().startswith("<svg")
    assert {key: again[key] for key in KEYS} == {key: first[key] for key in KEYS}
    code, out, _ = penstock("simulate", str(plan), "--costs", "unit:f=2,b=4", "--json")
    assert json.loads(out)["makespan"] == 2 * first["makespan"]


def test_actions_of_torch_go_out_and_come_back(tmp_path: Path) -> None:
    actions, better = tmp_path / "actions.csv", tmp_path / "better.json"
    planned(f"--scheme 1f1b --devices 2 --micro-batches 3 --torch-csv {actions}")
    assert actions.read_text() == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    arguments = ("simulate", str(actions), "--passes", "2bp", "--out", str(better), "--json")
    code, out, _ = penstock(*arguments)
    report = json.loads(out)
    assert (code, report["scheme"], report["makespan"], report["passes"]) == (
        0,
        "torch",
        10.0,
        ["2bp"],
    )
    code, out, _ = penstock("simulate", str(better), "--json")
    assert json.loads(out)["makespan"] == 10.0
    actions.write_text("0F0,0X0\n")
    code, _, err = penstock("simulate", str(actions))
    assert code == 2 and "actions.csv: line 1, cell 2: '0X0'" in err
    code, _, err = penstock(*"plan --scheme chimera --torch-csv x.csv".split())
    assert code == 2 and "route" in err


def test_a_list_of_schemes_passes_gpus_and_models() -> None:
    code, out, _ = penstock("plan", "--list")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert set(SCHEMES) | set(PASSES) | set(GPUS) | set(MODELS) < set(lines)
    assert all(len(lines[name].split()) > 4 for name in (*SCHEMES, *PASSES))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", ("penstock plan --scheme 1f1b", "examples/tiny.yaml")),
        ("--scheme x", ("--scheme = 'x'", "unknown scheme", "1f1b", "spipe")),
        ("--scheme 1f1b --passes x", ("--passes", "unknown pass 'x'", "mario")),
        ("--scheme chimera --devices 3", ("--devices", "3", "even")),
        ("--scheme 1f1b-2 --micro-batches 3", ("--micro-batches", "3", "8")),
        ("--scheme gpipe --forward-stages 7", ("--forward-stages = 7", "gpipe", "4")),
        ("--scheme gpipe --forward-stages 4 --stages-per-device 2", ("--forward-stages = 4",)),
        ("--scheme spipe --recompute none", ("--recompute = 'none'", "spipe", "full")),
        ("--scheme gpipe --recompute some", ("--recompute 'some'", "none, full, selective")),
        ("--scheme gpipe --recompute-after x", ("--recompute-after 'x'", "checkpoint, gradient")),
        ("--scheme gpipe --recompute selective --drop norm", ("--recompute", "analytic")),
        ("--scheme gpipe --optimizer x", ("--optimizer 'x'", "preview-settle")),
        ("--scheme gpipe --memory lots", ("--memory 'lots'", "20G")),
        ("--scheme gpipe --memory 3", ("--memory = 3 B", "device 0 needs 8 B", "--recompute")),
        ("--scheme gpipe --costs free", ("--costs 'free'", "unit[", "analytic:GPU:MODEL")),
        ("--scheme gpipe --costs unit:f=x", ("'f=x'", "number")),
        ("--scheme gpipe --costs analytic:x:llama2-7b", ("'x'", "A100-40")),
        ("--scheme gpipe --costs absent.json", ("absent.json",)),
        ("--scheme gpipe --set train.steps=3", ("--set",)),
        ("--scheme gpipe --out /absent/plan.json", ("/absent/plan.json", "cannot write")),
        ("examples/tiny.yaml --scheme gpipe", ("--scheme", "--set schedule.scheme=")),
        ("examples/tiny.yaml --costs unit", ("--costs 'unit'", "profile.json")),
    ],
)
def test_errors_name_the_option_and_what_would_do(arguments: str, words: tuple[str, ...]) -> None:
    code, out, err = penstock("plan", *arguments.split())
    assert (code, out) == (2, "")
    assert err.startswith("penstock: ") and err.count("\n") == 1
    assert [word for word in words if word not in err] == []


def test_drop_needs_operators_of_the_model() -> None:
    code, _, err = penstock(
        *"plan --scheme gpipe --costs analytic:H100:llama2-7b --drop norm,x".split()
    )
    assert code == 2
    assert "operators to drop: expected names among" in err and "cmb, mlp, attention, core" in err


def test_blocks_settled_early_are_shown_and_travel_with_the_plan(tmp_path: Path) -> None:
    config, plan = tmp_path / "saturated.yaml", tmp_path / "plan.json"
    config.write_text(
        "{model: {dtype: bf16}, data: {path: '@stdlib', sequence_length: 2048},"
        " train: {global_batch: 8}, schedule: {scheme: spipe},"
        " cluster: {workers: 4, device: 'emulated:analytic:A100-40:llama2-7b'}}"
    )
    report = planned(f"{config} --out {plan}")
    early = report["settled_early"]
    assert 0 in early and 0 < len(early) < 34
    uses = {row["use"] for row in report["memory"]}
    assert {"grads, early", "grads, advance"} <= uses and "grads" not in uses
    code, out, err = penstock("plan", str(config), "--set", f"schedule.file={plan}")
    assert code == 0, err
    shown = blocks_text(early)
    assert shown.startswith("0-") and f"settled early    {shown}\n" in out
    code, out, err = penstock(
        *f"simulate {plan} --costs analytic:A100-40:llama2-7b --passes 2bp --json".split()
    )
    assert (code, json.loads(out)["settled_early"]) == (0, early), err


def test_the_form_of_updates_that_auto_took_is_explained(tmp_path: Path) -> None:
    """With cores as slow as the paper's and one micro-batch a device, state is flushed."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "{model: {dtype: bf16}, data: {path: '@stdlib', tokenizer: byte, sequence_length: 2048},"
        " train: {steps: 2, micro_batch: 1, global_batch: 2}, optimizer: {grad_dtype: bf16},"
        " schedule: {scheme: 1f1b, passes: [interleave-updates], device_updates: auto},"
        " emulation: {scale: '1/100000', machine: {optimizer_rate: 1.0e+9}},"
        " cluster: {workers: 2, device: 'emulated:analytic:H100:llama2-7b'}}"
    )
    code, out, err = penstock("plan", str(file))
    assert code == 0, err
    [line] = [line for line in out.splitlines() if line.startswith("device updates")]
    code, out, _ = penstock("plan", str(file), "--json")
    found = json.loads(out)["device_updates"]
    assert found["flushed"] and not found["previewed"]
    forms = found["simulated_s"]
    assert forms["flush"] < forms["preview"]
    assert line == (
        f"device updates   auto took flush, {forms['flush']:.4g} s a step (simulated; preview"
        f" {forms['preview']:.4g} s, flush {forms['flush']:.4g} s)"
    )


def test_simulate_refuses_what_does_not_go_together(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    planned(f"--scheme gpipe --devices 2 --micro-batches 2 --out {plan}")
    code, _, err = penstock("simulate", str(plan), "--costs", "analytic:H100:llama2-7b")
    assert code == 2 and "the plan is for 2 blocks, the costs are of 34" in err
    code, _, err = penstock("simulate", str(plan), "--costs", "unit", "--profile", "p.json")
    assert (code, err) == (2, "penstock: --profile and --costs: give one of them\n")
    data = json.loads(plan.read_text())
    data["programs"][0].remove("SA 0 1 peer=1")
    plan.write_text(json.dumps(data))
    code, _, err = penstock("simulate", str(plan))
    assert code == 2 and ">>" in err and "Traceback" not in err
    plan.write_text("{}")
    code, _, err = penstock("simulate", str(plan))
    assert code == 2 and str(plan) in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (bytes(range(256)), "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"format": 1, "run_id": "0123456789ab", "version": 3}', "scheme is None"),
        (b'{"format": %s}' % (b"9" * 5000), "not valid JSON"),
        (b'{"format": 1, "scheme": "x", "num_devices": 1e999}', "num_devices is inf"),
    ],
    ids=["empty", "binary", "deep", "manifest", "digits", "infinite"],
)
def test_damaged_and_foreign_plan_files_end_in_one_line(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    code, out, err = penstock("simulate", str(path))
    assert (code, out) == (2, "")
    assert err.startswith("penstock: ") and err.count("\n") == 1
    assert words in err and str(path) in err and len(err) < 400
