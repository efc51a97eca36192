"""Makes ``losses.json`` of this folder with TRL: the losses of its ``ORPOTrainer``, and of its
``CPOTrainer`` with the loss simpo, on a tiny model.

``PYTHONPATH=. PYTHON -m tests.data.preferences.make FOLDER`` runs in an environment with TRL.
Model, records and settings are those of this file and of ``tests.data.dpo.make``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.data.dpo import make as dpo
from tests.data.sft import make as sft
from tests.data.sft.make import STEPS, sequential, settings

PAIRS, EVALUATED = dpo.PAIRS, dpo.EVALUATED
KINDS: dict[str, dict[str, Any]] = {
    "orpo": {"beta": 0.3},
    "orpo-truncated": {"beta": 0.3, "max_length": 76},
    "orpo-new-adapter": {"beta": 1.5},
    "orpo-trained-adapter": {"beta": 0.3},
    "simpo": {"beta": 2.0, "simpo_gamma": 0.8, "cpo_alpha": 0.0},
    "simpo-likelihood": {
        **{"beta": 1.2, "simpo_gamma": 0.5},
        **{"cpo_alpha": 0.7, "label_smoothing": 0.1},
    },
    "simpo-new-adapter": {"beta": 2.0, "simpo_gamma": 0.8, "cpo_alpha": 0.0},
}
"""Kinds of trainings with their keys of ``ORPOConfig`` and ``CPOConfig``. Rows of ``truncated``
lose their ends. Adapters are those of ``tests.data.dpo.make``.
"""
LENGTH = 96


def save(folder: Path) -> None:
    """Writes model and tokenizer. The tokenizer has no bos token: these trainers of TRL put one in
    front of a text, also where the tokenizer does not.
    """
    sft.save(folder, dpo.TEMPLATE)
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    del fields["bos_token"]
    path.write_text(json.dumps(fields))


def records(kind: str) -> list[dict[str, Any]]:
    """Returns texts with two answers, enough for all steps without a second pass."""
    return dpo.pairs("text", STEPS * PAIRS, seed=9 + sorted(KINDS).index(kind))


def held_out() -> list[dict[str, Any]]:
    """Returns the pairs of the evaluation after the last step."""
    return dpo.pairs("text", EVALUATED, seed=10)


def adapter(kind: str) -> str | None:
    """Returns the kind of an adapter; None for a model without one."""
    name = kind.partition("-")[2]
    return name if dpo.is_adapter(name) else None


def losses(folder: Path, kind: str) -> dict[str, Any]:
    """Returns the losses of TRL's trainer, in fp32 on CPUs, in the order of the data. Loss,
    accuracy and margin of other pairs at the end follow.
    """
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    simpo = kind.startswith("simpo")
    config: Any = CPOConfig if simpo else ORPOConfig
    keys: dict[str, Any] = {"max_length": LENGTH, **KINDS[kind], **settings(folder)}
    keys |= {"loss_type": "simpo"} if simpo else {}
    arguments = config(per_device_train_batch_size=PAIRS, per_device_eval_batch_size=PAIRS, **keys)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if (adapted := adapter(kind)) is not None:
        files = dpo.save_adapter(folder, adapted)
        model = PeftModel.from_pretrained(model, files, is_trainable=True)
    trainer = sequential(CPOTrainer if simpo else ORPOTrainer)(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(records(kind)),
        eval_dataset=Dataset.from_list(held_out()),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.train()
    evaluated = trainer.evaluate()
    names = ("eval_loss", "eval_rewards/accuracies", "eval_rewards/margins")
    return {"losses": trainer.noted, "eval": [evaluated[name] for name in names]}


def main(out: Path) -> None:
    """Writes the losses of all kinds."""
    import trl

    made: dict[str, Any] = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            save(Path(folder))
            made[kind] = losses(Path(folder), kind)
            print(kind, made[kind]["losses"][0], made[kind]["losses"][-1], flush=True)
    content = {"trl": trl.__version__, **made}
    (out / "losses.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
