"""Runs on pairs of answers without a reference: the losses of TRL's ``ORPOTrainer`` and
``CPOTrainer``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging

from tests.data.dpo import make as dpo
from tests.data.preferences import make as trl
from tests.data.sft import make as sft
from tests.system import conftest as H
from tests.system.test_dpo import TOLERANCE, settings

STORED: dict[str, Any] = json.loads((Path(trl.__file__).parent / "losses.json").read_text())
IN_GATE = ("orpo-trained-adapter", "simpo-likelihood")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def terms(kind: str) -> dict[str, Any]:
    """Keys of ``data`` for a kind."""
    given = dict(trl.KINDS[kind])
    length, name = given.pop("max_length", trl.LENGTH), kind.partition("-")[0]
    if name == "simpo":
        given["gamma"], given["likelihood"] = given.pop("simpo_gamma"), given.pop("cpo_alpha")
    return {"objective": name, name: given, "dpo": {}, "sequence_length": length}


def configured(kind: str, folder: Path) -> dict[str, Any]:
    """Keys of a run that repeats one of TRL's: two rows for each of its pairs."""
    changes = settings("text", folder)
    trl.save(folder / "model")
    if (adapted := trl.adapter(kind)) is not None:
        path = str(dpo.save_adapter(folder / "model", adapted))
        changes["adapter"] = {"path": path, "dropout": dpo.DROPOUT}
    files = {"records.jsonl": trl.records(kind), "held-out.jsonl": trl.held_out()}
    for name, records in files.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return {**changes, "data": {**changes["data"], **terms(kind)}}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in IN_GATE else pytest.mark.slow) for k in trl.KINDS]
)
def test_losses_of_pairs_equal_those_of_trl(runner: H.Runner, kind: str) -> None:
    """The likelihood term has its mean over the tokens of TRL's batch, in two micro-batches."""
    logging.disable_progress_bar()
    run_dir = runner.train(runner.configure("run", configured(kind, runner.root)))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["phase"] == "train"]
    expected = STORED[kind]["losses"]
    assert len(losses) == len(expected) == sft.STEPS
    worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    print(f"{kind}: largest difference {worst:.2g}")
    assert worst <= TOLERANCE, list(zip(losses, expected, strict=True))
    (evaluated,) = [line for line in lines if line["phase"] == "eval"]
    made = [evaluated[name] for name in ("loss", "pair_accuracy", "margin")]
    assert made == pytest.approx(STORED[kind]["eval"], abs=TOLERANCE)
    meta = json.loads((run_dir / "data/meta.json").read_text())
    assert not any("references" in entry for entry in meta.values() if isinstance(entry, dict))
    assert not list((run_dir / "data").rglob("references-*"))
