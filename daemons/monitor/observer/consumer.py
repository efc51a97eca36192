"""Consumers: observerd's work on the files of its run, each on its own thread.

A consumer may be slow, wait for a network or fail without an effect on the others. A failed
consumer is run again after :data:`AGAIN_S`, so its ``run`` must find its place by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from penstock.config.schema import Config
from penstock.daemons.monitor.trackers.registry import wanted_trackers
from penstock.host.stopping import StopSignal

AGAIN_S = 5.0
"""A consumer that failed is run again so much later."""
FINISH_S = 10.0
"""At the end of the run consumers have so long for what was written last."""

_log = logging.getLogger(__name__)


def is_observed(config: Config) -> bool:
    """Returns whether observerd may have work: sampled attempts or trackers."""
    every = config.observability.sample_every
    return 0 < every <= config.train.steps or bool(wanted_trackers(config))


class Consumer(Protocol):
    """One thing to do with a run's files."""

    @property
    def name(self) -> str:
        """The consumer's name in logs."""

    def run(self, stop: StopSignal) -> None:
        """Runs until ``stop`` is set; then handles existing input, and returns."""


def run_consumers(
    consumers: Sequence[Consumer], stop: StopSignal, *, finish_s: float = FINISH_S
) -> None:
    """Runs all consumers until ``stop`` is set, then waits for them for at most ``finish_s``.
    Consumers that are still running are named in the log, and end with the process.
    """
    threads = [
        threading.Thread(target=_run, args=(consumer, stop), name=consumer.name, daemon=True)
        for consumer in consumers
    ]
    for thread in threads:
        thread.start()
    while not stop.wait(60.0):
        pass
    deadline_s = time.monotonic() + finish_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
        if thread.is_alive():
            _log.warning("%s is not done %g s after the end of the run", thread.name, finish_s)


def _run(consumer: Consumer, stop: StopSignal) -> None:
    while True:
        try:
            consumer.run(stop)
            return
        except Exception:
            _log.exception("%s failed", consumer.name)
        if stop.wait(AGAIN_S):
            return
