"""Checkpoints of other trainers: pickles, and files of ``torch.save``."""

from __future__ import annotations

import argparse
import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from penstock.models.exchange.deepspeed.zero import ZeroReader
from penstock.models.exchange.pickles import PickledTensor, load_pickle, load_torch
from tests.fuzz.target import Target, from_file

VALUE: dict[str, Any] = {
    "param": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(4, dtype=torch.bfloat16)[1:],
    "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "step": 3}],
    "others": OrderedDict(a=torch.Size([2]), namespace=argparse.Namespace(a=1), seen={1, "a"}),
}


def _load(folder: Path) -> None:
    value = load_torch(folder / "a.pt")
    for item in value.values() if isinstance(value, dict) else ():
        if isinstance(item, PickledTensor):
            item.load()


def _saved() -> list[bytes]:
    file = io.BytesIO()
    torch.save(VALUE, file)
    return [file.getvalue()]


def _pickled() -> list[bytes]:
    plain = {key: value for key, value in VALUE.items() if key not in ("param", "half")}
    return [pickle.dumps(plain, protocol) for protocol in (0, 2, 4, 5)]


FLAT = {"exp_avg": torch.ones(8), "exp_avg_sq": torch.ones(8), "step": torch.tensor(3.0)}
ZERO: dict[str, Any] = {
    "optimizer_state_dict": {
        "zero_stage": 1,
        "partition_count": [1],
        "single_partition_of_fp32_groups": [torch.arange(8.0)],
        "base_optimizer_state": {
            "state": {0: FLAT},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}],
        },
        "param_alignment_paddings": [[0, 0]],
    },
    "param_shapes": [OrderedDict(a=torch.Size([2, 3]), b=torch.Size([2]))],
    "module": {"c": torch.ones(2)},
    "global_steps": 3,
}


def _zero(folder: Path) -> None:
    """Opens a directory of ZeRO with the same content in each file."""
    content = (folder / "a.pt").read_bytes()
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        (folder / name).write_bytes(content)
    for tensor in ZeroReader().open(folder).tensors[:16]:
        tensor.load()


def _zeros() -> list[bytes]:
    file = io.BytesIO()
    torch.save(ZERO, file)
    return [file.getvalue()]


PICKLES = (
    Target(
        name="zero-files",
        open=from_file("a.pt", _zero),
        covers=("models.exchange.deepspeed.common.read_model_states",),
        seeds=_zeros,
        examples=100,
    ),
    Target(
        name="torch-files",
        open=from_file("a.pt", _load),
        covers=(
            "models.exchange.pickles._Archive._start",
            "models.exchange.pickles.PickledTensor.load",
        ),
        seeds=_saved,
        examples=100,
    ),
    Target(
        name="pickles",
        open=from_file("a.pkl", lambda folder: load_pickle(folder / "a.pkl")),
        covers=("models.exchange.unpickler.Unpickler.load",),
        seeds=_pickled,
        examples=100,
    ),
)
