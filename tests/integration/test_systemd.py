"""The units of ``penstock deploy systemd``, in hosts that systemd runs."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.hosts import SHARED, Host, Wire, require_hosts, wait_until
from tests.system.conftest import newest_state, newest_step, state_bytes

UNIT = "penstock-node@run.{}.service"
TARGET = "penstock-run@run.target"
WORST_SCORE = 2.5


def configure(shared: Path, hosts: dict[str, str], **sections: dict[str, object]) -> Path:
    """Writes ``run.yaml``, a small model with a worker on each of ``hosts`` (addresses by name)."""
    config: dict[str, dict[str, object]] = {
        "run": {"name": "run", "seed": 7, "dir": str(SHARED / "runs/run")},
        "model": {
            "dtype": "fp32",
            "hf": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 4,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
            },
        },
        "data": {
            "path": str(Path(sysconfig.get_paths()["stdlib"]) / "a*.py"),
            "tokenizer": "byte",
            "sequence_length": 32,
        },
        "train": {"steps": 6, "global_batch": 4, "micro_batch": 2, "clip_grad_norm": 1.0},
        "optimizer": {"lr": 1.0e-3, "threads": 1},
        "schedule": {"scheme": "1f1b"},
        "cluster": {
            "workers": 1,
            "threads_per_worker": 1,
            "nodes": [{"name": name, "host": host} for name, host in hosts.items()],
        },
    }
    for section, values in sections.items():
        config[section] |= values
    path = shared / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o644)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder for hosts and what they share."""
    require_hosts()
    (tmp_path / "shared").mkdir(mode=0o755)
    yield tmp_path


def test_a_training_runs_under_the_installed_unit(place: Path) -> None:
    """The gate's taste of the below: one host, from deploy until the run is stopped."""
    shared = place / "shared"
    configure(shared, {"a": "127.0.0.1"}, train={"steps": 10**6})
    host, unit = Host(place, "single", shared), UNIT.format("a")
    try:
        print(f"\nbooted {host.name} in {host.boot():.1f} s")
        print(host.penstock("deploy", "systemd", *CONFIG, "--node", "a"))
        host.run("systemctl", "enable", "--now", TARGET)
        assert host.show(unit, "ActiveState") == "active"
        wait_until("a step is shown", lambda: "step" in host.show(unit, "StatusText"))
        print(host.run("systemctl", "status", "--no-pager", unit))
        check_confinement(host, unit)
        host.penstock("stop", "--run-dir", str(SHARED / "runs/run"), user="penstock")
        wait_until("the run is over", lambda: host.show(unit, "ActiveState") == "inactive")
        assert host.show(unit, "Result") == "success"
        assert host.show(unit, "ExecMainStatus") == "5"
        step = newest_step(shared / "runs/run")
        assert newest_state(shared / "runs/run").name == f"step-{step:08}"
        assert host.run("ls", "/dev/shm") == ""
        assert "removed" in host.penstock("deploy", "systemd", *CONFIG, "--node", "a", "--remove")
        assert unit not in host.run("systemctl", "list-unit-files", "penstock-*")
    except BaseException:
        print(host.story())
        raise
    finally:
        host.close()


CONFIG = ("--config", str(SHARED / "run.yaml"))


