"""Kinds of preloaders with the modules they import, and handles of preloaders that a process
inherits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

NODE, PLAIN, TORCH = "node", "plain", "torch"
VARIABLE = "PENSTOCK_PRELOADERS"
"""Environment variable that lists the preloaders a process inherits, with their descriptors."""

MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        NODE: ("penstock.daemons.node.main",),
        PLAIN: (
            "penstock.daemons.scheduler.main",
            "penstock.daemons.memory.main",
            "penstock.daemons.mirror.main",
            "penstock.daemons.optimizer.main",
            "penstock.daemons.monitor.metrics.main",
            "penstock.daemons.monitor.observer.main",
        ),
        TORCH: (
            "penstock.workers.main",
            "penstock.models.surgery.hf",
            "transformers.modeling_utils",
            "transformers.modeling_layers",
            # Layers are compiled on GPUs: without these imports a replaced worker needs seconds.
            *(("torch._inductor.compile_fx",) if Path("/dev/nvidiactl").exists() else ()),
        ),
    }
)
"""Modules that each kind imports, after those of the earlier kinds in :data:`STAGES`. No import may
start a thread: a fork has only the forking thread, and locks that other threads held stay locked.
"""
STAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {PLAIN: (NODE, PLAIN), TORCH: (NODE, TORCH)}
)
"""Kinds that each preloader becomes one after the other, ending with its own."""
QUIET: Mapping[str, str] = MappingProxyType(
    {
        "OPENBLAS_NUM_THREADS": "1",
        "GRPC_VERBOSITY": "NONE",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
)
"""Environment variables during imports. OpenBLAS (numpy) and pyarrow start threads on import, and
Inductor starts processes; transformers imports pyarrow through scikit-learn and pandas, if
installed. gRPC logs every unknown client. A library that checks for a GPU must not initialise the
driver, which a fork could not use.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloaderHandle:
    """A preloader of the calling process: what it imports, the owner's socket, its pid, and whether
    it has said that it is ready.
    """

    kind: str
    descriptor: int
    pid: int
    warm: bool = False


def export_handles(inherits: Iterable[PreloaderHandle]) -> None:
    """Writes down what the calling process owns."""
    text = ",".join(f"{h.kind}:{h.descriptor}:{h.pid}:{int(h.warm)}" for h in inherits)
    os.environ.pop(VARIABLE, None)
    if text:
        os.environ[VARIABLE] = text


def take_inherited(environment: MutableMapping[str, str]) -> dict[str, PreloaderHandle]:
    """Returns what the calling process owns, by kind, and forgets it: children own nothing of
    it.
    """
    entries = [entry.split(":") for entry in environment.pop(VARIABLE, "").split(",") if entry]
    inherits = (
        PreloaderHandle(kind=kind, descriptor=int(descriptor), pid=int(pid), warm=warm == "1")
        for kind, descriptor, pid, warm in entries
    )
    return {handle.kind: handle for handle in inherits}
