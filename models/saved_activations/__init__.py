"""What a forward keeps: selective recomputation, swapping, and weights bound anew.

:mod:`.store` is the entry and states what is guaranteed; :mod:`.collection` and :mod:`.slots` hold,
:mod:`.weights` looks up, :mod:`.swap` copies, :mod:`.tape` records and runs again what
:mod:`.operators` names.
"""

from penstock.models.saved_activations.operators import OperatorTracker
from penstock.models.saved_activations.slots import Arrival, KeptError
from penstock.models.saved_activations.store import KeepPolicy, Kept, keeping, let_go
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
    "KeepPolicy",
    "Kept",
    "KeptError",
    "OperatorTracker",
    "PlainCopies",
    "host_memory",
    "keeping",
    "let_go",
]
