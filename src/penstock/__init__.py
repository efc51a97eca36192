"""Penstock trains language models that do not fit in the memory of the GPUs at hand.

Model state lives in host memory owned by daemons; workers execute instruction lists; CPU cores run
the optimizer at the same time; a scheduler commits or rolls back every step. Start with
``penstock --help`` or :func:`penstock.train`.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

from penstock.host.requirements import python_objection

__version__ = "0.1.0"
__all__ = [
    "Estimate",
    "Evaluation",
    "Exported",
    "Generation",
    "PenstockError",
    "Run",
    "TrainResult",
    "__version__",
    "estimate",
    "evaluate",
    "export",
    "generate",
    "load_run",
    "train",
]

# Before anything else: most modules cannot even be read by an older Python.
if _objection := python_objection(sys.version_info[:3]):
    raise ImportError(_objection)

# gRPC reads the variable on import. It would write lines about forks, ports and unauthenticated
# connections to the terminal; our logs and errors have them.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

if TYPE_CHECKING:
    from penstock.client.api import (
        Estimate,
        Evaluation,
        Exported,
        Generation,
        Run,
        TrainResult,
        estimate,
        evaluate,
        export,
        generate,
        load_run,
        train,
    )
    from penstock.host.errors import PenstockError


def __getattr__(name: str) -> Any:
    """Import the Python entry point lazily: daemons start without the client's dependencies."""
    if name in __all__ and name not in ("PenstockError", "__version__"):
        from penstock.client import api

        return getattr(api, name)
    if name == "PenstockError":
        from penstock.host.errors import PenstockError

        return PenstockError
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
