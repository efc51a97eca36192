"""What metricsd measures of its node: memory, disks, network, CPU time, clocks."""

from __future__ import annotations

import os
import secrets
import socket
import time
from pathlib import Path

import pytest

from penstock.config.schema import parse_config
from penstock.daemons.monitor.metrics import resources
from penstock.daemons.monitor.metrics.clocks import Exchange, best_of, clock_page, compare
from penstock.daemons.monitor.metrics.exporter import Exporter
from penstock.daemons.monitor.metrics.exposition import Exposition
from penstock.daemons.monitor.metrics.network import Interface, interfaces_to
from penstock.daemons.monitor.metrics.resources import NodeResources
from penstock.host.limits.cgroup import ControlGroups, machine_cpu_s, stolen_s, tightest_memory
from penstock.protocol.metrics.node import METRICSD
from penstock.protocol.run.rundir import RunDirectory
from tests.metrics.test_merging import samples

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

CONFIG = {
    "run": {"name": "measured"},
    "model": {"hf": {"model_type": "llama"}},
    "data": {"path": "@stdlib"},
    "cluster": {"nodes": [{"name": "a"}, {"name": "a-b"}]},
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "resolved.yaml").write_text(parse_config(CONFIG).to_yaml())
    return RunDirectory.create(tmp_path)


def measured(run: RunDirectory) -> Samples:
    """All that node a says of itself."""
    watched = NodeResources(run, "a")
    try:
        deadline = time.monotonic() + 600.0
        while watched._survey is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        exposition = Exposition(METRICSD)
        watched.put(exposition)
        return samples(exposition.page())
    finally:
        watched.close()


def test_memory_and_disks_are_those_of_machine_group_and_file_system(run: RunDirectory) -> None:
    found = measured(run)
    assert found["penstock_node_shm_limit_bytes", ()] >= found["penstock_node_shm_used_bytes", ()]
    memory = tightest_memory()
    assert found["penstock_node_memory_limit_bytes", ()] == memory.limit
    left = found["penstock_node_memory_available_bytes", ()]
    assert abs(left - memory.available) < 0.5 * memory.limit
    disk = os.statvfs(run.path)
    for what in ("run", "state"):
        labels = (("what", what),)
        free = found["penstock_node_disk_free_bytes", labels]
        assert free == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.2)
        assert free < found["penstock_node_disk_size_bytes", labels]
    assert ("penstock_node_planned_network_bytes_per_second", ()) not in found, "a guess"


def test_a_nodes_memory_is_that_of_its_own_segments(run: RunDirectory) -> None:
    sizes = {"a-weights": 8192, "a-b-weights": 4096}
    paths = {name: Path(f"/dev/shm/penstock-{run.run_id}-{name}") for name in sizes}
    try:
        for name, path in paths.items():
            path.write_bytes(bytes(sizes[name]))
        assert measured(run)["penstock_node_shm_run_bytes", ()] == 8192
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)


def test_a_file_system_that_does_not_answer_holds_up_nothing_else(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "STALE_S", 0.0)  # as if that had been its last answer
    found = measured(run)
    assert ("penstock_node_shm_limit_bytes", ()) in found
    assert not [name for name, _ in found if "disk" in name]


def test_bytes_that_nodes_send_each_other_are_counted_on_their_interface(run: RunDirectory) -> None:
    labels = (("interface", "lo"),)
    before = measured(run)["penstock_node_network_transmit_bytes_total", labels]
    with socket.create_server(("127.0.0.9", 0)) as server:
        with socket.create_connection(server.getsockname()) as sender:
            receiver, _ = server.accept()
            with receiver:
                sender.sendall(bytes(50_000))
                received = 0
                while received < 50_000:
                    received += len(receiver.recv(50_000))
    found = measured(run)
    assert found["penstock_node_network_transmit_bytes_total", labels] >= before + 50_000
    assert ("penstock_node_network_speed_bytes_per_second", labels) not in found


def test_interfaces_are_those_that_hosts_lead_over() -> None:
    assert interfaces_to("127.0.0.1", ["127.0.0.2"]) == {"lo"}
    assert interfaces_to("localhost", []) == {"lo"}
    assert interfaces_to("no-such-host.invalid", ["192.0.2.255.invalid"]) == frozenset()


