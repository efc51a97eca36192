"""Folders of torch.distributed.checkpoint: ``.metadata`` with a file of zeros that it names, and
parts of weights in safetensors.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import torch
from safetensors.torch import save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from penstock.models.exchange.dcp.metadata import METADATA
from penstock.models.exchange.dcp.reader import DcpReader
from penstock.models.exchange.dcp.shards import sharded_weights
from tests.fuzz.target import Target, from_file

FILE = "__0_0.distcp"


def _open(folder: Path) -> None:
    (folder / FILE).write_bytes(bytes(64))
    for tensor in DcpReader().open(folder).tensors[:16]:
        tensor.load()


def _metadata() -> list[bytes]:
    halves = [
        ChunkStorageMetadata(offsets=torch.Size([row, 0]), sizes=torch.Size([1, 3]))
        for row in (0, 1)
    ]
    described = TensorStorageMetadata(
        properties=TensorProperties(dtype=torch.float32), size=torch.Size([2, 3]), chunks=halves
    )
    places = {MetadataIndex("model.a", half.offsets): _StorageInfo(FILE, 0, 64) for half in halves}
    tensors = Metadata({"model.a": described}, {"model.a": ("model", "a")}, places)
    lr = "optimizer.param_groups.a.lr"
    values = Metadata(
        {lr: BytesStorageMetadata()},
        {lr: ("optimizer", "param_groups.a.lr")},
        {MetadataIndex(lr): _StorageInfo(FILE, 0, 64)},
    )
    return [pickle.dumps(each, protocol) for each in (tensors, values) for protocol in (2, 4)]


def _open_parts(folder: Path) -> None:
    for weight in sharded_weights(folder).values():
        weight.load()


def _parts() -> list[bytes]:
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(2)}
    places = {name: {"saved_offsets": [0] * tensor.ndim} for name, tensor in tensors.items()}
    return [save(tensors, {"DCP_SHARDING_INFO": json.dumps(places)}), save(tensors)]


DCP = (
    Target(
        name="dcp-parts",
        open=from_file("shard-00001-model-00001-of-00001.safetensors", _open_parts),
        covers=("models.exchange.dcp.shards._places",),
        seeds=_parts,
        examples=100,
    ),
    Target(
        name="dcp-metadata",
        open=from_file(METADATA, _open),
        covers=("models.exchange.dcp.metadata.read_contents",),
        seeds=_metadata,
        examples=100,
    ),
)
