"""Process groups between workers: the same bits as messages, and the same ends of waits."""

from __future__ import annotations

from socket import create_server
from typing import Any

import pytest

from penstock.workers.channels.torch_groups import TCPStore


@pytest.fixture(scope="module", autouse=True)
def store_library() -> None:
    """The first store of a process opens a pipe that stays."""
    socket = create_server(("127.0.0.1", 0))
    port = socket.getsockname()[1]
    TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=socket.detach())


PARITY = [
    pytest.param("1f1b", 2, 1, {}, id="1f1b"),
    pytest.param("chimera", 2, 1, {}, id="chimera"),
    pytest.param("spipe", 2, 2, {}, id="spipe-checkpoints-two-nodes"),
    pytest.param("interleaved", 3, 1, {"stages_per_device": 2}, id="interleaved"),
]


def trained(cluster: Any) -> list[Any]:
    """Two attempts with two evaluations between them, bit for bit."""
    found = []
    for phase, number in (("train", 1), ("eval", 1 << 20), ("eval", (1 << 20) + 1), ("train", 2)):
        found.append(cluster.train(cluster.job(attempt=number, phase=phase, seed=number % 97)))
        found.append(cluster.gradient_bytes())
    return found


@pytest.mark.parametrize(("scheme", "workers", "nodes", "schedule"), PARITY)
def test_gloo_gives_the_bits_of_messages(
    make_cluster: Any, scheme: str, workers: int, nodes: int, schedule: Any
) -> None:
    found = []
    for transport in ("zmq", "gloo"):
        cluster = make_cluster(
            scheme=scheme, workers=workers, nodes=nodes, schedule=schedule, transport=transport
        )
        found.append(trained(cluster))
    assert found[0] == found[1]
