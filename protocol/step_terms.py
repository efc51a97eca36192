"""What decides the bits of an optimizer step beside its commit record, its gradients and the state.

Records hold what differs from step to step. The keys here are the same for all steps of a process,
so memory that may hold a committed step still to be settled is adopted only with the same values
(:class:`penstock.shm.memory.MemorySpec`).
"""

from __future__ import annotations

import json

from penstock.protocol.config import Config

STEP_TERMS = (
    "optimizer.betas",
    "optimizer.momentum",
    "optimizer.eps",
    "optimizer.weight_decay",
)


def step_terms(config: Config) -> str:
    """The values of :data:`STEP_TERMS` as text; equal texts lead to equal bits."""
    values = config.optimizer.model_dump(mode="json")
    return json.dumps({key: values[key.partition(".")[2]] for key in STEP_TERMS})
