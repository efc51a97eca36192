"""What a forward keeps: selective recomputation, swapping, and weights bound anew.

:mod:`.store` is the entry and states what is guaranteed; :mod:`.collection` and :mod:`.slots` hold,
:mod:`.weights` looks up, :mod:`.tape` records and runs again what :mod:`.operators` names. Copies
are asked of :mod:`penstock.models.torch_device`.
"""

from penstock.models.saved_activations.operators import OperatorTracker
from penstock.models.saved_activations.slots import SavedActivationError
from penstock.models.saved_activations.store import (
    SavedActivations,
    SavePolicy,
    let_go,
    saving_activations,
)
from penstock.models.saved_activations.weights import BoundWeights

__all__ = [
    "BoundWeights",
    "OperatorTracker",
    "SavePolicy",
    "SavedActivationError",
    "SavedActivations",
    "let_go",
    "saving_activations",
]
