"""A tiny llama that transformers' Trainer trains on fixed batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

LLAMA: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
    **{"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False},
}
BATCH, LENGTH = 4, 16
SETTINGS: dict[str, Any] = {
    **{"learning_rate": 1e-2, "weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 1.0},
    **{"lr_scheduler_type": "linear", "warmup_steps": 4, "seed": 1},
}


def tokens(steps: int) -> torch.Tensor:
    """Returns one text, of which each sample is ``LENGTH`` tokens, with the next one as label."""
    generator = torch.Generator().manual_seed(3)
    count = steps * BATCH * LENGTH + 1
    # Squares make small ids frequent, so that there is something to learn.
    return (torch.rand(count, generator=generator) ** 2 * LLAMA["vocab_size"]).long()


def new_model(**fields: object) -> Any:
    """Returns a model with random weights."""
    tqdm.monitor_interval = 0  # its thread would outlive the test
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**LLAMA, **fields}))


@dataclass(frozen=True)
class Trained:
    """A checkpoint. ``losses``: of all steps. ``moments``: the optimizer's, after the last step,
    by array and name.
    """

    path: Path
    losses: list[float]
    moments: dict[tuple[str, str], torch.Tensor]


class _InOrder(Trainer):
    """Takes the samples in their order, and keeps the losses of its steps."""

    losses: list[float]

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Iterable[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def train(
    folder: Path,
    steps: int = 1,
    *,
    saved_at: int | None = None,
    model: Any = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    **settings: Any,
) -> Trained:
    """Trains and saves once, by default at the end."""
    saved_at = saved_at or steps
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        save_steps=saved_at,
        logging_strategy="no",
        **{**SETTINGS, **settings},
    )
    model = new_model() if model is None else model
    samples = tokens(steps).unfold(0, LENGTH + 1, LENGTH)
    trainer = _InOrder(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in samples],
        optimizers=(None if optimizer is None else optimizer(model), None),
    )
    trainer.losses = []
    trainer.train()
    state = trainer.optimizer.state
    moments = {
        (array, name): state[parameter][array]
        for name, parameter in model.named_parameters()
        for array in ("exp_avg", "exp_avg_sq")
        if array in state.get(parameter, {})
    }
    return Trained(folder / f"checkpoint-{saved_at}", trainer.losses, moments)


def saved_untrained(folder: Path, model: Any) -> Path:
    """Saves the files of a Trainer after one step with the gradient 1; returns the folder."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    progress = {"global_step": 1, "train_batch_size": BATCH, "epoch": 0.1}
    (folder / "trainer_state.json").write_text(json.dumps(progress))
    return folder
