"""Plans and resolved configurations that a start writes, as hashes: golden/planned_runs.json.

A change that is meant to move them rewrites the file: ``python -m tests.node.test_planned_runs``.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import parse_config
from penstock.daemons.node.preparing.fitting.capacity import MachineMemory
from penstock.daemons.node.preparing.fitting.planned_run import HostMachine, RunRequest, plan_run
from penstock.host.errors import CapacityError, ConfigError
from penstock.planner.cost.profile import GPU_GUESS
from tests.planner.conftest import make_table

GOLDEN = Path(__file__).parent / "golden" / "planned_runs.json"
MEMORY = MachineMemory(ram_available=1 << 40, shm_free=1 << 40, held=0, memlock=None)

BASE: dict[str, Any] = {
    "model": {"hf": {"model_type": "llama"}},
    "data": {"path": "@stdlib", "sequence_length": 8},
    "train": {"global_batch": 8, "micro_batch": 1},
    "cluster": {"workers": 2},
}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "1f1b with replicas": {"schedule": {"scheme": "1f1b", "replicas": 2, "recompute": "none"}},
    "gpipe, recomputed": {"schedule": {"scheme": "gpipe", "recompute": "full"}},
    "interleaved": {"schedule": {"scheme": "interleaved", "stages_per_device": 2}},
    "chimera": {"schedule": {"scheme": "chimera", "reduce_gradients": True}},
    "zb-v with 2bp": {"schedule": {"scheme": "zb-v", "passes": ["2bp"]}},
    "mario": {"schedule": {"scheme": "1f1b", "recompute": "full", "passes": ["mario"]}},
    "a limit of devices": {
        "schedule": {"scheme": "1f1b", "passes": ["keep-what-fits"]},
        "memory": {"device_limit": 70_000},
    },
    "a limit that nothing meets": {
        "schedule": {"scheme": "1f1b"},
        "memory": {"device_limit": 1_000},
    },
    "replicas that do not fit": {"schedule": {"scheme": "1f1b", "replicas": 3}},
    "settled early": {"optimizer": {"settle": "early"}, "schedule": {"scheme": "mobius"}},
    "sgd, in place": {"optimizer": {"name": "sgd", "rollback": "arithmetic"}},
    "two nodes, mirrored": {
        "cluster": {"nodes": [{"name": "a"}, {"name": "b"}]},
        "memory": {"mirror": "partner"},
        "schedule": {"scheme": "1f1b"},
    },
    "updates on devices": {
        "schedule": {"scheme": "mobius", "passes": ["interleave-updates"], "update_stride": 2}
    },
    "auto": {"schedule": {"scheme": "auto"}, "train": {"micro_batch": "auto"}},
    "auto, recomputed": {"schedule": {"scheme": "auto", "recompute": "full"}},
    "auto that nothing fits": {
        "schedule": {"scheme": "auto"},
        "memory": {"device_limit": 1_000},
    },
    "a chosen micro-batch": {"schedule": {"scheme": "gpipe"}, "train": {"micro_batch": "auto"}},
    "one gpu": {"cluster": {"device": "cuda", "workers": 1}, "train": {"micro_batch": 2}},
    "an emulated cluster": {
        "model": {"dtype": "bf16"},
        "cluster": {"device": "emulated:analytic:V100-32:gpt3-125m"},
        "emulation": {"scale": 1e-5},
        "schedule": {"scheme": "spipe"},
    },
    "auto on an emulated cluster": {
        "model": {"dtype": "bf16"},
        "cluster": {"device": "emulated:analytic:V100-32:gpt3-125m:half_layers=yes"},
        "emulation": {"scale": 1e-5},
        "schedule": {"scheme": "auto"},
    },
}


def planned(changes: dict[str, Any]) -> dict[str, str]:
    """Hashes of configuration and plan with the choice in words, or the refusal."""
    sections = BASE.keys() | changes.keys()
    config = parse_config(
        {name: {**BASE.get(name, {}), **changes.get(name, {})} for name in sections}
    )
    guess = GPU_GUESS if config.cluster.device == "cuda" else None
    machine = HostMachine(memory=MEMORY, guess=guess)
    try:
        run = plan_run(RunRequest(config=config, table=make_table(8)), machine)
    except (ConfigError, CapacityError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {
        "configuration": _short(run.config.to_yaml()),
        "plan": _short(run.plan.to_json()),
        "needs": _short(repr(run.demands)),
        "choice": run.choice,
    }


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_planned_as_before(name: str) -> None:
    assert planned(CASES[name]) == json.loads(GOLDEN.read_text())[name]


def rewrite() -> None:
    """Rewrites the golden file."""
    content = {name: planned(changes) for name, changes in CASES.items()}
    GOLDEN.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    rewrite()
