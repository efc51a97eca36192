"""Local sockets hear the processes of their node, and nobody else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import zmq

from penstock.host.process_identity import descends_from, parent_of
from penstock.protocol.wire.local_peers import LocalPeerFilter

NOBODY = 2**22 + 1
"""No process has a number over PID_MAX_LIMIT."""

SENDS = """
import sys, zmq
with zmq.Context() as context:
    push = context.socket(zmq.PUSH)
    push.set(zmq.LINGER, 5000)
    push.connect(sys.argv[1])
    push.send(b"hello")
    push.close()
"""


@dataclass
class Listening:
    """A PULL socket on an abstract name."""

    context: zmq.Context[Any]
    pull: zmq.Socket[bytes]
    name: str

    @property
    def address(self) -> str:
        return f"ipc://@{self.name}"


@pytest.fixture
def listening() -> Iterator[Listening]:
    context: zmq.Context[Any] = zmq.Context()
    name = f"penstock-test-{uuid.uuid4().hex}"
    pull: zmq.Socket[bytes] = context.socket(zmq.PULL)
    pull.bind(f"ipc://@{name}")
    yield Listening(context, pull, name)
    context.destroy(linger=0)


def test_descent_is_told_from_strangers() -> None:
    parent = os.getppid()
    assert parent_of(os.getpid()) == parent
    assert descends_from(os.getpid(), parent) and descends_from(parent, parent)
    assert not descends_from(parent, os.getpid())
    assert not descends_from(NOBODY, parent) and not descends_from(os.getpid(), NOBODY)
    assert not descends_from(0, parent), "a process of another pid namespace"


def test_children_of_the_same_parent_are_heard(listening: Listening) -> None:
    peer_filter = LocalPeerFilter(listening.pull, elder=os.getpid())
    child = subprocess.Popen([sys.executable, "-c", SENDS, listening.address])
    try:
        assert listening.pull.poll(20_000), "of a child"
        assert listening.pull.recv() == b"hello"
    finally:
        child.wait(timeout=600)
        peer_filter.close()


def test_a_process_of_no_neighbour_is_cut(
    listening: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    peer_filter = LocalPeerFilter(listening.pull, elder=NOBODY)
    try:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(600.0)
            stranger.connect(f"\0{listening.name}")
            with pytest.raises(OSError):
                while True:
                    if not stranger.recv(100):
                        raise ConnectionResetError
            with pytest.raises(OSError):
                for _ in range(1000):
                    stranger.sendall(bytes(1000))
        assert f"process {os.getpid()}, which is none of its node" in caplog.text
    finally:
        peer_filter.close()


def test_the_end_is_quick(listening: Listening) -> None:
    peer_filter = LocalPeerFilter(listening.pull, elder=os.getpid())
    peer_filter.close()
    assert not peer_filter._thread.is_alive()
    with listening.context.socket(zmq.PUSH) as push:
        push.connect(listening.address)
        push.send(b"still open")
        assert listening.pull.poll(120_000)
