"""``make gpu`` where there is no GPU: its parts at toy size, its deadlines, its page."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gpu import install
from bench.gpu.measures.correctness import outcome
from bench.gpu.measures.delays import Delays
from bench.gpu.measures.faults import compared
from bench.gpu.page import HEAD, KEPT, page
from bench.gpu.page import main as page_main
from bench.gpu.page.goals import GOALS
from bench.gpu.parts import PARTS
from bench.gpu.results import Outcome, PartResults, Status, merged, read_folders
from bench.gpu.running import Measurement, SkippedError, Task, measure, processes_naming
from bench.gpu.shapes import SHAPES, TINY

ROOT = Path(__file__).parents[2]
SOME = {
    "probe": ["versions", "host", "register", "shared memory"],
    "correctness": ["as they are"],
    "copies": [],
    "kernels": [],
    "models": ["4 B streamed"],
    "baselines": ["4 B plain resident loop", "4 B FSDP2, gradients once a step"],
    "faults": [],
}
"""What the gate runs of each part; all of it takes minutes, and is ``make soak``'s."""


def ladder(out: Path, *arguments: str, timeout_s: float) -> dict[str, PartResults]:
    """Runs it, small, and returns what it wrote."""
    command = [
        sys.executable,
        "-m",
        "bench.gpu",
        *arguments,
        "--tiny",
        "--device",
        "cpu",
        "--patience",
        "8",
    ]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=timeout_s, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_folders([out])


def check(results: dict[str, PartResults]) -> None:
    """Nothing failed; what was skipped needs a GPU or a package."""
    for part in results.values():
        for name, one in part.measurements.items():
            what = f"{part.part}: {name}: {one.error}\n{one.log}"
            assert one.status in (Status.DONE, Status.SKIPPED), what
            if one.status is Status.SKIPPED:
                assert "no GPU" in one.error or "does not import" in one.error, what


def test_the_ladder_runs_at_toy_size_without_a_gpu(tmp_path: Path) -> None:
    wanted = [part for part in SOME if part != "faults"]
    names = [name for part in SOME.values() for name in part]
    names += [one.name for part in ("copies", "kernels") for one in PARTS[part].measurements]
    found = ladder(tmp_path, *wanted, "--only", *names, timeout_s=280)
    check(found)
    model = found["models"].measurements["4 B streamed"].figures
    assert model["decisions"] == {"commit": model["steps"]}
    assert sum(model["critical_s"].values()) > 0.0
    loops = [found["baselines"].measurements[n].figures["losses"] for n in SOME["baselines"]]
    assert loops[0][:2] == pytest.approx(loops[1][:2], abs=2e-3), "the same training"
    assert found["correctness"].measurements["as they are"].figures["failed"] == 0
    text = page(found)
    assert "| 4 B streamed |" in text and "register: skipped: no GPU" in text


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_the_ladder_runs_at_toy_size(tmp_path: Path) -> None:
    found = ladder(tmp_path, timeout_s=1750)
    check(found)
    for one in found["faults"].measurements.values():
        assert one.figures["killed_each_once"] and one.figures["same_bytes"]


def test_all_parts_fit_their_times() -> None:
    assert all(part.within_s <= 480 for part in PARTS.values())
    assert sum(part.within_s for part in PARTS.values()) <= 25 * 60
    assert len(PARTS) <= 8, "as many files come back"
    names = [one.name for part in PARTS.values() for one in part.measurements]
    assert len(set(names)) == len(names), "--only names a measurement"


def _hang(task: Task) -> None:
    task.say(before=1)
    marked = str(task.folder / "child")
    program = "import time, sys; time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", program, marked], start_new_session=True)
    task.say(folder=str(task.folder))
    time.sleep(600)


def _fail(task: Task) -> None:
    task.say(before=2)
    sys.stdout.write("what it printed\n")
    raise ValueError("no such thing")


def _skip(task: Task) -> None:
    raise SkippedError("not on Sundays")


def _leave(task: Task) -> None:
    left = Path(f"/dev/shm/penstock-{secrets.token_hex(6)}-left")
    left.write_bytes(bytes(4096))
    task.say(left=str(left))


def _measured(run: object, within_s: float = 300.0) -> Outcome:
    one = Measurement(name="one", deadline_s=300.0, run=run)  # type: ignore[arg-type]
    return measure(one, device="cpu", tiny=True, within_s=within_s)


def test_what_hangs_loses_only_itself_and_what_it_started() -> None:
    found = _measured(_hang, 5.5)
    assert (found.status, found.error) == (Status.LATE, "killed after 6 s")
    assert found.figures["before"] == 1
    assert not processes_naming(Path(found.figures["folder"]))
    assert not Path(found.figures["folder"]).exists()


