"""Run as a module: a process that has preloaders from its start on has each of them fork."""

from __future__ import annotations

import os
import sys

from penstock.daemons.preload.client import Preloader
from penstock.daemons.preload.fork_request import ForkRequest
from penstock.daemons.preload.preloaders import take_inherited

if __name__ == "__main__":
    for kind, handle in take_inherited(os.environ).items():
        preloader = Preloader.adopt(handle)
        assert preloader.warm(60.0), "the inherited preloader imports what is left"
        words = [f"{sys.argv[1]}/{kind}", "0"]
        child = preloader.fork(
            ForkRequest.here("tests.preload.newborn", words, os.environ), (0, 1, 2)
        )
        assert child.ended(10.0) and child.reap() == 0
        preloader.end()
