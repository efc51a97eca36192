"""The configuration: what is accepted, what is refused and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.schema import Config, load_config, parse_config
from penstock.config.values import CHOSEN_LATER, parse_size
from penstock.config.words import apply_overrides
from penstock.host.errors import ConfigError

MINIMAL: dict[str, Any] = {"model": {"hf": {"model_type": "llama"}}, "data": {"path": "@stdlib"}}


def complaint(*overrides: str) -> str:
    """What parsing the minimal configuration with overrides says."""
    with pytest.raises(ConfigError) as caught:
        parse_config(apply_overrides(MINIMAL, overrides))
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_defaults_fill_everything_in() -> None:
    config = parse_config(MINIMAL)
    assert (config.train.steps, config.cluster.nodes[0].name) == (200, "a")
    assert config.run_dir == Path("runs/penstock")
    assert config.num_workers == 2


def test_epochs_leave_the_steps_to_the_preparation(tmp_path: Path) -> None:
    config = parse_config(apply_overrides(MINIMAL, ("train.epochs=2.5",)))
    assert (config.train.steps, config.planned_passes) == (CHOSEN_LATER, 2.5)
    known = config.with_steps(37)
    path = tmp_path / "resolved.yaml"
    path.write_text(known.to_yaml())
    assert load_config(path) == config, "the file has no steps, so other epochs can be set"
    assert load_config(path, ("train.epochs=3",)).planned_passes == 3.0
    values = known.model_dump(mode="json", exclude_unset=True)
    assert parse_config(values) == config, "derived steps do not count as given"
    assert parse_config(apply_overrides(MINIMAL, ("data.passes=3",))).planned_passes == 3.0
    same = parse_config(apply_overrides(MINIMAL, ("data.passes=3", "train.epochs=3")))
    assert same.planned_passes == 3.0


def test_steps_of_the_learning_rate_are_whole_numbers_or_shares() -> None:
    values = [("3", 3), ("3.0", 3), ("0", 0), ("0.0", 0), ("0.03", 0.03), ("1.0", 1)]
    for text, expected in values:
        config = parse_config(apply_overrides(MINIMAL, (f"optimizer.warmup_steps={text}",)))
        assert repr(config.optimizer.warmup_steps) == repr(expected)


def test_resolved_yaml_reads_back_equal(tmp_path: Path) -> None:
    config = parse_config(
        apply_overrides(
            MINIMAL, ("optimizer.lr=1e-3", "memory.host_limit=1.5G", "cluster.nodes=[{name: x}]")
        )
    )
    path = tmp_path / "resolved.yaml"
    path.write_text(config.to_yaml())
    assert load_config(path) == config
    assert config.memory.host_limit == 3 * 2**29
    assert config.optimizer.lr == 1e-3


def test_the_example_is_valid() -> None:
    config = load_config(Path(__file__).parents[2] / "examples" / "tiny.yaml")
    assert config.schedule.scheme == "1f1b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("20G", 20 * 2**30), ("512M", 2**29), ("1.5T", 3 * 2**39), ("7", 7), (7, 7), ("2KiB", 2048)],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("train.stepz=3",), ("train.stepz", "unknown key", "steps")),
        (("optimiser.lr=3",), ("optimiser", "unknown key", "optimizer")),
        (("cluster.nodes=[{name: a, nome: b}]",), ("cluster.nodes.0.nome", "name, host")),
        (("train.steps=0",), ("train.steps = 0",)),
        (("train.steps=9", "train.epochs=2"), ("train.steps 9 and train.epochs 2", "remove one")),
        (("data.passes=1", "train.epochs=2"), ("data.passes 1 and train.epochs 2", "remove")),
        (("train.epochs=0",), ("train.epochs = 0", "above 0")),
        (("train.steps=yes",), ("train.steps = True", "a whole number")),
        (("optimizer.lr=.inf",), ("optimizer.lr", "finite")),
        (("optimizer.betas=[0.9, 1.0]",), ("optimizer.betas", "[0, 1)")),
        (("optimizer.min_lr=1",), ("min_lr 1.0", "optimizer.lr")),
        (
            ("optimizer.min_lr=1e-5", "optimizer.curve=transformers", "optimizer.schedule=linear"),
            ("min_lr 1e-05", "falls to 0", "schedule cosine or wsd, or curve penstock"),
        ),
        (("optimizer.warmup_steps=1.5",), ("warmup_steps = 1.5", "share of train.steps below 1")),
        (("optimizer.warmup_steps=-1",), ("warmup_steps = -1", "a whole number of steps, or")),
        (("optimizer.warmup_steps=true",), ("warmup_steps = True", "a whole number of steps, or")),
        (("optimizer.decay_steps=.inf",), ("decay_steps = inf", "a whole number of steps, or")),
        (("optimizer.grad_dtype=fp16",), ("grad_dtype", "bf16 or fp32")),
        (
            ("optimizer.rollback=arithmetic", "model.dtype=fp16"),
            ("optimizer.rollback arithmetic", "loss scale", "no arithmetic brings back", "exact"),
        ),
        (
            ("optimizer.rollback=arithmetic", "optimizer.settle=early"),
            ("steps in place", "optimizer.settle early", "use settle advance, or rollback exact"),
        ),
        (("optimizer.master=split", "model.dtype=fp16"), ("model.dtype is fp16", "bf16")),
        (
            ("optimizer.master=split", "model.dtype=bf16", "optimizer.rollback=arithmetic"),
            ("optimizer.rollback arithmetic", "master is split", "exact"),
        ),
        (("optimizer.name=rmsprop",), ("optimizer.name = 'rmsprop'", "adagrad")),
        (("train.global_batch=8", "train.micro_batch=3"), ("8", "micro_batch 3")),
        (("train.freeze=['(']",), ("train.freeze", "'('")),
        (("model.path=/x",), ("exactly one of model.hf and model.path",)),
        (("model.hf={}",), ("model_type",)),
        (("data.tokens=x.bin",), ("exactly one of data.path, data.tokens and data.sources",)),
        (("cluster.nodes=[{name: a}, {name: a}]",), ("distinct names",)),
        (("cluster.nodes=[]",), ("at least one",)),
        (("cluster.heartbeat_timeout_s=0.1",), ("heartbeat_timeout_s", "twice")),
        (("memory.host_limit=many",), ("memory.host_limit = 'many'", "20G")),
        (("run.name=a b",), ("run.name = 'a b'",)),
        (("schedule.scheme=zb",), ("schedule.scheme = 'zb'", "spipe")),
        (("cluster.attempt_timeout_s=0",), ("cluster.attempt_timeout_s = 0", "above 0")),
        (
            ("cluster.device=emulated:x", "schedule.profile=p.json"),
            ("schedule.profile = 'p.json'", "emulated:FILE.json"),
        ),
    ],
)
def test_refusals_name_key_value_and_remedy(
    overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    message = complaint(*overrides)
    assert [word for word in words if word not in message] == []


def test_schedules_have_a_short_form() -> None:
    for name in ("auto", "1f1b"):
        short = parse_config(apply_overrides(MINIMAL, (f"schedule={name}",)))
        assert short == parse_config({**MINIMAL, "schedule": {"scheme": name}})
        assert short.schedule.scheme == name
    assert "schedule.scheme = 'spip'" in complaint("schedule=spip")


def test_all_mistakes_are_listed_at_once() -> None:
    message = complaint("train.steps=0", "train.typo=1", "cluster.workers=0")
    assert all(key in message for key in ("train.steps", "train.typo", "cluster.workers"))


def test_overrides_reach_new_empty_and_nested_keys() -> None:
    data = {**MINIMAL, "run": None}
    changed = apply_overrides(data, ("run.name=x", "model.hf.hidden_size=8", "train.steps=3"))
    config = parse_config(changed)
    assert (config.run.name, config.train.steps) == ("x", 3)
    assert config.model.hf == {"model_type": "llama", "hidden_size": 8}
    assert data["run"] is None, "the caller's mapping is not changed"
    assert "hidden_size" not in data["model"]["hf"]


@pytest.mark.parametrize("override", ["train", "=3", "train..steps=1", "data.path.x=1"])
def test_malformed_overrides(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        apply_overrides(MINIMAL, (override,))


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "\x00", "just words"])
def test_files_that_are_no_configuration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        load_config(path)


def test_a_section_that_is_no_mapping() -> None:
    with pytest.raises(ConfigError, match="train"):
        parse_config({**MINIMAL, "train": 3})


def test_a_null_section_means_defaults() -> None:
    assert parse_config({**MINIMAL, "train": None}) == parse_config(MINIMAL)


def test_configurations_cannot_be_changed() -> None:
    config: Config = parse_config(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3
    yaml.safe_load(config.to_yaml())
