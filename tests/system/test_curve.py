"""Two nodes with keys, and strangers at their sockets: the bytes of one node alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.authority import make
from penstock.protocol.wire.control import ControlClient
from tests.system import conftest as H
from tests.system.strangers import Strangers, listening, speaks_zmtp

HOSTS = {"a": "127.0.0.1", "b": "127.0.0.2"}


def with_keys(folder: Path, name: str) -> dict[str, Any]:
    """``plain_run`` on two nodes, with keys."""
    make(folder / "keys", name, tuple(HOSTS))
    nodes = [{"name": node, "host": host} for node, host in HOSTS.items()]
    cluster = {"workers": 1, "nodes": nodes, "security": "tls", "keys": str(folder / "keys")}
    return {**H.PLAIN, "cluster": cluster}


def places_of(run: H.TrainProcess, *, check: bool = True) -> dict[str, tuple[str, int]]:
    """Where members of a run listen with ZeroMQ; without ``check``, those that nobody here can
    ask, and listen anywhere but on loopback.
    """
    return {
        name: place
        for name, pid in run.members().items()
        for place in listening(pid)
        if name.partition(".")[0] in ("memoryd", "optimizerd", "worker")
        if (speaks_zmtp(place) if check else not place[0].startswith("127."))
    }


def test_strangers_change_nothing_between_nodes_with_keys(
    runner: Any, tmp_path: Path, plain_run: Path
) -> None:
    run = runner.start(runner.configure("two", with_keys(tmp_path, "two")))
    H.wait_for_step(run, 2)
    with ControlClient.for_run(run.run_dir) as client:
        client.pause()  # the few steps could be over before the sockets are found
    places = places_of(run)
    assert {name.partition(".")[0] for name in places} == {"memoryd", "optimizerd", "worker"}
    assert len(places) == 6
    strangers = Strangers(RunDirectory(run.run_dir).run_id, list(places.values()))
    strangers.start(per_place=200)
    with ControlClient.for_run(run.run_dir) as client:
        client.resume()
    code, output = run.wait(500)
    strangers.join()
    assert code == 0, f"{output}\n{H.tail_logs(run.run_dir)}"
    assert strangers.sent == 3 * 200 * 6 and strangers.answers == 0
    found, expected = H.arrays(run.run_dir), H.arrays(plain_run)
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
