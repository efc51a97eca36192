"""What each kind of preloader imports."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PLAIN, TORCH = "plain", "torch"

_DAEMONS = (
    "penstock.daemons.node.main",
    "penstock.daemons.scheduler.main",
    "penstock.daemons.memory.main",
    "penstock.daemons.mirror.main",
    "penstock.daemons.optimizer.main",
    "penstock.daemons.metrics.main",
    "penstock.daemons.observer.main",
)
MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        PLAIN: _DAEMONS,
        TORCH: (
            "penstock.workers.main",
            "penstock.models.surgery.hf",
            "transformers.modeling_utils",
            "transformers.modeling_layers",
        ),
    }
)
"""What each kind imports, behind what the kinds before it in :data:`STAGES` do. Nothing of it may
start a thread: forks have only the thread that asked for them, with whatever locks the others held.
"""
STAGES: Mapping[str, tuple[str, ...]] = MappingProxyType({PLAIN: (PLAIN,), TORCH: (PLAIN, TORCH)})
"""What each kind has become on its way, itself at last."""
QUIET: Mapping[str, str] = MappingProxyType({"OPENBLAS_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"})
"""The environment of imports: numpy's library starts threads when it is imported; gRPC complains of
every stranger."""
