"""Ends the process without a traceback if Ctrl-C comes during the imports of the command line.

``penstock.client.main`` imports this module first. Until :func:`imported` is called, Ctrl-C ends
the process as SIGHUP and SIGTERM do.
"""

from __future__ import annotations

import signal
import threading
from typing import Any


def imported() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again."""
    _replace(signal.SIG_DFL, signal.default_int_handler)


def _replace(old: Any, new: Any) -> None:
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGINT) is old:
            signal.signal(signal.SIGINT, new)


_replace(signal.default_int_handler, signal.SIG_DFL)
