"""One page of all processes of a node: asked for, labelled and merged, at most once a second."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from penstock.daemons.metrics.asking import Answer, ask
from penstock.daemons.metrics.merging import MergedPage, family_text
from penstock.protocol.config.schema import Config
from penstock.protocol.run.names import place_of_member
from penstock.protocol.run.pages import page_address, render
from penstock.shm.process import ProcessUsage

DEADLINE_S = 1.0
"""How long a process may take to hand out its page."""
FRESH_S = 1.0
"""However many scrape, processes are asked no more often."""


def labels_of(config: Config, node: str, process: str) -> dict[str, str]:
    """Returns the labels that all samples of a process of ``node`` get."""
    _, device = place_of_member(config, process)
    labels = {"run": config.run.name, "node": node, "process": process}
    return labels if device is None else {**labels, "device": str(device)}


class Collection:
    """The page of a node's ``processes`` (name -> labels), to which that of this process,
    ``registry``, is added under the labels ``ours``. Any thread may ask for it.
    """

    def __init__(
        self,
        run_id: str,
        processes: Mapping[str, Mapping[str, str]],
        registry: CollectorRegistry,
        ours: Mapping[str, str],
    ) -> None:
        self._processes, self._registry, self._ours = processes, registry, ours
        self._addresses = {name: page_address(run_id, name) for name in processes}
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
        answers = ask(self._addresses, deadline_s)
        merged = MergedPage()
        for process, answer in answers.items():
            labels = self._processes[process]
            merged.add(_said_of(answer), labels)
            if answer.page is not None:
                merged.add(answer.page, labels)
        merged.add(render(self._registry), self._ours)
        own = Answer(page=b"", pid=os.getpid(), seconds=time.monotonic() - begun_s)
        merged.add(_said_of(own), self._ours)
        return merged.text()


def _said_of(answer: Answer) -> bytes:
    """Returns what is to be said of a process itself, as a page."""
    families = [
        family_text(
            "penstock_process_up",
            "gauge",
            "1 if the process handed out its metrics in time, else 0.",
            [({}, float(answer.page is not None))],
        ),
        family_text(
            "penstock_collect_seconds",
            "gauge",
            "How long the process took to hand out its metrics, or was waited for.",
            [({}, answer.seconds)],
        ),
    ]
    usage = None if answer.pid is None else ProcessUsage.of(answer.pid)
    if usage is not None:
        families += [
            family_text(name, kind, text, [({}, value)])
            for name, kind, text, value in (
                (
                    "penstock_process_cpu_seconds_total",
                    "counter",
                    "CPU time of all threads of the process.",
                    usage.cpu_s,
                ),
                (
                    "penstock_process_resident_bytes",
                    "gauge",
                    "Memory that is the process's own: what it maps of /dev/shm is left out.",
                    usage.resident_bytes,
                ),
                (
                    "penstock_process_start_time_seconds",
                    "gauge",
                    "When the process was started, in seconds since 1970.",
                    usage.started_s,
                ),
            )
        ]
    return "".join(families).encode()
