"""Callers that do not go when their call is ended."""

from __future__ import annotations

import resource
import socket

import pytest

from penstock.daemons.scheduler.intake import reset_connection
from penstock.daemons.scheduler.main import make_room_for_streams


@pytest.mark.parametrize("kind, host", [("ipv4", "127.0.0.1"), ("ipv6", "::1")])
def test_one_connection_is_reset_and_no_other(kind: str, host: str) -> None:
    family = socket.AF_INET if kind == "ipv4" else socket.AF_INET6
    with socket.create_server((host, 0), family=family) as server:
        address = server.getsockname()[:2]
        with socket.create_connection(address) as stays, socket.create_connection(address) as goes:
            accepted = [server.accept()[0] for _ in range(2)]
            shown = f"[{host}]" if kind == "ipv6" else host
            reset_connection(f"{kind}:{shown}:{goes.getsockname()[1]}")
            with pytest.raises(ConnectionResetError):
                goes.recv(1)
            accepted[0].sendall(b"a")
            assert stays.recv(1) == b"a"
            for connection in accepted:
                connection.close()
    reset_connection("unix:/somewhere")


def test_a_large_cluster_may_have_more_connections_than_the_usual_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip(f"this machine's hard limit is {hard}")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        make_room_for_streams(11)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
        make_room_for_streams(1100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 2456
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
