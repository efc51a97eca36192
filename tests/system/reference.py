"""The plain loop that every schedule must match: transformers + AdamW + clip_grad_norm_."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from penstock.config.values import MASKED
from penstock.daemons.scheduler.machine.activities.learning_rates import learning_rate
from penstock.protocol.run.rundir import RunDirectory
from penstock.workers.data import micro_batches, open_dataset

STORAGE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class ReferenceResult:
    """Per step losses and gradient norms; final parameters by name; the sum of rates."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, np.ndarray]
    summed_lr: float


class ReferenceLoop:
    """The run's model in one process, from the folder of ``model.path``, which transformers reads.

    With 16-bit weights it keeps fp32 masters, computes in fp32 from their rounded copies and rounds
    the summed gradients, as the run does.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.config = run_dir, RunDirectory(run_dir).config
        assert self.config.model.path is not None, "both sides start from a folder"
        self.model = self.load_model(self.config.model.path).train()
        self.parameters = self.named_parameters()
        self.masters = {n: nn.Parameter(p.detach().clone()) for n, p in self.parameters.items()}
        self.optimizer = self._optimizer()
        self.dataset = open_dataset(run_dir / "data", "train", self.config)

    def load_model(self, folder: Path) -> Any:
        """transformers' own model from its own reading of the folder, in fp32."""
        masked = self.config.data.objective == MASKED
        kind = AutoModelForMaskedLM if masked else AutoModelForCausalLM
        return kind.from_pretrained(folder, dtype=torch.float32)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by the names that the run's blocks have."""
        return dict(self.model.named_parameters())

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the model makes of a micro-batch, (micro_batch, positions, vocabulary)."""
        return self.model(input_ids=inputs).logits

    def _optimizer(self) -> torch.optim.AdamW:
        settings = self.config.optimizer
        groups: list[dict[str, Any]] = []
        for name, parameter in self.masters.items():
            group = {"params": [parameter], "rate": 1.0}
            group["weight_decay"] = settings.weight_decay if parameter.ndim >= 2 else 0.0
            for given in settings.groups:
                if re.search("|".join(given.match), name):
                    group["rate"] = given.rate
                    if given.weight_decay is not None:
                        group["weight_decay"] = given.weight_decay
                    break
            groups.append(group)
        return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)

    def compute_gradients(self, data_position: int) -> float:
        """Gradients of one global batch into the masters; the loss per counted token."""
        train, total = self.config.train, 0.0
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.masters[name].to(STORAGE[self.config.model.dtype]))
        batches, counted = micro_batches(
            self.dataset, data_position, train.global_batch, train.micro_batch
        )
        for batch in batches:
            inputs = torch.as_tensor(np.asarray(batch.input_ids), dtype=torch.long)
            labels = torch.as_tensor(np.asarray(batch.labels), dtype=torch.long)
            logits = self.logits(inputs).flatten(0, 1).float()
            loss_sum = functional.cross_entropy(
                logits, labels.flatten(), reduction="sum", ignore_index=-100
            )
            (loss_sum / counted).backward()
            total += loss_sum.item()
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None
            rounded = parameter.grad.to(STORAGE[self.config.optimizer.grad_dtype])
            self.masters[name].grad = rounded.float()
        return total / counted

    def update(self, rate: float) -> float:
        """Clip and step; the gradient norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["rate"]
        clip = self.config.train.clip_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(list(self.masters.values()), clip)
        self.optimizer.step()
        return float(norm)


def reference_loop(
    run_dir: Path, steps: int, make: Callable[[Path], ReferenceLoop] = ReferenceLoop
) -> ReferenceResult:
    """Train the run's model on its data for ``steps`` steps."""
    torch.set_num_threads(1)  # several wait for each other when other tests have the cores
    loop = make(run_dir)
    train, result = loop.config.train, ReferenceResult([], [], {}, 0.0)
    for step in range(1, steps + 1):
        rate = learning_rate(loop.config.optimizer, train.steps, step)
        result.losses.append(loop.compute_gradients((step - 1) * train.global_batch))
        result.grad_norms.append(loop.update(rate))
        result.summed_lr += rate
    result.weights = {n: p.detach().numpy().copy() for n, p in loop.masters.items()}
    return result
