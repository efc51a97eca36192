"""What a forward keeps: selective recomputation, swapping, and weights bound anew.

:mod:`.store` is the entry and states what is guaranteed; :mod:`.collection` and :mod:`.slots` hold,
:mod:`.weights` looks up, :mod:`.swap` copies, :mod:`.tape` records and runs again what
:mod:`.operators` names.
"""

from penstock.models.saved_activations.operators import OperatorTracker
from penstock.models.saved_activations.slots import Arrival, SavedActivationError
from penstock.models.saved_activations.store import (
    SavedActivations,
    SavePolicy,
    let_go,
    saving_activations,
)
from penstock.models.saved_activations.swap import (
    Allocate,
    CopyStream,
    CudaCopies,
    PlainCopies,
    host_memory,
)
from penstock.models.saved_activations.weights import BoundWeights

__all__ = [
    "Allocate",
    "Arrival",
    "BoundWeights",
    "CopyStream",
    "CudaCopies",
    "OperatorTracker",
    "PlainCopies",
    "SavePolicy",
    "SavedActivationError",
    "SavedActivations",
    "host_memory",
    "let_go",
    "saving_activations",
]
