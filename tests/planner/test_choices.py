"""The choices of ``schedule: auto`` for models of known shapes on known machines."""

from __future__ import annotations

from typing import Any

from penstock.planner.cost.emulation import Emulation
from penstock.planner.tuning.auto import choose
from penstock.protocol.config.schema import Config, parse_config
from penstock.shm.table import BlockTable
from tests.planner.conftest import AnyMachine


def config_of(device: str, **sections: dict[str, Any]) -> Config:
    """A configuration that leaves schedule and micro-batch open; bf16 weights."""
    base: dict[str, dict[str, Any]] = {
        "model": {"hf": {"model_type": "llama"}, "dtype": "bf16"},
        "data": {"path": "@stdlib", "sequence_length": 512},
        "train": {"global_batch": 8, "micro_batch": "auto"},
        "schedule": {"scheme": "auto"},
        "cluster": {"device": device, "workers": 2},
    }
    return parse_config({name: {**base.get(name, {}), **sections.get(name, {})} for name in base})


def table_of(model: str, **sections: dict[str, Any]) -> BlockTable:
    """The block table of a model of the catalogue, at full size."""
    return Emulation.of(config_of(f"emulated:analytic:H100:{model}", **sections)).table


def test_workers_on_cpus_train_one_pipeline_each_and_keep_everything() -> None:
    """As README's fine-tuning does. Streamed plans hide copies and sweeps behind computation only
    where these have cores of their own.
    """
    winner = choose(config_of("cpu"), table_of("gpt3-760m"), AnyMachine())
    schedule = winner.config.schedule
    assert (schedule.scheme, schedule.replicas, schedule.recompute) == ("1f1b", 2, "none")
    assert not schedule.passes
