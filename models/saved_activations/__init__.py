"""Activations kept from forward to backward: selective recomputation, swaps, moved weights.

:mod:`.store` is the entry and states the guarantees. :mod:`.saved_tensors` and :mod:`.tensor_slots`
hold tensors, :mod:`.weights` finds weights. :mod:`.op_log` records kernels and runs them again;
:mod:`.operators` names their operators. Copies go through :mod:`penstock.models.torch_device`.
"""

from penstock.models.saved_activations.operators import OperatorTracker
from penstock.models.saved_activations.store import (
    SavedActivations,
    SavedTensorPolicy,
    release_values,
    saving_activations,
)
from penstock.models.saved_activations.tensor_slots import SavedActivationError
from penstock.models.saved_activations.weights import BoundWeights

__all__ = [
    "BoundWeights",
    "OperatorTracker",
    "SavedActivationError",
    "SavedActivations",
    "SavedTensorPolicy",
    "release_values",
    "saving_activations",
]
