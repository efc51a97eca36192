"""What a forward keeps: selective recomputation, swapping, and weights bound anew.

:mod:`.store` is the entry and states what is guaranteed; :mod:`.saved_tensors` and :mod:`.tensor_slots` hold,
:mod:`.weights` looks up, :mod:`.op_log` records and runs again what :mod:`.operators` names. Copies
are asked of :mod:`penstock.models.torch_device`.
"""

from penstock.models.saved_activations.operators import OperatorTracker
from penstock.models.saved_activations.store import (
    SavedActivations,
    SavedTensorPolicy,
    let_go,
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
    "let_go",
    "saving_activations",
]
