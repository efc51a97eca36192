"""Connections that break are noticed: PUSH sockets alone would make new ones and say nothing."""

from __future__ import annotations

import queue
import socket as sockets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from penstock.workers.channels.connections import LOCAL_S, LOOK_S, Connections

TIMEOUT_S = 1.5


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def losses() -> queue.SimpleQueue[str]:
    return queue.SimpleQueue()


@pytest.fixture
def connections(
    context: zmq.Context[zmq.Socket[bytes]], losses: queue.SimpleQueue[str]
) -> Iterator[Connections]:
    made = Connections(context, TIMEOUT_S, losses.put)
    yield made
    made.close()


def listener(
    context: zmq.Context[zmq.Socket[bytes]], port: int = 0
) -> tuple[zmq.Socket[bytes], str]:
    socket = context.socket(zmq.PULL)
    socket.bind(f"tcp://127.0.0.1:{port}")
    return socket, socket.get_string(zmq.LAST_ENDPOINT)


def test_a_connection_that_ends_is_told_once_though_another_takes_its_place(
    context: zmq.Context[zmq.Socket[bytes]],
    connections: Connections,
    losses: queue.SimpleQueue[str],
) -> None:
    peer, address = listener(context)
    push = connections.open("worker 1", address).socket
    connections.watch()
    push.send(b"heard")
    assert peer.recv() == b"heard"
    peer.close(linger=0)
    assert losses.get(timeout=600) == "the connection to worker 1 was lost"
    peer, _ = listener(context, int(address.rpartition(":")[2]))
    push.send(b"later")
    assert peer.recv() == b"later"
    peer.close(linger=0)
    assert losses.empty()


def test_a_peer_that_cannot_be_reached_is_told_after_the_deadline(
    context: zmq.Context[zmq.Socket[bytes]],
    connections: Connections,
    losses: queue.SimpleQueue[str],
) -> None:
    peer, there = listener(context)
    gone = sockets.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{gone.getsockname()[1]}"
    gone.close()
    connections.open("worker 1", there).socket.send(b"heard")
    assert peer.recv() == b"heard"
    connections.open("worker 2", address)
    start_s = time.monotonic()
    connections.watch()
    assert losses.get(timeout=600) == f"worker 2 could not be reached at {address} for 1.5 s"
    assert time.monotonic() - start_s >= TIMEOUT_S
    peer.close(linger=0)
    assert losses.empty()


def lose_a_local_connection(
    context: zmq.Context[zmq.Socket[bytes]], connections: Connections, folder: Path
) -> None:
    """Sends to a local peer, which then closes its socket."""
    peer = context.socket(zmq.PULL)
    address = f"ipc://{folder}/inbox"
    peer.bind(address)
    push = connections.open("worker 1", address).socket
    connections.watch()
    push.send(b"heard")
    assert peer.recv() == b"heard"
    peer.close(linger=0)


def test_a_local_connection_that_ends_is_told_a_little_later(
    context: zmq.Context[zmq.Socket[bytes]],
    connections: Connections,
    losses: queue.SimpleQueue[str],
    tmp_path: Path,
) -> None:
    lose_a_local_connection(context, connections, tmp_path)
    start_s = time.monotonic()
    assert losses.get(timeout=600) == "the connection to worker 1 was lost"
    assert time.monotonic() - start_s >= LOCAL_S - 2 * LOOK_S, "its process would be named first"


def test_a_local_connection_that_ends_with_the_epoch_is_not_told(
    context: zmq.Context[zmq.Socket[bytes]],
    connections: Connections,
    losses: queue.SimpleQueue[str],
    tmp_path: Path,
) -> None:
    """The node had told the scheduler of the end of the process."""
    lose_a_local_connection(context, connections, tmp_path)
    time.sleep(5 * LOOK_S)
    connections.close()
    assert losses.empty()


def test_nothing_is_told_after_the_end(
    context: zmq.Context[zmq.Socket[bytes]],
    connections: Connections,
    losses: queue.SimpleQueue[str],
) -> None:
    peer, address = listener(context)
    connections.open("worker 1", address)
    connections.watch()
    connections.close()
    peer.close(linger=0)
    time.sleep(0.2)
    assert losses.empty()


def test_an_event_behind_a_loss_does_not_keep_the_thread_busy(
    context: zmq.Context[zmq.Socket[bytes]],
    connections: Connections,
    losses: queue.SimpleQueue[str],
) -> None:
    """A loss early in an epoch is told a second later; meanwhile the peer is there again."""
    peer, address = listener(context)
    push = connections.open("worker 1", address).socket
    connections.watch()
    push.send(b"heard")
    assert peer.recv() == b"heard"
    peer.close(linger=0)
    time.sleep(0.15)
    peer, _ = listener(context, int(address.rpartition(":")[2]))
    push.send(b"later")
    assert peer.recv() == b"later"
    before_s = time.process_time()
    assert losses.get(timeout=600) == "the connection to worker 1 was lost"
    assert time.process_time() - before_s < 0.2
    peer.close(linger=0)
