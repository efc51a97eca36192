"""GPUs of a machine, as NVML describes them: a library with its functions stands for it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from penstock.config.schema import Config, parse_config
from penstock.daemons.node.preparing import gpus
from penstock.daemons.node.preparing.gpus import USABLE, FoundGpu, found_gpus, guess_here
from penstock.planner.cost.profile import GPU_GUESS, Guess, guess_of_gpu
from penstock.protocol.run.hardware.sweep_rates import OptimizerRates
from penstock.shm.table import DType

SUCCESS, UNKNOWN = 0, 999


class Nvml:
    """The functions of NVML. ``models``: name and bytes of each GPU; without a name it fails."""

    def __init__(self, *models: tuple[str, int], starts: bool = True) -> None:
        self.models, self.starts, self.open = models, starts, 0

    def nvmlInit_v2(self) -> int:
        self.open += self.starts
        return SUCCESS if self.starts else UNKNOWN

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return SUCCESS

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.models)
        return SUCCESS

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        device._obj.value = index.value + 1
        return SUCCESS

    def nvmlDeviceGetName(self, device: Any, name: Any, length: Any) -> int:
        text = self.models[device.value - 1][0]
        assert len(text) < length.value
        name.value = text.encode()
        return SUCCESS if text else UNKNOWN

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj.total = self.models[device.value - 1][1]
        return SUCCESS


def config(device: str = "cuda", **schedule: Any) -> Config:
    return parse_config(
        {
            "model": {"hf": {"model_type": "llama"}, "dtype": "bf16"},
            "data": {"path": "@stdlib"},
            "schedule": schedule,
            "cluster": {"device": device},
        }
    )


def test_gpus_have_names_and_bytes() -> None:
    library = Nvml(("NVIDIA H200", 150_000), ("", 7), ("Tesla V100", 32_000))
    assert list(found_gpus(library)) == [
        FoundGpu(name="NVIDIA H200", memory_bytes=150_000),
        FoundGpu(name="Tesla V100", memory_bytes=32_000),
    ]
    assert not library.open
    assert not list(found_gpus(Nvml(("NVIDIA H200", 150_000), starts=False)))


@pytest.mark.parametrize(
    ("models", "rates"),
    [
        ((("NVIDIA H200", 9_000),), guess_of_gpu("H200", DType.BF16)),
        (
            (("NVIDIA H200", 9_000), ("NVIDIA A100-SXM4-40GB", 4_000)),
            guess_of_gpu("A100-40", DType.BF16),
        ),
        ((("Intel Whatever", 5_000),), GPU_GUESS),
    ],
)
def test_plans_reckon_with_the_smallest_gpu(
    models: tuple[tuple[str, int], ...], rates: Guess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: Nvml(*models))
    guess = guess_here(config())
    assert guess is not None and guess.device_flops == rates.device_flops
    assert guess.machine.fetch_bandwidth == rates.machine.fetch_bandwidth
    smallest = min(num_bytes for _, num_bytes in models)
    assert guess.machine.device_memory_bytes == smallest * USABLE
    for other in (
        config("cpu"),
        config(profile="p.json"),
        config("emulated:analytic:H100:llama2-7b"),
    ):
        assert guess_here(other) is None


def test_the_cores_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of the optimizer are those of this machine, rounded so that two starts plan alike."""
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: Nvml(("NVIDIA H200", 9_000)))
    measured = OptimizerRates(advance=7.1e9, preview=8.2e9, settle=7.9e9, in_place=6.5e9)
    again = OptimizerRates(advance=7.3e9, preview=8.0e9, settle=8.1e9, in_place=6.3e9)
    guesses = []
    for rates in (measured, again):
        monkeypatch.setattr(gpus, "measure_optimizer", lambda config, num_elements, r=rates: r)
        guesses.append(guess_here(config()))
    assert guesses[0] == guesses[1] and guesses[0] is not None
    machine = guesses[0].machine
    for name in ("advance", "preview", "settle", "in_place"):
        rate = getattr(machine, f"{name}_rate")
        assert rate == pytest.approx(getattr(measured, name), rel=0.13)
    monkeypatch.undo()
    real = gpus._rates_of_cores(config(), num_elements=1 << 12)
    assert all(rate > 0.0 for rate in real.values())
    assert {f"{field.name}_rate" for field in fields(OptimizerRates)} == real.keys()


def test_a_machine_without_the_library_has_no_rates_of_its_own() -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpus.ctypes, "CDLL", missing)
        assert guess_here(config()) is None
