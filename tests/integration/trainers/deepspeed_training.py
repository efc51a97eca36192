"""Trains a tiny Llama with DeepSpeed on the CPU: ``python -m ... SETTINGS.json``.

Runs in an environment with DeepSpeed, one process a rank. The last line of its output is the JSON
list of losses. Settings: ``model`` is a folder, ``rows`` are token ids by step, ``steps`` the first
and the last step. ``load`` is a checkpoint's folder; ``universal`` is true for that form.
``own_steps`` true gives each part of the optimizer's state its own step, as docs/CHECKPOINTS.md
advises for stage 3. ``kind``: an optimizer of :func:`optimizer_of`. ``groups`` false makes one
group. ``frozen`` are prefixes of names, ``adapter`` the settings of PEFT's LoRA. ``save_at``: the
step before which the checkpoint is saved; without it, the end. ``light`` leaves frozen parameters
out of the checkpoint, as transformers' Trainer does for an adapter.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def optimizer_of(settings: dict[str, Any], groups: Any) -> Any:
    """Returns AdamW of torch, or one of DeepSpeed's own, which are compiled at their first use."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    kinds = {"torch": torch.optim.AdamW, "cpu": DeepSpeedCPUAdam, "fused": FusedAdam}
    known = {key: settings["optimizer"][key] for key in ("lr", "betas", "eps")}
    return kinds[settings.get("kind", "torch")](groups, **known)


def model_of(settings: dict[str, Any]) -> Any:
    """Returns the model, perhaps with PEFT's adapter or frozen parts."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = FLOATS[settings.get("dtype", "fp32")]
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    model.config.use_cache = False
    if "adapter" in settings:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(**settings["adapter"]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(settings.get("frozen", ()))))
    return model


def engine_of(settings: dict[str, Any]) -> Any:
    """Returns DeepSpeed's engine with the model in it."""
    import deepspeed

    model = model_of(settings)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: Any = [{"params": trained, "weight_decay": settings["optimizer"]["weight_decay"]}]
    if settings.get("groups", True):
        decayed = [p for p in trained if p.dim() > 1]
        plain = [p for p in trained if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": settings["optimizer"]["weight_decay"]},
            {"params": plain, "weight_decay": 0.0},
        ]
    ranks = settings["ranks"]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer_of(settings, [group for group in groups if group["params"]]),
        config={
            "train_batch_size": len(settings["rows"][0]),
            "train_micro_batch_size_per_gpu": len(settings["rows"][0]) // ranks,
            "zero_optimization": {
                "stage": settings["stage"],
                "stage3_param_persistence_threshold": 0,
                **settings.get("zero", {}),
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": settings.get("clip", 0.0),
            "bf16": {"enabled": settings.get("dtype") == "bf16"},
            "checkpoint": {"load_universal": bool(settings.get("universal"))},
        },
    )
    return engine


def train(rank: int, settings: dict[str, Any], losses: Path) -> None:
    """Trains as one rank; rank 0 writes the losses."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    import deepspeed

    torch.set_num_threads(1)
    # gloo carries all messages: DeepSpeed would compile an operator for them at each start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    engine = engine_of(settings)
    if settings.get("load"):
        path, _ = engine.load_checkpoint(settings["load"], tag=settings.get("from"))
        assert path is not None, "DeepSpeed loaded nothing"
    if settings.get("own_steps"):
        for state in engine.optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()
    result = []
    first, last = settings["steps"]
    save_at = settings.get("save_at", last) if settings.get("save") else None
    for step in range(first, last + 1):
        if step == save_at:
            light = settings.get("light", False)
            words = {"tag": settings["tag"], "exclude_frozen_parameters": light}
            engine.save_checkpoint(settings["save"], **words)
        if step == last:
            break
        batch = settings["rows"][step]
        size = len(batch) // settings["ranks"]
        ids = torch.tensor(batch[rank * size : (rank + 1) * size])
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double() / settings["ranks"]
        torch.distributed.all_reduce(mean)
        result.append(mean.item())
    if rank == 0:
        losses.write_text(json.dumps(result))


def main() -> None:
    """Starts the ranks and prints the losses."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(settings["port"]),
        "WORLD_SIZE": str(settings["ranks"]),
        "LOCAL_SIZE": str(settings["ranks"]),
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
    }
    with tempfile.TemporaryDirectory() as folder:
        losses = Path(folder) / "losses.json"
        torch.multiprocessing.spawn(  # type: ignore[no-untyped-call]
            train, (settings, losses), nprocs=settings["ranks"]
        )
        print(losses.read_text())


if __name__ == "__main__":
    main()
