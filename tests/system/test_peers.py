"""A run of two nodes while hostile peers connect to every port that its daemons listen on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.generated import scheduler_pb2_grpc as rpc
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.credentials import TOKEN_KEY
from penstock.protocol.security.token import read_token, token_path
from penstock.protocol.wire.control import ControlClient
from penstock.protocol.wire.sockets import PlainAccess
from tests.protocol.hostile import HostilePeer
from tests.system import conftest as H

MIB = 2**20
KINDS = {"memoryd": b"DEALER", "optimizerd": b"PUSH", "worker": b"PUSH"}
LISTEN = "0A"
"""State of a socket in /proc/net/tcp."""


def listening_ports(pid: int) -> list[int]:
    """TCP ports on which a process listens, the lowest descriptor first."""
    inodes = []
    for entry in sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda path: int(path.name)):
        target = os.readlink(entry)
        if target.startswith("socket:["):
            inodes.append(target[8:-1])
    ports = {}
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == LISTEN:
            ports[words[9]] = int(words[1].partition(":")[2], 16)
    return [ports[inode] for inode in inodes if inode in ports]


def private_bytes(pid: int) -> int:
    """Memory of a process that is no shared segment."""
    words = Path(f"/proc/{pid}/status").read_text().split()
    return int(words[words.index("RssAnon:") + 1]) * 1024


class Attack:
    """Sends frames without a last one to each ZeroMQ socket of some processes, again and again, and
    looks how much memory they take.
    """

    def __init__(self, members: dict[str, int], token: str) -> None:
        """With the run's ``token`` even they get no further."""
        self._access = PlainAccess(token)
        self.members = members
        self.num_cut = dict.fromkeys(members, 0)
        self.grown = dict.fromkeys(members, 0)
        self._before = {name: private_bytes(pid) for name, pid in members.items()}

    def round(self, part_bytes: int) -> None:
        """One connection to every socket."""
        for name, pid in self.members.items():
            for port in listening_ports(pid):
                password = self._access.password(f"tcp://127.0.0.1:{port}")
                kind = KINDS[name.partition(".")[0]]
                with pytest.raises(OSError):
                    HostilePeer("127.0.0.1", port, kind)
                peer = HostilePeer("127.0.0.1", port, kind, password)
                sent = peer.send_parts(part_bytes, 10**9)
                peer.close()
                self.num_cut[name] += sent < 10**9
                grown = private_bytes(pid) - self._before[name]
                self.grown[name] = max(self.grown[name], grown // MIB)


def impostors(run_id: str, members: list[str]) -> Iterator[pb.MemberMessage]:
    """Hellos in the names of living members, of long names, and none."""
    for member in [*members, "x" * 100_000]:
        yield pb.MemberMessage(hello=pb.Hello(run_id=run_id, member=member, pid=1, nonce=1))


@pytest.mark.slow
def test_two_nodes_train_on_among_hostile_peers(runner: Any, tmp_path: Path) -> None:
    nodes = {"workers": 1, "nodes": [{"name": "a"}, {"name": "b"}]}
    changes = {"train": {"steps": 10**6}, "cluster": nodes}
    run = runner.start(runner.configure("beset", changes))
    H.wait_for_step(run, 2)
    members = {n: p for n, p in run.members().items() if n.partition(".")[0] in KINDS}
    assert len(members) == 6
    token = read_token(token_path(run.run_dir))
    shown = ((TOKEN_KEY, token),)
    with ControlClient.for_run(run.run_dir) as client:
        attack = Attack(members, token)
        address = client.address
    with grpc.insecure_channel(address) as channel:
        stub = rpc.MembershipStub(channel)  # type: ignore[no-untyped-call]  # generated
        for part_bytes in (4000, 0):
            for hello in impostors(RunDirectory(run.run_dir).run_id, list(members)):
                with suppress(grpc.RpcError):
                    assert list(stub.Join(iter([hello]), timeout=5.0, metadata=shown)) == []
            attack.round(part_bytes)
    H.wait_for_step(run, H.newest_step(run.run_dir) + 3)
    os.kill(run.process.pid, signal.SIGINT)
    code, output = run.wait(500)
    assert code == 130, output
    assert set(attack.num_cut.values()) == {2}
    limits = {name: 1500 if name.startswith("worker") else 150 for name in members}
    assert all(attack.grown[name] < limits[name] for name in members), attack.grown
    assert "is lost" not in (run.run_dir / "logs" / "schedulerd.jsonl").read_text()
    logs = sum(path.stat().st_size for path in (run.run_dir / "logs").iterdir())
    assert logs < 2 * MIB
    assert not H.segments_of(tmp_path)
