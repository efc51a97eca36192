"""``ExecStop=`` of a node's unit: a machine that goes down leaves the run, instead of stopping it.

A node that is asked to stop stops the run on all machines. That is what ``systemctl stop`` is for,
but a machine that only starts anew should not need a person on all others. So while systemd shuts
the machine down, the state is saved and the node is killed: for the others that is a power cut with
nothing lost, and they go on when the machine is back. When the machine stays, or the state cannot
be saved, nothing is done here, and systemd asks the node to stop as ever.
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
    """Leaves the run in the directory ``words[0]`` if the machine goes down; the exit code."""
    if not going_down():
        return 0
    manager = ServiceManager.of(os.environ, os.getpid())
    manager.extends(SNAPSHOT_TIMEOUT_S + _ASK_TIMEOUT_S)
    try:
        with ControlClient.for_run(Path(words[0])) as client:
            saved = client.snapshot()
    except PenstockError as error:
        sys.stderr.write(f"penstock: not saved, so the run is stopped: {error}\n")
        return int(error.exit_code)
    sys.stderr.write(f"this machine goes down: saved {saved.directory}, the run waits for it\n")
    os.kill(int(os.environ["MAINPID"]), signal.SIGKILL)
    return 0


def going_down() -> bool:
    """Returns whether systemd is shutting this machine down; what cannot be told counts as no."""
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
