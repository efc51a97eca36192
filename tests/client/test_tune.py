"""``penstock tune`` and ``penstock profile``: options, tables, and a file that train takes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from penstock.client.main import app
from penstock.client.planning import run_report as planning
from penstock.client.planning import tuning
from penstock.config.schema import load_config
from penstock.daemons.node.preparing import tool
from penstock.daemons.preload.client import ChildProcess, spawn
from penstock.daemons.preload.starting import Spawning
from penstock.planner.cost.profile import CPU_GUESS
from penstock.planner.planning.auto import trainable_schemes
from penstock.planner.planning.configured import trainable_plan
from penstock.planner.planning.pipeline import try_plan
from penstock.planner.planning.pricing import config_context
from penstock.planner.render.units import SECONDS
from penstock.planner.schemes import SCHEMES
from penstock.protocol.plan.profile import KindProfile, LinearFit, Profile, to_json
from penstock.shm.table import BlockSpec, BlockTable, DType, TensorSpec

CONFIG = {
    "run": {"name": "small"},
    "model": {"hf": {"model_type": "llama"}},
    "data": {"path": "@stdlib", "sequence_length": 8},
    "train": {"global_batch": 4, "micro_batch": 4},
    "schedule": {"scheme": "gpipe", "recompute": "full"},
    "cluster": {"workers": 2},
}


def penstock(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def block(index: int) -> BlockSpec:
    tensor = TensorSpec(
        name=f"block{index}.weight", shape=(32, 32), trainable=True, decay=True, offset=0
    )
    return BlockSpec(
        index=index,
        name=f"block{index}",
        kind="layer",
        layer_index=index,
        tensors=(tensor,),
        borrows=(),
        trainable_elements=1024,
        frozen_elements=0,
        contributions=1,
        forward_flops=1e6,
        activation_bytes=256.0,
        output_bytes=64.0,
    )


TABLE = BlockTable(
    blocks=tuple(map(block, range(8))),
    weight_dtype=DType.FP32,
    grad_dtype=DType.FP32,
    state_arrays=("exp_avg", "exp_avg_sq"),
    vocab_size=256,
    num_parameters=8 * 1024,
)


FIT = LinearFit(slope=1e-6)
PROFILE = Profile(
    device="a laptop",
    sequence_length=8,
    micro_batch=1,
    machine=CPU_GUESS.machine,
    kinds={
        "layer": KindProfile(
            **{
                field.name: FIT
                for field in fields(KindProfile)
                if field.name not in ("operators", "sources")
            }
        )
    },
    table=TABLE,
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration whose block table is known without torch."""
    monkeypatch.setattr(tuning, "table_of", lambda config: TABLE)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def test_the_file_is_the_whole_configuration_with_the_winner_in_it(
    config: Path, tmp_path: Path
) -> None:
    config.write_text(f"# mine\n{config.read_text()}".replace("name: small", "name: small  # s"))
    out = tmp_path / "tuned.yaml"
    options = ("--set", "train.steps=9", "--out", str(out), "--json")
    code, text, err = penstock("tune", str(config), *options)
    assert code == 0, err
    report = json.loads(text)
    best = report["outcomes"][0]
    assert {o["scheme"] for o in report["outcomes"]} <= set(trainable_schemes())
    tuned, plain = load_config(out), load_config(config, ("train.steps=9",))
    for section in set(type(tuned).model_fields) - {"schedule", "train"}:
        assert getattr(tuned, section) == getattr(plain, section)
    assert tuned.train == plain.with_micro_batch(best["micro_batch"]).train
    plan = trainable_plan(tuned, TABLE)
    assert plan.num_microbatches == best["micro_batches"] * best["replicas"]
    assert len(plan.backward_stages) == best["backward_stages"] * plan.num_routes
    context = config_context(tuned, TABLE)
    assert try_plan(plan, context).makespan_s == pytest.approx(best["step_seconds"])
    own_s = try_plan(trainable_plan(plain, TABLE), config_context(plain, TABLE)).makespan_s
    written = out.read_text()
    for words in (
        "# penstock tune: made from config.yaml --set train.steps=9\n",
        f"micro-batches of {best['micro_batch']}: {SECONDS.format(best['step_seconds'])} a step,",
        " tokens/s, simulated (default rates, not measured on this machine)\n",
        f"the configuration as it is: {SECONDS.format(own_s)} a step, simulated\n",
        "# mine\n",
        "  name: small  # s\n",
    ):
        assert words in written
    assert penstock("tune", str(out), "--out", str(out))[0] == 0
    assert out.read_text().count("# penstock tune: made from ") == 1, "old headings go"


