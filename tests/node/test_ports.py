"""The scheduler's port: kept from other users while a schedulerd is replaced, waited for when it is
taken, and another one where nobody else looks for it.
"""

from __future__ import annotations

import os
import socket
from contextlib import closing
from pathlib import Path

import pytest

from penstock.config.schema import Config
from penstock.daemons.kit.events import StopAsked
from penstock.daemons.kit.waits import WaitNote, waits
from penstock.daemons.node import endpoint
from penstock.daemons.node.endpoint import locate_scheduler, own_port, write_endpoint
from penstock.daemons.scheduler import main as scheduler_main
from penstock.daemons.scheduler.intake import EventQueue
from penstock.daemons.scheduler.service import SchedulerServer
from penstock.host.errors import ConfigError
from penstock.protocol.run.run_result import EndWatch, RunEnd

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
            endpoint.signal, "sigpending", lambda: {endpoint.STOP_ORDER}, raising=True
        )
        with pytest.raises(endpoint.StoppedError, match=f"stopped while waiting .* port {port}"):
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that was killed, or moved, did not keep it."""
    noted: list[dict[str, str]] = []
    answers: list[object] = ["server", ConfigError("taken"), ConfigError("taken by process 5")]

    def serve() -> object:
        noted.append(waits(tmp_path))
        answer = answers.pop()
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    monkeypatch.setattr(scheduler_main, "PORT_RETRY_S", 0.01)
    note = WaitNote(tmp_path, "schedulerd")
    server = scheduler_main._await_port(serve, EventQueue(), note)  # type: ignore[arg-type]
    assert server == "server"  # type: ignore[comparison-overlap]
    assert "waiting: taken by process 5" in caplog.text
    told = "waiting: taken"
    assert noted == [{}, {"schedulerd": f"{told} by process 5"}, {"schedulerd": told}]
    assert waits(tmp_path) == {}


def test_a_stop_ends_the_wait_of_a_scheduler(tmp_path: Path) -> None:
    def serve() -> SchedulerServer:
        raise ConfigError("taken by process 5")

    events = EventQueue()
    events.put(StopAsked())
    assert scheduler_main._await_port(serve, events, WaitNote(tmp_path, "schedulerd")) is None
    assert scheduler_main._stopped_early(tmp_path, 5) == 130
    end = RunEnd.read(tmp_path)
    assert end is not None and end.keep_memory and not end.failed and end.code == 130


def test_notes_of_killed_processes_are_not_believed(tmp_path: Path) -> None:
    note = WaitNote(tmp_path, "metricsd.a")
    note.renew("waiting:\nport 5")
    assert waits(tmp_path) == {"metricsd.a": "waiting: port 5"}
    os.utime(tmp_path / "waits" / "metricsd.a", (1.0, 1.0))
    assert waits(tmp_path) == {}
    note.renew("waiting: port 5")
    assert waits(tmp_path) == {"metricsd.a": "waiting: port 5"}
    note.clear()
    assert waits(tmp_path) == {}
