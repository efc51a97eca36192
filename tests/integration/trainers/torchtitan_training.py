"""Trains torchtitan's llama3 on the CPU: ``python -m ... SETTINGS.json``.

Runs in an environment with torchtitan: its model, its container of optimizers, and the states that
its CheckpointManager hands to torch's DCP. Saves the initial weights by torchtitan's own adapter as
a Hugging Face file. The last line of the output is the JSON list of losses. Settings: ``rows`` are
token ids by step, ``folder`` receives ``initial.safetensors`` and ``step-N``, ``save_at`` is N.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from torch.nn import functional


@dataclass
class TrainState:
    """The counters of torchtitan's Trainer."""

    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def main() -> None:
    from torchtitan.components.checkpoint import ModelWrapper
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.models.llama3 import (
        Llama3StateDictAdapter,
        Transformer,
        TransformerModelArgs,
    )

    settings = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(settings["folder"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = TransformerModelArgs(**settings["model"])
    model = Transformer(sizes)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    tensors = Llama3StateDictAdapter(sizes, None).to_hf(model.state_dict())
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "initial.safetensors")
    optimizers = OptimizersContainer([model], torch.optim.AdamW, settings["optimizer"])
    state, losses = TrainState(), []
    for step, rows in enumerate(settings["rows"], start=1):
        ids = torch.tensor(rows)
        logits = model(ids[:, :-1]).flatten(0, 1)
        loss = functional.cross_entropy(logits.float(), ids[:, 1:].flatten())
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
        state.step = step
        if step == settings["save_at"]:
            states = {"optimizer": optimizers, "train_state": state}
            states |= ModelWrapper(model).state_dict()  # as in _flattened_model_states_sd
            dcp.save(states, checkpoint_id=folder / f"step-{step}", no_dist=True)
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
