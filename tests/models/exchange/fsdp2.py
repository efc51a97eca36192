"""A tiny llama in FSDP2, on CPUs with gloo, saved and loaded by torch.distributed.checkpoint.

``python -m tests.models.exchange.fsdp2 FOLDER RANK`` is one of :data:`RANKS` processes. A job of
``jobs.json`` trains steps of its data, after the checkpoint ``load`` if the job names one. The job
writes losses, the checkpoint ``save``, and ``full``: the complete numbers as torch gathers them.
``save-trainer`` and ``save-automodel`` are the same checkpoint in the form of other trainers.
``automodel`` has settings of Automodel's own checkpoints by name.
``dtype`` is that of parameters; ``computes`` is the type of a step over parameters in fp32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, StateDictType, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, TrainerState

RANKS = 2
LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "vocab_size": 61},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 32, "tie_word_embeddings": False},
}
ROWS, LENGTH = 4, 16
RATE, BETAS, EPS, DECAY = 5e-3, (0.9, 0.95), 1e-8, 0.1


def tokens(steps: int) -> torch.Tensor:
    """Returns a fixed text for some steps, with one token more."""
    generator = torch.Generator().manual_seed(7)
    count = steps * ROWS * LENGTH + 1
    # Squares make small ids frequent, so that there is something to learn.
    return (torch.rand(count, generator=generator) ** 2 * LLAMA["vocab_size"]).long()


def batches(steps: int) -> torch.Tensor:
    """Returns the text as rows of ``LENGTH`` tokens and the next one, by step and row."""
    return tokens(steps).unfold(0, LENGTH + 1, LENGTH).reshape(steps, ROWS, LENGTH + 1)


def model_of(fields: dict[str, Any], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Returns a model with random weights, the same in each process."""
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(LlamaConfig(**fields)).to(dtype)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW with a group that decays and a group that does not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss of the next tokens, in fp32."""
    logits = model(ids).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def work(job: dict[str, Any], rank: int) -> None:
    """Does a job as one of the processes."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model = model_of(job["model"], getattr(torch, job.get("dtype", "float32")))
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not any(part in name for part in job.get("freeze", ()))
    computes = getattr(torch, job["computes"]) if "computes" in job else None
    policy = MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=computes and torch.float32)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = optimizer_of(model)
    flat = StateDictOptions(flatten_optimizer_state_dict=not job.get("nested", False))
    if job.get("load"):
        weights, state = get_state_dict(model, optimizer, options=flat)
        values = {"model": weights, "optimizer": state}
        dcp.load(values, checkpoint_id=job["load"])
        set_state_dict(
            model,
            optimizer,
            model_state_dict=weights,
            optim_state_dict=state,
            options=flat,
        )
    losses = []
    saved_at = job.get("save_after", len(job["steps"]))
    for number, step in enumerate([*job["steps"], None]):
        if number == saved_at:
            _save(job, model, optimizer, flat, rank)
        if step is None:
            break
        ids = torch.load(job["data"])[step]
        loss = loss_of(model, ids.chunk(RANKS)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / RANKS)
    if rank == 0:
        Path(job["losses"]).write_text(json.dumps(losses))


def trainer_folder(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    kind: StateDictType = StateDictType.SHARDED_STATE_DICT,
) -> Path:
    """Saves as transformers' Trainer does with FSDP2, through accelerate."""
    PartialState(cpu=True)  # accelerate's log asks for it
    folder.mkdir(exist_ok=True)
    plugin = SimpleNamespace(fsdp_version=2, state_dict_type=kind)
    plugin.state_dict_config = SimpleNamespace(offload_to_cpu=False, rank0_only=False)
    accelerator = SimpleNamespace(num_processes=1, process_index=0, is_fsdp2=True)
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    state = TrainerState(global_step=step, train_batch_size=ROWS // RANKS)
    state.save_to_json(str(folder / "trainer_state.json"))
    return folder


def automodel_folder(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """Saves as NeMo Automodel does: weights of each rank in safetensors, the optimizer as DCP."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    writer = HuggingFaceStorageWriter(path=str(folder / "model"), save_distributed=True)
    dcp.save(weights, storage_writer=writer)
    dcp.save({"optim": state, "sched": {"num_steps": 3}}, checkpoint_id=folder / "optim")
    return folder


def _automodel(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, str]
) -> None:
    """Saves through NeMo Automodel itself, where it is installed."""
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig

    rank = dist.get_rank()
    config = CheckpointingConfig(checkpoint_dir=folder.parent, **options)
    checkpointer = config.build(dp_rank=rank, tp_rank=0, pp_rank=0)
    checkpointer.save_model(model, str(folder))
    checkpointer.save_optimizer(optimizer, model, str(folder))
    checkpointer.close()


def _save(
    job: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: StateDictOptions,
    rank: int,
) -> None:
    if job.get("save"):
        weights, state = get_state_dict(model, optimizer, options=options)
        values = {"model": weights, job.get("section", "optimizer"): state}
        dcp.save(values, checkpoint_id=job["save"])
        step = job.get("save_after", len(job["steps"]))
        trainer_folder(Path(f"{job['save']}-trainer"), model, optimizer, step)
        automodel_folder(Path(f"{job['save']}-automodel"), model, optimizer)
    for name, settings in job.get("automodel", {}).items():
        _automodel(Path(f"{job['save']}-{name}-automodel"), model, optimizer, settings)
    if job.get("full"):
        gathered = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
        weights, state = get_state_dict(model, optimizer, options=gathered)
        if rank == 0:
            torch.save({"model": weights, "optimizer": state}, job["full"])


def run(
    folder: Path, *jobs: dict[str, Any], python: str | Path = sys.executable
) -> list[list[float]]:
    """Does jobs with :data:`RANKS` processes; returns the losses of each job."""
    listed = [{**job, "losses": str(folder / f"losses-{n}.json")} for n, job in enumerate(jobs)]
    (folder / "meeting").unlink(missing_ok=True)
    (folder / "jobs.json").write_text(json.dumps(listed))
    words = [python, "-m", "tests.models.exchange.fsdp2", str(folder)]
    root = Path(__file__).parents[3]
    variables = {**os.environ, "PYTHONPATH": str(root)}
    members = [
        subprocess.Popen([*words, str(rank)], cwd=root, env=variables) for rank in range(RANKS)
    ]
    assert [member.wait(timeout=500) for member in members] == [0] * RANKS
    return [json.loads(Path(job["losses"]).read_text()) for job in listed]


def main(folder: Path, rank: int) -> None:
    """Does the jobs of a folder as one of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=RANKS
    )
    for job in json.loads((folder / "jobs.json").read_text()):
        work(job, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # threads of groups that libraries made would end the process with a signal
