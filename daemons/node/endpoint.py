"""Where the run's scheduler listens: a port for it, and the file that tells the others.

The node that hosts the scheduler chooses the port and writes ``RUN_DIR/endpoint.json`` for control
clients and for other nodes on the same machine; nodes elsewhere know the port from the
configuration or the command line.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.protocol.config.schema import Config
from penstock.protocol.errors import ConfigError, LostMemberError
from penstock.protocol.run.ended import EndWatch
from penstock.protocol.run.files import DAMAGED, parse_json, write_atomically
from penstock.shm.claims import Claim
from penstock.shm.process import start_ticks

CHOSEN_PORTS = range(20_000, 32_000)
"""Below the range from which the system serves port 0 (32768 and up by default): nobody can get
the scheduler's port by chance while a killed schedulerd is being replaced."""
ENDPOINT_WAIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """One node's part of a run. ``scheduler`` is ``host:port``; ``hosts`` whether it runs here.

    ``grace_seconds`` replaces ``cluster.grace_seconds``. ``claim`` keeps other runs of this machine
    from choosing the scheduler's port, until it is released.
    """

    run_dir: Path
    node: str
    scheduler: str
    hosts: bool
    grace_seconds: float | None = None
    claim: Claim | None = None


def locate_scheduler(
    config: Config, run_dir: Path, node: str, scheduler: str | None, ending: EndWatch
) -> NodeSettings | None:
    """Returns where the scheduler is or will be, and whether this node is to host it; None: the run
    has ended.
    """
    if ending.look() is not None:
        return None
    first = config.cluster.nodes[0]
    hosts, claim = scheduler is None and node == first.name, None
    if hosts:
        # Where a killed node of this run had it, other nodes still look for the scheduler.
        port, claim = _own_port(
            first.host, config.cluster.scheduler_port, preferred=read_endpoint_port(run_dir)
        )
        scheduler = f"{first.host}:{port}"
    elif scheduler is None and config.cluster.scheduler_port:
        scheduler = f"{first.host}:{config.cluster.scheduler_port}"
    elif scheduler is None:
        scheduler = wait_for_endpoint(run_dir, ending, timeout_s=ENDPOINT_WAIT_S)
        if scheduler is None:
            return None
    return NodeSettings(run_dir=run_dir, node=node, scheduler=scheduler, hosts=hosts, claim=claim)


def _own_port(host: str, configured: int, preferred: int | None) -> tuple[int, Claim]:
    """Returns a free port that no other run of this machine has chosen, and the claim to it: until
    its schedulerd listens, and while a killed one is replaced, the port looks free.

    Raises:
        ConfigError: the configured port is taken, or none is to be had.
    """
    while True:
        port = choose_port(host, configured, preferred)
        claim = Claim.of((f"port-{host}:{port}",))
        if claim is not None:
            return port, claim
        if configured:
            raise ConfigError(
                f"cluster.scheduler_port = {port}: is another run's on this machine;"
                " choose another port, or 0 to let Penstock choose"
            )
        preferred = None


def wait_for_endpoint(run_dir: Path, ending: EndWatch, *, timeout_s: float) -> str | None:
    """Returns the scheduler's address, as soon as the (living) first node on this machine announces
    it; None: the run has ended.

    Raises:
        LostMemberError: it did not in time.
    """
    path = run_dir / "endpoint.json"
    deadline = time.monotonic() + timeout_s
    while ending.look() is None:
        if path.exists():
            found = read_endpoint(run_dir)
            if found is not None and start_ticks(found.pid) is not None:
                return found.scheduler
        if time.monotonic() >= deadline:
            raise LostMemberError(
                f"{path} was not written by a living first node on this machine within"
                f" {timeout_s:g} s: start that node; if it runs on another machine, set"
                " cluster.scheduler_port, or give --scheduler HOST:PORT"
            )
        time.sleep(0.05)
    return None


def choose_port(host: str, configured: int, preferred: int | None = None) -> int:
    """Returns a free port to listen on: ``configured``, or when that is 0 ``preferred`` or one of
    :data:`CHOSEN_PORTS`.

    Raises:
        ConfigError: the configured port is taken, or nothing can be bound on ``host``.
    """
    if configured:
        _probe(host, configured)
        return configured
    last: ConfigError | None = None
    candidates = [CHOSEN_PORTS.start + secrets.randbelow(len(CHOSEN_PORTS)) for _ in range(50)]
    for port in candidates if preferred is None else (preferred, *candidates):
        try:
            _probe(host, port)
        except ConfigError as error:
            last = error
        else:
            return port
    raise ConfigError(f"no free port found on {host} in 50 tries; the last: {last}")


def write_endpoint(run_dir: Path, address: str) -> None:
    """Tell control clients where the scheduler is."""
    text = f'{{"scheduler": "{address}", "pid": {os.getpid()}}}\n'
    write_atomically(run_dir / "endpoint.json", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What ``endpoint.json`` says: ``host:port``, and the pid of the first node."""

    scheduler: str
    pid: int


def read_endpoint(run_dir: Path) -> Endpoint | None:
    """Returns what the endpoint file says; None if it is not of our making: it will be replaced."""
    try:
        fields = parse_json((run_dir / "endpoint.json").read_bytes())
        return Endpoint(scheduler=str(fields["scheduler"]), pid=int(fields["pid"]))
    except (OSError, *DAMAGED):
        return None


def read_endpoint_port(run_dir: Path) -> int | None:
    """Port in the endpoint file that a killed node left behind, if any."""
    found = read_endpoint(run_dir)
    port = "" if found is None else found.scheduler.rpartition(":")[2]
    return int(port) if port.isdecimal() and 0 < int(port) < 2**16 else None


def remove_endpoint(run_dir: Path) -> None:
    """The run has ended: there is nobody to talk to."""
    (run_dir / "endpoint.json").unlink(missing_ok=True)


def _probe(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As servers do: connections of a killed scheduler in TIME_WAIT do not count as in use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cluster.scheduler_port = {port}: cannot listen on {host}:{port}:"
                f" {error.strerror}; choose another port, or 0 to let Penstock choose"
            ) from error
