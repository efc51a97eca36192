"""memoryd's block server on one host of a test bed, and who reads from it on another.

``remote_memory.py serve HOST`` makes a small node's memory, serves it, prints its address and waits
for a line; as many bytes are there from a plain TCP socket. ``remote_memory.py fetch ADDRESS
TIMES`` prints the seconds of 64 MiB from the socket, and of a fetch of as many, in turns, a line
each time.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from bench.fetch import SIZES, ZmqFetcher, memory_spec
from penstock.daemons.memory.metrics import MemoryMetrics
from penstock.daemons.memory.server import BlockServer
from penstock.protocol.run.names import ipc_address
from penstock.shm.memory import NodeMemory

RUN_ID = "0123456789ab"
PLAIN_PORT = 29500
SMALLEST, LARGEST = 0, len(SIZES) - 1


def serve(host: str) -> None:
    memory = NodeMemory.create(memory_spec(RUN_ID))
    memory.control.set_incarnation(1)
    server = BlockServer(run_id=RUN_ID, local_address=ipc_address(RUN_ID, "a", "served"), host=host)
    server.start(memory, MemoryMetrics(CollectorRegistry()))
    plain = socket.create_server((host, PLAIN_PORT))
    threading.Thread(target=send_plainly, args=(plain,), daemon=True).start()
    print(server.endpoint, flush=True)
    sys.stdin.readline()
    server.close()
    memory.close()


def send_plainly(listener: socket.socket) -> None:
    """Answer each byte with 64 MiB."""
    content = bytes(SIZES[LARGEST])
    while True:
        with listener.accept()[0] as connection:
            while connection.recv(1):
                connection.sendall(content)


def receive_plainly(connection: socket.socket, out: np.ndarray[Any, Any]) -> None:
    connection.sendall(b"?")
    view = memoryview(out)
    while view:
        view = view[connection.recv_into(view) :]


def fetch(address: str, times: int) -> None:
    host = address.removeprefix("tcp://").rpartition(":")[0]
    client, out = ZmqFetcher(address, RUN_ID), np.zeros(SIZES[LARGEST], dtype=np.uint8)
    client.fetch(SMALLEST, np.zeros(SIZES[SMALLEST], dtype=np.uint8))
    with socket.create_connection((host, PLAIN_PORT)) as plain:
        for _ in range(times):
            moments = [time.perf_counter()]
            receive_plainly(plain, out)
            moments.append(time.perf_counter())
            client.fetch(LARGEST, out)
            moments.append(time.perf_counter())
            print(moments[1] - moments[0], moments[2] - moments[1], flush=True)
    client.close()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        fetch(sys.argv[2], int(sys.argv[3]))
