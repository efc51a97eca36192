"""Run as a module: says what a process sees of itself, then ends as it is told."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
from pathlib import Path


def view() -> dict[str, object]:
    """What a child may not have from the process that forked it."""
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines()
    )
    return {
        "argv": sys.argv[1:],
        "cmdline": [word for word in Path("/proc/self/cmdline").read_text().split("\0") if word],
        "cores": sorted(os.sched_getaffinity(0)),
        "descriptors": sorted(
            os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()
        ),
        "directory": os.getcwd(),
        "blocked": status["SigBlk"],
        "environment": dict(os.environ),
        "group": os.getpgid(0) == os.getpid(),
        "handlers": [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT)],
        "parent": os.getppid(),
        "random": random.random(),
        "garbage collection": gc.isenabled(),
        "collections": gc.get_stats()[0]["collections"],
        "has torch": "torch" in sys.modules,
        "threads": len(os.listdir("/proc/self/task")),
    }


if __name__ == "__main__":
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(view(), file)
    if sys.argv[2] == "sleep":
        time.sleep(600)
    sys.exit(int(sys.argv[2]))
