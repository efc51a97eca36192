"""Loaded as ``sitecustomize``: a schedulerd that dies between a journal entry and its broadcast."""

import os
import signal
import sys

# A preloader forks them: it is changed, too.
if {"schedulerd", "penstock.daemons.preload.main"} & set(sys.orig_argv):
    from penstock.daemons.scheduler import journal as _journal

    _append = _journal.Journal.decide

    def _append_then_die(self, effect, *args, **kwargs):
        result = _append(self, effect, *args, **kwargs)
        marker = os.environ["TEST_KILL_MARKER"]
        reached = effect.record.version >= int(os.environ["TEST_KILL_VERSION"])
        if reached and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    _journal.Journal.decide = _append_then_die
