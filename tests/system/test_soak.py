"""``penstock chaos`` with many configurations, on one and two nodes: every run ends with the
undisturbed bytes.

``make soak`` has ``--soak-faults`` of them, 2500 if not said otherwise, :data:`FAULTS_A_TEST` of a
configuration at a time. A failure says the seed, and what was done to which process when;
``--soak-seed`` draws the same faults again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.chaos.table import row_of
from tests.forked import Forking
from tests.shelf import Shelf
from tests.system import conftest as H

FAULTS_A_TEST = 40
STEPS, INTERVAL = 120, 12
TEST_TIMEOUT_S = 2400

BASE: dict[str, Any] = {
    "model": {
        "hf": {
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "max_position_embeddings": 128,
        }
    },
    "data": {"sequence_length": 128},
    "train": {
        "steps": STEPS,
        "eval_every": INTERVAL,
        "save_every": INTERVAL,
        "global_batch": 16,
        "micro_batch": 4,
        "clip_grad_norm": 2.7,
    },
    "cluster": {
        "heartbeat_interval_s": 0.2,
        "heartbeat_timeout_s": 2.0,
        "max_restarts": 1000,
    },
}
TWO_NODES = {"workers": 1, "nodes": [{"name": "a"}, {"name": "b"}]}
MIRRORED = {"cluster": TWO_NODES, "memory": {"mirror": "partner"}}
SKIPPING: dict[str, Any] = {
    "model": {"dtype": "fp16"},
    "train": {"max_skips": 40},
    "optimizer": {
        "initial_loss_scale": 2.0**26,
        "loss_scale_growth_interval": 6,
        "grad_dtype": "fp16",
    },
}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "spipe on two nodes": {
        "model": {"hf": {"tie_word_embeddings": True}},
        "schedule": {"scheme": "spipe"},
        "cluster": TWO_NODES,
    },
    "fp16 with skips": SKIPPING,
    "mobius, frozen": {
        "train": {"freeze": ["embed_tokens", "layers.1."]},
        "schedule": {"scheme": "mobius"},
    },
    "chimera on two nodes": {"schedule": {"scheme": "chimera"}, "cluster": TWO_NODES},
    "split master": {
        "model": {"dtype": "bf16", "hf": {"tie_word_embeddings": True}},
        "optimizer": {"master": "split", "settle": "early", "grad_dtype": "bf16"},
        "schedule": {"scheme": "spipe"},
    },
    "gloo on two nodes": {
        "schedule": {"scheme": "gpipe"},
        "cluster": {**TWO_NODES, "transport": "gloo"},
    },
    "fp16, updates on devices": {
        "model": {"dtype": "fp16"},
        "optimizer": {"settle": "early", "initial_loss_scale": 2.0**20, "grad_dtype": "bf16"},
        "schedule": {"passes": ["interleave-updates"], "update_stride": 2, "resident_share": 0.2},
    },
    "flushed by devices": {
        "schedule": {
            "passes": ["interleave-updates"],
            "update_stride": 2,
            "device_updates": "flush",
        },
    },
    "gpipe, dropout": {
        "model": {"hf": {"attention_dropout": 0.2}},
        "schedule": {"scheme": "gpipe"},
    },
    "emulated": {
        "model": {"hf": None, "dtype": "fp16"},
        "data": {"sequence_length": 256},
        "optimizer": {"grad_dtype": "bf16"},
        "cluster": {"device": "emulated:analytic:V100-32:gpt3-1.3b"},
        "emulation": {"scale": "1/1000", "time_scale": 1.0},
    },
    "zb-h1": {"schedule": {"scheme": "zb-h1"}},
    "replicas on two nodes": {
        "schedule": {"scheme": "gpipe", "replicas": 2},
        "cluster": TWO_NODES,
    },
    "spipe, settled early": {
        "optimizer": {"settle": "early"},
        "schedule": {"scheme": "spipe"},
    },
    "never speculating": {"optimizer": {"speculate": "never"}},
    "1f1b, unclipped": {"train": {"clip_grad_norm": None}},
    "mirrored": {"model": {"hf": {"tie_word_embeddings": True}}, **MIRRORED},
    "mirrored, fp16 with skips": {**SKIPPING, **MIRRORED},
    "mirrored, split master": {
        "model": {"dtype": "bf16"},
        "optimizer": {"master": "split", "settle": "early", "grad_dtype": "bf16"},
        "schedule": {"scheme": "spipe"},
        **MIRRORED,
    },
    "mirrored, updates on devices": {
        "schedule": {"passes": ["interleave-updates"], "update_stride": 2},
        **MIRRORED,
    },
    "mirrored replicas, frozen": {
        "train": {"freeze": ["embed_tokens", "layers.1."]},
        "schedule": {"scheme": "gpipe", "replicas": 2},
        **MIRRORED,
    },
}
"""Of all steps of a run some are clipped, unless nothing is."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a configuration in turn, until there are enough faults."""
    if "fault_count" not in metafunc.fixturenames:
        return
    left: int = metafunc.config.getoption("--soak-faults")
    names = list(CONFIGURATIONS)
    runs = [
        (names[index % len(names)], index, min(FAULTS_A_TEST, left - start))
        for index, start in enumerate(range(0, left, FAULTS_A_TEST))
    ]
    ids = [f"{short(name)}-{number}" for name, number, _ in runs]
    metafunc.parametrize(("name", "number", "fault_count"), runs, ids=ids)