def test_paths_of_a_file_in_another_folder_are_absolute(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``penstock train`` takes them: from the folder in which a user starts it."""
    monkeypatch.chdir(tmp_path)
    profile = tmp_path / "p.json"
    profile.write_text(to_json(PROFILE))
    config.write_text(
        "model: {hf: {model_type: llama}, imports: [layers]}\n"
        "data: {path: texts/*.txt, tokenizer: byte, eval_path: '@stdlib', sequence_length: 8}\n"
        "train: {global_batch: 4, micro_batch: auto}\nschedule: auto\n"
    )
    (tmp_path / "sub").mkdir()
    options = ("--costs", "p.json", "--keep", "1")
    for name, texts in (
        ("tuned.yaml", "texts/*.txt"),
        ("sub/tuned.yaml", f"{tmp_path}/texts/*.txt"),
    ):
        code, _, err = penstock("tune", str(config), *options, "--out", name)
        assert code == 0, err
        tuned = load_config(Path(name))
        assert tuned.data.path == texts and tuned.data.tokenizer == "byte"
        assert tuned.data.eval_path == "@stdlib" and tuned.model.import_path == tmp_path
        assert tuned.schedule.profile is not None and not tuned.chooses
        assert (Path.cwd() / tuned.schedule.profile) == profile
        assert tuned.schedule.profile.is_absolute() == ("sub" in name)
        assert "simulated (with measured costs)\n" in Path(name).read_text()


@pytest.mark.parametrize(
    "schedule", [{"replicas": 2}, {"passes": ["2bp"]}, {"scheme": "interleaved", "recompute": None}]
)
def test_what_a_configuration_says_of_its_schedule_does_not_stay_in_candidates(
    schedule: dict[str, Any], config: Path, tmp_path: Path
) -> None:
    """The winner goes back into it as it is: with its replicas, passes and stages."""
    raw = {**CONFIG, "schedule": {**CONFIG["schedule"], **schedule}}
    config.write_text(yaml.safe_dump(raw))
    code, text, err = penstock("tune", str(config), "--schemes", "1f1b", "--json", "--keep", "3")
    assert code == 0, err
    report = json.loads(text)
    config.write_text(
        yaml.safe_dump(raw | {k: {**raw[k], **v} for k, v in report["fragment"].items()})
    )
    best, merged = report["outcomes"][0], load_config(config).schedule
    assert (merged.scheme, merged.replicas) == ("1f1b", best["replicas"])
    assert list(merged.passes) == best["passes"] and merged.recompute == best["recompute"]
    plain = json.loads(
        penstock("tune", str(_plain(tmp_path)), "--schemes", "1f1b", "--json", "--keep", "3")[1]
    )
    assert report["outcomes"] == plain["outcomes"]


def _plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def test_host_memory_is_that_of_the_configured_optimizer(config: Path) -> None:
    """SGD has one array of float32 where AdamW has two: 4 bytes less for each of 8 x 1024."""
    options = ("--schemes", "1f1b", "--json", "--keep", "1", "--set", "optimizer.name=")
    adam, sgd = (
        json.loads(penstock("tune", str(config), *options[:-1], options[-1] + name)[1])
        for name in ("adamw", "sgd")
    )
    saved = adam["outcomes"][0]["host_bytes"] - sgd["outcomes"][0]["host_bytes"]
    assert saved == 4 * 8 * 1024


def test_all_searches_what_train_cannot_run(config: Path) -> None:
    code, text, err = penstock(
        "tune", str(config), "--all", "--schemes", "zb-h1,1f1b", "--json", "--keep", "50"
    )
    assert code == 0, err
    report = json.loads(text)
    assert "zb-h1" in {outcome["scheme"] for outcome in report["outcomes"]}
    assert report["trainable"] is False


def test_a_table_for_people(config: Path) -> None:
    code, out, _ = penstock("tune", str(config), "--schemes", "gpipe,1f1b", "--keep", "2")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("small on 2 workers, 4 sequences a step, what train runs")
    header = next(line for line in lines if "scheme" in line and "PPxDP" in line)
    rows = lines[lines.index(header) + 1 :][:2]
    schemes = [row.split()[1] for row in rows]
    assert [row.split()[0] for row in rows] == ["1", "2"] and set(schemes) <= {"gpipe", "1f1b"}
    assert "schedule:" in lines and f"  scheme: {schemes[0]}" in lines


def test_named_models_and_gpus() -> None:
    code, out, err = penstock(
        *"tune --model gpt3-125m --gpu V100-32 --devices 2 --global-batch 4 --sequence-length 512"
        " --schemes 1f1b,spipe --memory 30G --keep 5 --json".split()
    )
    assert code == 0, err
    report = json.loads(out)
    assert report["what"] == "gpt3-125m on 2 x V100-32, 4 sequences of 512 tokens a step"
    times = [outcome["step_seconds"] for outcome in report["outcomes"]]
    assert len(times) == 5 and times[0] <= 1.03 * min(times), "streaming must win 3 %"
    assert all(outcome["device_bytes"] <= 30 * 2**30 for outcome in report["outcomes"])
    assert report["fragment"]["train"]["global_batch"] == 4
    assert report["fragment"]["cluster"] == {"device": "cuda", "workers": 2}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("", 2, ("--model", "penstock tune examples/tiny.yaml")),
        ("--model llama2 --gpu H100 --devices 2", 2, ("'llama2'", "did you mean llama2-7b")),
        ("--model llama2-7b --gpu x --devices 2 --global-batch 2", 2, ("'x'", "H100")),
        ("CONFIG --schemes x", 2, ("--schemes", "'x'", "spipe")),
        ("CONFIG --costs unit", 2, ("--costs 'unit'", "profile.json")),
        ("CONFIG --costs absent.json", 2, ("absent.json",)),
        ("CONFIG --optimizer x", 2, ("--optimizer 'x'", "advance")),
        ("CONFIG --drop core", 2, ("operators to drop", "--costs p.json")),
    ],
)
def test_errors_name_the_option(
    arguments: str, code: int, words: tuple[str, ...], config: Path
) -> None:
    found, out, err = penstock("tune", *arguments.replace("CONFIG", str(config)).split())
    assert (found, out) == (code, "")
    assert err.startswith("penstock: ") and err.count("\n") == 1
    assert [word for word in words if word not in err] == []


def test_a_plan_of_auto_says_what_was_chosen(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "table_of", lambda config: TABLE)
    code, out, err = penstock("plan", str(config), "--set", "schedule=auto")
    assert code == 0, err
    assert out.startswith("schedule: auto chose ") and "; spipe, the default, " in out
    code, text, err = penstock("plan", str(config), "--set", "schedule=auto", "--json")
    report = json.loads(text)
    assert code == 0 and out.startswith(f"{report['choice']}\n\n")
    assert f"auto chose {report['scheme']}, " in report["choice"]
    code, out, err = penstock(
        "plan", str(config), "--set", "schedule={scheme: auto, stages_per_device: 2}"
    )
    assert (code, out) == (2, "") and "schedule.stages_per_device = '2'" in err


def test_trainable_schemes_are_those_that_a_configuration_accepts() -> None:
    assert {"gpipe", "1f1b", "mobius", "spipe"} <= set(trainable_schemes()) <= set(SCHEMES)


def _pretend(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let ``penstock profile`` start a program of ours; its arguments are ``sys.argv[1:]``."""

    class Pretending(Spawning):
        def start(
            self,
            module: str,
            arguments: Sequence[str],
            streams: Sequence[int],
            kept: Sequence[int] = (),
            inherits: tuple[str, ...] = (),
        ) -> ChildProcess:
            return spawn((sys.executable, "-c", program, *arguments), os.environ, streams, kept)

    monkeypatch.setattr(tool, "Spawning", Pretending)


def test_profile_passes_on_what_the_process_says(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(
        monkeypatch,
        "import sys; print('measuring layers');"
        "print('penstock: train.steps: ' + ' '.join(sys.argv[1:]), file=sys.stderr); sys.exit(2)",
    )
    out = tmp_path / "p.json"
    code, _, err = penstock(
        "profile", str(config), "--out", str(out), "--set", "train.micro_batch=2"
    )
    assert code == 2
    assert (
        f"penstock: train.steps: {config} --out {out} --set train.micro_batch=2 --parent-pid" in err
    )


def test_profile_that_fails_or_has_nowhere_to_write(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(monkeypatch, "raise RuntimeError('broken')")
    code, _, err = penstock("profile", str(config), "--out", str(tmp_path / "p.json"))
    assert code == 4 and "exited with code 1: RuntimeError: broken" in err
    code, _, err = penstock("profile", str(config), "--out", str(tmp_path / "no" / "p.json"))
    assert code == 2 and "its directory does not exist" in err


def test_profile_that_never_ends(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "TIMEOUT_S", 0.2)
    _pretend(monkeypatch, "import time; time.sleep(60)")
    code, _, err = penstock("profile", str(config), "--out", str(tmp_path / "p.json"))
    assert code == 4 and "no line after 0.2 s" in err
