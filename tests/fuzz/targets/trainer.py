"""Checkpoints of transformers' Trainer."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.models.exchange.trainer import TrainerCheckpoint
from tests.fuzz.target import Decoder, Form, Target

PROGRESS = {"global_step": 3, "train_batch_size": 4, "epoch": 0.5}


def _bytes_of(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@contextmanager
def _json(folder: Path) -> Iterator[Decoder]:
    (folder / "pytorch_model.bin").write_bytes(_bytes_of({"w": torch.ones(2)}))
    index = folder / "pytorch_model.bin.index.json"

    def read(data: bytes) -> None:
        (folder / "trainer_state.json").write_bytes(data)
        (folder / "pytorch_model.bin").rename(folder / "a.bin")
        index.write_bytes(data)
        try:
            TrainerCheckpoint().open(folder)
        finally:
            index.unlink()
            (folder / "a.bin").rename(folder / "pytorch_model.bin")

    yield read


@contextmanager
def _pickles(folder: Path) -> Iterator[Decoder]:
    (folder / "trainer_state.json").write_text(json.dumps(PROGRESS))

    def read(data: bytes) -> None:
        for name in ("optimizer.pt", "pytorch_model.bin", "training_args.bin"):
            (folder / name).write_bytes(data)
        TrainerCheckpoint().open(folder)

    yield read


@contextmanager
def _schedules(folder: Path) -> Iterator[Decoder]:
    (folder / "trainer_state.json").write_text(json.dumps(PROGRESS))
    weights, optimizer, _ = _optimizers()
    (folder / "pytorch_model.bin").write_bytes(weights)
    (folder / "optimizer.pt").write_bytes(optimizer)

    def read(data: bytes) -> None:
        (folder / "scheduler.pt").write_bytes(data)
        TrainerCheckpoint().open(folder)

    yield read


def _optimizers() -> list[bytes]:
    weights = {"w": torch.nn.Parameter(torch.ones(2, 3)), "b": torch.nn.Parameter(torch.ones(3))}
    optimizer = torch.optim.AdamW([{"params": [weight]} for weight in weights.values()])
    sum(weight.sum() for weight in weights.values()).backward()
    optimizer.step()
    values = {name: weight.detach() for name, weight in weights.items()}
    # One file for all names: settings and state of the optimizer, or weights.
    return [_bytes_of(value) for value in (values, optimizer.state_dict(), {})]


TRAINER = (
    Target(
        name="trainer-json",
        open=_json,
        covers=(
            "models.exchange.trainer._progress",
            "models.exchange.pickled_weights.pickled_files",
        ),
        seeds=lambda: [json.dumps({**PROGRESS, "weight_map": {"w": "a.bin"}}).encode()],
        form=Form.JSON,
    ),
    Target(
        name="trainer-pickles",
        open=_pickles,
        covers=(
            "models.exchange.trainer._read_optimizer",
            "models.exchange.pickled_weights.PickledWeights._read_headers",
        ),
        seeds=_optimizers,
    ),
    Target(
        name="trainer-schedules",
        open=_schedules,
        covers=("models.exchange.trainer._read_schedule",),
        seeds=lambda: [
            _bytes_of({"_last_lr": [1e-3, 1e-3], "base_lrs": [1e-2, 1e-2], "last_epoch": 3})
        ],
    ),
)