@pytest.fixture(scope="module")
def seed(request: pytest.FixtureRequest) -> int:
    """Of the whole session."""
    given: int | None = request.config.getoption("--soak-seed")
    return random.SystemRandom().randrange(10**6) if given is None else given


@pytest.fixture(scope="module")
def tally(seed: int) -> Iterator[Counter[str]]:
    """What was struck in all runs, printed at the end."""
    counts: Counter[str] = Counter()
    yield counts
    print(f"\nsoak with seed {seed}:")
    for what, count in sorted(counts.items()):
        print(f"{count:5} {what}")


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, shelf: Shelf, forking: Forking
) -> Iterator[Callable[[str], Path]]:
    """Name of a configuration -> directory of its undisturbed run, made when it is asked for."""
    runner = H.Runner(tmp_path_factory.mktemp("undisturbed"), shelf, forking)
    finished: dict[str, Path] = {}

    def run_dir(name: str) -> Path:
        if name not in finished:
            changes = H.merge(BASE, CONFIGURATIONS[name])
            finished[name] = runner.train(runner.configure(short(name), changes))
        return finished[name]

    yield run_dir
    runner.stop_all()


def short(name: str) -> str:
    """A name of a run."""
    return name.replace(" ", "-").replace(",", "")


@pytest.mark.slow
@pytest.mark.timeout(TEST_TIMEOUT_S)
def test_random_faults_leave_the_undisturbed_bytes(
    runner: Any,
    undisturbed: Callable[[str], Path],
    seed: int,
    tally: Counter[str],
    name: str,
    number: int,
    fault_count: int,
) -> None:
    reference = undisturbed(name)
    path = runner.configure("run", H.merge(BASE, CONFIGURATIONS[name]))
    options = {
        "--faults": fault_count,
        "--seed": seed * 1000 + number,
        "--reference": reference,
        "--out": runner.root / "chaos",
    }
    report = chaos(runner, path, options)
    tally["faults"] += len(report["faults"])
    tally["blows"] += report["blows"]
    tally.update(row_of(entry) for entry in report["faults"])


def chaos(runner: Any, config: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Run ``penstock chaos``, which must succeed; what it reports."""
    words = [str(word) for option in options.items() for word in option]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.client.main", "chaos", str(config), *words, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    runner.started.append(process)
    try:
        output, events = process.communicate(timeout=TEST_TIMEOUT_S - 60)
    except BaseException:
        os.kill(process.pid, signal.SIGINT)  # it ends its runs
        raise
    assert process.returncode == 0, events
    print(events)
    report: dict[str, Any] = json.loads(output)
    return report
