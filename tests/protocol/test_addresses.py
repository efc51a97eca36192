"""Sockets follow the name of their machine when its address changes."""

from __future__ import annotations

import socket as sockets
from collections.abc import Iterator

import pytest
import zmq

from penstock.protocol.wire import addresses
from penstock.protocol.wire.addresses import HomeAddress, HomeSocket


class World:
    """What the name server and the interfaces of this machine say; all of 127.0.0.0/8 is here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name, self.here = "127.0.0.1", {"127.0.0.1"}
        self.questions = 0
        monkeypatch.setattr(sockets, "gethostbyname", self._resolve)
        monkeypatch.setattr(addresses, "_is_here", lambda number: number in self.here)
        monkeypatch.setattr(addresses, "LOOK_S", 0.0)

    def _resolve(self, host: str) -> str:
        self.questions += 1
        if host != "here.example":
            raise sockets.gaierror(sockets.EAI_NONAME, "unknown")
        return self.name


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def test_a_name_is_asked_for_only_when_its_address_has_gone(world: World) -> None:
    home = HomeAddress("here.example")
    assert not home.moved()
    world.name = "127.0.0.2"
    assert not home.moved(), "the address before is still this machine's"
    assert world.questions == 1
    world.here = set()
    assert not home.moved(), "nothing is here: the network is being changed"
    world.here = {"127.0.0.2"}
    assert home.moved()
    assert home.number == "127.0.0.2"
    assert not home.moved()


def test_a_number_or_a_name_without_meaning_moves_nowhere(world: World) -> None:
    home = HomeAddress("here.example")
    world.here = {"127.0.0.2"}
    assert not home.moved(), "the name still means what is gone"
    home.host = "nowhere.example"
    assert not home.moved()
    with pytest.raises(OSError):
        HomeAddress("nowhere.example")


def test_a_socket_listens_at_the_new_address_on_its_port(
    world: World, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    home = HomeSocket(pull, "here.example")
    port = home.endpoint.rpartition(":")[2]
    assert home.endpoint == f"tcp://127.0.0.1:{port}"
    world.name, world.here = "127.0.0.2", {"127.0.0.2"}
    with sockets.create_server(("127.0.0.2", int(port))):
        home.follow()
        assert home.endpoint == f"tcp://127.0.0.1:{port}", "the port is taken there"
    home.follow()
    assert home.endpoint == f"tcp://127.0.0.2:{port}"
    push.connect(home.endpoint)
    push.send(b"heard")
    assert pull.recv() == b"heard"
    with pytest.raises(ConnectionRefusedError):
        sockets.create_connection(("127.0.0.1", int(port)), timeout=5)
    for socket in (pull, push):
        socket.close(linger=0)
