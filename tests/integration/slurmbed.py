"""A real Slurm on this machine: munged, slurmctld, and slurmds that are one node each.

The nodes share the machine (and /dev/shm) and have names that nobody can resolve: only Slurm knows
their address. It enforces no limits: processes are tracked by their parents, and not confined.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
HANG_S = 600.0

CONFIGURATION = """\
ClusterName=penstock
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
ReturnToService=2
FirstJobId={first_job}
JobRequeue=1
KillWait={kill_wait_s}
SlurmctldTimeout=60
SlurmdTimeout=120
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Returns why no Slurm can be started here; empty if one can."""
    if os.geteuid() != 0:
        return "only root starts slurmd"
    absent = [name for name in DAEMONS if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)} (Debian: slurm-wlm, munge)" if absent else ""


def free_ports(count: int) -> list[int]:
    """Ports that nobody has at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@dataclass
class SlurmBed:
    """A running Slurm; :meth:`stop` it in any case."""

    nodes: tuple[str, ...] = ("pn1", "pn2")
    kill_wait_s: int = 30
    root: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="pn-slurm-")))
    _daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of Slurm's commands, without that of a Slurm around us."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SRUN_"))}
        return {**kept, "SLURM_CONF": str(self.root / "slurm.conf")}

    def start(self) -> None:
        """Starts all daemons; returns when the nodes take jobs."""
        self.root.chmod(0o755)
        (self.root / "state").mkdir()
        key = self.root / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        controller, *ports = free_ports(1 + len(self.nodes))
        cpus = len(os.sched_getaffinity(0))
        host = socket.gethostname()
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}"
            " RealMemory=4000"
            for name, port in zip(self.nodes, ports, strict=True)
        ]
        (self.root / "slurm.conf").write_text(
            CONFIGURATION.format(
                root=self.root,
                host=host.partition(".")[0],
                controller_port=controller,
                # Several test runs on a machine would all choose the port of job 1.
                first_job=1 + secrets.randbelow(10_000),
                kill_wait_s=self.kill_wait_s,
                nodes="\n".join(lines),
            )
        )
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={key}",
            f"--socket={self.root}/munge.socket", f"--pid-file={self.root}/munged.pid",
            f"--log-file={self.root}/munged.log", f"--seed-file={self.root}/munged.seed",
        )  # fmt: skip
        self.wait_until(lambda: (self.root / "munge.socket").exists(), "munged listens")
        self._daemon("slurmctld", "-D", "-c")
        for name in self.nodes:
            self._daemon("slurmd", "-D", "-N", name)
        self.wait_until(
            lambda: (
                self.ask("sinfo", "--noheader", "--Node", "--format=%T").split()
                == ["idle"] * len(self.nodes)
            ),
            "the nodes are idle",
        )
        version = self.ask("slurmctld", "-V").strip()
        pids = ", ".join(f"{Path(str(d.args[0])).name} {d.pid}" for d in self._daemons)  # type: ignore[index]
        print(f"\nstarted {version} with nodes {', '.join(self.nodes)}: {pids}")

    def submit(self, script: Path, *options: str) -> str:
        """Submits a script; returns the number of the job."""
        words = [option.strip() for option in options]
        job = self.ask("sbatch", "--parsable", *words, str(script)).strip()
        print(f"submitted job {job}: sbatch {' '.join([*words, script.name])}")
        return job

    def state(self, job: str) -> str:
        """The state of a job, such as RUNNING."""
        return self.ask(
            "squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"
        ).strip()

    def field(self, job: str, name: str) -> str:
        """One field of ``scontrol show job``."""
        words = self.ask("scontrol", "show", "job", "--oneliner", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def wait_for_state(self, job: str, *states: str, timeout_s: float = HANG_S) -> str:
        """Waits until the job is in one of the states; returns which."""
        self.wait_until(
            lambda: self.state(job) in states, f"job {job} is {' or '.join(states)}", timeout_s
        )
        return self.state(job)

    def clear(self) -> None:
        """Cancels all jobs; returns when they are gone."""
        self.ask("scancel", f"--user={os.geteuid()}")
        self.wait_until(lambda: not self.ask("squeue", "--noheader").strip(), "no job is left")

    def ask(self, *command: str) -> str:
        """Runs one of Slurm's commands; returns what it prints."""
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def wait_until(self, condition: object, what: str, timeout_s: float = HANG_S) -> None:
        """Waits, and fails with the daemons' logs."""
        assert callable(condition)
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, (
                f"not within {timeout_s:g} s: {what}\n{self.logs()}"
            )
            time.sleep(0.1)

    def logs(self) -> str:
        """The last lines of all daemons' logs."""
        parts = []
        for path in sorted(self.root.glob("*.log")):
            parts += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-8:]]
        return "\n".join(parts)

    def processes(self) -> list[int]:
        """The processes of this Slurm and its jobs, by the configuration in their environment."""
        mark = f"SLURM_CONF={self.root}/slurm.conf".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    words = (entry / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue  # it has ended
                if mark in words:
                    found.append(int(entry.name))
        return found

    def stop(self) -> None:
        """Kills what still runs, and removes all files."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for daemon in reversed(self._daemons):
                if daemon.poll() is None:
                    daemon.send_signal(sign)
            for daemon in self._daemons:
                try:
                    daemon.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    continue
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        shutil.rmtree(self.root, ignore_errors=True)

    def _daemon(self, *command: str) -> None:
        with (self.root / f"{command[0]}-said.log").open("ab") as said:
            process = subprocess.Popen(
                [shutil.which(command[0]) or command[0], *command[1:]],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        self._daemons.append(process)
