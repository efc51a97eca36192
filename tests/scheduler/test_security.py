"""Rights of the scheduler's callers: certificates, roles, tokens and replaced keys, over gRPC."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.config.schema import Config, parse_config
from penstock.daemons.scheduler.intake import EventQueue
from penstock.daemons.scheduler.machine.events import ControlAsked, Joined, Reply
from penstock.daemons.scheduler.service import SchedulerServer
from penstock.host.errors import ConfigError, LostMemberError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.generated import scheduler_pb2_grpc as rpc
from penstock.protocol.security.admission import scheduler_admission
from penstock.protocol.security.authority import make, renew
from penstock.protocol.security.credentials import (
    TOKEN_KEY,
    Credentials,
    client_credentials,
    member_credentials,
)
from penstock.protocol.security.folders import KeyFolder
from penstock.protocol.security.identity import Role
from penstock.protocol.security.token import ensure_token, read_token, token_path
from penstock.protocol.wire.control import ControlClient
from penstock.protocol.wire.member import CHANNEL_OPTIONS

HOMES = {"node.a": "a", "worker.0": "a", "node.b": "b", "worker.1": "b"}
DEADLINE_S = 600.0


def config(security: str, keys: Path | None = None) -> Config:
    return parse_config(
        {
            "run": {"name": "r"},
            "model": {"path": "/m"},
            "data": {"tokens": "/t"},
            "cluster": {
                "security": security,
                "keys": None if keys is None else str(keys),
                "nodes": [{"name": "a"}, {"name": "b"}],
            },
        }
    )


class Scheduler:
    """A real server; control calls are answered, and what joined is kept."""

    def __init__(self, made: Config, run_dir: Path) -> None:
        self.complaints: list[str] = []
        self.joined: list[str] = []
        self.asked: list[str] = []
        self._events = EventQueue()
        admission = scheduler_admission(made, run_dir, self.complaints.append)
        self._server = SchedulerServer(self._events, "127.0.0.1", 0, HOMES, admission)
        self._server.start()
        self.address = f"127.0.0.1:{self._server.port}"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while not self._closing.is_set():
            try:
                event = self._events.get(timeout=0.05)
            except queue.Empty:
                continue
            if isinstance(event, Joined):
                self.joined.append(event.hello.member)
                self._server.refuse(event.stream, "welcome")
            elif isinstance(event, ControlAsked):
                self.asked.append(event.call.value)
                kind = pb.StatusReply if event.call.value == "status" else pb.ControlReply
                self._server.answer(Reply(ticket=event.ticket, reply=kind()))

    def join(self, access: Credentials, member: str) -> str:
        """The answer to a Hello in the name of ``member``."""
        connection, answered = access.connect(self.address, CHANNEL_OPTIONS), threading.Event()

        def hellos() -> Iterator[pb.MemberMessage]:
            yield pb.MemberMessage(hello=pb.Hello(run_id="0" * 12, member=member, pid=1))
            answered.wait(DEADLINE_S)

        with connection.channel as channel:
            stub = rpc.MembershipStub(channel)  # type: ignore[no-untyped-call]  # generated
            try:
                answers = stub.Join(hellos(), timeout=DEADLINE_S, metadata=connection.metadata)
                return str(next(iter(answers)).refused.reason)
            finally:
                answered.set()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._server.close(0.1)


@pytest.fixture(scope="module", autouse=True)
def polling() -> Iterator[None]:
    """The thread that gRPC keeps for all event loops of a process, and its sockets."""
    grpc.aio.init_grpc_aio()
    yield
    grpc.aio.shutdown_grpc_aio()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made")
    make(made / "keys", "r", ["a", "b"])
    make(made / "other", "r", ["a", "b"])
    return made / "keys"


@pytest.fixture
def secured(keys: Path, tmp_path: Path) -> Iterator[Scheduler]:
    scheduler = Scheduler(config("tls", keys), tmp_path)
    yield scheduler
    scheduler.close()


def test_a_certificate_joins_as_the_processes_of_its_node_only(
    secured: Scheduler, keys: Path, tmp_path: Path
) -> None:
    node_b = member_credentials(config("tls", keys), tmp_path, "b")
    assert secured.join(node_b, "worker.1") == "welcome"
    assert secured.join(node_b, "worker.0") == "keys of node b do not speak for worker.0"
    assert secured.join(node_b, "worker.7") == "keys of node b do not speak for worker.7"
    for role in ("control", "look"):
        with pytest.raises(grpc.RpcError, match="Join is for the role node; these keys"):
            secured.join(Credentials(KeyFolder(keys / role)), "worker.1")
    assert secured.joined == ["worker.1"]


def test_who_looks_changes_nothing(secured: Scheduler, keys: Path, tmp_path: Path) -> None:
    with ControlClient(secured.address, Credentials(KeyFolder(keys / "look"))) as client:
        client.status()
        for call, name in ((client.stop, "Stop"), (client.pause, "Pause")):
            with pytest.raises(ConfigError, match=f"{name} is for the role control.*: look"):
                call()
    credentials = client_credentials(config("tls", keys), tmp_path, Role.CONTROL)
    with ControlClient(secured.address, credentials) as client:
        client.stop()
        client.status()
    with ControlClient(secured.address, Credentials(KeyFolder(keys / "node.b"))) as client:
        client.stop()
        with pytest.raises(ConfigError, match=r"Pause is for the role control; these keys: node"):
            client.pause()
    assert secured.asked == ["status", "stop", "status", "stop"]


def test_strangers_get_no_connection(secured: Scheduler, keys: Path, tmp_path: Path) -> None:
    """Neither with another run's keys, nor without any, nor in plain text."""
    folder = KeyFolder(keys.parent / "other" / "control")
    other = Credentials(folder)
    mixed = keys.parent / "mixed"
    if not mixed.exists():
        mixed.mkdir()
        for name in ("tls.pem", "tls.key"):
            (mixed / name).write_bytes((folder.path / name).read_bytes())
            (mixed / name).chmod(0o600)
    ca = (keys / "look" / "ca.pem").read_bytes()
    foreign = [(mixed / name).read_bytes() for name in ("tls.key", "tls.pem")]
    options = (("grpc.ssl_target_name_override", "scheduler.penstock"),)
    with ControlClient(secured.address, other, timeout_s=2.0) as client:
        with pytest.raises(LostMemberError, match="no answer"):
            client.status()
    channels = [
        grpc.insecure_channel(secured.address),
        grpc.secure_channel(secured.address, grpc.ssl_channel_credentials(ca), options),
        grpc.secure_channel(secured.address, grpc.ssl_channel_credentials(ca, *foreign), options),
    ]
    for channel in channels:
        with channel:
            for method in ("/penstock.v1.Control/Status", "/grpc.health.v1.Health/Check"):
                with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                    channel.unary_unary(method)(b"", timeout=2.0)
    assert secured.asked == secured.joined == []


