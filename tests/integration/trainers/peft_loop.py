"""The plain loop of PEFT, transformers and AdamW that a LoRA run must match; runs where PEFT is.

``python -m tests.integration.trainers.peft_loop SETTINGS`` reads a JSON file of these keys:

* ``model``: a folder of transformers; ``dtype``: type of its weights (default "fp32").
* ``adapter``: a folder of PEFT, where training starts; PEFT keeps its adapters in fp32.
* ``batches``: an ``.npz`` file of ``input_ids`` and ``labels``, both (steps, rows, positions). The
  label of a place is its next token, as in Penstock's rows; -100 does not count.
* ``micro_batch``: rows of one backward (default: all); a step's loss is the mean over its counted
  tokens.
* ``lr``: a number, or a list of one for each step; ``betas`` (0.9, 0.999), ``eps`` (1e-8).
* ``weight_decay`` (0): for parameters of two or more axes.
* ``clip`` (null): the largest norm of the gradients.
* ``out``: the folder of the trained adapter, in PEFT's files; ``threads`` (1): torch's threads.

The last line of the output is JSON: ``losses`` and ``norms`` (before clipping) of each step, and
``trained``, the number of trained elements.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load(model: str, adapter: str, dtype: str, trainable: bool) -> Any:
    """transformers' model of a folder with PEFT's adapter of another."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
    return PeftModel.from_pretrained(base, adapter, is_trainable=trainable)


def optimizer_of(settings: dict[str, Any], parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    """AdamW with decay for matrices alone; its rate is set before each step."""
    decay = settings.get("weight_decay", 0.0)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = tuple(settings.get("betas", (0.9, 0.999)))
    return torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=settings.get("eps", 1e-8))


def backward(model: Any, ids: torch.Tensor, labels: torch.Tensor, rows: int) -> float:
    """Gradients of a global batch into the model; its loss for each counted token."""
    counted, total = int((labels != -100).sum()), 0.0
    for begin in range(0, len(ids), rows):
        logits = model(input_ids=ids[begin : begin + rows]).logits.flatten(0, 1).float()
        part = labels[begin : begin + rows].flatten()
        loss = functional.cross_entropy(logits, part, reduction="sum", ignore_index=-100)
        (loss / counted).backward()
        total += loss.item()
    return total / counted


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings.get("threads", 1))
    dtype = settings.get("dtype", "fp32")
    model = load(settings["model"], settings["adapter"], dtype, True).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_of(settings, parameters)
    batches = np.load(settings["batches"])
    ids = torch.as_tensor(batches["input_ids"].astype(np.int64))
    labels = torch.as_tensor(batches["labels"].astype(np.int64))
    rates = settings["lr"] if isinstance(settings["lr"], list) else [settings["lr"]] * len(ids)
    rows, clip = settings.get("micro_batch", ids.shape[1]), settings.get("clip")
    losses, norms = [], []
    for step, rate in zip(range(len(ids)), rates, strict=True):
        model.zero_grad(set_to_none=True)
        losses.append(backward(model, ids[step], labels[step], rows))
        limit = float("inf") if clip is None else clip
        norms.append(float(nn.utils.clip_grad_norm_(parameters, limit)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    model.save_pretrained(settings["out"])
    trained = sum(p.numel() for p in parameters)
    print(json.dumps({"losses": losses, "norms": norms, "trained": trained}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
