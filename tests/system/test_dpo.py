"""Runs on pairs of answers: the losses of TRL's ``DPOTrainer``, kills and stops."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging

from penstock.host.errors import ExitCode
from penstock.protocol.wire.control import ControlClient
from tests.data.dpo import make as trl
from tests.data.sft import make as sft
from tests.system import conftest as H
from tests.system.test_exactness import assert_exact, disturb, obeyed

STORED: dict[str, Any] = json.loads((Path(trl.__file__).parent / "losses.json").read_text())
IN_GATE = ("truncated", "trained-adapter")
TOLERANCE = 1e-5

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def settings(kind: str, folder: Path) -> dict[str, Any]:
    """Keys of a run that repeats one of TRL's: two rows for each of its pairs."""
    logging.disable_progress_bar()  # its monitor is a thread that stays
    sft.save(folder / "model", trl.TEMPLATE)
    adapter = {}
    if trl.is_adapter(kind):
        path = str(trl.save_adapter(folder / "model", kind))
        adapter = {"adapter": {"path": path, "dropout": trl.DROPOUT}}
    files = {
        "records.jsonl": trl.pairs(kind, trl.records(kind)),
        "held-out.jsonl": trl.pairs(kind, trl.EVALUATED, seed=10),
    }
    for name, records in files.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / name).write_text(text)
    return {
        **adapter,
        "model": {"hf": None, "path": str(folder / "model"), "dtype": "fp32"},
        "data": {
            "path": str(folder / "records.jsonl"),
            "tokenizer": None,
            "objective": "dpo",
            "dpo": {"beta": trl.BETA},
            "sequence_length": trl.LENGTHS[kind],
            "shuffle": False,
        },
        "train": {
            "steps": trl.STEPS,
            "global_batch": 2 * trl.PAIRS,
            "micro_batch": 4,
            "clip_grad_norm": 1.0,
        },
        "eval": {
            "sets": [{"name": "pairs", "path": str(folder / "held-out.jsonl"), "every": trl.STEPS}]
        },
        "optimizer": {
            "lr": sft.RATE,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": sft.DECAY,
            "schedule": "linear",
            "curve": "transformers",
            "warmup_steps": sft.WARMUP,
            "min_lr": 0.0,
        },
    }


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k in IN_GATE else pytest.mark.slow) for k in trl.LENGTHS],
)
def test_losses_of_pairs_equal_those_of_trl(runner: H.Runner, kind: str) -> None:
    run_dir = runner.train(runner.configure("run", settings(kind, runner.root)))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["phase"] == "train"]
    expected = STORED[kind]["losses"]
    assert len(losses) == len(expected)
    worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    print(f"{kind}: largest difference {worst:.2g}")
    assert worst <= TOLERANCE, list(zip(losses, expected, strict=True))
    (evaluated,) = [line for line in lines if line["phase"] == "eval"]
    loss, accuracy = STORED[kind]["eval"]
    assert evaluated["loss"] == pytest.approx(loss, abs=TOLERANCE)
    if evaluated["pairs"] % trl.PAIRS == 0:  # TRL's accuracy is the mean of its batches' means
        assert evaluated["pair_accuracy"] == pytest.approx(accuracy)
    assert "perplexity" not in evaluated and "token_accuracy" not in evaluated


def reached(run: H.TrainProcess) -> int:
    """The last step of a run that is stopped."""
    obeyed(run, ControlClient.stop)
    code, output = run.wait(500)
    assert code == ExitCode.STOPPED, f"exit code {code}\n{output}\n{H.tail_logs(run.run_dir)}"
    return H.newest_step(run.run_dir)


@pytest.mark.parametrize("adapter", [None, {"r": 4, "alpha": 16}], ids=["model", "adapter"])
def test_a_disturbed_run_ends_with_the_same_bytes(
    runner: H.Runner, adapter: dict[str, Any] | None
) -> None:
    """Worker and memoryd are killed, then the run is stopped and resumed. The references stay those
    of the start, which is the model without its adapter.
    """
    changes = H.merge(settings("text", runner.root), H.ENDLESS)
    changes = H.merge(
        changes, {"data": {"shuffle": True}, "adapter": adapter, "eval": {"sets": []}}
    )
    path = runner.configure("run", changes)
    run = runner.start(path)
    H.wait_for_step(run, 2)
    for target in ("worker.1", "memoryd.a"):
        disturb(run, target, "kill", random.Random())
        H.wait_for_step(run, H.newest_step(run.run_dir) + 1)
    stopped = reached(run)
    references = (run.run_dir / "data/references-train.bin").read_bytes()
    resumed = runner.start(path)
    H.wait_for_step(resumed, stopped + 1)
    steps = reached(resumed)
    assert (run.run_dir / "data/references-train.bin").read_bytes() == references
    as_long = H.merge(changes, {"train": {"steps": steps}})
    undisturbed = runner.train(runner.configure("undisturbed", as_long))
    assert_exact(run.run_dir, steps, H.state_bytes(undisturbed))
    kept = ("loss", "pairs", "pair_accuracy", "margin")
    rows, expected = (
        [[line[key] for key in kept] for line in H.metrics(each)]
        for each in (run.run_dir, undisturbed)
    )
    assert rows == expected and rows[-1][3] != 0.0
    assert rows[0][0] == pytest.approx(math.log(2.0), abs=1e-6), "the start is the reference"
