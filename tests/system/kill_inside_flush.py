"""Loaded as ``sitecustomize``: somebody dies, once each, while half of a block's state is flushed:
the worker that flushes, and its node's optimizerd.
"""

import os
import signal
import sys
from pathlib import Path

# A preloader forks them: it is changed, too.
if {"worker", "penstock.daemons.preload.main"} & set(sys.orig_argv):
    from penstock.workers.state import updates as _updates

    _flush = _updates.NativePreviewer._flush

    def _pid_of_optimizerd():
        run_dir = os.path.dirname(sys.argv[sys.argv.index("--config") + 1])
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                if "optimizerd" in words and any(run_dir in word for word in words):
                    return int(entry.name)
        return None

    def _strike(who, version):
        """Whether this is the step in which ``who`` dies, and nobody has struck yet."""
        marker = Path(os.environ["TEST_KILL_MARKER"] + "-" + who)
        if version < int(os.environ["TEST_KILL_" + who.upper()]):
            return False
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _flush_and_die(self, arrays, step):
        there = arrays.copy_of(step.version)
        for array in there.all:
            array[: len(array) // 2] = float("nan")
        if _strike("worker", step.version):
            os.kill(os.getpid(), signal.SIGKILL)
        if _strike("optimizerd", step.version) and (pid := _pid_of_optimizerd()) is not None:
            os.kill(pid, signal.SIGKILL)
        return _flush(self, arrays, step)

    _updates.NativePreviewer._flush = _flush_and_die
