"""model.compile: auto: settled by device and plan before the first step, kept by a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import Config, load_config, parse_config
from penstock.daemons.node.preparing.changes import find_changes, fixed_values
from penstock.daemons.node.preparing.layers import first_guess, is_to_try, keep_compile
from penstock.daemons.node.preparing.prepare import prepare_run
from penstock.host.errors import ConfigError
from penstock.planner.planning.configured import complete_plan
from penstock.planner.planning.pricing import config_context
from penstock.protocol.plan.plan import Plan
from tests.scheduler.fakes import make_table

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def config(
    compiled: object = "auto", device: str = "cuda", hf: dict[str, Any] = LLAMA, **schedule: Any
) -> Config:
    """A small model on one worker."""
    return parse_config(
        {
            "model": {"hf": hf, "compile": compiled},
            "data": {"path": "@stdlib", "sequence_length": 32},
            "train": {"steps": 2, "global_batch": 2, "micro_batch": 1},
            "schedule": {"scheme": "gpipe", **schedule},
            "cluster": {"workers": 1, "device": device},
        }
    )


def plan_of(asked: Config) -> Plan:
    """Returns the plan of a configuration for three small blocks."""
    table = make_table()
    return complete_plan(asked, table, config_context(asked, table))


def guess(asked: Config) -> tuple[object, list[str]]:
    """Returns the value that auto stands for as far as device and plan tell, and the words."""
    words: list[str] = []
    return first_guess(asked, plan_of(asked), words.append).model.compile, words


def test_gpus_compile_and_cpus_do_not() -> None:
    assert guess(config()) == (True, [])
    assert guess(config(device="cpu")) == (False, [])
    assert guess(config(True, device="cpu")) == (True, [])
    assert guess(config(False)) == (False, [])


def test_plans_that_need_layers_as_they_are_say_so() -> None:
    assert guess(config(recompute="selective", drop=["norm"])) == (
        False,
        [
            "model.compile: auto does not compile the layers: the plan drops operators,"
            " which compiled layers cannot do"
        ],
    )


def test_plans_that_split_the_backward_or_bind_weights_anew_compile() -> None:
    assert guess(config(passes=["split-backward"])) == (True, [])
    assert guess(config(scheme="zb-h1")) == (True, [])
    mobius = config(scheme="mobius", recompute="none", stages_per_device=3)
    assert plan_of(mobius).rebinds_weights
    assert guess(mobius) == (True, [])


def test_a_run_keeps_what_auto_stood_for() -> None:
    assert keep_compile(config(), None).model.compile == "auto"
    for value in (True, False):
        assert keep_compile(config(), config(value)).model.compile is value
    assert keep_compile(config(True), config(False)).model.compile is True


def test_a_user_may_change_it_between_steps() -> None:
    (change,) = find_changes(config(False), config(True))
    assert change.allowed and "round differently" in str(change)
    assert "model.compile" not in fixed_values(config(True))


def test_layers_are_tried_before_the_first_step_and_after_changes() -> None:
    compiled = config(True)
    assert is_to_try(compiled, None, ())
    assert is_to_try(compiled, config(False), find_changes(config(False), compiled))
    assert not is_to_try(compiled, compiled, ())
    assert not is_to_try(config(False), None, ())
    longer = compiled.model_copy(
        update={"data": compiled.data.model_copy(update={"sequence_length": 64})}
    )
    assert is_to_try(longer, compiled, find_changes(compiled, longer))


def test_layers_of_several_graphs_are_refused_before_memory_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layers of kind '.*' cannot be compiled"):
        prepare_run(config(True, device="cpu", hf=MIXTRAL), tmp_path / "run")
    assert not (tmp_path / "run" / "journal.sqlite").exists()


def test_a_prepared_run_has_its_graphs(tmp_path: Path) -> None:
    words: list[str] = []
    run_dir = tmp_path / "run"
    prepare_run(config(True, device="cpu"), run_dir, words.append)
    assert "compiling the layers (model.compile)" in words
    assert load_config(run_dir / "resolved.yaml").model.compile is True
    assert any((run_dir / "compiled").rglob("*.so")), "kernels for later processes"
    words.clear()
    prepare_run(config(True, device="cpu"), run_dir, words.append)
    assert not any("compiling" in line for line in words)
