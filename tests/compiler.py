"""A fresh compiler for each test of compiled layers, and the warnings that tests ignore."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch._inductor import config as inductor_config
from tqdm import tqdm

QUIET = [
    # The compiler itself asks.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0"),
]
"""Marks of a module that compiles."""


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No graphs of other tests, before or after; no threads or processes that outlive the test."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    # Its own is also one between processes, for which Python 3.14 starts a process.
    tqdm.set_lock(threading.RLock())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with inductor_config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


def graphs() -> int:
    """Graphs compiled so far in this test."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
