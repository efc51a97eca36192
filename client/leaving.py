"""``ExecStop=`` of a node's unit: a machine that shuts down leaves the run instead of stopping it.

A stopped node stops the run on all machines, as ``systemctl stop`` should. After a reboot of one
machine, no operator should have to restart the nodes of all machines. So during a shutdown, this
program saves the state and kills the node. The other nodes see a power failure without loss, and
continue when the machine is back. If the machine does not shut down, or the save fails, the program
does nothing, and systemd stops the node as usual.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from penstock.daemons.node.service_manager import ServiceManager
from penstock.host.errors import PenstockError
from penstock.protocol.wire.control import SNAPSHOT_TIMEOUT_S, ControlClient

_ASK_TIMEOUT_S = 20.0


def main(words: list[str]) -> int:
    """Leaves the run in the directory ``words[0]`` if the machine shuts down; returns the exit
    code.
    """
    if not going_down():
        return 0
    manager = ServiceManager.of(os.environ, os.getpid())
    manager.extends(SNAPSHOT_TIMEOUT_S + _ASK_TIMEOUT_S)
    try:
        with ControlClient.for_run(Path(words[0])) as client:
            saved = client.snapshot()
    except PenstockError as error:
        sys.stderr.write(f"penstock: cannot save, so the run stops: {error}\n")
        return int(error.exit_code)
    sys.stderr.write(
        f"this machine shuts down: saved {saved.directory}; the run waits for the machine\n"
    )
    os.kill(int(os.environ["MAINPID"]), signal.SIGKILL)
    return 0


def going_down() -> bool:
    """Returns whether systemd is shutting this machine down; False if systemd does not answer."""
    try:
        result = subprocess.run(
            ("systemctl", "is-system-running"),
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    if result.stderr:
        sys.stderr.write(f"systemctl is-system-running: {result.stderr}")
    return result.stdout.strip() == "stopping"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
