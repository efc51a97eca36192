"""Run as a module: a process that has preloaders from birth on has each of them fork."""

from __future__ import annotations

import os
import sys

from penstock.daemons.preload.birth import Birth
from penstock.daemons.preload.heirs import take_heirs
from penstock.daemons.preload.owner import Preloader

if __name__ == "__main__":
    for kind, heir in take_heirs(os.environ).items():
        preloader = Preloader.adopt(heir)
        assert preloader.warm(60.0), "an heir imports what is left"
        words = [f"{sys.argv[1]}/{kind}", "0"]
        child = preloader.fork(Birth.here("tests.preload.newborn", words, os.environ), (0, 1, 2))
        assert child.ended(10.0) and child.reap() == 0
        preloader.end()
