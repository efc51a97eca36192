"""The network test bed does what its faults are called, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.netbed import NetBed, missing

pytestmark = pytest.mark.skipif(missing() != "", reason=missing())

ECHO = """
import socket, threading
def answer(connection):
    while data := connection.recv(65536):
        connection.sendall(data)
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
while True:
    threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()
"""

ASK = """
import socket, sys
connection = None
for line in sys.stdin:
    try:
        if line == "connect\\n":
            connection = socket.create_connection(("beta", 5000), timeout=600.0)
        connection.settimeout(0.5 if line == "in vain\\n" else 600.0)
        connection.sendall(b"x")
        print("heard" if connection.recv(1) else "ended", flush=True)
    except OSError as error:
        print("silence" if isinstance(error, TimeoutError) else error, flush=True)
"""


class Asker:
    """A client on alpha that sends a byte to beta and says whether it came back."""

    def __init__(self, bed: NetBed) -> None:
        self._process = subprocess.Popen(
            bed["alpha"].command([sys.executable, "-c", ASK]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, word: str = "send") -> str:
        """``connect`` first, or ``send`` on the connection of before; ``in vain`` waits shorter."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.communicate(timeout=600)


def test_faults_of_the_bed(tmp_path: Path) -> None:
    with NetBed(tmp_path) as bed:
        echo = bed["beta"].start([sys.executable, "-c", ECHO], tmp_path / "echo")
        deadline = time.monotonic() + 600
        while "listening" not in echo.text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        asker = Asker(bed)
        try:
            assert asker.ask("connect") == "heard"
            bed.cut("beta", "alpha", both=False)
            assert asker.ask("in vain") == "silence"
            bed.heal("alpha", "beta")
            assert asker.ask("connect") == "heard"
            bed.half_open("alpha", "beta")
            assert asker.ask("in vain") == "silence"
            assert asker.ask("connect") == "heard"
            bed.move("beta", 22)
            assert asker.ask("in vain") == "silence"
            assert asker.ask("connect") == "heard"
            bed.delay("alpha", "beta", 0.05)
            start_s = time.monotonic()
            assert asker.ask() == "heard"
            assert time.monotonic() - start_s >= 0.1
        finally:
            asker.close()
        host = bed["beta"]
        assert "penstock" not in host.run("ls", "/dev/shm")
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    assert host.device not in links.stdout
    assert not Path(f"/proc/{host.pid}").exists()