def test_a_failure_is_kept_with_its_words() -> None:
    found = _measured(_fail)
    assert (found.status, found.error) == (Status.FAILED, "ValueError: no such thing")
    assert found.figures["before"] == 2 and "what it printed" in found.log
    assert (_measured(_skip).status, _measured(_skip).error) == (Status.SKIPPED, "not on Sundays")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_shared_memory_of_a_measurement_goes_with_it() -> None:
    found = _measured(_leave)
    assert found.status is Status.DONE
    assert not Path(found.figures["left"]).exists()


def _results(part: str, device: str = "cuda", **outcomes: Outcome) -> PartResults:
    names = {name.replace("_", " "): one for name, one in outcomes.items()}
    return PartResults(part=part, device=device, tiny=False, gpu="GPU", measurements=names)


def _rate(tokens_per_s: float, **more: float) -> Outcome:
    return Outcome(status=Status.DONE, figures={"tokens_per_s": tokens_per_s, **more})


def test_results_are_what_was_written(tmp_path: Path) -> None:
    done = Outcome(status=Status.DONE, seconds=1.5, at="2026-01-01", figures={"a": [1.0]})
    one = _results("copies", alone=replace(done, gpu="GPU"))
    one.write(tmp_path)
    assert PartResults.read(tmp_path / "copies.json") == one
    (tmp_path / "kernels.json").write_text("[]")
    with pytest.raises(ValueError, match=r"kernels\.json is no file of results"):
        read_folders([tmp_path])


def test_of_several_tries_what_got_furthest_counts_then_the_last() -> None:
    tries = [
        _results("copies", alone=Outcome(status=status, at=at))
        for status, at in ((Status.DONE, "1"), (Status.DONE, "3"), (Status.FAILED, "4"))
    ]
    assert merged(tries)["copies"].measurements["alone"].at == "3"


def test_earlier_tries_and_other_cards_stand_beside_the_newest_of_an_h200(tmp_path: Path) -> None:
    tries = [("H200", "1"), ("H100", "4"), ("NVIDIA H200", "3")]
    for number, (gpu, at) in enumerate(tries):
        rate = replace(_rate(number), gpu=gpu, at=at, commit=f"c{number}")
        folder = tmp_path / str(number)
        folder.mkdir()
        _results("models", alone=rate).write(folder)
    found = read_folders([tmp_path / str(number) for number in range(3)])["models"]
    kept = tmp_path / "kept"
    kept.mkdir()
    found.without_logs().write(kept)
    for results in (found, read_folders([kept, tmp_path / "0"])["models"]):
        alone = results.measurements["alone"]
        assert (alone.gpu, alone.at, alone.commit) == ("NVIDIA H200", "3", "c2")
        assert [(o.gpu, o.at, o.commit) for o in alone.others] == [
            ("H200", "1", "c0"),
            ("H100", "4", "c1"),
        ]


def test_a_part_that_was_measured_on_several_gpus_names_them() -> None:
    tries = [
        replace(_results("copies", alone=_rate(1.0)), gpu=gpu)
        for gpu in ("H200 NVL", "H200", None, "H200")
    ]
    assert merged(tries)["copies"].gpu == "H200 NVL, H200"


def test_goals_are_judged_by_what_was_found() -> None:
    gib = float(1 << 30)
    results = {
        "models": PartResults(
            part="models",
            device="cuda",
            tiny=False,
            measurements={
                "4 B streamed": _rate(9600.0, model_tflops=390.0),
                "4 B resident": _rate(9900.0, model_tflops=410.0),
                "7 B streamed": _rate(5000.0, model_tflops=395.0, host_bytes=120 * gib),
            },
        ),
        "baselines": PartResults(
            part="baselines",
            device="cuda",
            tiny=False,
            measurements={
                "4 B plain resident loop": _rate(10_000.0),
                "4 B FSDP2": _rate(3000.0),
                "4 B FSDP2, gradients once a step": _rate(4000.0),
            },
        ),
    }
    found = [goal.find(results) for goal in GOALS]
    assert [(one.text, one.reached) for one in found if one] == [
        ("96.0%", True),
        ("395 (7 B streamed)", False),
        ("2.40 times", False),
        ("120 GiB", True),
    ]
    assert [goal.find({}) for goal in GOALS] == [None] * 4


def test_the_page_is_that_of_the_results_that_are_kept() -> None:
    written = (ROOT / "docs" / "evidence" / "GPU.md").read_text(encoding="utf-8")
    assert written == page(read_folders([KEPT])), "python -m bench.gpu page"


def test_trials_are_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _results("copies", device="cpu", alone=_rate(1.0)).write(tmp_path)
    assert page_main([str(tmp_path), "-o", str(tmp_path / "p.md"), "--keep"]) == 2
    assert "copies: a trial" in capsys.readouterr().err
    assert page_main([str(tmp_path), "-o", str(tmp_path / "p.md")]) == 0
    assert "the figures mean nothing" in (tmp_path / "p.md").read_text()


