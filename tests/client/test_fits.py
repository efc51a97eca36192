"""``estimate``, ``tune --model`` and the preparation of ``train`` say the same of one machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from typer.testing import CliRunner

from penstock.client.main import app
from penstock.client.planning import estimate, tuning
from penstock.client.planning.described import Description, MachineOptions
from penstock.client.planning.shapes import hugging_face_config
from penstock.client.planning.tuning import TuneOptions, tune_model
from penstock.config.schema import Config, load_config, parse_config
from penstock.config.words import apply_overrides
from penstock.daemons.node.preparing import prepare, tables
from penstock.daemons.node.preparing.fitting import planned_run, reliefs
from penstock.daemons.node.preparing.fitting.planned_run import RunRequest, plan_anyway
from penstock.host.errors import CapacityError, ConfigError
from penstock.planner.cost.catalogue import GPUS, MODELS
from penstock.shm.table import BlockTable
from tests.folders import TEXT, save_model

GIB = 2**30
NAME = "gpt3-125m"


@pytest.fixture(name="tables_known", scope="module")
def _tables_known() -> Callable[..., BlockTable]:
    """``table_of`` that makes the table of each model and adapter once."""
    known: dict[str, BlockTable] = {}

    def table_of(config: Config, *, config_only: bool = False) -> BlockTable:
        del config_only
        assert config.model.path is not None
        shape = (config.model.path / "config.json").read_text()
        key = f"{shape} {config.model.dtype} {config.optimizer} {config.adapter}"
        if key not in known:
            known[key] = tables.table_of(config, config_only=True)
        return known[key]

    return table_of


@pytest.fixture(name="quick", autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tables_known: Callable[..., BlockTable]) -> None:
    for module in (estimate, tuning, reliefs):
        monkeypatch.setattr(module, "table_of", tables_known)


def _from_keys(keys: dict[str, Any], folder: Path) -> Config:
    """The configuration of a file with the printed keys, a model and data."""
    values = json.loads(json.dumps(keys))
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(hugging_face_config(MODELS[NAME])))
    values.setdefault("model", {})["path"] = str(folder / "model")
    values.setdefault("data", {})["tokens"] = "tokens.bin"
    (folder / "run.yaml").write_text(yaml.safe_dump({"run": {"name": "run"}, **values}))
    return load_config(folder / "run.yaml")


@pytest.mark.parametrize("gpu", GPUS)
def test_printed_keys_have_the_table_of_a_start_on_each_card(
    gpu: str, tmp_path: Path, tables_known: Callable[..., BlockTable]
) -> None:
    machine = MachineOptions(gpu=gpu, host_bytes=64 * GIB)
    settings = ("optimizer.master=split", "schedule.scheme=mobius")
    described = Description(model=NAME, machine=machine, global_batch=2, settings=settings)
    report = estimate.estimate(described)
    options = TuneOptions(machine=machine, keep=1, schemes=("mobius",))
    tuned = tune_model(described, options, lambda done, of, best: None)
    assert report.run.fits and report.keys["optimizer"] == {"master": "split"}
    for keys, rows in ((report.keys, report.run.rows), (tuned.fragment, None)):
        config = _from_keys(dict(keys), tmp_path)
        request = RunRequest(config=config, table=tables_known(config))
        run = plan_anyway(request, machine.machine(config))
        assert run.fits and run.config.schedule.scheme == config.schedule.scheme
        if rows is not None:
            assert (run.rows, run.demands) == (rows, report.run.demands)
            assert run.simulate().makespan_s == report.step_s
        else:
            best = tuned.outcomes[0]
            assert run.simulate().makespan_s == best.step_s
            assert sum(row.num_bytes for row in run.rows if row.place == "device 0") == (
                pytest.approx(best.device_bytes, abs=4)
            )


def test_train_refuses_with_the_table_of_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same machine, described for the one, found by the other."""
    save_model(tmp_path / "model", "llama", hidden_size=64, num_hidden_layers=3)
    (tmp_path / "text.txt").write_text(TEXT * 20)
    described = Description(
        model=str(tmp_path / "model"),
        machine=MachineOptions(host_bytes=GIB // 2),
        sequence_length=32,
        micro_batch="1",
    )
    report = estimate.estimate(described)
    assert not report.run.fits
    values = json.loads(json.dumps(report.keys))
    values["model"]["path"] = described.model
    values["data"]["path"] = str(tmp_path / "text.txt")
    config = parse_config({"run": {"name": "run"}, **values})

    class Described(planned_run.HostMachine):
        @classmethod
        def here(cls, config: Config, *_: Any, **__: Any) -> planned_run.HostMachine:
            return described.machine.machine(config)

    monkeypatch.setattr(prepare, "HostMachine", Described)
    with pytest.raises(CapacityError) as caught:
        prepare.prepare_run(config, tmp_path / "run")
    text = report.to_text()
    assert str(caught.value) in text
    assert text.splitlines()[-1] == "does not fit: host RAM 890.9 MiB of 512.0 MiB"


def test_each_line_of_help_is_what_its_setting_needs() -> None:
    """The estimate needs a line's bytes with the settings of the line, and fits if it says so."""
    words = f"estimate {NAME} --gpu V100-16 --host-memory 4G --json".split()
    report = json.loads(CliRunner().invoke(app, words).stdout)
    assert not report["fits"] and report["reliefs"]
    for line in report["reliefs"]:
        keys, _, claim = line.partition(": needs ")
        schedule = {**report["keys"]["schedule"], "passes": []}
        given = "" if "adapter" in keys else f"schedule={json.dumps(schedule)}"
        micro_batch = f"train.micro_batch={report['keys']['train']['micro_batch']}"
        settings = [key.replace(": ", "=") for key in keys.split(" and ")]
        settings += [given, micro_batch] if given else []
        options = [word for setting in settings for word in ("--set", setting)]
        other = json.loads(CliRunner().invoke(app, [*words, *options]).stdout)
        assert other["fits"] == claim.endswith("; fits")
        for part in claim.removesuffix("; fits").split(", "):
            size, _, what = part.partition(" of ")
            needed = next(n["needed_bytes"] for n in other["needs"] if n["what"].startswith(what))
            assert size == estimate.human_bytes(needed)


def test_a_machine_without_sizes_limits_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["estimate", "llama2-7b", "--gpu", "geforce rtx 4090"])
    assert result.exit_code == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    assert last.startswith("fits RTX4090: device memory ")
    assert "; not compared (give --host-memory): /dev/shm 150.6 GiB; host RAM 151.3 GiB" in last


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("4090", "RTX4090"),
        ("A100", "A100-40 or A100-80"),
        ("h100-sxm", "H100"),
        ("rtx5080", "RTX5090"),
        ("L40", "L40S"),
    ],
)
def test_near_misses_of_cards_are_suggested(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"GPU '{name}' is not .*did you mean {hint}"):
        MachineOptions(gpu=name)


