"""Losses of whole runs against a plain torch loop over the samples, one at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from penstock.models.data.batch import MicroBatch
from penstock.protocol.run.rundir import RunDirectory
from penstock.workers.data import micro_batches, open_dataset
from tests.data.sft import make as sft
from tests.system import conftest as H

STEPS, BATCH, RATE, DECAY = 8, 4, 0.002, 0.1
TOLERANCE = 1e-6


def settings(folder: Path, *sections: dict[str, Any]) -> dict[str, Any]:
    """Keys of a run on packed conversations."""
    logging.disable_progress_bar()  # its monitor is a thread that stays
    sft.save(folder / "model", "qwen2_5")
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in sft.records("messages")))
    made: dict[str, Any] = {
        "model": {"hf": None, "path": str(folder / "model"), "dtype": "fp32"},
        "data": {"path": str(path), "tokenizer": None, "sequence_length": 256},
        "train": {"steps": STEPS, "global_batch": BATCH, "micro_batch": 1},
        "optimizer": {
            "lr": RATE,
            "betas": [0.9, 0.999],
            "weight_decay": DECAY,
            "schedule": "constant",
            "warmup_steps": 0,
            "min_lr": 0.0,
        },
    }
    for section in sections:
        made = H.merge(made, section)
    return made


def batches(run_dir: Path) -> list[MicroBatch]:
    """The global batches of all steps; some of their rows have several samples."""
    dataset = open_dataset(run_dir / "data", "train", RunDirectory(run_dir).config)
    read = [micro_batches(dataset, step * BATCH, BATCH, BATCH)[0][0] for step in range(STEPS)]
    assert sum(batch.document_ids is not None for batch in read) > STEPS // 2
    return read


def samples(batch: MicroBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels of the batch's samples with counted tokens."""
    ids, labels, documents = batch.input_ids, batch.labels, batch.document_ids
    parts = []
    for row in range(BATCH):
        numbers = np.zeros_like(ids[row]) if documents is None else documents[row]
        for number in np.unique(numbers):
            kept = numbers == number
            if (labels[row][kept] != -100).any():
                parts.append((torch.tensor(ids[row][kept]), torch.tensor(labels[row][kept])))
    return parts


def plain_losses(run_dir: Path, *, by_sample: bool) -> list[float]:
    """The losses of transformers' model, torch's cross-entropy and AdamW."""
    folder = RunDirectory(run_dir).config.model.path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.ndim >= 2]},
            {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=RATE,
        betas=(0.9, 0.999),
        weight_decay=DECAY,
    )
    criterion = torch.nn.CrossEntropyLoss(reduction="mean" if by_sample else "sum")
    losses = []
    for parts in map(samples, batches(run_dir)):
        made = [criterion(model(input_ids=ids[None]).logits[0], labels) for ids, labels in parts]
        counted = sum(int((labels != -100).sum()) for _, labels in parts)
        loss = torch.stack(made).sum() / (len(parts) if by_sample else counted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def check(run_dir: Path, expected: list[float]) -> None:
    """The run's losses are the expected ones."""
    losses = [line["loss"] for line in H.metrics(run_dir)]
    assert len(losses) == len(expected)
    worst = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
    print(f"largest relative difference {worst:.2g}")
    assert worst <= TOLERANCE, list(zip(losses, expected, strict=True))


def test_samples_count_alike(runner: H.Runner) -> None:
    """Two replicas of two micro-batches each, with packed rows."""
    changes = {"train": {"loss_mean": "samples"}, "schedule": {"replicas": 2}}
    run_dir = runner.train(runner.configure("run", settings(runner.root, changes)))
    expected = plain_losses(run_dir, by_sample=True)
    check(run_dir, expected)
    others = plain_losses(run_dir, by_sample=False)
    assert abs(others[0] / expected[0] - 1) > 1e-4, "both means are the same"