def test_commands_of_the_page_are_short_and_name_real_parts() -> None:
    text = HEAD.read_text(encoding="utf-8")
    commands = [line for line in text.splitlines() if "python3 -m bench.gpu" in line]
    assert commands and all(len(line) < 2000 for line in commands)
    assert all(name in text for name in PARTS)


def test_shapes_count_what_the_models_have() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    for one in (TINY, *SHAPES.values()):
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**one.hf))
        assert sum(weight.numel() for weight in model.parameters()) == one.parameters
    assert SHAPES["4 B"].micro_batch * SHAPES["4 B"].sequence == 8192
    assert SHAPES["4 B"].step_tokens == 65_536


def test_copies_come_late_and_with_the_same_bytes() -> None:
    slept: list[int] = []
    delays = Delays(1, slept.append, concerns=lambda tensor: tensor.dtype is torch.float64)
    ones = torch.ones(8, dtype=torch.float64)
    with delays.installed():
        for _ in range(40):
            assert torch.zeros(8, dtype=torch.float64).copy_(ones).sum() == 8.0
            assert torch.zeros(8).copy_(torch.ones(8)).to(torch.float32).sum() == 8.0
    assert 8 < len(slept) == delays.count < 32
    assert torch.Tensor.copy_.__name__ == "copy_"


def test_reports_of_pytest_are_counted(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="x" time="1.5"/>'
        '<testcase classname="a" name="y"><failure message="E: no&#10;more"/></testcase>'
        '<testcase classname="a" name="z"><skipped/></testcase></testsuite></testsuites>'
    )
    found = outcome(tmp_path / "report.xml")
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert found["failures"] == {"a::y": "E: no"}
    found = outcome(tmp_path / "report.xml", interrupted=True)
    assert (found["passed"], found["interrupted"]) == (0, 1), "the last one did not end"


def test_saved_states_are_compared_by_bytes(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for name, value in (("one", 1.0), ("same", 1.0), ("other", 1.5)):
        folder = tmp_path / name / "step-00000002"
        folder.mkdir(parents=True)
        save_file({"w": torch.full((3,), value)}, folder / "block-0000.safetensors")
    assert compared(tmp_path / "one", tmp_path / "same")["same_bytes"]
    found = compared(tmp_path / "one", tmp_path / "other")
    assert (found["same_bytes"], found["largest_difference"]) == (False, 0.5)


def test_wheels_are_those_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there.txt"
    there.write_text("# a list\ntorch==2.11.0\nnumpy\nPyYAML==6.0\nold==1.0\n")
    fetched: list[str] = []

    def download(requirement: str, folder: Path) -> None:
        fetched.append(requirement)
        name = requirement.partition(">")[0].partition("=")[0]
        needs = {"pyzmq": ["numpy", "cffi; extra == 'x'", "deep==2.0"]}.get(name, [])
        with zipfile.ZipFile(folder / f"{name}-9.0-py3-none-any.whl", "w") as wheel:
            lines = [f"Requires-Dist: {need}" for need in needs]
            text = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 9.0", *lines])
            wheel.writestr(f"{name}-9.0.dist-info/METADATA", text + "\n")

    monkeypatch.setattr(install, "_download", download)
    has = install.packages_there(there)
    install._download_all(
        ["torch>=2.11", "numpy", "pyzmq>=26", "old>=2.0", "pyyaml>=6"], has, tmp_path
    )
    assert sorted(fetched) == ["deep==2.0", "old>=2.0", "pyzmq>=26"]


def test_nothing_of_wheels_lies_where_git_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they are fetched, too: a commit at that moment would take them along."""
    folder, seen = tmp_path / ".whl", []

    def download(wanted: list[str], has: object, fresh: Path) -> None:
        seen.append(fresh.parent)
        (fresh / f"one-{len(seen)}-py3-none-any.whl").write_bytes(b"wheel")

    monkeypatch.setattr(install, "_download_all", download)
    monkeypatch.setattr(install, "_own_wheel", lambda fresh: [])
    (tmp_path / ".whl").mkdir()
    (folder / "old-1.0-py3-none-any.whl").write_bytes(b"old")
    assert install.fetch_wheels(install.THERE, folder) == []
    assert set(seen) == {folder} and list(tmp_path.iterdir()) == [folder]
    assert sorted(file.name[:5] for file in folder.iterdir()) == [
        "one-1",
        "one-2",
        "one-3",
        "penst",
    ]
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert install.WHEELS == ROOT / ".whl" and ".whl/" in ignored


def test_what_a_machine_has_is_named_as_pyproject_names_it() -> None:
    """A version that pyproject.toml no longer takes would be fetched, though it is large."""
    from packaging.requirements import Requirement

    has = install.packages_there(install.THERE)
    for text in install.requirements():
        need = Requirement(text)
        if has.get(need.name):
            assert need.specifier.contains(has[need.name]), text
