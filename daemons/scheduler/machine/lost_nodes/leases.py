"""When another machine may take a node's name over (``memory.mirror: partner``).

A node that hears no scheduler for its lease kills its children. So a spare of the same name may
start where the node before it cannot be asked any more: when that time has passed since its stream
ended, and some more for clocks and for messages that were under way. On the same machine nobody
has to wait: a node takes its lock when the last process of the one before is dead.

A scheduler that was started anew does not know on which machines nodes were, and asks nobody to
wait.
"""

from __future__ import annotations

from dataclasses import dataclass

MARGIN = 1.5
"""Times the lease: what a spare waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lease:
    machine: str
    until_s: float


class Leases:
    """Of nodes whose streams have ended. ``lease_s`` None: nobody waits for anything."""

    def __init__(self, lease_s: float | None) -> None:
        self._lease_s = lease_s
        self._running: dict[str, _Lease] = {}

    def ended(self, node: str, machine: str, now_s: float) -> None:
        """The stream of a node's process on ``machine`` (its kernel's boot id) has ended."""
        if self._lease_s is not None and machine:
            until_s = now_s + MARGIN * self._lease_s
            self._running[node] = _Lease(machine=machine, until_s=until_s)

    def objection(self, node: str, machine: str, now_s: float) -> str:
        """Returns why a process on ``machine`` may not be the node yet; empty if it may."""
        lease = self._running.get(node)
        if lease is None or machine == lease.machine or now_s >= lease.until_s:
            return ""
        return (
            f"{node} was on another machine, which may still run for"
            f" {lease.until_s - now_s:.1f} s without an answer from this scheduler; join again then"
        )

    def taken(self, node: str) -> None:
        """A process is the node."""
        self._running.pop(node, None)

    def forgive(self, now_s: float) -> None:
        """The scheduler itself was stopped: leases begin anew."""
        for node, lease in list(self._running.items()):
            self.ended(node, lease.machine, now_s)
