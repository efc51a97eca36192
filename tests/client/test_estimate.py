"""``penstock estimate``: its figures beside a real run, and errors that help."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import peft
import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

import penstock
from penstock.client.main import app
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.memory import NodeMemory
from tests.folders import TEXT, save_model


def estimated(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    result = CliRunner().invoke(app, ["estimate", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def report_of(*arguments: str | Path) -> dict[str, Any]:
    """What ``penstock estimate … --json`` says."""
    code, out, err = estimated(*arguments, "--json")
    assert code == 0, err
    return dict(json.loads(out))


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path, "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=3)
    return path


@pytest.fixture(name="alone", scope="module")
def _alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``config.json`` and nothing else."""
    path = tmp_path_factory.mktemp("alone")
    (path / "config.json").write_bytes((folder / "config.json").read_bytes())
    return path


def test_bytes_are_those_of_a_real_run(folder: Path, alone: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 20)
    run_dir = tmp_path / "run"
    result = penstock.train(
        {
            "model": {"path": str(folder), "dtype": "bf16"},
            "data": {"path": str(tmp_path / "text.txt"), "sequence_length": 32},
            "train": {"steps": 2, "global_batch": 4},
            "cluster": {"workers": 2},
        },
        run_dir=run_dir,
    )
    assert result.exit_code == 0, result.error
    options = "--dtype bf16 --sequence-length 32 --global-batch 4 --workers 2".split()
    report = report_of(alone, *options)
    run = RunDirectory(run_dir)
    with closing(NodeMemory.create(run.memory_spec(0))) as memory:
        files = [*Path("/dev/shm").glob(f"penstock-{run.run_id}-*")]
        held = sum(file.stat().st_size for file in files)
        memory.unlink()
    assert len(files) == 4 and report["shm"]["total"] == held
    (state,) = (run_dir / "state").glob("step-*")
    written = sum(path.stat().st_size for path in state.iterdir())
    assert report["saved_state"] == pytest.approx(written, rel=0.01)


def test_only_config_json_is_read(folder: Path, alone: Path) -> None:
    """A file of weights that is damaged does not matter."""
    before = sorted(alone.iterdir())
    (alone / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    report = report_of(alone / "config.json", "--workers", "1")
    (alone / "model.safetensors").unlink()
    assert sorted(alone.iterdir()) == before
    whole = report_of(folder, "--workers", "1")
    for each in (report, whole):
        for need in each["needs"]:
            del need["there_bytes"]  # what this machine has free changes
    assert report | {"model": ""} == whole | {"model": ""}


def test_a_gpu_of_the_catalogue_gives_rates_and_memory(alone: Path) -> None:
    options = ("--dtype", "bf16", "--workers", "1", "--micro-batch", "2")
    fast, slow = (report_of(alone, *options, "--gpu", gpu) for gpu in ("H100", "V100-16"))
    assert fast["device"] == "cuda" and fast["rates"] == "rates of H100 in the catalogue"
    assert fast["step_seconds"] < slow["step_seconds"] and fast["micro_batch"] == 2
    code, out, err = estimated(alone, *options, "--gpu", "H100", "--device-memory", "10K")
    assert (code, err) == (0, "") and "not enough memory" in out
    assert out.splitlines()[-1].startswith("does not fit: memory.device_limit ")
    assert out.splitlines()[-1].endswith(" of 10.0 KiB")


def test_frozen_tensors_take_their_bytes_on_disk_once(alone: Path) -> None:
    options = ("--dtype", "bf16", "--set", "train.freeze=['mlp']")
    whole, frozen = report_of(alone, *options[:2]), report_of(alone, *options)
    elements = 3 * 3 * 64 * 128
    assert whole["base"] == 0 and frozen["base"] == pytest.approx(2 * elements, rel=0.03)
    fewer = whole["saved_state"] - frozen["saved_state"]
    assert fewer == pytest.approx(12 * elements, rel=0.03)
    lines = [
        [line for line in estimated(alone, *words)[1].splitlines() if "kept once" in line]
        for words in (options[:2], options)
    ]
    assert [len(kept) for kept in lines] == [0, 1]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_an_adapter_is_trained_beside_frozen_weights(alone: Path) -> None:
    """The numbers are PEFT's, of the same rank and modules."""
    options = ("--dtype", "bf16", "--workers", "1")
    whole, lora = (report_of(alone, *options, *more) for more in ((), ("--set", "adapter.r=4")))
    config = AutoConfig.from_pretrained(alone)
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_config(config), peft.LoraConfig(r=4, target_modules="all-linear")
    )
    trained, total = model.get_nb_trainable_parameters()
    assert (lora["trained_parameters"], lora["parameters"]) == (trained, total)
    assert whole["trained_parameters"] == whole["parameters"] == total - trained
    shm = lora["shm"]
    assert 2 * (total - trained) <= shm["frozen weights"] <= 1.1 * whole["shm"]["weights"]
    assert whole["shm"]["frozen weights"] == 0 < shm["weights"] < shm["frozen weights"]
    out = estimated(alone, *options, "--set", "adapter.r=4")[1]
    assert f"{total:,} parameters ({trained:,} of them trained, " in out
    assert "frozen weights" in out
    assert "frozen weights" not in estimated(alone, *options)[1]


def test_a_table_for_people(alone: Path) -> None:
    code, out, err = estimated(alone, "--set", "train.keep_snapshots=5")
    assert code == 0, err
    for words in (
        "parameters in 5 blocks",
        "moments",
        "keep_snapshots 5",
        "tokens/s",
        "not measured",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("absent",), ("MODEL 'absent'", "config.json")),
        (("ALONE", "--gpu", "X1"), ("'X1'", "H100")),
        (("ALONE", "--dtype", "x"), ("model.dtype = 'x'", "bf16")),
        (("ALONE", "--device-memory", "x"), ("--device-memory 'x'", "20G")),
        (("ALONE", "--micro-batch", "3"), ("train.global_batch 8", "train.micro_batch 3")),
        (("ALONE", "--profile", "absent.json"), ("absent.json",)),
        (
            ("ALONE", "--set", "cluster.device=emulated:analytic:H100:llama2-7b"),
            ("emulated", "plan"),
        ),
    ],
)
def test_errors_name_the_option(
    arguments: tuple[str, ...], words: tuple[str, ...], alone: Path
) -> None:
    code, out, err = estimated(*(str(alone) if word == "ALONE" else word for word in arguments))
    assert (code, out) == (2, "") and err.startswith("penstock: ") and err.count("\n") == 1
    assert [word for word in words if word not in err] == []
