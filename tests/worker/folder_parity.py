"""A model folder through real workers, beside transformers' own model of that folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from penstock.config.schema import Config, parse_config
from penstock.models.checkpoints.constants import read_constants
from penstock.models.checkpoints.export import export_hf
from penstock.models.checkpoints.initial import initial_blocks
from penstock.models.data.batch import MicroBatch
from penstock.models.prepare import prepare
from penstock.models.surgery.hf import load_run_config
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import DType
from penstock.workers.epoch import Job
from tests.worker.cluster import Cluster, build_cluster

MICRO_BATCHES, ROWS = 2, 2
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Differences between a run and a plain loop over the same folder.

    ``loss``: of the summed losses, relative. ``gradients``: the largest of any tensor, in norm,
    relative. ``exported``: names of tensors that an export of the untrained run lacks, has beside
    those of the folder, or has with other numbers.
    """

    loss: float
    gradients: float
    exported: list[str]


def configured(
    folder: Path,
    run_dir: Path,
    *,
    length: int = 12,
    dtype: str = "fp32",
    workers: int = 2,
    progress: Callable[[str], None] = lambda _: None,
) -> Config:
    """Returns a prepared run over random tokens of the folder's model.

    Raises:
        PenstockError: the folder is refused.
    """
    tokens = np.random.default_rng(0).integers(2, 61, 16 * (length + 1), dtype=np.uint16)
    run_dir.mkdir(exist_ok=True)
    tokens.tofile(run_dir.parent / f"{run_dir.name}.bin")
    config = parse_config(
        {
            "run": {"seed": 7, "dir": str(run_dir)},
            "model": {"path": str(folder), "dtype": dtype},
            "data": {
                "tokens": str(run_dir.parent / f"{run_dir.name}.bin"),
                "sequence_length": length,
            },
            "train": {"global_batch": ROWS * MICRO_BATCHES, "micro_batch": ROWS},
            "schedule": {"scheme": "1f1b"},
            "cluster": {"workers": workers, "nodes": [{"name": "a"}]},
        }
    )
    (run_dir / "resolved.yaml").write_text(config.to_yaml())
    prepare(config, run_dir, progress=progress)
    return config


def load_causal(folder: Path, dtype: torch.dtype) -> Any:
    """Returns the folder's model as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


Load = Callable[[Path, torch.dtype], Any]


def compare(
    folder: Path,
    run_dir: Path,
    *,
    length: int = 12,
    dtype: str = "fp32",
    workers: int = 2,
    load: Load = load_causal,
) -> Comparison:
    """Prepares a run from a folder, trains one attempt, exports its initial weights, and returns
    the differences to transformers' model, as ``load`` gets it.

    Raises:
        PenstockError: the folder is refused.
    """
    config = configured(folder, run_dir, length=length, dtype=dtype, workers=workers)
    with ExitStack() as stack:
        cluster = build_cluster(stack, config, timeout_s=600, constants=read_constants(run_dir))
        job = _job(length)
        loss, counted = cluster.train(job)
        assert counted == job.counted_tokens
        gradients = cluster.gradients()
        reference = load(folder, TORCH_DTYPES[dtype])
        wanted_loss, wanted = plain_loop(reference, job)
        wanted = _by_our_names(cluster, reference, wanted)
    return Comparison(
        loss=abs(loss - wanted_loss) / wanted_loss,
        gradients=_largest_difference(gradients, wanted),
        exported=exported_differences(folder, config, run_dir, DType(dtype), load),
    )


def plain_loop(model: Any, job: Job) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns the loss sum and the gradients of transformers' model itself."""
    model.train()
    total = 0.0
    for batch in job.batches:
        logits = model(input_ids=torch.from_numpy(batch.input_ids), use_cache=False).logits
        labels = torch.from_numpy(batch.labels).flatten()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels, reduction="sum", ignore_index=-100
        )
        (loss * job.loss_weight).backward()
        total += loss.item()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    return total, gradients


def exported_differences(
    folder: Path, config: Config, run_dir: Path, dtype: DType, load: Load = load_causal
) -> list[str]:
    """Returns the names of tensors that an export of the initial weights has otherwise than the
    model that transformers loads from the folder, by file and as a loaded model.
    """
    table, hf_config = RunDirectory(run_dir).table, load_run_config(run_dir)
    blocks = dict(initial_blocks(config, hf_config, table, range(len(table.blocks))))

    def read_block(block: int) -> dict[str, Any]:
        return {name: value.numpy() for name, value in blocks[block].items()}

    out = run_dir.parent / f"{run_dir.name}-export"
    constants = read_constants(run_dir)
    export_hf(hf_config, table, read_block, out, dtype=dtype, carried={}, constants=constants)
    reference = load(folder, TORCH_DTYPES[dtype])
    again = AutoModelForCausalLM.from_pretrained(out, dtype=TORCH_DTYPES[dtype])
    assert type(again) is type(reference)
    theirs, ours = reference.state_dict(), again.state_dict()
    differing = [
        name
        for name in sorted(theirs.keys() | ours.keys())
        if name not in ours or name not in theirs or not torch.equal(theirs[name], ours[name])
    ]
    reference.save_pretrained(run_dir.parent / f"{run_dir.name}-saved")
    return differing + sorted(_names(out) ^ _names(run_dir.parent / f"{run_dir.name}-saved"))


def _names(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    return names


def _job(length: int) -> Job:
    random = np.random.default_rng(3)
    batches = []
    for _ in range(MICRO_BATCHES):
        tokens = random.integers(2, 61, (ROWS, length + 1))
        labels = tokens[:, 1:].copy()
        labels[random.random(labels.shape) < 0.2] = -100
        batches.append(MicroBatch(input_ids=tokens[:, :-1].copy(), labels=labels))
    return Job(
        phase="train",
        number=1,
        base_version=0,
        data_position=0,
        loss_scale=1.0,
        batches=batches,
        counted_tokens=sum(batch.counted_tokens for batch in batches),
    )


def _by_our_names(
    cluster: Cluster, model: Any, gradients: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the gradients of distinct parameters by the names that the table has for them."""
    ours = {t.name for block in cluster.table.blocks for t in block.tensors if t.trainable}
    every = dict(model.named_parameters(remove_duplicate=False))
    assert ours <= every.keys(), sorted(ours - every.keys())
    distinct = {id(every[name]) for name in ours}
    missing = [name for name, parameter in every.items() if id(parameter) not in distinct]
    assert not missing, missing
    return {name: gradients[name] for name in ours}


def _largest_difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    size = max(float(value.float().norm()) for value in wanted.values())
    return max(
        float((found[name] - wanted[name].float()).norm())
        / max(float(wanted[name].float().norm()), 1e-6 * size)
        for name in wanted
    )
