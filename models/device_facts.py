"""Software and hardware of a worker's device that the bits of its layers depend on.

A worker sends these facts in its Hello, and the scheduler compares them with those of the process
before.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from penstock.config.schema import Config

Facts = list[tuple[str, str]]
"""Names and values of facts, in the order in which errors show them."""

_LAYERS = ("torch", "transformers")
_ON_GPUS = (
    *("triton", "flash-attn", "flash-attn-3", "xformers"),
    *("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
_MIG = " MIG "


def device_facts(config: Config, device: int) -> Facts:
    """Returns the facts of a worker's device; none for an emulated device. A fact that is not known
    is left out.
    """
    platform = config.cluster.platform
    if platform.builtin_model:
        return []
    facts = list(_versions(_LAYERS))
    if platform.own_memory:
        facts += _versions(_ON_GPUS)
        with suppress(RuntimeError):  # without a GPU the worker ends with its own error
            facts += _gpu(device % config.cluster.workers)
        return facts
    capability = torch.backends.cpu.get_cpu_capability()
    return [*facts, ("instructions", capability), ("threads", str(torch.get_num_threads()))]


@cache
def _versions(packages: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    facts = []
    for name in packages:
        with suppress(PackageNotFoundError):
            facts.append((name, version(name)))
    return tuple(facts)


def _gpu(local_index: int) -> Facts:
    count = torch.cuda.device_count()
    if not count:
        return []
    properties = torch.cuda.get_device_properties(local_index % count)
    model, _, profile = properties.name.partition(_MIG)
    return [
        ("CUDA", str(torch.version.cuda)),
        ("cuDNN", str(torch.backends.cudnn.version())),  # type: ignore[no-untyped-call]
        ("GPU", model),
        ("multiprocessors", str(properties.multi_processor_count)),
        ("MIG profile", profile or "none"),
    ]
