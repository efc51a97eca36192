"""GPUs of this machine, as the driver's library (NVML) describes them, and the rates of its cores.
CUDA is not started.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import log10
from typing import Any

from penstock.config.schema import Config
from penstock.planner.cost.profile import Guess, guess_of_device
from penstock.protocol.run.hardware.sweep_rates import NUM_ELEMENTS, measure_optimizer

LIBRARY = "libnvidia-ml.so.1"
"""NVML, which the driver installs."""
_NAME_BYTES = 96

USABLE = 0.85
"""Share of a GPU's memory that plans may fill. Contexts, workspaces (which only a profile counts)
and gaps between allocations take the rest. ``memory.device_limit`` replaces the share.
"""


_STEPS = 10
"""Rates of a decade that measured rates are rounded to."""


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGpu:
    """A GPU with the driver's name of its model."""

    name: str
    memory_bytes: int


def guess_here(config: Config) -> Guess | None:
    """Returns the rates of this machine's smallest GPU (by memory), with the optimizer's rates on
    the cores.

    Returns None if devices are no GPUs, were measured (``schedule.profile``), or are unknown to the
    driver. Measuring takes less than a second on 16 cores.
    """
    platform = config.cluster.platform
    if not platform.own_memory or platform.simulated_clock or config.schedule.profile is not None:
        return None
    with suppress(OSError):
        gpus = tuple(found_gpus(ctypes.CDLL(LIBRARY)))
        smallest = min(gpus, key=lambda gpu: gpu.memory_bytes, default=None)
        if smallest is not None:
            usable = smallest.memory_bytes * USABLE
            guess = guess_of_device(smallest.name, usable, config.model.dtype)
            return replace(guess, machine=replace(guess.machine, **_rates_of_cores(config)))
    return None


def _rates_of_cores(config: Config, num_elements: int = NUM_ELEMENTS) -> dict[str, float]:
    """Returns the optimizer's rates as a machine profile names them."""
    rates = measure_optimizer(config, num_elements=num_elements)
    return {f"{name}_rate": _rounded(rate) for name, rate in asdict(rates).items()}


def _rounded(rate: float) -> float:
    """Returns the nearest tenth power of ten: two measurements of a machine give the same plan."""
    return float(10.0 ** (round(_STEPS * log10(rate)) / _STEPS))


def found_gpus(library: Any) -> Iterator[FoundGpu]:
    """Yields the GPUs that NVML, loaded as ``library``, describes completely."""
    if library.nvmlInit_v2() != 0:
        return
    try:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device, memory = ctypes.c_void_p(), _Memory()
            name = ctypes.create_string_buffer(_NAME_BYTES)
            failures = (
                library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)),
                library.nvmlDeviceGetName(device, name, ctypes.c_uint(_NAME_BYTES)),
                library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)),
            )
            if not any(failures):
                yield FoundGpu(name=name.value.decode(), memory_bytes=int(memory.total))
    finally:
        library.nvmlShutdown()
