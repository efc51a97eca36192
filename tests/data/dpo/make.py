"""Makes ``losses.json`` of this folder with TRL: the losses of its ``DPOTrainer`` on a tiny model.

``PYTHONPATH=. PYTHON -m tests.data.dpo.make FOLDER`` runs in an environment with TRL. Model,
records and settings are those of this file, so that a run of Penstock repeats them without TRL.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.data.sft.make import STEPS, WORDS, drawn, save, sequential, settings

PAIRS, BETA = 4, 0.2
TEMPLATE = "qwen2_5"
LENGTHS = {
    **{"text": 96, "messages": 288, "implicit": 224, "truncated": 190},
    **{"new-adapter": 96, "trained-adapter": 96},
}
"""Kinds of trainings, and ``max_length`` of each. ``truncated`` are messages that lose their ends;
some of them are left out. Adapters train on texts: a new one has zeros in B, so the reference is
the model without it. The reference of a trained one is a copy of it.
"""
DROPOUT = 0.25
ADAPTER: Mapping[str, Any] = {
    **{"r": 4, "lora_alpha": 16, "lora_dropout": DROPOUT},
    "target_modules": "all-linear",
}
"""Fields of PEFT's ``LoraConfig``. TRL turns the dropout off."""

EVALUATED = 24
"""Pairs of the evaluation after the last step."""


def texts(bits: Any, least: int, most: int) -> str:
    """Returns a random text of a random number of words."""
    count = least + int(bits.random_raw()) % (most - least + 1)
    return " ".join(WORDS[n % len(WORDS)] for n in bits.random_raw(count).tolist())


def pairs(kind: str, count: int, seed: int = 9) -> list[dict[str, Any]]:
    """Returns records with a prompt and two answers."""
    bits, made = drawn(seed), []
    for number in range(count):
        prompt = texts(bits, 2, 30 if kind == "truncated" else 9)
        chosen, rejected = texts(bits, 1, 12), texts(bits, 1, 12)
        if kind == "text" or is_adapter(kind):
            made.append({"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"})
            continue
        talk = [{"role": "user", "content": prompt}]
        if number % 2 and kind != "truncated":
            talk += [
                {"role": "assistant", "content": texts(bits, 1, 4)},
                {"role": "user", "content": texts(bits, 1, 4)},
            ]
        answers = [[{"role": "assistant", "content": each}] for each in (chosen, rejected)]
        if kind == "implicit":
            made.append({"chosen": talk + answers[0], "rejected": talk + answers[1]})
        else:
            made.append({"prompt": talk, "chosen": answers[0], "rejected": answers[1]})
    return made


def is_adapter(kind: str) -> bool:
    """Returns whether a kind trains an adapter."""
    return kind.endswith("-adapter")


def save_adapter(folder: Path, kind: str) -> Path:
    """Writes PEFT's files of an adapter for the model in ``folder``; returns their folder. Weights
    are between -0.1 and 0.1. Those of B are zero in a new adapter.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **ADAPTER))
    bits = drawn(13)
    with torch.no_grad():
        for name, parameter in sorted(adapted.named_parameters()):
            if ".lora_A." in name or (".lora_B." in name and kind == "trained-adapter"):
                raw = bits.random_raw(parameter.numel()) >> np.uint64(40)
                values = (raw.astype(np.float32) / 2**24 - 0.5) * 0.2
                parameter.copy_(torch.from_numpy(values).reshape(parameter.shape))
    adapted.save_pretrained(folder / "adapter")
    return folder / "adapter"


def models(folder: Path, kind: str) -> dict[str, Any]:
    """Returns the arguments of TRL's trainer that name its model and its reference."""
    from peft import LoraConfig, PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if not is_adapter(kind):
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return {"model": model, "ref_model": reference}
    adapter = save_adapter(folder, kind)
    if kind == "new-adapter":
        return {"model": model, "peft_config": LoraConfig(task_type="CAUSAL_LM", **ADAPTER)}
    return {"model": PeftModel.from_pretrained(model, adapter, is_trainable=True)}


def losses(folder: Path, kind: str) -> dict[str, Any]:
    """Returns the losses of TRL's trainer, in fp32 on CPUs, in the order of the data. Loss and
    accuracy of other pairs at the end follow.
    """
    from datasets import Dataset
    from peft import load_peft_weights, set_peft_model_state_dict
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(
        beta=BETA,
        max_length=LENGTHS[kind],
        precompute_ref_log_probs=False,
        per_device_train_batch_size=PAIRS,
        per_device_eval_batch_size=PAIRS,
        **settings(folder),
    )
    trainer = sequential(DPOTrainer)(
        **models(folder, kind),
        args=arguments,
        train_dataset=Dataset.from_list(pairs(kind, records(kind))),
        eval_dataset=Dataset.from_list(pairs(kind, EVALUATED, seed=10)),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    if kind == "new-adapter":  # the trainer made an adapter that starts at random
        set_peft_model_state_dict(trainer.model, load_peft_weights(str(folder / "adapter")))
    trainer.train()
    evaluated = trainer.evaluate()
    return {
        "losses": trainer.noted,
        "eval": [evaluated["eval_loss"], evaluated["eval_rewards/accuracies"]],
    }


def records(kind: str) -> int:
    """Returns the number of records: enough for all steps without a second pass."""
    return STEPS * PAIRS + (120 if kind == "truncated" else 0)


def main(out: Path) -> None:
    """Writes the losses of all kinds."""
    import trl

    made: dict[str, Any] = {}
    for kind in LENGTHS:
        with tempfile.TemporaryDirectory() as folder:
            save(Path(folder), TEMPLATE)
            made[kind] = losses(Path(folder), kind)
            print(kind, made[kind]["losses"][0], made[kind]["losses"][-1], flush=True)
    content = {"trl": trl.__version__, **made}
    (out / "losses.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
