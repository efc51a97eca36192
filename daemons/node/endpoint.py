"""Chooses the port of the run's scheduler, and writes the file that tells other processes its
address.

The node that hosts the scheduler chooses the port. It writes ``RUN_DIR/endpoint.json`` for control
clients and for other nodes on the same machine. Nodes on other machines know the port from the
configuration or the command line.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.config.schema import Config
from penstock.daemons.kit.waits import WaitNote
from penstock.host.core_locks import Claim
from penstock.host.errors import ConfigError, ExitCode, LostMemberError, PenstockError
from penstock.host.files import DAMAGED, parse_json, write_atomically
from penstock.host.logs import Complaints
from penstock.host.process_identity import start_ticks
from penstock.host.stopping import STOP_ORDER
from penstock.protocol.run.names import node_member_name
from penstock.protocol.run.run_result import EndWatch
from penstock.protocol.security.token import describe_listener

CHOSEN_PORTS = range(20_000, 32_000)
"""Ports below the range from which the kernel serves port 0 (32768 and up by default). So no
process gets the scheduler's port by chance while a killed schedulerd is being replaced.
"""
ENDPOINT_WAIT_S = 120.0
HOLD_WAIT_S = 2.0
"""Seconds to wait until connections of a killed scheduler let its port be held."""
_RETRY_S = 0.5

_log = logging.getLogger(__name__)


class PortTakenError(ConfigError):
    """Another process has the scheduler's port."""


class StoppedError(PenstockError):
    """The node's parent asked it to stop before the run began here. Exit code 130."""

    exit_code = ExitCode.INTERRUPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPort:
    """The scheduler's port, reserved for this run until :meth:`release`, even while a killed
    schedulerd is replaced.

    ``claim`` keeps other runs of this machine from choosing the port. ``hold`` is bound to the port
    without listening. The kernel then lets only sockets of the same user with SO_REUSEPORT bind the
    port (socket(7)).
    """

    port: int
    claim: Claim
    hold: socket.socket | None

    def release(self) -> None:
        """Releases the port for other runs."""
        self.claim.release()
        if self.hold is not None:
            self.hold.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """One node's part of a run. ``scheduler`` is ``host:port``; ``hosts`` whether it runs here.

    ``grace_seconds`` replaces ``cluster.stop_grace_s``. ``own_port`` is kept where the scheduler
    runs here.
    """

    run_dir: Path
    node: str
    scheduler: str
    hosts: bool
    grace_seconds: float | None = None
    own_port: OwnPort | None = None


def locate_scheduler(
    config: Config, run_dir: Path, node: str, scheduler: str | None, ending: EndWatch
) -> NodeSettings | None:
    """Returns where the scheduler is or will be, and whether this node is to host it; None: the run
    has ended.
    """
    if ending.look() is not None:
        return None
    first = config.cluster.nodes[0]
    hosts, port = scheduler is None and node == first.name, None
    if hosts:
        # A killed node of this run had the scheduler at this port, and other nodes still try it.
        former, configured = read_endpoint_port(run_dir), config.cluster.scheduler_port
        fixed = configured or (former if former and len(config.cluster.nodes) > 1 else 0)
        if former is not None and fixed == former:
            port = _await_port(first.host, fixed, WaitNote(run_dir, node_member_name(node)))
        else:
            port = own_port(first.host, configured, former)
        scheduler = f"{first.host}:{port.port}"
    elif scheduler is None and config.cluster.scheduler_port:
        scheduler = f"{first.host}:{config.cluster.scheduler_port}"
    elif scheduler is None:
        scheduler = wait_for_endpoint(run_dir, ending, timeout_s=ENDPOINT_WAIT_S)
        if scheduler is None:
            return None
    return NodeSettings(run_dir=run_dir, node=node, scheduler=scheduler, hosts=hosts, own_port=port)


def own_port(host: str, configured: int, preferred: int | None = None) -> OwnPort:
    """Returns a free port that no other run of this machine has chosen, and keeps it.

    Raises:
        ConfigError: the configured port is taken, or none is to be had.
    """
    while True:
        port = choose_port(host, configured, preferred)
        claim = Claim.of((f"port-{host}:{port}",))
        if claim is not None:
            return OwnPort(port=port, claim=claim, hold=_hold(host, port))
        if configured:
            raise PortTakenError(
                f"cluster.scheduler_port = {port}: belongs to another run on this machine;"
                " choose another port, or 0 to let Penstock choose"
            )
        preferred = None


def _await_port(host: str, port: int, note: WaitNote) -> OwnPort:
    """Returns the port at which a killed node had the scheduler, because the other nodes still try
    it. Waits while another process has the port; ``note`` reports the wait.

    Raises:
        StoppedError: a stop was asked for meanwhile.
    """
    complaints = Complaints(_log)
    try:
        while True:
            try:
                return own_port(host, port)
            except PortTakenError as error:
                text = f"waiting for port {port}, where the run expects its scheduler: {error}"
                complaints.say(text)
                note.renew(text)
                # The parent's order waits until the node listens for it; without a parent a signal
                # has raised KeyboardInterrupt.
                if STOP_ORDER in signal.sigpending():
                    raise StoppedError(
                        f"stopped while waiting for the scheduler's port {port}: {error}"
                    ) from error
            time.sleep(_RETRY_S)
    finally:
        note.clear()


def _hold(host: str, port: int) -> socket.socket | None:
    """Returns a socket that keeps other users from a free port; None, with a warning, where the
    connections of a killed scheduler are in its way for too long.
    """
    deadline = time.monotonic() + HOLD_WAIT_S
    while True:
        hold = socket.socket(_family(host))
        # No SO_REUSEADDR: with it, sockets of other users that set it could bind the same port.
        hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            hold.bind((host, port))
        except OSError as error:
            hold.close()
            if time.monotonic() >= deadline:
                _log.warning("port %d cannot be kept from other users: %s", port, error)
                return None
            time.sleep(0.05)
        else:
            return hold


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
            endpoint = read_endpoint(run_dir)
            if endpoint is not None and start_ticks(endpoint.pid) is not None:
                return endpoint.scheduler
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
    """Writes the scheduler's address for control clients."""
    text = f'{{"scheduler": "{address}", "pid": {os.getpid()}}}\n'
    write_atomically(run_dir / "endpoint.json", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Content of ``endpoint.json``: ``host:port``, and the pid of the first node."""

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
    """Returns the port in the endpoint file that a killed node left behind, if any."""
    endpoint = read_endpoint(run_dir)
    port = "" if endpoint is None else endpoint.scheduler.rpartition(":")[2]
    return int(port) if port.isdecimal() and 0 < int(port) < 2**16 else None


def remove_endpoint(run_dir: Path) -> None:
    """Removes the endpoint file when the run has ended."""
    (run_dir / "endpoint.json").unlink(missing_ok=True)


def _probe(host: str, port: int) -> None:
    with socket.socket(_family(host)) as probe:
        # As servers do: connections of a killed scheduler in TIME_WAIT do not count as in use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            owner = f" ({describe_listener(f'{host}:{port}')})" if taken else ""
            raise (PortTakenError if taken else ConfigError)(
                f"cluster.scheduler_port = {port}: cannot listen on {host}:{port}:"
                f" {error.strerror}{owner}; choose another port, or 0 to let Penstock choose"
            ) from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
