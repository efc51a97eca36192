"""The scheduler's port: kept from other users while a schedulerd is replaced, waited for when it is
taken, and another one where nobody else looks for it.
"""

from __future__ import annotations

import os
import socket
from contextlib import closing
from pathlib import Path

import pytest

from penstock.daemons.node import endpoint
from penstock.daemons.node.endpoint import locate_scheduler, own_port, write_endpoint
from penstock.daemons.scheduler import main as scheduler_main
from penstock.protocol.config.schema import Config
from penstock.protocol.errors import ConfigError, LostMemberError
from penstock.protocol.run.ended import EndWatch

HOST = "127.0.0.1"


def bound(port: int = 0, *options: int) -> socket.socket:
    found = socket.socket()
    for option in options:
        found.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        found.bind((HOST, port))
        found.listen()
    except OSError:
        found.close()
        raise
    return found


def configuration(nodes: int, port: int) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": "unused"},
            "model": {"hf": {"model_type": "llama"}},
            "data": {"path": "unused"},
            "cluster": {
                "workers": 1,
                "nodes": [{"name": "ab"[i]} for i in range(nodes)],
                "scheduler_port": port,
            },
        }
    )


@pytest.mark.parametrize("options", [(), (socket.SO_REUSEADDR,)])
def test_nobody_gets_the_port_while_no_scheduler_listens(options: tuple[int, ...]) -> None:
    """Between the death of a schedulerd and the next one."""
    own = own_port(HOST, 0)
    with pytest.raises(OSError, match="in use"):
        bound(own.port, *options)
    own.release()
    bound(own.port, *options).close()


def test_at_the_start_a_taken_port_is_refused_with_its_owner() -> None:
    with closing(bound()) as taken:
        port = taken.getsockname()[1]
        owner = rf"process {os.getpid()} of user {os.geteuid()}"
        with pytest.raises(ConfigError, match=rf"scheduler_port = {port}: .*{owner}.*choose"):
            own_port(HOST, port)


@pytest.mark.parametrize(
    ("nodes", "configured"), [(1, True), (2, True), (2, False)], ids=["one", "two", "chosen"]
)
def test_a_run_waits_for_the_port_where_it_looks_for_its_scheduler(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    nodes: int,
    configured: bool,
) -> None:
    taken = bound()
    port = taken.getsockname()[1]
    write_endpoint(tmp_path, f"{HOST}:{port}")  # of a node that was killed
    monkeypatch.setattr(endpoint.time, "sleep", lambda seconds: taken.close())
    config = configuration(nodes, port if configured else 0)
    found = locate_scheduler(config, tmp_path, "a", None, EndWatch(tmp_path, old=None))
    assert found is not None and found.own_port is not None
    assert found.scheduler == f"{HOST}:{port}"
    found.own_port.release()
    assert f"process {os.getpid()} of user {os.geteuid()}" in caplog.text


def test_a_stop_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(bound()) as taken:
        port = taken.getsockname()[1]
        write_endpoint(tmp_path, f"{HOST}:{port}")
        monkeypatch.setattr(
            endpoint.signal, "sigpending", lambda: {endpoint.signal.SIGTERM}, raising=True
        )
        with pytest.raises(LostMemberError, match=f"stopped while waiting .* port {port}"):
            locate_scheduler(
                configuration(1, port), tmp_path, "a", None, EndWatch(tmp_path, old=None)
            )


def test_a_chosen_port_that_is_taken_gives_way_to_another(tmp_path: Path) -> None:
    with closing(bound()) as taken:
        port = taken.getsockname()[1]
        write_endpoint(tmp_path, f"{HOST}:{port}")
        config = configuration(1, 0)
        found = locate_scheduler(config, tmp_path, "a", None, EndWatch(tmp_path, old=None))
        assert found is not None and found.own_port is not None
        assert found.own_port.port != port
        found.own_port.release()


def test_a_scheduler_waits_for_its_port(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that was killed, or moved, did not keep it."""
    answers: list[object] = ["server", ConfigError("taken by process 5 of user 12345")]

    def serve() -> object:
        answer = answers.pop()
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    monkeypatch.setattr(scheduler_main.time, "sleep", lambda seconds: None)
    assert scheduler_main._await_port(serve) == "server"  # type: ignore[arg-type, comparison-overlap]
    assert "waiting: taken by process 5 of user 12345" in caplog.text