def test_renewed_keys_serve_at_once_and_expired_ones_are_turned_away(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make(keys, "r", ["a", "b"], days=30)
    scheduler = Scheduler(config("tls", keys), tmp_path)
    try:
        node_b, worker = member_credentials(config("tls", keys), tmp_path, "b"), "worker.1"
        assert scheduler.join(node_b, worker) == "welcome"
        renew(keys, days=60)
        assert scheduler.join(node_b, worker) == "welcome"
        # A node without its renewed keys: its keys expire, the scheduler's do not.
        serving = ("server.key", "server.pem")
        kept = {name: (keys / "node.a" / name).read_bytes() for name in serving}
        renew(keys, days=1 / 86400)
        for name, content in kept.items():
            (keys / "node.a" / name).write_bytes(content)
        held = KeyFolder(keys / "node.b").peek()
        time.sleep(1.1)
        with pytest.raises(ConfigError, match=r"tls.pem: the certificate expired at .*keys renew"):
            scheduler.join(node_b, worker)
        shown = grpc.ssl_channel_credentials(held.ca, held.key, held.certificate)
        options = (("grpc.ssl_target_name_override", "scheduler.penstock"),)
        with grpc.secure_channel(scheduler.address, shown, options) as channel:
            with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                channel.unary_unary("/penstock.v1.Control/Status")(b"", timeout=2.0)
        renew(keys, days=60)
        assert scheduler.join(node_b, worker) == "welcome"
        for name in serving:
            (keys / "node.a" / name).write_bytes(b"rubbish")
        assert scheduler.join(node_b, worker) == "welcome", "with what was read before"
        assert "damaged keys" in scheduler.complaints[-1]
    finally:
        scheduler.close()


def test_without_certificates_the_token_of_the_run_is_asked_for(tmp_path: Path) -> None:
    ensure_token(tmp_path)
    scheduler = Scheduler(config("none"), tmp_path)
    try:
        known = member_credentials(config("none"), tmp_path, "a")
        assert scheduler.join(known, "worker.0") == "welcome"
        with ControlClient(scheduler.address, known) as client:
            client.stop()
        with grpc.insecure_channel(scheduler.address) as channel:
            token = read_token(token_path(tmp_path))
            for shown in ((), ((TOKEN_KEY, token[:-1] + "x"),), ((TOKEN_KEY, ""),)):
                for method in ("penstock.v1.Control/Stop", "penstock.v1.Control/Status"):
                    with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                        channel.unary_unary(f"/{method}")(b"", timeout=600.0, metadata=shown)
                with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                    list(rpc.MembershipStub(channel).Join(iter(()), metadata=shown))  # type: ignore[no-untyped-call]
                health = health_pb2_grpc.HealthStub(channel)
                with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                    health.Check(health_pb2.HealthCheckRequest(), timeout=600.0, metadata=shown)
                reflect = channel.stream_stream(
                    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
                )
                with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                    list(reflect(iter([b""]), timeout=600.0, metadata=shown))
        assert scheduler.asked == ["stop"] and scheduler.joined == ["worker.0"]
        token_path(tmp_path).chmod(0o644)
        with pytest.raises(ConfigError, match="mode 0644 lets others read it"):
            ControlClient(scheduler.address, known)
        ensure_token(tmp_path)
        assert read_token(token_path(tmp_path)) != token, "others may have read the old one"
    finally:
        scheduler.close()


def test_a_token_is_shown_to_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_token(tmp_path)
    scheduler = Scheduler(config("none"), tmp_path)
    try:
        known = Credentials(token_path(tmp_path)).connect(scheduler.address, CHANNEL_OPTIONS)
        known.check()
        monkeypatch.setattr("os.geteuid", lambda: 4711)
        lines = Path("/proc/net/tcp6").read_text().replace("     0        0 ", "    33        0 ")
        monkeypatch.setattr(Path, "read_text", lambda path: lines)
        with pytest.raises(LostMemberError, match="a process of user 33 listens there"):
            known.check()
        monkeypatch.setattr(Path, "read_text", lambda path: "")
        with pytest.raises(LostMemberError, match="no process listens"):
            known.check()
        known.channel.close()
    finally:
        scheduler.close()


def test_the_authoritys_key_does_not_lie_on_nodes(keys: Path, tmp_path: Path) -> None:
    made = config("tls", keys)
    member_credentials(made, tmp_path, "a")  # everything is on one machine: it was made here
    away = made.cluster.nodes[1].model_copy(update={"host": "10.0.0.2"})
    cluster = made.cluster.model_copy(update={"nodes": (made.cluster.nodes[0], away)})
    with pytest.raises(ConfigError, match=r"authority/ca.key: lies on a node.*keys pack"):
        member_credentials(made.model_copy(update={"cluster": cluster}), tmp_path, "a")
