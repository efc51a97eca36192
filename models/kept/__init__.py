"""What a forward keeps: selective recomputation, swapping, and weights bound anew.

:mod:`.store` is the entry and states what is guaranteed; :mod:`.collection` and :mod:`.slots` hold,
:mod:`.weights` looks up, :mod:`.swap` copies, :mod:`.tape` records and runs again what
:mod:`.operators` names.
"""

from penstock.models.kept.operators import OperatorTracker
from penstock.models.kept.slots import Arrival, KeptError
from penstock.models.kept.store import KeepPolicy, Kept, keeping, let_go
from penstock.models.kept.swap import Allocate, CopyStream, CudaCopies, PlainCopies, host_memory
from penstock.models.kept.weights import BoundWeights

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
