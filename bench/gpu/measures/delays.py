"""A plugin of pytest, ``-p bench.gpu.measures.delays``: copies of a GPU come late, at random.

Before a copy from or to a GPU its stream sleeps for up to a millisecond, every other time not at
all. What is ordered by events and waits does not notice; what only happened to be in time does. The
seed is that of ``GPU_DELAYS_SEED``. Only copies of pytest's own process are delayed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

LONGEST_CYCLES = 2_000_000
"""About a millisecond of a GPU at 2 GHz."""


class Delays:
    """Sleeps before copies. ``sleep`` takes cycles; ``concerns``: whether a tensor is a GPU's."""

    def __init__(
        self,
        seed: int,
        sleep: Callable[[int], None],
        concerns: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cuda,
    ) -> None:
        self._random = random.Random(seed)
        self._sleep = sleep
        self._concerns = concerns
        self.count = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Delays ``Tensor.copy_`` and ``Tensor.to`` inside the block."""
        originals = {name: getattr(torch.Tensor, name) for name in ("copy_", "to")}
        for name, original in originals.items():
            setattr(torch.Tensor, name, self._late(original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(torch.Tensor, name, original)

    def _late(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def late(tensor: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
            others = [one for one in arguments if isinstance(one, torch.Tensor)]
            if (
                any(self._concerns(one) for one in (tensor, *others))
                and self._random.random() < 0.5
            ):
                self.count += 1
                self._sleep(self._random.randrange(LONGEST_CYCLES))
            return original(tensor, *arguments, **named)

        return late


@pytest.fixture(scope="session", autouse=True)
def late_copies() -> Iterator[None]:
    """Provides the device for all tests of the session."""
    delays = Delays(int(os.environ.get("GPU_DELAYS_SEED", "0")), _sleep)
    with delays.installed():
        yield


def _sleep(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
