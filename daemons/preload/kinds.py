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
            *_DAEMONS,
            "penstock.workers.main",
            "penstock.models.surgery.hf",
            "transformers.modeling_utils",
            "transformers.modeling_layers",
        ),
    }
)
"""What each kind imports. None of them may start a thread: forks have only the thread that asked
for them, with whatever locks the others held."""
