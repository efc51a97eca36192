"""Measures a node's shared memory, memory, disk, network and CPU time.

Slow sources (an unresponsive file system, a name server, the planner) are read by a separate thread
every :data:`SURVEY_S` seconds. Results older than :data:`STALE_S` are omitted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.config.schema import Config
from penstock.daemons.monitor.metrics.exposition import Exposition
from penstock.daemons.monitor.metrics.network import Interface, interfaces_to
from penstock.host.errors import PenstockError
from penstock.host.limits.cgroup import (
    ControlGroups,
    MemoryUnknownError,
    machine_cpu_s,
    stolen_s,
    tightest_memory,
)
from penstock.protocol.run.names import node_index
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import segment_name
from penstock.shm.segment import SHM_ROOT, is_own, status_of

SURVEY_S = 5.0
LOOK_UP_S = 60.0
"""Hosts are asked for at name servers no more often."""
STALE_S = 30.0
BLOCK_BYTES = 512
"""Bytes of a block in stat(2)'s counts."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Slow measurements of time ``at_s``. ``disks``: path's purpose -> (bytes free for this user,
    size).
    """

    at_s: float
    disks: dict[str, tuple[int, int]]
    interfaces: frozenset[str]
    planned_bytes_per_s: float | None


class NodeResources:
    """Measures one node of a run until :meth:`close`."""

    def __init__(self, run: RunDirectory, node: str) -> None:
        self._run, self._config = run, run.config
        self._index = node_index(run.config, node)
        self._segments = [segment_name(run.run_id, node, kind) for kind in SegmentKind]
        self._groups = ControlGroups()
        self._survey: Survey | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._survey_on, name="survey", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread."""
        self._closing.set()
        self._thread.join(timeout=1.0)  # a file system may hold it for ever

    def put(self, exposition: Exposition) -> None:
        """Writes all current measurements."""
        self._put_memory(exposition)
        exposition.put("penstock_node_cpu_used_seconds", machine_cpu_s())
        exposition.put("penstock_node_cpu_stolen_seconds", stolen_s())
        throttled_s = self._groups.cpu_throttled_s()
        if throttled_s is not None:
            exposition.put("penstock_node_cpu_throttled_seconds", throttled_s)
        survey = self._survey
        if survey is not None and time.monotonic() - survey.at_s < STALE_S:
            _put_survey(exposition, survey)

    def _put_memory(self, exposition: Exposition) -> None:
        free, size = _room(SHM_ROOT)
        exposition.put("penstock_node_shm_used_bytes", size - free)
        exposition.put("penstock_node_shm_limit_bytes", size)
        exposition.put("penstock_node_shm_run_bytes", _size_of(self._segments))
        try:
            memory = tightest_memory()
        except MemoryUnknownError:
            return
        exposition.put("penstock_node_memory_available_bytes", memory.available)
        exposition.put("penstock_node_memory_limit_bytes", memory.limit)

    def _survey_on(self) -> None:
        planned = _planned_bytes_per_s(self._config)
        hosts = [node.host for node in self._config.cluster.nodes]
        own_host = hosts.pop(self._index)
        interfaces, looked_up_s = frozenset[str](), float("-inf")
        while not self._closing.is_set():
            if time.monotonic() - looked_up_s > LOOK_UP_S:
                interfaces, looked_up_s = interfaces_to(own_host, hosts), time.monotonic()
            disks = {}
            for what, path in (("run", self._run.path), ("state", self._run.state_dir)):
                try:
                    disks[what] = _room(path if path.exists() else path.parent)
                except OSError as error:
                    _log.warning("%s: %s", path, error)
            self._survey = Survey(
                at_s=time.monotonic(),
                disks=disks,
                interfaces=interfaces,
                planned_bytes_per_s=planned,
            )
            self._closing.wait(SURVEY_S)


def _put_survey(exposition: Exposition, survey: Survey) -> None:
    for what, (free, size) in survey.disks.items():
        exposition.put("penstock_node_disk_free_bytes", free, what=what)
        exposition.put("penstock_node_disk_size_bytes", size, what=what)
    for name in sorted(survey.interfaces):
        interface = Interface.read(name)
        if interface is None:
            continue
        exposition.put(
            "penstock_node_network_receive_bytes", interface.received_bytes, interface=name
        )
        exposition.put("penstock_node_network_transmit_bytes", interface.sent_bytes, interface=name)
        if interface.bytes_per_s is not None:
            speed = interface.bytes_per_s
            exposition.put("penstock_node_network_speed_bytes_per_second", speed, interface=name)
    if survey.planned_bytes_per_s is not None:
        planned = survey.planned_bytes_per_s
        exposition.put("penstock_node_planned_network_bytes_per_second", planned)


def _room(path: Path) -> tuple[int, int]:
    """Returns the bytes that are free for this user, and the size, of a file system."""
    status = os.statvfs(path)
    size = (status.f_blocks - status.f_bfree + status.f_bavail) * status.f_frsize
    return status.f_bavail * status.f_frsize, size


def _size_of(segments: Iterable[str]) -> int:
    """Returns the bytes that segments take, those that are there."""
    total = 0
    for name in segments:
        status = status_of(name)
        if status is not None and is_own(status):
            total += BLOCK_BYTES * status.st_blocks
    return total


def _planned_bytes_per_s(config: Config) -> float | None:
    """Returns the bandwidth between nodes that the plan was made with; None: a guess, or there is
    one node only. (The planner takes a second to load.)
    """
    if len(config.cluster.nodes) == 1:
        return None
    try:
        if config.cluster.platform.simulated_clock:
            from penstock.planner.cost.emulation import Emulation

            return Emulation.of(config).reads_bytes_per_s
        if config.schedule.profile is not None:
            from penstock.protocol.plan.profile import load_profile

            return load_profile(config.schedule.profile).machine.peer_bandwidth
    except PenstockError as error:
        _log.warning("the planned network rates are unknown: %s", error)
    return None
