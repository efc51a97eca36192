"""Two to four hosts on this machine, and a network between them that misbehaves on demand.

A :class:`Host` has namespaces of its own for network, processes, mounts (with its own /dev/shm),
name and IPC: what two hosts share is the file system, as in a cluster. The network is a process
(:mod:`tests.integration.forwarder`) that delays, drops, cuts and forgets; rates are the kernel's
token buckets. Nothing outlives the test: namespaces have no names and end with their first process,
which the kernel kills when the test's process ends, however it does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

COMMANDS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount")
SHM_MIB = 512
_NAMESPACES = ("--mount", "--net", "--pid", "--uts", "--ipc")
_DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_FORWARDER = Path(__file__).with_name("forwarder.py")
_SETUP = """set -e
mount -t tmpfs -o size={shm}m tmpfs /dev/shm
mount --bind {hosts} /etc/hosts
hostname {name}
ip link set lo up
echo ready
exec sleep infinity
"""


def missing() -> str:
    """Returns why there can be no test bed here, an empty text if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [command for command in COMMANDS if shutil.which(command) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (see tests/integration/packages)"
    return "" if os.path.exists("/dev/net/tun") else "there is no /dev/net/tun"


@dataclass
class Running:
    """A command on a host; its output goes to ``log``."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        """Its process id, as this machine sees it; nsenter is its parent."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        deadline = time.monotonic() + 600.0
        while not (found := children.read_text().split()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return int(found[0])

    def signal(self, number: signal.Signals) -> None:
        """Send the command a signal."""
        os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> int:
        """Returns its exit code.

        Raises:
            subprocess.TimeoutExpired: it did not end in time.
        """
        return self.process.wait(timeout=timeout_s)

    def end(self) -> None:
        """Close its input, and wait until it has ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=600)

    def text(self) -> str:
        """Returns what it has printed."""
        return self.log.read_text(errors="replace")


@dataclass
class Host:
    """``pid``: of the first process of its namespaces; ``device``: its network device."""

    name: str
    address: str
    device: str
    holder: subprocess.Popen[bytes]
    pid: int
    running: list[Running] = field(default_factory=list)

    def command(self, argv: Sequence[str]) -> list[str]:
        """Returns the command that runs ``argv`` on this host, in the present directory."""
        inside = f"--wd={os.getcwd()}"
        return ["nsenter", f"--target={self.pid}", *_NAMESPACES, inside, "--", *argv]

    def start(
        self,
        argv: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        *,
        wait: bool = False,
    ) -> Running:
        """Start a command; it ends with the host at the latest. With ``wait`` its input stays open
        until :meth:`Running.end`.
        """
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.command(argv),
                stdin=subprocess.PIPE if wait else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )
        started = Running(process, log)
        self.running.append(started)
        return started

    def run(self, *argv: str, timeout_s: float = 600.0) -> str:
        """Returns what a command printed.

        Raises:
            AssertionError: it failed.
        """
        done = subprocess.run(
            self.command(argv), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{self.name}: {' '.join(argv)}: {done.stdout}{done.stderr}"
        return done.stdout

    def stop(self) -> None:
        """Kill everything on the host, without a word to anybody, and the host."""
        if self.holder.poll() is None:
            # The first process of the namespace: the kernel kills all others with it.
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.holder.wait(timeout=600)
        for running in self.running:
            running.process.wait(timeout=600)


class NetBed:
    """A network of hosts, from ``with`` to its end. Links are directions: (from, to)."""

    def __init__(
        self,
        root: Path,
        names: Sequence[str] = ("alpha", "beta"),
        *,
        subnet: str = "10.99.7",
        shm_mib: int = SHM_MIB,
    ) -> None:
        """Files of the bed (its /etc/hosts) lie in ``root``; hosts have addresses ``subnet``.1 …"""
        self.root = root
        self.hosts: dict[str, Host] = {}
        self._names = tuple(names)
        self._subnet = subnet
        self._shm_mib = shm_mib
        self._hosts_file = root / "hosts"
        self._forwarder: subprocess.Popen[str] | None = None
        self._bytes_per_s: dict[str, float] = {}

    def __enter__(self) -> NetBed:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts.values())

    def close(self) -> None:
        """End all hosts and the network."""
        for host in self:
            host.stop()
        if self._forwarder is not None:
            assert self._forwarder.stdin is not None and self._forwarder.stdout is not None
            with suppress(BrokenPipeError):
                self._forwarder.stdin.close()
            try:
                self._forwarder.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._forwarder.kill()
                self._forwarder.wait(timeout=5)
            self._forwarder.stdout.close()

    # ---- faults ----

    def cut(self, source: str, target: str, *, both: bool = True) -> None:
        """Let nothing through any more, from ``source`` to ``target`` or both ways."""
        self._change(source, target, both, cut=True)

    def delay(self, source: str, target: str, seconds: float, *, both: bool = True) -> None:
        """Let everything arrive so much later."""
        self._change(source, target, both, delay_s=seconds)

    def lose(self, source: str, target: str, share: float, *, both: bool = True) -> None:
        """Drop a share of all bursts."""
        self._change(source, target, both, loss=share)

    def half_open(self, source: str, target: str) -> None:
        """Drop all packets of connections that are open now, both ways and for ever; new ones work:
        a peer that vanished and came back, or a firewall that was restarted.
        """
        self._change(source, target, True, forgotten=True)

    def heal(self, source: str, target: str) -> None:
        """Let everything through again, both ways; connections that were forgotten stay so."""
        self._change(source, target, True, cut=False, delay_s=0.0, loss=0.0)

    def limit(self, name: str, mbit_per_s: float) -> None:
        """Let the host send so much and no more, by a token bucket of 64 KiB bursts."""
        burst, latency = "128k", "100ms"
        self.hosts[name].run(
            *("tc", "qdisc", "replace", "dev", "net0", "root", "tbf"),
            *("rate", f"{mbit_per_s}mbit", "burst", burst, "latency", latency),
        )

    def move(self, name: str, last_byte: int) -> None:
        """Give a host another address of the subnet; its name means the new one from now on."""
        host = self.hosts[name]
        old, host.address = host.address, f"{self._subnet}.{last_byte}"
        # In this order: with the first address of a subnet Linux takes its other ones away.
        host.run("ip", "address", "del", f"{old}/24", "dev", "net0")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "net0")
        self._publish()

    # ---- inside ----

    def _build(self) -> None:
        self._hosts_file.write_text("")
        tag = f"pn{os.getpid() % 100000}"
        devices = {name: f"{tag}-{index}" for index, name in enumerate(self._names)}
        self._forwarder = subprocess.Popen(
            [*_DIE_WITH_US, sys.executable, str(_FORWARDER)]
            + [f"{name}={device}" for name, device in devices.items()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._expect("ready")
        for index, (name, device) in enumerate(devices.items()):
            self._add_host(name, f"{self._subnet}.{index + 1}", device)
        self._publish()

    def _add_host(self, name: str, address: str, device: str) -> None:
        script = _SETUP.format(shm=self._shm_mib, hosts=self._hosts_file, name=name)
        log = self.root / f"{name}.log"
        unshare = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        with log.open("wb") as output:
            holder = subprocess.Popen(
                [*_DIE_WITH_US, *unshare, "--propagation", "private", "sh", "-c", script],
                stdout=subprocess.PIPE,
                stderr=output,
            )
        assert holder.stdout is not None
        with holder.stdout as said:
            first = said.readline()
        assert first == b"ready\n", f"host {name} cannot be made: {log.read_text()}"
        [pid] = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        host = Host(name=name, address=address, device=device, holder=holder, pid=int(pid))
        self.hosts[name] = host
        subprocess.run(["ip", "link", "set", device, "netns", pid], check=True)
        host.run("ip", "link", "set", device, "name", "net0")
        host.run("ip", "address", "add", f"{address}/24", "dev", "net0")
        host.run("ip", "link", "set", "net0", "mtu", "1500", "txqueuelen", "256", "up")

    def _publish(self) -> None:
        """Write /etc/hosts, in place since it is mounted, and tell the network."""
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self)]
        self._hosts_file.write_text("\n".join(lines) + "\n")
        self._order({"addresses": {host.address: host.name for host in self}})

    def _change(self, source: str, target: str, both: bool, **change: Any) -> None:
        for one, other in [(source, target), (target, source)][: 1 + both]:
            self._order({"source": one, "target": other, "change": change})

    def _order(self, order: dict[str, Any]) -> None:
        assert self._forwarder is not None and self._forwarder.stdin is not None
        self._forwarder.stdin.write(json.dumps(order) + "\n")
        self._forwarder.stdin.flush()
        self._expect("done")

    def _expect(self, word: str) -> None:
        assert self._forwarder is not None and self._forwarder.stdout is not None
        said = self._forwarder.stdout.readline().strip()
        assert said == word, f"the forwarder said {said!r}, not {word!r}"
