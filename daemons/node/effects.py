"""The supervisor's hands: child processes and the port and endpoint file of the scheduler.

Children are started with ``posix_spawn`` from the main thread (their parent-death signal follows
the thread), each in its own process group (Ctrl-C in a terminal reaches the supervisor only), and
are watched, killed and reaped through their pidfd, so that a reused pid is never hit.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.protocol.errors import ConfigError
from penstock.protocol.run.files import parse_json, write_atomically
from penstock.protocol.run.stopping import STOP_SIGNALS
from penstock.shm.process import is_stopped

CHOSEN_PORTS = range(20_000, 32_000)
"""Below the range from which the system serves port 0 (32768 and up by default): nobody can get
the scheduler's port by chance while a killed schedulerd is being replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to start: ``name`` is the member name (or ``schedulerd``), ``argv[0]`` a path."""

    name: str
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    pid: int
    pidfd: int


class Children:
    """The running children. Use from the main thread only."""

    def __init__(self, specs: tuple[ProcessSpec, ...], environment: Mapping[str, str]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._environment = dict(environment)
        self._running: dict[str, _Running] = {}

    @property
    def pidfds(self) -> dict[int, str]:
        """Descriptor that becomes readable when the child of that name dies."""
        return {running.pidfd: name for name, running in self._running.items()}

    @property
    def stopped(self) -> frozenset[str]:
        """Names of those that a signal has stopped."""
        return frozenset(name for name, child in self._running.items() if is_stopped(child.pid))

    def start(self, name: str) -> int:
        """Start a child; its pid.

        Raises:
            OSError: the kernel would not.
        """
        argv = self._specs[name].argv
        pid = os.posix_spawn(
            argv[0],
            argv,
            self._environment,
            setpgroup=0,
            setsigmask=STOP_SIGNALS,  # until the child listens; it obeys this process only
            setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGPIPE),
        )
        self._running[name] = _Running(pid=pid, pidfd=os.pidfd_open(pid))
        return pid

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal; a child that is dead already is left to :meth:`reap`."""
        running = self._running.get(name)
        if running is None:
            return
        try:
            signal.pidfd_send_signal(running.pidfd, number)
        except ProcessLookupError:
            return  # dead, not reaped yet

    def reap(self, name: str) -> tuple[int, int]:
        """Wait for a child whose pidfd is readable; its pid and exit code (negative: signal)."""
        running = self._running.pop(name)
        result = os.waitid(os.P_PIDFD, running.pidfd, os.WEXITED)
        os.close(running.pidfd)
        assert result is not None, "waitid without WNOHANG returns a result"
        exited = result.si_code == os.CLD_EXITED
        return running.pid, result.si_status if exited else -result.si_status

    def kill_all(self) -> None:
        """SIGKILL and reap what is left."""
        for name in tuple(self._running):
            self.signal(name, signal.SIGKILL)
        for name in tuple(self._running):
            self.reap(name)


def choose_port(host: str, configured: int, preferred: int | None = None) -> int:
    """A free port to listen on: ``configured``, or when that is 0 ``preferred`` or one of
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
    """The endpoint file, if there is one of our making: any other is about to be replaced."""
    try:
        fields = parse_json((run_dir / "endpoint.json").read_bytes())
        return Endpoint(scheduler=str(fields["scheduler"]), pid=int(fields["pid"]))
    except (OSError, ValueError, OverflowError, KeyError, TypeError):
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
