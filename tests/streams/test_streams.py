"""The device code on streams that run late or at random: no race, and the bytes of the CPU.

``make soak`` adds every scheme, aborts before every instruction, and waits that are taken away.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from penstock.planner.schemes import SCHEMES
from tests.streams import removals
from tests.streams.checker import Checker, Order
from tests.streams.platform import checked
from tests.streams.scenarios import SCENARIOS, aborts, settings_of
from tests.worker.cluster import build_cluster, make_config
from tests.worker.test_channels import store_library
from tests.worker.test_parity_matrix import CORNERS, LABS, Lab, refusal

__all__ = ["store_library"]  # a fixture

OFTEN = (
    "streamed in 16 bits",
    "swapped",
    "nccl, streamed",
    "updates in 16 bits",
    "residents",
    "flushes",
    "broken updates",
)
"""In the gate; the others in ``make soak``."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Interpreters share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", OFTEN)
def test_late_streams(name: str) -> None:
    SCENARIOS[name]("late")


def test_streams_at_random() -> None:
    SCENARIOS["swapped"](1)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["late", *range(2, 8)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_more_orders(name: str, order: Order) -> None:
    SCENARIOS[name](order)


def test_an_attempt_ends_and_what_was_under_way_is_lost() -> None:
    aborts(settings_of("mobius"), None, 3, dies=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("scheme", ["mobius", "1f1b", "zb-h1"])
def test_an_attempt_ends_before_every_instruction(scheme: str, dies: bool) -> None:
    with ExitStack() as stack:
        cluster = build_cluster(stack, make_config(**settings_of(scheme)))
        longest = max(len(program) for program in cluster.plan.programs)
    for at in range(longest):
        aborts(settings_of(scheme), at, at, dies=dies)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("order", ["late", 1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme: str, order: Order) -> None:
    """Whole and split, dropped and swapped, with the bits of the CPU."""
    settings = {**LABS[scheme], "transport": "zmq"}
    cells = [cell for cell in CORNERS if refusal(scheme, cell) is None]
    with ExitStack() as stack:
        cluster = build_cluster(stack, make_config(**settings))
        lab = Lab(settings, cluster, cluster.plan)
        wanted = {cell: lab.outcome(lab.plan(cell)).bits for cell in cells}
    checker = Checker(order)
    with checked(checker), ExitStack() as stack:
        cluster = build_cluster(stack, make_config(**settings, device="cuda"))
        lab = Lab(settings, cluster, cluster.plan)
        for cell in cells:
            assert lab.outcome(lab.plan(cell)).bits == wanted[cell], cell
            checker.host_writes_all("what follows an attempt")
    checker.check()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_wait_is_needed() -> None:
    """Each that is taken away is found, or is explained.

    The removals need a process that has imported none of the modules that lose a wait.
    """
    command = [sys.executable, "-m", "tests.streams.removals", "--jobs", "2"]
    tried = subprocess.run(command, cwd=removals.ROOT, capture_output=True, text=True, check=False)
    assert tried.returncode == 0, tried.stdout + tried.stderr
