"""A platform is what one object says: a worker that is given another computes with that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from penstock.config.platforms import PLATFORMS
from penstock.protocol.plan.instructions import Instruction, Opcode
from penstock.workers.attempt import Attempt
from penstock.workers.device import WorkerSite
from penstock.workers.handlers import HANDLERS, Handler
from penstock.workers.platforms import registry
from penstock.workers.platforms.cpu.platform import CpuPlatform
from penstock.workers.platforms.cuda.platform import CudaPlatform
from tests.worker.cluster import Cluster, build_cluster, make_config


def test_each_description_has_an_implementation_and_a_loader() -> None:
    assert registry.IMPLEMENTATIONS.keys() == PLATFORMS.keys()
    assert all(find_spec(platform.loader) for platform in PLATFORMS.values())


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Takes clusters down after the test."""
    with ExitStack() as made:
        yield made


def test_a_worker_trains_on_the_platform_that_is_registered(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes, by handlers of its own."""
    executed: Counter[Opcode] = Counter()

    class CountedPlatform(CpuPlatform):
        def __init__(self, site: WorkerSite) -> None:
            super().__init__(site)
            counted = {opcode: counting(handler) for opcode, handler in HANDLERS.items()}
            self.handlers = MappingProxyType(counted)

    def counting(handler: Handler) -> Callable[[Instruction, Attempt], None]:
        def run(instruction: Instruction, attempt: Attempt) -> None:
            executed[instruction.opcode] += 1
            handler(instruction, attempt)

        return run

    expected = trained(build_cluster(stack, make_config(workers=1)))
    assert not executed
    others = {**registry.IMPLEMENTATIONS, "cpu": CountedPlatform}
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", others)
    cluster = build_cluster(stack, make_config(workers=1))
    assert trained(cluster) == expected
    program = Counter(instruction.opcode for instruction in cluster.plan.programs[0])
    assert executed == Counter({opcode: 2 * count for opcode, count in program.items()})


def trained(cluster: Cluster) -> list[bytes]:
    """The gradients after two attempts."""
    for attempt in (1, 2):
        cluster.train(cluster.job(attempt=attempt))
    return cluster.gradient_bytes()


@pytest.mark.parametrize("platform", [CpuPlatform, CudaPlatform])
@pytest.mark.parametrize("model", [{}, {"deterministic": False}])
def test_kernels_repeat_their_bits_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    platform: type[CpuPlatform | CudaPlatform],
    model: dict[str, bool],
) -> None:
    asked: list[None] = []
    monkeypatch.setattr(f"{platform.__module__}.repeat_bits", lambda: asked.append(None))
    worker: Any = SimpleNamespace(_site=SimpleNamespace(config=make_config(model=model)))
    platform.set_up_process(worker)
    assert bool(asked) == (not model)
