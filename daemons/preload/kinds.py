"""What each kind of preloader imports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

NODE, PLAIN, TORCH = "node", "plain", "torch"

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
"""What each kind imports, behind what the kinds before it in :data:`STAGES` do. Nothing of it may
start a thread: forks have only the thread that asked for them, with whatever locks the others held.
"""
STAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {PLAIN: (NODE, PLAIN), TORCH: (NODE, TORCH)}
)
"""What each kind becomes on its way, itself at last."""
QUIET: Mapping[str, str] = MappingProxyType(
    {
        "OPENBLAS_NUM_THREADS": "1",
        "GRPC_VERBOSITY": "NONE",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
)
"""The environment of imports: numpy's library, and pyarrow's, which transformers imports by way of
scikit-learn and pandas where they are installed, start threads when they are imported, and Inductor
processes; gRPC complains of every stranger; a library that asks whether there is a GPU is not to
wake the driver, which no fork could use then."""
