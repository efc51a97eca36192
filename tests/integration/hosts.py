"""Machines that systemd runs: containers of systemd-nspawn that boot from this system's own /usr.

Each has its own /etc, /var, /dev/shm, processes and, if it is given one, network namespace. What
Python and this checkout need is mounted read-only at the same paths. ``/srv/shared`` is one folder
of the machine that all hosts see, as a shared file system would be.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

_PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).parents[2]
SHARED = Path("/srv/shared")
_HIDDEN = (Path("/tmp"), Path("/var/tmp"))
"""A host has its own, and so has a service in it."""
_COMMANDS = ("systemd-nspawn", "nsenter", "ip")


def require_hosts() -> None:
    """Skips the test where no host can be booted, and says why."""
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if os.geteuid() != 0:
        pytest.skip("booting a host needs root")
    if missing:
        pytest.skip(f"missing: {', '.join(missing)} (Debian: systemd-container, util-linux)")
    hidden = [path for path in _mounts() if any(path.is_relative_to(top) for top in _HIDDEN)]
    if hidden:
        pytest.skip(f"{hidden[0]} is in a folder of which every service has its own")


def wait_until(what: str, condition: Callable[[], bool], timeout_s: float = 600.0) -> float:
    """Waits until a condition holds; returns for how many seconds."""
    start_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - start_s
        assert waited_s < timeout_s, f"waited {waited_s:.0f} s until {what}"
        time.sleep(0.1)
    return time.monotonic() - start_s


class Wire:
    """Two network namespaces with one cable between them: ``networks``, and their ``addresses``."""

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self) -> None:
        self.networks = tuple(f"penstock-{os.getpid()}-{end}" for end in "ab")
        for network in self.networks:
            _ip("netns", "add", network)
        first, second = self.networks
        peer = ("peer", "name", "wire0", "netns", second)
        _ip("-n", first, "link", "add", "wire0", "type", "veth", *peer)
        for network, address in zip(self.networks, self.addresses, strict=True):
            _ip("-n", network, "address", "add", f"{address}/24", "dev", "wire0")
            for device in ("lo", "wire0"):
                _ip("-n", network, "link", "set", device, "up")

    def set(self, state: str) -> None:
        """Pulls the cable (``down``) or puts it back (``up``)."""
        _ip("-n", self.networks[0], "link", "set", "wire0", state)

    def close(self) -> None:
        """Removes both."""
        for network in self.networks:
            _ip("netns", "delete", network)


class Host:
    """One machine; :meth:`boot` starts it, :meth:`kill` pulls its plug, :meth:`close` ends it."""

    def __init__(self, root: Path, name: str, shared: Path, network: str = "") -> None:
        self.name = name
        self._tree = root / name
        self._shared = shared
        self._network = network
        self._console = root / f"{name}.console"
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: list[Path] = []
        _make_tree(self._tree)

    def boot(self) -> float:
        """Starts the host; returns after how many seconds systemd says that it is up."""
        start_s = time.monotonic()
        self._groups = _control_groups(f"penstock-test-{self.name}-{os.getpid()}")
        network = ("--private-network",)
        if self._network:
            network = (f"--network-namespace-path=/run/netns/{self._network}",)
        mounts = [f"--bind-ro={path}" for path in _mounts()]
        with self._console.open("ab") as console:
            self._process = subprocess.Popen(
                [
                    "systemd-nspawn",
                    *("--register=no", "--keep-unit", "--link-journal=no", "--console=pipe"),
                    *("--capability=CAP_IPC_LOCK", "--rlimit=RLIMIT_MEMLOCK=infinity"),
                    *(f"--machine={self.name}", f"--directory={self._tree}"),
                    *("--bind-ro=/usr", *mounts, f"--bind={self._shared}:{SHARED}"),
                    *(*network, "--boot"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                preexec_fn=self._prepare,
            )
        wait_until(f"{self.name} is up", self._is_up)
        return time.monotonic() - start_s

    def run(self, *command: str, check: bool = True) -> str:
        """Runs a command on the host, as root; returns what it said on stdout and stderr."""
        result = subprocess.run(
            ["nsenter", "-t", str(self._leader()), "-a", "-w", "--", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        if check:
            assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}"
        return result.stdout.strip()

    def penstock(self, *words: str, user: str = "root") -> str:
        """Runs the command line on the host, in the shared folder."""
        command = f"setpriv --reuid={user} --clear-groups {sys.executable} -m penstock.client.main"
        return self.run("sh", "-c", f'cd {SHARED} && exec {command} "$@"', "sh", *words)

    def show(self, unit: str, prop: str) -> str:
        """Returns a property of a unit."""
        return self.run("systemctl", "show", "--value", "--property", prop, unit)

    def main_pid(self, unit: str) -> int:
        """Returns the main process of a service, by its id on the machine; 0: none."""
        inside = self.show(unit, "MainPID")
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
            except (OSError, ValueError):
                continue  # ended meanwhile
            # The ids of nested namespaces, outermost first; and whether it is of this host.
            if fields.get("NSpid", "").split()[1:] == [inside] and self._owns(status.parent):
                return int(status.parent.name)
        return 0

    def kill(self) -> None:
        """Ends every process at once, as a power cut does; memory and /dev/shm are lost."""
        if self._process is None:
            return
        leader = self._leader()
        for pid in (leader, self._process.pid):
            if pid:
                os.kill(pid, signal.SIGKILL)
        self._process.wait(timeout=600)
        wait_until(f"{self.name} is dead", lambda: not Path(f"/proc/{leader}").exists())
        self._forget()

    def restart(self) -> None:
        """Shuts the host down as its administrator would, and boots it again."""
        assert self._process is not None
        start_s = time.monotonic()
        self.run("systemctl", "--no-block", "poweroff")
        self._process.wait(timeout=600)
        print(f"{self.name} was shut down in {time.monotonic() - start_s:.1f} s")
        self._forget()
        self.boot()

    def close(self) -> None:
        """Ends the host, and removes its tree."""
        self.kill()
        shutil.rmtree(self._tree, ignore_errors=True)

    def story(self) -> str:
        """Returns what the host's console and journal say, for a test that fails."""
        journal = "not running"
        if self._process is not None:
            ours = ("-u", "penstock-*", "-u", "init.scope")
            journal = self.run("journalctl", "--no-pager", "-n", "80", *ours, check=False)
        return f"--- {self.name}\n{self._console.read_text(errors='replace')}\n{journal}"

    def _forget(self) -> None:
        self._process = None
        for group in self._groups:
            _remove_group(group)

    def _prepare(self) -> None:
        """Runs in the child: it shuts the host down should this process be gone."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        for group in self._groups:
            (group / "cgroup.procs").write_text("0")

    def _leader(self) -> int:
        assert self._process is not None, f"{self.name} is not running"
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else 0

    def _owns(self, process: Path) -> bool:
        try:
            return os.readlink(process / "ns/pid") == os.readlink(f"/proc/{self._leader()}/ns/pid")
        except OSError:
            return False

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._console.read_text(errors="replace")
        if not self._leader():
            return False
        said = self.run("systemctl", "is-system-running", check=False)
        # "starting": a node of ours waits for another host.
        return said in ("running", "degraded") or (
            said == "starting"
            and "active" == self.run("systemctl", "is-active", "basic.target", check=False)
        )


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=600)


def _make_tree(tree: Path) -> None:
    journal = "var/log/journal"  # that is there, so it is kept when the host starts anew
    for name in ("usr", "etc/systemd/system", journal, "root", "srv", "proc", "sys", "dev", "run"):
        (tree / name).mkdir(parents=True, exist_ok=True)
    (tree / "tmp").mkdir(mode=0o1777)
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/usr", name).exists():
            (tree / name).symlink_to(f"usr/{name}")
    accounts = {
        "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/usr/sbin/nologin\n",
        "group": "root:x:0:\nnogroup:x:65534:\n",
        "machine-id": "",
    }
    for name, text in accounts.items():
        (tree / "etc" / name).write_text(text)
    for name in ("os-release", "ld.so.cache"):
        if Path("/etc", name).exists():
            shutil.copy(Path("/etc", name), tree / "etc" / name)
    default = tree / "etc/systemd/system/default.target"
    default.symlink_to("/usr/lib/systemd/system/multi-user.target")


def _mounts() -> Sequence[Path]:
    """Returns the folders that Python and this checkout need, beside /usr, none within another."""
    wanted = {ROOT, Path(sys.prefix), Path(sys.base_prefix)}
    wanted |= {Path(entry).resolve() for entry in sys.path if Path(entry).is_dir()}
    wanted.discard(Path("/"))
    outer: list[Path] = []
    for path in sorted(wanted, key=lambda path: len(path.parts)):
        if not any(path.is_relative_to(other) for other in (Path("/usr"), *outer)):
            outer.append(path)
    return outer


def _control_groups(name: str) -> list[Path]:
    """Makes a control group below ours in each hierarchy that systemd keeps services in: hosts that
    shared one would count each other's processes as theirs.
    """
    groups = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        mounts = {"": ("unified", "."), "name=systemd": ("systemd",)}.get(controllers, ())
        for mount in mounts:
            top = Path("/sys/fs/cgroup", mount)
            if (top / "cgroup.procs").exists():
                group = top / path.lstrip("/") / name
                group.mkdir()
                groups.append(group)
                break
    return groups


def _remove_group(group: Path) -> None:
    for folder, _, _ in os.walk(group, topdown=False):
        wait_until(f"{folder} is empty", lambda folder=folder: _rmdir(Path(folder)))


def _rmdir(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False  # its processes are still being reaped
    return True
