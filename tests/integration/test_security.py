"""Two hosts with TLS and CURVE, among strangers: the bytes of one node without."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.security.authority import make, renew
from tests.integration.netbed import NetBed, missing
from tests.integration.nodes import PORT, BedRun, bed_cluster
from tests.shelf import Shelf
from tests.system import conftest as H

pytestmark = [
    pytest.mark.skipif(missing() != "", reason=missing()),
    pytest.mark.integration,
    pytest.mark.timeout(2400),
]
MIB = 2**20
CLI = (sys.executable, "-m", "penstock.client.main")


def resident_bytes(pid: int) -> int:
    words = Path(f"/proc/{pid}/status").read_text().split()
    return int(words[words.index("VmRSS:") + 1]) * 1024


def secrets_of(keys: Path, run_dir: Path) -> dict[str, bytes]:
    """What must stand in no other file: by name, a part of each key, password and token."""
    found = {}
    for path in [*keys.rglob("*.key"), *keys.rglob("*.secret"), keys / "metrics" / "password"]:
        lines = path.read_bytes().splitlines()
        found[str(path)] = lines[1] if path.suffix == ".key" else lines[0]
    return found | {"token": (run_dir / "token").read_bytes()}


def files_with(secrets: dict[str, bytes], *folders: Path) -> list[str]:
    wrong = []
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        wrong += [
            f"{name} in {path}"
            for name, secret in secrets.items()
            if secret in content and path.name != "token"
        ]
    return wrong


def beset(bed: NetBed, keys: Path, other: Path, scheduler: int) -> dict[str, Any]:
    """Strangers on beta call the scheduler on alpha, and hold connections; what came of it."""
    callers = Path(__file__).with_name("callers.py")
    argv = [sys.executable, str(callers), f"{bed['alpha'].address}:{PORT}", str(keys), str(other)]
    before = resident_bytes(scheduler)
    with subprocess.Popen(
        bed["beta"].command(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        found: dict[str, Any] = json.loads(process.stdout.readline())
        most = 0
        for _ in range(20):
            most = max(most, resident_bytes(scheduler))
            time.sleep(0.05)
        process.stdin.close()
    return found | {"grown_mib": round((most - before) / MIB, 1)}


def test_strangers_change_nothing_between_two_hosts_with_keys(tmp_path: Path, shelf: Shelf) -> None:
    runner = H.Runner(tmp_path, shelf)
    keys, other = tmp_path / "keys", tmp_path / "other"
    make(keys, "secured", ["alpha", "beta"])
    make(other, "secured", ["alpha", "beta"])
    authority = tmp_path / "authority"
    (keys / "authority").rename(authority)
    with NetBed(tmp_path) as bed:
        secured = {"security": "tls", "keys": str(keys), "heartbeat_timeout_s": 600.0}
        changes = H.ENDLESS | {"cluster": bed_cluster(bed, **secured)}
        config = runner.configure("secured", changes)
        run = BedRun(bed, config, tmp_path / "secured")
        run.start()
        run.wait_for_step(2)
        members = H.TrainProcess(None, run.run_dir).members  # type: ignore[arg-type]
        found = beset(bed, keys, other, members()["schedulerd"])
        print(f"two hosts, TLS and CURVE, strangers at the scheduler: {found}")
        assert found["answered"] == found["well"] == 0 and found["longest_answer"] < 64
        assert found["frames"] >= 100_000 and found["held"] == 1000 and found["grown_mib"] < 64
        of_run = ("--run-dir", str(run.run_dir))
        refused = subprocess.run(
            bed["beta"].command([*CLI, "stop", *of_run, "--keys", str(keys / "look")]),
            capture_output=True,
            text=True,
        )
        assert refused.returncode == 2 and "Stop is for the role control" in refused.stderr
        # New keys, and a scheduler and connections that need them.
        renew(keys, authority, days=30)
        os.kill(members()["schedulerd"], signal.SIGKILL)
        run.wait_for_step(H.newest_step(run.run_dir) + 2)
        bed["beta"].run(*CLI, "stop", *of_run, "--keys", str(keys / "control"))
        assert run.wait(600) == {"alpha": 5, "beta": 5}, run.told()
        steps = H.newest_step(run.run_dir)
        print(f"stopped after step {steps}")
        alone = H.merge(H.endless_until(steps), {"cluster": {"workers": 2}})
        argv = [*CLI, "train", str(runner.configure("alone", alone))]
        assert bed["alpha"].start(argv, tmp_path / "alone.txt").wait(900) == 0
        out = tmp_path / "exported"
        bed["alpha"].run(*CLI, "export", str(run.run_dir), str(out))
    assert H.state_bytes(run.run_dir) == H.state_bytes(tmp_path / "alone")
    log = (run.run_dir / "logs" / "schedulerd.jsonl").read_text()
    assert "is lost" not in log and "pausing" not in log
    assert sum(path.stat().st_size for path in (run.run_dir / "logs").iterdir()) < 2 * MIB
    assert files_with(secrets_of(keys, run.run_dir), run.run_dir, out) == []


NOBODY = """
import os, socket, sys
import grpc
run_dir, address = sys.argv[1:]
try:
    open(f"{run_dir}/token").read()
    print("read the token")
except PermissionError:
    pass
with grpc.insecure_channel(address) as channel:
    for method in ("Control/Status", "Control/Stop", "Membership/Join"):
        try:
            list(channel.stream_stream(f"/penstock.v1.{method}")(iter([b""]), timeout=600.0))
            print(method, "was answered")
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                print(method, error)
for line in open("/proc/net/unix"):
    name = line.split()[-1]
    if "penstock" not in name:
        continue
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5.0)
        try:
            connection.connect("\\0" + name[1:] if name[0] == "@" else name)
            connection.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03")
            if connection.recv(64):
                print(name, "answered")
        except OSError:
            pass
        print("knocked at", name.rpartition("/")[2], file=sys.stderr)
"""


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that every user can enter, which pytest's are not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


def test_another_user_of_the_machine_learns_and_changes_nothing(
    open_path: Path, shelf: Shelf
) -> None:
    runner = H.Runner(open_path, shelf)
    with NetBed(open_path) as bed:
        cluster = {"workers": 2, "nodes": [{"name": "alpha"}]}
        changes = H.ENDLESS | {"cluster": cluster}
        config = runner.configure("shared", changes)
        run = BedRun(bed, config, open_path / "shared")
        run.start_node("alpha")
        run.wait_for_step(2)
        endpoint = json.loads((run.run_dir / "endpoint.json").read_text())["scheduler"]
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable]
        done = subprocess.run(
            bed["alpha"].command([*nobody, "-c", NOBODY, str(run.run_dir), endpoint]),
            capture_output=True,
            text=True,
            timeout=600,
            cwd="/",
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
        assert "knocked at memory" in done.stderr and "knocked at optimizer" in done.stderr
        print(f"another user: {done.stderr.split()}")
        run.wait_for_step(H.newest_step(run.run_dir) + 2)
        bed["alpha"].run(*CLI, "stop", "--run-dir", str(run.run_dir))
        assert run.wait() == {"alpha": 5}, run.told()