def check_confinement(host: Host, unit: str) -> None:
    """The score of the unit that is running, and what the kernel holds its main process to."""
    said = host.run("systemd-analyze", "security", "--no-pager", unit)
    score = re.search(r"Overall exposure level for .*: ([\d.]+)", said)
    assert score is not None, said
    print(score[0])
    assert float(score[1]) <= WORST_SCORE
    status = Path(f"/proc/{host.main_pid(unit)}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    assert fields["NoNewPrivs"] == "1" and fields["Seccomp"] == "2"
    assert int(fields["CapBnd"], 16) == 0 and fields["Uid"].split()[0] != "0"
    assert host.show(unit, "LimitMEMLOCK") == "infinity"
    limits = Path(f"/proc/{host.main_pid(unit)}/limits").read_text()
    locked = next(line for line in limits.splitlines() if line.startswith("Max locked memory"))
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY:
        assert locked.split()[3:5] == ["unlimited", "unlimited"]
    else:
        print(f"this machine lets nobody raise the limit, so not tested: {locked}")


class Pair:
    """Hosts a and b, a worker on each, and what is known of their run."""

    def __init__(self, place: Path, wire: Wire) -> None:
        self.run_dir = place / "shared/runs/run"
        self.wire = wire
        self.a, self.b = (
            Host(place, name, place / "shared", network)
            for name, network in zip("ab", wire.networks, strict=True)
        )
        self.hosts = (self.a, self.b)

    def say(self, what: str, seconds: float) -> None:
        print(f"{what}: {seconds:.1f} s; step {newest_step(self.run_dir)}", flush=True)

    def install(self, host: Host, core: int) -> None:
        """Installs the units with the command, and a drop-in that makes systemd impatient. In a
        container of cgroups v1 it is not told that a service's last process is gone, and waits for
        TimeoutStopSec=.
        """
        node = ("--node", host.name, "--cores", str(core))
        print(host.penstock("deploy", "systemd", *CONFIG, *node).splitlines()[0])
        drop_in = f"/etc/systemd/system/{UNIT.format(host.name)}.d/50-test.conf"
        impatient = f"[Service]\nWatchdogSec={WATCHDOG_S}\nRestartSec=1\nTimeoutStopSec=15\n"
        host.run("sh", "-c", f"printf '{impatient}' > {drop_in}; systemctl daemon-reload")

    def state(self, host: Host) -> tuple[str, str, str]:
        unit = UNIT.format(host.name)
        states = (host.show(unit, name) for name in ("ActiveState", "Result", "ExecMainStatus"))
        active, result, code = states
        return active, result, code

    def wait_for_steps(self, number: int) -> float:
        aim = newest_step(self.run_dir) + number
        return wait_until(f"step {aim}", lambda: newest_step(self.run_dir) >= aim)

    def wait_for_end(self, code: str) -> float:
        ended = ("inactive", "success", code)
        return wait_until(
            f"both have ended with {code}",
            lambda: all(self.state(host) == ended for host in self.hosts),
        )


WATCHDOG_S = 12
MORE_STEPS = 20


def sections(steps: int) -> dict[str, dict[str, object]]:
    """Sections of a run in which a step does not depend on the number of steps."""
    return {
        "train": {"steps": steps, "save_every": 10},
        "optimizer": {"schedule": "constant", "min_lr": 0.0},
    }


def undisturbed(place: Path, steps: int) -> dict[str, bytes]:
    """The bytes of the same run on this machine, which nobody disturbs."""
    (place / "plain").mkdir()
    hosts = dict.fromkeys("ab", "127.0.0.1")
    directory = {"dir": str(place / "plain/run")}
    config = configure(place / "plain", hosts, run=directory, **sections(steps))
    command = [sys.executable, "-m", "penstock.client.main", "train", str(config)]
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    return state_bytes(place / "plain/run")


@pytest.fixture
def pair(place: Path) -> Iterator[Pair]:
    wire = Wire()
    pair = Pair(place, wire)
    try:
        yield pair
    finally:
        for host in pair.hosts:
            host.close()
        wire.close()


@pytest.mark.integration
def test_two_hosts_train_through_cuts_hangs_and_stops(place: Path, pair: Pair) -> None:
    a, b = pair.hosts
    addresses = dict(zip("ab", pair.wire.addresses, strict=True))
    cluster = {"scheduler_port": 29500, "security": "insecure"}
    configure(place / "shared", addresses, cluster=cluster, **sections(10**6))
    try:
        for core, host in enumerate(pair.hosts):
            print(f"\nbooted {host.name} in {host.boot():.1f} s")
            pair.install(host, core)
        for host in pair.hosts:
            host.run("systemctl", "enable", "--now", TARGET)
        pair.say("training", pair.wait_for_steps(12))
        check_confinement(a, UNIT.format("a"))

        pair.wire.set("down")
        a.kill()
        print("a, which has the scheduler, has no power")
        pair.wire.set("up")
        pair.say("a is up again", a.boot())
        pair.say("and trains", pair.wait_for_steps(2))

        seen, start_s = newest_step(pair.run_dir), time.monotonic()
        b.restart()
        assert a.show(UNIT.format("a"), "ActiveState") == "active", "the run waits for b"
        assert newest_state(pair.run_dir).name >= f"step-{seen:08}", "saved before b went down"
        pair.say("b has started anew", time.monotonic() - start_s)
        pair.say("and trains", pair.wait_for_steps(2))

        run = ("--run-dir", str(SHARED / "runs/run"))
        a.penstock("pause", *run, user="penstock")
        hang(b, UNIT.format("b"))
        a.penstock("resume", *run, user="penstock")
        pair.say("after a hang", pair.wait_for_steps(2))

        stop_s = time.monotonic()
        a.run("systemctl", "stop", TARGET)
        pair.wait_for_end("5")
        pair.say("stopped on both, and saved", time.monotonic() - stop_s)
        steps = newest_step(pair.run_dir) + MORE_STEPS
        configure(place / "shared", addresses, cluster=cluster, **sections(steps))
        for host in pair.hosts:
            host.run("systemctl", "start", TARGET)
        pair.say("at the end", pair.wait_for_end("0"))
        assert state_bytes(pair.run_dir) == undisturbed(place, steps)
        assert [host.run("ls", "/dev/shm") for host in pair.hosts] == ["", ""]
    except BaseException:
        for host in pair.hosts:
            print(host.story())
        raise


def hang(host: Host, unit: str) -> None:
    """Holds up the node's own thread in a system call; nothing else notices, since its processes
    and its heartbeats go on.
    """
    pid = host.main_pid(unit)
    delay = "inject=poll:delay_enter=120000000"
    command = ["strace", "-qq", "-o", "/dev/null", "-e", delay, "-p", str(pid)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as tracer:
        try:
            wait_s = wait_until(
                "the watchdog has barked", lambda: host.show(unit, "Result") == "watchdog"
            )
        finally:
            tracer.kill()  # which held on to the dead process, too
    wait_s += wait_until(
        "systemd has replaced the node",
        lambda: host.show(unit, "NRestarts") != "0" and host.main_pid(unit) not in (0, pid),
    )
    print(f"the hung node was killed and started anew after {wait_s:.1f} s")
