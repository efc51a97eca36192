"""Publishes the addresses of metrics in files for Prometheus' file_sd, one for each node of a run.

``RUN_DIR/metrics/NODE.json`` exists while the node's metricsd serves. A copy is in the folder
``observability.targets``, which runs may share, as ``RUN_ID.NODE.json``. The labels ``run`` and
``node`` identify the target of ``up``. All other samples have their own labels, which Prometheus
keeps with ``honor_labels: true``.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.config.schema import Config
from penstock.host.errors import PenstockError
from penstock.host.files import DAMAGED, make_directory, parse_json, write_atomically
from penstock.protocol.run.names import node_index
from penstock.protocol.run.rundir import RunDirectory

FOLDER = "metrics"
_EVERYWHERE = ("0.0.0.0", "::", "")

_log = logging.getLogger(__name__)


def target(run: RunDirectory, node: str, port: int) -> dict[str, Any]:
    """Returns what Prometheus is to scrape: an entry of a file_sd or HTTP SD answer."""
    config = run.config
    host = _reached_at(config, node)
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    labels = {
        "__scheme__": "https" if config.cluster.uses_keys else "http",
        "__meta_penstock_run_id": run.run_id,
        "run": config.run.name,
        "node": node,
    }
    return {"targets": [place], "labels": labels}


def write_targets(run: RunDirectory, node: str, port: int) -> None:
    """Writes the address of ``node``'s metrics. A failure is only logged: the run does not need the
    files, and clients that know the address do not either.
    """
    text = json.dumps([target(run, node, port)], indent=1) + "\n"
    for path in _files(run, node):
        try:
            make_directory(path.parent)
            write_atomically(path, text)
            path.chmod(0o644)  # Prometheus may be another user
        except (OSError, PenstockError) as error:
            _log.warning("cannot publish the address of metrics for Prometheus: %s", error)


def renew_targets(run: RunDirectory, node: str, port: int) -> None:
    """Updates the files' times, to show that they are no leftovers; restores missing files."""
    for path in _files(run, node):
        try:
            os.utime(path)
        except OSError:
            return write_targets(run, node, port)


def former_port(run: RunDirectory, node: str) -> int:
    """Returns the port of a killed metricsd of ``node``; 0 if there is none. If the next metricsd
    serves at the same port, Prometheus' series and counters continue.
    """
    for entry in _entries(run.path / FOLDER / f"{node}.json"):
        _, _, port = str(entry["targets"][0]).rpartition(":")
        if port.isdecimal() and int(port) < 65536:
            return int(port)
    return 0


def remove_targets(run: RunDirectory, node: str) -> None:
    """Removes the files of ``node``."""
    for path in _files(run, node):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s is left behind: %s", path, error)


def read_targets(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the entries of all nodes that serve metrics now, as far as files can be read."""
    return [entry for path in sorted((run_dir / FOLDER).glob("*.json")) for entry in _entries(path)]


def addresses(run_dir: Path) -> dict[str, str]:
    """Returns where metrics are served: node -> URL."""
    return {
        str(entry["labels"]["node"]): (
            f"{entry['labels']['__scheme__']}://{entry['targets'][0]}/metrics"
        )
        for entry in read_targets(run_dir)
    }


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    try:
        for entry in parse_json(path.read_bytes()):
            labels, targets = entry["labels"], entry["targets"]
            if targets and {"__scheme__", "node"} <= labels.keys() and type(targets) is list:
                yield entry
    except (OSError, *DAMAGED):
        return  # being replaced, or none of ours


def _files(run: RunDirectory, node: str) -> Iterator[Path]:
    yield run.path / FOLDER / f"{node}.json"
    if run.config.observability.targets is not None:
        yield run.config.observability.targets / f"{run.run_id}.{node}.json"


def _reached_at(config: Config, node: str) -> str:
    """Returns the host that others ask: where all addresses are served, that of the node."""
    served = config.observability.metrics_host
    return config.cluster.nodes[node_index(config, node)].host if served in _EVERYWHERE else served
