"""Run as a module: spawns a process for each line of stdin, and says its pid and exit code."""

from __future__ import annotations

import os
import sys

from penstock.daemons.preload.client import spawn

if __name__ == "__main__":
    print("ready", flush=True)
    for _ in sys.stdin:
        child = spawn(("/bin/true",), os.environ)
        print(child.pid, child.reap() if child.ended(20.0) else "no end", flush=True)
