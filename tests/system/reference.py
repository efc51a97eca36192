"""The plain loop that every schedule must match: transformers + AdamW + clip_grad_norm_."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.daemons.scheduler.learning_rate import learning_rate
from penstock.models.initial import initial_blocks
from penstock.protocol.rundir import RunDirectory
from penstock.workers.data import TokenDataset, micro_batches


@dataclass
class ReferenceResult:
    """Per step losses and gradient norms; final parameters by name; the sum of rates."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, np.ndarray]
    summed_lr: float


def reference_loop(run_dir: Path, steps: int) -> ReferenceResult:
    """Train the run's model from its initial weights on its data in one process.

    With 16-bit weights the loop keeps fp32 masters, computes in fp32 from their rounded copies and
    rounds the summed gradients, as the run does.
    """
    files = RunDirectory(run_dir)
    config, table = files.config, files.table
    hf_config = AutoConfig.from_pretrained(run_dir / "model")
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    model.train()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for _, tensors in initial_blocks(config, hf_config, table, range(len(table.blocks))):
            for name, value in tensors.items():
                parameters[name].copy_(value)
    storage = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    weight_dtype, grad_dtype = storage[config.model.dtype], storage[config.optimizer.grad_dtype]
    masters = {n: torch.nn.Parameter(p.detach().clone()) for n, p in parameters.items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in masters.values() if p.ndim >= 2]},
            {"params": [p for p in masters.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
    )
    dataset = TokenDataset.open(run_dir / "data", "train", config)
    result = ReferenceResult([], [], {}, 0.0)
    for step in range(1, steps + 1):
        rate = learning_rate(config.optimizer, config.train.steps, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        position = (step - 1) * config.train.global_batch
        batches, counted = micro_batches(
            dataset, position, config.train.global_batch, config.train.micro_batch
        )
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name].to(weight_dtype))
        total = 0.0
        for batch in batches:
            inputs = torch.as_tensor(np.asarray(batch.input_ids), dtype=torch.long)
            labels = torch.as_tensor(np.asarray(batch.labels), dtype=torch.long)
            logits = model(input_ids=inputs, use_cache=False).logits
            loss_sum = functional.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=-100
            )
            (loss_sum / counted).backward()
            total += loss_sum.item()
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            masters[name].grad = parameter.grad.to(grad_dtype).float()
        clip = config.train.clip_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(list(masters.values()), clip)
        optimizer.step()
        result.losses.append(total / counted)
        result.grad_norms.append(float(norm))
        result.summed_lr += rate
    result.weights = {n: p.detach().numpy().copy() for n, p in masters.items()}
    return result
