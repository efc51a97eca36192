"""One page of all processes of a node: asked for, labelled and merged, at most once a second."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping

from penstock.config.schema import Config
from penstock.daemons.monitor.metrics.exposition import Exposition, MergedExposition
from penstock.daemons.monitor.metrics.scrape import Scraped, scrape
from penstock.host.logs import Complaints
from penstock.host.process_identity import ProcessUsage
from penstock.protocol.metrics.node import (
    COLLECT_SECONDS,
    PROCESS,
    PROCESS_CPU,
    PROCESS_MEMORY,
    PROCESS_START,
    PROCESS_UP,
)
from penstock.protocol.run.metrics_socket import metrics_address
from penstock.protocol.run.names import place_of_member

_log = logging.getLogger(__name__)

DEADLINE_S = 1.0
"""Seconds that a process may take to send its exposition."""
FRESH_S = 1.0
"""However many scrape, processes are asked no more often."""


def labels_of(config: Config, node: str, process: str) -> dict[str, str]:
    """Returns the labels that all samples of a process of ``node`` get."""
    _, device = place_of_member(config, process)
    labels = {"run": config.run.name, "node": node, "process": process}
    return labels if device is None else {**labels, "device": str(device)}


class Collection:
    """The page of a node's ``processes`` (name -> labels), to which that of this process,
    ``own_page``, is added under the labels ``ours``. Any thread may ask for it.
    """

    def __init__(
        self,
        run_id: str,
        processes: Mapping[str, Mapping[str, str]],
        own_page: Callable[[], bytes],
        ours: Mapping[str, str],
    ) -> None:
        self._processes, self._own_page, self._ours = processes, own_page, ours
        self._addresses = {name: metrics_address(run_id, name) for name in processes}
        self._complaints = Complaints(_log)
        self._lock = threading.Lock()
        self._page, self._made_s = b"", float("-inf")

    def page(self, deadline_s: float = DEADLINE_S) -> bytes:
        """Returns the page, at most :data:`FRESH_S` old. A process that does not answer within
        ``deadline_s`` is down, and none of its samples are there.
        """
        with self._lock:
            if time.monotonic() - self._made_s >= FRESH_S:
                self._page = self._collect(min(deadline_s, DEADLINE_S))
                self._made_s = time.monotonic()
            return self._page

    def _collect(self, deadline_s: float) -> bytes:
        begun_s = time.monotonic()
        answers = scrape(self._addresses, deadline_s, self._complaints.say)
        merged = MergedExposition()
        for process, answer in answers.items():
            labels = self._processes[process]
            merged.add(_said_of(answer), labels)
            if answer.page is not None:
                merged.add(answer.page, labels)
        merged.add(self._own_page(), self._ours)
        this_process = Scraped(page=b"", pid=os.getpid(), seconds=time.monotonic() - begun_s)
        merged.add(_said_of(this_process), self._ours)
        return merged.text()


def _said_of(answer: Scraped) -> bytes:
    """Returns the metrics about a process itself, as an exposition."""
    exposition = Exposition(PROCESS)
    exposition.put(PROCESS_UP.name, answer.page is not None)
    exposition.put(COLLECT_SECONDS.name, answer.seconds)
    usage = None if answer.pid is None else ProcessUsage.of(answer.pid)
    if usage is not None:
        exposition.put(PROCESS_CPU.name, usage.cpu_s)
        exposition.put(PROCESS_MEMORY.name, usage.resident_bytes)
        exposition.put(PROCESS_START.name, usage.started_s)
    return exposition.page()
