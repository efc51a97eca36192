"""Log lines about what strangers do: they may go on for long, the log should not."""

from __future__ import annotations

import logging
import threading
import time

COMPLAINT_INTERVAL_S = 1.0


class Complaints:
    """Warnings, at most one a second; any thread may complain."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._said_s, self._unsaid = float("-inf"), 0

    def say(self, text: str) -> None:
        """Log a warning, or count it for the next one."""
        with self._lock:
            now_s, unsaid = time.monotonic(), self._unsaid
            if now_s - self._said_s < COMPLAINT_INTERVAL_S:
                self._unsaid += 1
                return
            self._said_s, self._unsaid = now_s, 0
        self._log.warning("%s%s", text, f" ({unsaid} more such before)" if unsaid else "")