SHAPES = "llama3-1b gpt3-125m mamba-130m mistral-7b gemma2-2b mixtral-8x7b qwen1.5-moe-a2.7b"


@pytest.mark.parametrize("name", [*SHAPES.split(), "qwen3-30b-a3b", "jamba-52b"])
def test_named_models_have_the_shape_that_the_planner_knows(name: str) -> None:
    """transformers counts as many parameters as the catalogue."""
    fields = dict(hugging_face_config(MODELS[name]) or {})
    with torch.device("meta"):
        config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == MODELS[name].num_parameters


@pytest.mark.parametrize("option", ["--host-memory", "--shm", "--device-memory"])
@pytest.mark.parametrize("size", ["0", "-1G", "much"])
def test_sizes_name_their_option(option: str, size: str) -> None:
    words = ["estimate", NAME, "--gpu", "H100", f"{option}={size}"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and result.stderr.startswith(f"penstock: {option} {size!r}: ")
    assert result.stderr.count("\n") == 1


def test_what_train_cannot_take_is_refused_by_name() -> None:
    result = CliRunner().invoke(app, ["estimate", "bert-32", "--gpu", "H100"])
    assert result.exit_code == 2 and "is not a causal language model" in result.stderr
    result = CliRunner().invoke(app, ["estimate", "llama2-8b", "--gpu", "H100"])
    assert result.exit_code == 2 and "or llama3-8b?" in result.stderr


def test_plan_holds_a_configuration_against_a_named_machine(tmp_path: Path) -> None:
    keys = {"model": {"dtype": "bf16"}, "data": {"sequence_length": 64}}
    values = apply_overrides(keys, ("cluster.workers=1", "train.global_batch=8"))
    config = _from_keys(values, tmp_path)
    assert config.cluster.device == "cpu"
    options = "--gpu L40S --host-memory 3G --json".split()
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "run.yaml"), *options])
    assert result.exit_code == 0, result.stderr
    needs = {need["what"]: need for need in json.loads(result.stdout)["needs"]}
    assert needs["/dev/shm"]["there_bytes"] == 1.5 * GIB and needs["/dev/shm"]["short"]
    assert needs["device memory"]["there_bytes"] == int(48e9 * 0.85)
    result = CliRunner().invoke(app, ["plan", "--scheme", "1f1b", "--gpu", "L40S"])
    assert result.exit_code == 2 and "--costs analytic:GPU:MODEL" in result.stderr
