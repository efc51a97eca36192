"""Run as a script: a child that leaves its pid behind and ends as it is told.

``stub_child.py PIDS_FILE SECONDS CODE``: sleeps, then exits with CODE. An order to stop, or
SIGTERM, ends it with 0.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from penstock.host.stopping import HEARD_SIGNALS, STOP_ORDER
from penstock.protocol.run.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(os.getppid())
    for number in (signal.SIGTERM, STOP_ORDER):
        signal.signal(number, lambda number, frame: sys.exit(0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD_SIGNALS)
    with open(sys.argv[1], "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(float(sys.argv[2]))
    sys.exit(int(sys.argv[3]))
