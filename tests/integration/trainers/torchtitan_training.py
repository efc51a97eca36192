"""Trains a model of torchtitan on the CPU: ``python -m ... SETTINGS.json``.

Runs in an environment with torchtitan: its model, its optimizers and schedulers, and its
CheckpointManager. The last line of the output is the JSON list of losses. Settings: ``family`` is
llama3 or qwen3. ``rows`` are token ids by step. ``folder`` receives ``checkpoint/step-N`` each
``save_every`` steps, and ``initial.safetensors`` by torchtitan's own adapter. ``load`` is the
folder of a checkpoint; the training goes on at its step.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional


@dataclass
class TrainState:
    """The counters of torchtitan's Trainer."""

    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Loader(TrainState):
    """A loader of data with a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": b"a pickle of torchdata", "world_size": 1}


def family_of(settings: dict[str, Any]) -> tuple[Any, Any]:
    """Returns a model of torchtitan, and the adapter of its weights to transformers."""
    if settings["family"] == "llama3":
        from torchtitan.models.llama3 import (
            Llama3StateDictAdapter,
            Transformer,
            TransformerModelArgs,
        )

        sizes: Any = TransformerModelArgs(**settings["model"])
        return Transformer(sizes), Llama3StateDictAdapter(sizes, None)
    from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs
    from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

    sizes = Qwen3ModelArgs(**settings["model"])
    return Qwen3Model(sizes), Qwen3StateDictAdapter(sizes, None)


def main() -> None:
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.job_config import Checkpoint, LRScheduler

    settings = json.loads(Path(sys.argv[1]).read_text())
    folder, rows = Path(settings["folder"]), settings["rows"]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, adapter = family_of(settings)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    tensors = adapter.to_hf(model.state_dict())
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "initial.safetensors")
    optimizers = OptimizersContainer([model], torch.optim.AdamW, settings["optimizer"])
    schedulers = build_lr_schedulers(optimizers, LRScheduler(warmup_steps=0), len(rows))
    state, losses = TrainState(), []
    manager = CheckpointManager(
        dataloader=Loader(),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        checkpoint_config=Checkpoint(
            enable=True,
            interval=settings["save_every"],
            keep_latest_k=0,
            initial_load_path=settings.get("load"),
            initial_load_model_only=False,
            exclude_from_loading=["dataloader"],
        ),
        sd_adapter=adapter,
        base_folder=str(folder),
    )
    assert manager.load() == ("load" in settings)
    for ids in map(torch.tensor, rows[state.step :]):
        logits = model(ids[:, :-1]).flatten(0, 1)
        loss = functional.cross_entropy(logits.float(), ids[:, 1:].flatten())
        loss.backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
        state.step += 1
        manager.save(state.step)
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
