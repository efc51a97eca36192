"""How processes hand out their pages, and how metricsd asks for them: the slow and the hostile."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families

from penstock.daemons.monitor.metrics import scrape as scraping
from penstock.daemons.monitor.metrics.collection import Collection
from penstock.daemons.monitor.metrics.scrape import scrape
from penstock.host.process_identity import ProcessUsage, start_ticks
from penstock.protocol.run import metrics_socket
from penstock.protocol.run.metrics_socket import MetricsServer, metrics_address


@pytest.fixture
def run_id() -> str:
    return secrets.token_hex(6)


def registry(value: float) -> CollectorRegistry:
    made = CollectorRegistry()
    Gauge("penstock_test", "For this test.", registry=made).set(value)
    Counter("penstock_things", "For this test.", registry=made)
    return made


@pytest.fixture
def served(run_id: str) -> Iterator[MetricsServer]:
    server = MetricsServer(registry(5), metrics_address(run_id, "memoryd.a"))
    yield server
    server.close()


SECOND_PROCESS = """
import sys, time
from prometheus_client import CollectorRegistry, Gauge
from penstock.protocol.run.metrics_socket import MetricsServer, metrics_address
registry = CollectorRegistry()
Gauge("penstock_test", "For this test.", registry=registry).set(7)
MetricsServer(registry, metrics_address(sys.argv[1], "worker.1"))
print("ready", flush=True)
time.sleep(60)
"""


CONNECT = """
import os, socket, sys
for user in sys.argv[2:]:
    os.setuid(int(user))
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
    stranger.settimeout(600.0)
    stranger.connect(chr(0) + sys.argv[1])
    received = 0
    while part := stranger.recv(4096):
        received += len(part)
print(received, end="")
"""


def test_a_page_without_when_counters_began(run_id: str, served: MetricsServer) -> None:
    address = metrics_address(run_id, "memoryd.a")
    [(name, answer)] = scrape({"memoryd.a": address}, 5.0).items()
    assert (name, answer.pid) == ("memoryd.a", os.getpid()) and answer.page is not None
    assert b"penstock_test 5.0\n" in answer.page
    assert b"_created" not in answer.page
    assert scrape({"x": metrics_address(run_id, "worker.9")}, 5.0)["x"].pid is None


def test_who_connects_and_reads_nothing_keeps_nobody_out(
    run_id: str, served: MetricsServer
) -> None:
    address = metrics_address(run_id, "memoryd.a")
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(4)]
    try:
        for connection in silent:
            connection.connect(address)
        assert scrape({"memoryd.a": address}, 2.0)["memoryd.a"].page is not None
    finally:
        for connection in silent:
            connection.close()


def test_other_users_are_sent_away_at_both_ends(
    run_id: str, served: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = metrics_address(run_id, "memoryd.a")
    command = [sys.executable, "-c", CONNECT, address[1:]]
    if os.geteuid() == 0:  # else there is nobody to be another user
        told = subprocess.run([*command, "65534"], capture_output=True, timeout=600)
        assert (told.returncode, told.stdout) == (0, b"0"), told.stderr
    told = subprocess.run(command, capture_output=True, timeout=600)
    assert told.returncode == 0 and int(told.stdout) > 100
    with monkeypatch.context() as patch:
        patch.setattr(scraping, "is_own_user", lambda user: user != os.getuid())
        assert scrape({"memoryd.a": address}, 1.0)["memoryd.a"].pid is None
    assert scrape({"memoryd.a": address}, 1.0)["memoryd.a"].page is not None


@pytest.mark.parametrize("said", [b"", b"\0" * 7, b"\0" * 7 + b"\x05page", b"\xff" * 200])
def test_what_is_no_whole_page_is_none(run_id: str, said: bytes) -> None:
    address = metrics_address(run_id, "worker.0")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as liar:
        liar.bind(address)
        liar.listen()

        def lie() -> None:
            connection, _ = liar.accept()
            with connection:
                connection.sendall(said)

        thread = threading.Thread(target=lie)
        thread.start()
        answer = scrape({"x": address}, 3600.0)["x"]  # the end of the connection ends the wait
        thread.join()
        assert (answer.page, answer.pid) == (None, os.getpid())


def test_a_name_that_is_taken_is_got_when_its_holder_is_gone(run_id: str) -> None:
    address = metrics_address(run_id, "memoryd.a")
    before = MetricsServer(registry(1), address)
    after = MetricsServer(registry(2), address)
    try:
        before.close()
        deadline = time.monotonic() + 600.0
        while (answer := scrape({"x": address}, 1.0)["x"]).page is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert b"penstock_test 2.0" in answer.page
    finally:
        after.close()


def test_the_living_are_heard_beside_one_that_stands_still(
    run_id: str, served: MetricsServer
) -> None:
    """The stopped one is down, and its samples are gone; when it goes on they come back."""
    other = subprocess.Popen(
        [sys.executable, "-c", SECOND_PROCESS, run_id], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    names = {"memoryd.a": {"process": "memoryd.a"}, "worker.1": {"process": "worker.1"}}
    try:
        assert other.stdout.readline() == "ready\n"

        def samples() -> dict[tuple[str, str], float]:
            collection = Collection(run_id, names, bytes, {"process": "metricsd.a"})
            text = collection.page(0.3).decode()
            found = {}
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    key = (sample.name.removeprefix("penstock_"), sample.labels["process"])
                    found[key] = sample.value
            return found

        deadline = time.monotonic() + 600.0
        while (before := samples()).get(("test", "worker.1")) is None:
            assert time.monotonic() < deadline  # a busy machine may not answer in time at once
        assert before["test", "worker.1"] == 7 and before["process_up", "worker.1"] == 1
        other.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)  # a busy machine still lets it answer once
        heard = 0
        deadline = time.monotonic() + 600.0
        while heard < metrics_socket.BACKLOG + 3:  # more than may wait at its socket
            during = samples()
            assert during["process_up", "worker.1"] == 0 and ("test", "worker.1") not in during
            assert during["process_up", "metricsd.a"] == 1
            heard += during.get(("test", "memoryd.a")) == 5
            assert time.monotonic() < deadline, f"the living was heard {heard} times"
        other.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + 600.0
        while ("test", "worker.1") not in samples():
            assert time.monotonic() < deadline
        other.kill()
        other.wait()
        dead = samples()
        assert dead["process_up", "worker.1"] == 0
        assert ("process_cpu_seconds_total", "worker.1") not in dead
    finally:
        other.kill()
        other.communicate()


def test_however_many_scrape_processes_are_asked_once_a_second(
    run_id: str, served: MetricsServer
) -> None:
    names = {"memoryd.a": {"node": "a"}}
    collection = Collection(run_id, names, bytes, {"node": "a"})
    first = collection.page()
    assert b'penstock_test{node="a"} 5.0' in first
    assert collection.page() is first


def test_what_a_process_has_used(run_id: str) -> None:
    usage = ProcessUsage.of(os.getpid())
    assert usage is not None and start_ticks(os.getpid())
    assert abs(usage.cpu_s - sum(os.times()[:2])) < 0.1
    assert 10e6 < usage.resident_bytes < 10e9
    assert 0 < time.time() - usage.started_s < 86400
    assert ProcessUsage.of(2**22 + 1) is None