@pytest.mark.parametrize(
    ("speed", "expected"), [("25000", 3.125e9), ("-1", None), ("", None), (None, None)]
)
def test_speeds_are_those_that_devices_say(
    tmp_path: Path, speed: str | None, expected: float | None
) -> None:
    folder = tmp_path / "eth0"
    (folder / "statistics").mkdir(parents=True)
    for name, value in (("rx_bytes", "7"), ("tx_bytes", "9")):
        (folder / "statistics" / name).write_text(value)
    if speed is not None:
        (folder / "speed").write_text(speed)
    found = Interface.read("eth0", tmp_path)
    assert found is not None and found.bytes_per_s is None, "a virtual one makes its speed up"
    (folder / "device").mkdir()
    found = Interface.read("eth0", tmp_path)
    assert found == Interface(name="eth0", received_bytes=7, sent_bytes=9, bytes_per_s=expected)
    assert Interface.read("eth1", tmp_path) is None


def test_cpu_time_that_others_got(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "proc" / "stat").write_text(f"cpu 1 2 3 4 5 6 7 {3 * ticks} 0 0\ncpu0 1\n")
    assert stolen_s(tmp_path) == 3.0
    assert machine_cpu_s(tmp_path) == pytest.approx((1 + 2 + 3 + 6 + 7) / ticks)
    assert stolen_s() >= 0.0
    own = ControlGroups().cpu_throttled_s()
    assert own is None or own >= 0.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("usage_usec 9\nthrottled_usec 2500000\n", 2.5),
        ("nr_periods 1\nthrottled_time 5000\n", 5e-6),
    ],
)
def test_throttled_time_is_read_from_groups_of_both_generations(
    tmp_path: Path, text: str, seconds: float
) -> None:
    mount = tmp_path / "sys/fs/cgroup"
    (mount / "job").mkdir(parents=True)
    (mount / "job" / "cpu.stat").write_text(text)
    process = tmp_path / "proc" / "self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text("0::/job\n")
    (process / "mountinfo").write_text("30 1 0:2 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n")
    assert ControlGroups(tmp_path).cpu_throttled_s() == seconds


@pytest.mark.parametrize("shift_s", [0.0, 3.5])
def test_a_clock_is_compared_within_the_error_that_is_stated(shift_s: float) -> None:
    def app(environ: object, start: object) -> list[bytes]:
        body = clock_page(time.time() - shift_s)
        start("200 OK", [("Content-Length", str(len(body)))])  # type: ignore[operator]
        return [body]

    server = Exporter(app, "127.0.0.1", 0, None)
    try:
        begun_s = time.monotonic()
        exchanges = [compare(f"http://127.0.0.1:{server.port}/metrics", None) for _ in range(5)]
    finally:
        server.close()
    ended_s = time.monotonic()
    best = best_of(tuple(exchanges), ended_s)
    assert best is not None
    offset_s, error_s = best
    assert abs(offset_s - shift_s) <= error_s < ended_s - begun_s + 0.5, "no longer than it took"


def test_the_exchange_counts_that_says_most_now() -> None:
    quick = Exchange(at_s=0.0, offset_s=1.0, error_s=0.001)
    slow = Exchange(at_s=100.0, offset_s=2.0, error_s=0.02)
    assert best_of((quick, slow), 101.0) == (1.0, pytest.approx(0.001 + 101 * 50e-6))
    assert best_of((quick, slow), 310.0) == (2.0, pytest.approx(0.02 + 210 * 50e-6))
    assert best_of((quick, slow), 500.0) is None, "nobody knows how the clocks went on"


def test_what_is_no_time_is_no_exchange() -> None:
    def app(environ: object, start: object) -> list[bytes]:
        start("200 OK", [])  # type: ignore[operator]
        return [secrets.token_bytes(50)]

    server = Exporter(app, "127.0.0.1", 0, None)
    try:
        with pytest.raises(ValueError):
            compare(f"http://127.0.0.1:{server.port}", None)
    finally:
        server.close()
    with pytest.raises(OSError):
        compare(f"http://127.0.0.1:{server.port}", None)
