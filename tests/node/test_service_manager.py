"""What a node tells the service manager: READY, STATUS, WATCHDOG, STOPPING, more time."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.daemons.node.service_manager import (
    EXTEND_INTERVAL_S,
    SAY_INTERVAL_S,
    STATUS_INTERVAL_S,
    NodeReports,
    NodeView,
    ServiceManager,
    progress_of,
)
from penstock.protocol.generated import scheduler_pb2 as pb
from tests.node.test_supervision import Node, StubScheduler, wait_until

STARTING = NodeView(up=False, ending=False, well=False)
UP = NodeView(up=True, ending=False, well=False)
ENDING = NodeView(up=True, ending=True, well=False)


class Manager:
    """Hears what is sent to a socket, as systemd does."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind("\0" + address[1:] if address[0] == "@" else address)

    def heard(self) -> list[str]:
        messages = []
        while True:
            try:
                messages.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return messages


@pytest.fixture(params=["path", "abstract"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name = f"{tmp_path.name}-{os.getpid()}"
    return str(tmp_path / "notify") if request.param == "path" else f"@penstock-test-{name}"


@pytest.fixture
def manager(address: str) -> Iterator[Manager]:
    instance = Manager(address)
    yield instance
    instance.socket.close()


def test_a_life_is_told_in_order_and_repeated_as_often_as_needed(
    address: str, manager: Manager, tmp_path: Path
) -> None:
    watched = ServiceManager.of({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "20000000"}, 7)
    assert watched.watchdog_s == 20.0
    reports = NodeReports(watched, tmp_path, steps=9)
    reports.turned(STARTING, 100.0)
    assert manager.heard() == ["WATCHDOG=1", "STATUS=starting: no step yet"]
    reports.turned(UP, 100.5)
    assert manager.heard() == ["READY=1\nSTATUS=all processes run"]
    (tmp_path / "metrics.jsonl").write_text('{"phase": "train", "step": 3, "loss": 2.5}\n{"ph')
    reports.turned(UP, 101.0 + STATUS_INTERVAL_S)
    assert manager.heard() == ["STATUS=training: step 3 of 9, loss 2.5000"]
    reports.turned(UP, 105.0)
    reports.turned(UP, 105.1)
    assert manager.heard() == ["WATCHDOG=1"], "what has not changed is not said again"
    reports.turned(ENDING, 106.0)
    assert manager.heard()[:2] == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=60000000"]
    reports.turned(ENDING, 106.1 + EXTEND_INTERVAL_S)
    assert "EXTEND_TIMEOUT_USEC=60000000" in manager.heard()


def test_a_run_that_is_over_at_once_was_ready(
    address: str, manager: Manager, tmp_path: Path
) -> None:
    """Else systemd takes the end of a start for its failure, and starts anew, for ever."""
    reports = NodeReports(ServiceManager.of({"NOTIFY_SOCKET": address}, 7), tmp_path, steps=9)
    reports.turned(NodeView(up=False, ending=True, well=True), 1.0)
    assert manager.heard()[0].startswith("READY=1")


def test_without_a_manager_a_node_prints_its_steps(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"phase": "train", "step": 3, "loss": 2.5}\n')
    lines: list[str] = []
    reports = NodeReports(ServiceManager.of({}, 7), tmp_path, steps=9, say=lines.append)
    reports.turned(STARTING, 1.0)
    reports.turned(UP, 2.0)
    assert [line.partition(":")[0] for line in lines] == ["all processes run; to watch them"]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "train", "step": 4, "loss": 2.25}\n')
    reports.turned(UP, 2.1)
    assert len(lines) == 1, "not more often than every few seconds"
    reports.turned(UP, 2.1 + SAY_INTERVAL_S)
    reports.turned(UP, 2.2 + 2 * SAY_INTERVAL_S)
    assert lines[1:] == ["step 4 of 9, loss 2.2500"]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "train", "step": 9, "loss": 1.5}\n')
    reports.over()
    assert lines[2:] == ["step 9 of 9, loss 1.5000"]


def test_no_manager_one_that_is_gone_and_one_of_another_process(tmp_path: Path) -> None:
    assert not ServiceManager.of({}, 7).tell(READY="1")
    assert not ServiceManager.of({"NOTIFY_SOCKET": "vsock:2:1"}, 7).listens
    gone = ServiceManager.of({"NOTIFY_SOCKET": str(tmp_path / "gone")}, 7)
    assert not gone.tell(READY="1")
    NodeReports(gone, tmp_path, steps=9).turned(UP, 1.0)  # goes on
    environment = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "5", "WATCHDOG_PID": "8"}
    assert ServiceManager.of(environment, 7).watchdog_s is None
    assert ServiceManager.of({**environment, "WATCHDOG_USEC": "-5"}, 8).watchdog_s is None


@pytest.mark.parametrize(
    ("text", "progress"),
    [
        ('{"phase": "train", "step": 2, "loss": 1}\n', "step 2 of 5, loss 1.0000"),
        ('{"phase": "train", "step": 2, "loss": 1}\n{"phase": "eval"}\n', "step 2 of 5, loss 1.0"),
        ('{"phase": "train", "step": 2, "loss": null}\n', ""),
        ('[1]\n\xff\n{"phase": "train"}\n', ""),
        ("x" * 20_000 + '\n{"phase": "train", "step": 2, "loss": 1}\n', "step 2 of 5, loss 1.0"),
        ("", ""),
    ],
)
def test_progress_is_the_last_whole_line_of_training(
    tmp_path: Path, text: str, progress: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text(text, encoding="latin-1")
    assert progress_of(tmp_path, 5).startswith(progress)
    assert bool(progress) == bool(progress_of(tmp_path, 5))


def test_a_real_supervisor_pings_is_ready_and_says_that_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Manager(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "400000")
    node, heard = Node(tmp_path / "run"), list[str]()
    node.stub("worker.0")

    def hears(message: str) -> bool:
        heard.extend(listener.heard())
        return any(message in entry for entry in heard)

    try:
        with StubScheduler() as scheduler:
            node.start(scheduler.address)
            wait_until(lambda: hears("READY=1"), "it is ready")
            heard.clear()
            wait_until(lambda: hears("WATCHDOG=1"), "it pings")
            assert not hears("STOPPING"), heard
            node.signal(signal.SIGSTOP)
            wait_until(lambda: not listener.heard(), "the last ping was heard")
            heard.clear()
            node.signal(signal.SIGCONT)
            wait_until(lambda: hears("WATCHDOG=1"), "it pings again")
            shutdown = pb.Shutdown(reason="stopped on request", exit_code=5)
            scheduler.orders.put(pb.SchedulerMessage(shutdown=shutdown))
            wait_until(lambda: hears("STOPPING=1"), "it says that it stops")
            os.kill(node.pids("worker.0")[-1], signal.SIGTERM)
            scheduler.orders.put(None)
            assert node.wait()[0] == 5
    finally:
        node.close()
        listener.socket.close()
