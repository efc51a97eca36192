"""Reports a node's state to the service manager that started it, by the protocol of
``sd_notify(3)``.

systemd, or another manager that sets ``NOTIFY_SOCKET``, learns when the node is up, how far the run
is, and that the node ends. If the manager asks for it (``WATCHDOG_USEC``), it also learns that the
supervisor's loop still turns. The manager then kills and restarts a node with a hung loop. No
process of the run could do so, because only the node itself may declare its processes dead. Without
a manager nothing is sent.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.host.files import DAMAGED, parse_json

STATUS_INTERVAL_S = 2.0
SAY_INTERVAL_S = 5.0
"""Seconds between two lines with a step, on a console."""
EXTEND_INTERVAL_S = 10.0
"""Seconds between requests for more time by a node that ends."""
EXTEND_BY_S = 60.0
"""Seconds of silence that each request allows. The node itself limits the whole duration of a stop.
"""
PINGS_PER_TIMEOUT = 4
_TAIL_BYTES = 8192
"""Bytes read at the end of metrics.jsonl; a line is shorter."""

_log = logging.getLogger(__name__)


class ServiceManager:
    """The manager's socket. ``watchdog_s``: it must be pinged so often; None: it does not care."""

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s if address else None
        self._address = address
        self._failed = False

    @classmethod
    def of(cls, environment: Mapping[str, str], pid: int) -> ServiceManager:
        """Returns the manager that process ``pid`` was started by, as its environment says."""
        address = environment.get("NOTIFY_SOCKET", "")
        if address[:1] not in ("/", "@"):  # unset, or of a kind that only virtual machines have
            return cls(None)
        period = environment.get("WATCHDOG_USEC", "")
        meant = environment.get("WATCHDOG_PID", str(pid)) == str(pid)
        watched = period.isdecimal() and int(period) > 0 and meant
        return cls(address, int(period) / 1e6 if watched else None)

    @property
    def listens(self) -> bool:
        """True if there is a manager."""
        return self._address is not None

    def tell(self, **fields: str) -> bool:
        """Sends fields such as ``READY="1"``; returns whether they were taken.

        Never waits: a manager that is busy or gone must not hold up the node.
        """
        if self._address is None:
            return False
        text = "\n".join(f"{name}={' '.join(value.split())}" for name, value in fields.items())
        # An abstract address begins with a zero byte, which the variable spells as "@".
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(text.encode(), address)
        except OSError as error:
            if not self._failed:
                _log.warning("the service manager at %s gets no messages: %s", self._address, error)
            self._failed = True
            return False
        self._failed = False
        return True

    def prepares(self, what: str) -> None:
        """Says what goes on before the node is up, and asks for time for it."""
        self.tell(STATUS=what)
        self.extends(PREPARE_WITHIN_S)

    def over(self) -> None:
        """Says that there was nothing to do: an end before READY would be a failed start."""
        self.tell(READY="1", STOPPING="1", STATUS="the run has ended")

    def extends(self, seconds: float) -> None:
        """Asks for so much time from now, to start or to stop."""
        self.tell(EXTEND_TIMEOUT_USEC=str(int(seconds * 1e6)))


PREPARE_WITHIN_S = 900.0
"""Preparing a run (tokens, tables) gives a sign of life sooner than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node, as a service manager sees it. ``up``: its processes run, and the scheduler knows it.
    ``ending``: it was asked to stop, or is ending by itself; ``well``: because the run has ended as
    it should.
    """

    up: bool
    ending: bool
    well: bool


class NodeReports:
    """Says what changed, once, and at intervals what must be repeated; on the node's main thread,
    at each turn of its loop. ``say`` prints lines for people where no manager shows the status.
    """

    def __init__(
        self,
        manager: ServiceManager,
        run_dir: Path,
        steps: int,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._manager = manager
        self._say = None if manager.listens else say
        self._said, self._say_at_s = "", float("-inf")
        self._run_dir = run_dir
        self._steps = steps
        self._ready = self._stopping = False
        self._status = ""
        self._status_at_s = self._ping_at_s = self._extend_at_s = float("-inf")

    def turned(self, view: NodeView, now_s: float) -> None:
        """Reports to the manager's watchdog that the loop has turned at ``now_s`` (any monotonic
        clock).
        """
        if view.up and now_s >= self._say_at_s:
            first = self._say_at_s == float("-inf")
            self._say_at_s = now_s + SAY_INTERVAL_S
            self._say_step(first=first)
        if not self._manager.listens:
            return
        if not self._ready and (view.up or view.well):
            # A run that is over before all were up is no failed start.
            self._ready = self._manager.tell(READY="1", STATUS="all processes run")
        if view.ending:
            self._end(now_s)
        watchdog_s = self._manager.watchdog_s
        if watchdog_s is not None and now_s >= self._ping_at_s:
            self._ping_at_s = now_s + watchdog_s / PINGS_PER_TIMEOUT
            self._manager.tell(WATCHDOG="1")
        if now_s >= self._status_at_s:
            self._status_at_s = now_s + STATUS_INTERVAL_S
            self._tell_status(view)

    def over(self) -> None:
        """Reports the end of the node, after the last step has been reported."""
        self._say_step(first=False)

    def _say_step(self, *, first: bool) -> None:
        if self._say is None:
            return
        if first:
            self._say(f"all processes run; to watch them: penstock watch {self._run_dir}")
            self._said = progress_of(self._run_dir, self._steps)  # of the start before
        progress = progress_of(self._run_dir, self._steps)
        if progress != self._said:
            self._said = progress
            self._say(progress)

    def _end(self, now_s: float) -> None:
        if not self._stopping:
            self._stopping = self._manager.tell(STOPPING="1")
        if now_s >= self._extend_at_s:
            self._extend_at_s = now_s + EXTEND_INTERVAL_S
            self._manager.extends(EXTEND_BY_S)

    def _tell_status(self, view: NodeView) -> None:
        doing = "stopping" if view.ending else "training" if view.up else "starting"
        progress = progress_of(self._run_dir, self._steps)
        status = f"{doing}: {progress}" if progress else f"{doing}: no step yet"
        if status != self._status and self._manager.tell(STATUS=status):
            self._status = status


def progress_of(run_dir: Path, steps: int) -> str:
    """Returns the last step that ``metrics.jsonl`` shows, in words; empty without one."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return ""  # not written yet, or not to be reached: nothing that a status should end
    for line in reversed(lines[:-1]):  # behind the last line end is nothing, or half a line
        try:
            entry = parse_json(line)
            if entry["phase"] == "train":
                return f"step {int(entry['step'])} of {steps}, loss {float(entry['loss']):.4f}"
        except DAMAGED:
            continue  # cut by the window, or a loss that is none
    return ""
