"""Whose memory is not what the journal says, and which replica can fill it again.

Journal and owners are the truth. A replica counts when it follows the journal's filling of memory,
has all blocks, and is at the committed version, or one step behind with the gradients of that
commit. It has those whenever it was complete at the commit, which waited for it.

A node whose optimizerd is new has lost what it pulled from a node that is to be filled, or was
since the last commit (*bereft* of its gradients), and cannot take a pending step in: its own memory
counts as lost, too, and its partner has that step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.daemons.scheduler.machine.rules import Rules
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.names import memoryd_name, mirrord_name, optimizerd_name, partner_of
from penstock.shm.control import CommitRecord, Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """A memoryd that is to be filled from the replica that ``mirrord`` keeps, and why."""

    memoryd: str
    mirrord: str
    reason: str


@dataclass(slots=True, kw_only=True)
class Holdings:
    """Reports of members at a Drain. ``forgetful``: optimizerds that took part in no epoch yet.
    ``tokens``: those that the journal has of members' segments.
    """

    memory: dict[str, pb.MemoryState] = field(default_factory=dict)
    replicas: dict[str, pb.ReplicaState] = field(default_factory=dict)
    forgetful: frozenset[str] = frozenset()
    tokens: Mapping[str, str] = field(default_factory=dict)

    def unfit(
        self, rules: Rules, record: CommitRecord | None, generations: Mapping[str, int]
    ) -> dict[str, str]:
        """Returns the memoryds whose memory is not what the journal says, or cannot get there, and
        why.

        A memoryd may be one version behind: the commit was journaled and not announced to its node.
        No more, because no attempt is decided before each optimizerd has said something of it, and
        commits before it came first on the same stream.
        """
        if record is None:
            return dict.fromkeys(sorted(self.memory), "the journal has no committed version")
        found = {
            member: _why_unfit(member, memory, record, generations.get(member, 0))
            or self._why_strange(member, memory)
            for member, memory in sorted(self.memory.items())
        }
        unfit = {member: reason for member, reason in found.items() if reason}
        return unfit | self._dependent(rules, record, unfit) if rules.mirrords else unfit

    def recognisable(self, record: CommitRecord) -> dict[str, str]:
        """Returns the tokens that the journal is to have, once all memory is what ``record`` says
        or is filled: of a replica that claims to hold something already, only where the journal
        has none.
        """
        states: dict[str, pb.MemoryState | pb.ReplicaState] = dict(self.memory)
        for member, replica in self.replicas.items():
            if not _claims(replica, record) or member not in self.tokens:
                states[member] = replica
        return {member: state.tokens.hex() for member, state in states.items() if state.tokens}

    def strange(self, record: CommitRecord) -> tuple[str, ...]:
        """Returns the mirrords whose replicas claim to hold something and do not bear the journal's
        tokens: such a replica fills no memory, so its mirrord has to begin anew.
        """
        return tuple(
            member
            for member, replica in sorted(self.replicas.items())
            if _claims(replica, record) and self._why_strange(member, replica)
        )

    def _why_strange(self, member: str, state: pb.MemoryState | pb.ReplicaState) -> str:
        """Returns why a member's segments are not those that the journal knows; empty: they are."""
        expected = self.tokens.get(member)
        if expected is None or expected == state.tokens.hex():
            return ""
        return f"memory of {member} does not bear the tokens that the journal has of it"

    def bereft(self, record: CommitRecord | None) -> frozenset[str]:
        """Returns the memoryds that partners filled with this very commit: its state is there, the
        gradients that led to it are not.
        """
        if record is None or record.decision is Decision.RESTORE:
            return frozenset()
        return frozenset(
            member
            for member, memory in self.memory.items()
            if memory.incarnation == record.incarnation and memory.lost_attempt == record.attempt
        )

    def refills(
        self, rules: Rules, record: CommitRecord | None, unfit: Mapping[str, str]
    ) -> tuple[Refill, ...]:
        """Returns how partners can fill all memory that is unfit; nothing if they cannot."""
        if record is None or not rules.mirrords:
            return ()
        keepers = keepers_of(rules)
        if not all(self._usable(rules, member, keepers[member], record) for member in unfit):
            return ()
        return tuple(
            Refill(memoryd=member, mirrord=keepers[member], reason=reason)
            for member, reason in sorted(unfit.items())
        )

    def _dependent(
        self, rules: Rules, record: CommitRecord, unfit: Mapping[str, str]
    ) -> dict[str, str]:
        if record.decision is Decision.RESTORE:  # no step is pending
            return {}
        found: dict[str, str] = {}
        bereft = self.bereft(record)
        while True:
            lost = {*unfit, *found, *bereft}
            more = {
                member: f"its optimizerd is new, and needs gradients of {', '.join(on)}"
                for member, sources in rules.contributors.items()
                if member not in lost and _optimizerd_of(rules, member) in self.forgetful
                if (on := sorted(sources & lost))
            }
            if not more:
                return found
            found |= more

    def _usable(self, rules: Rules, memoryd: str, mirrord: str, record: CommitRecord) -> bool:
        replica = self.replicas.get(mirrord)
        if replica is None or not replica.complete or self._why_strange(mirrord, replica):
            return False
        # A replica without blocks holds no gradients that could name an attempt, and needs none.
        has_step = replica.attempt == record.attempt or (
            _optimizerd_of(rules, memoryd) in rules.spectators
        )
        at = replica.committed == record.version
        beyond = replica.committed + 1 == record.version and has_step
        return replica.incarnation == record.incarnation and (at or beyond)


def keepers_of(rules: Rules) -> dict[str, str]:
    """Returns memoryd -> the mirrord that keeps the replica of its memory."""
    nodes = rules.config.cluster.nodes
    return {
        memoryd_name(node.name): mirrord_name(nodes[partner_of(rules.config, index)].name)
        for index, node in enumerate(nodes)
    }


def _claims(replica: pb.ReplicaState, record: CommitRecord) -> bool:
    """Returns whether a replica says that it can fill memory of the record's filling."""
    return replica.complete and replica.incarnation == record.incarnation


def _optimizerd_of(rules: Rules, memoryd: str) -> str:
    return optimizerd_name(memoryd.partition(".")[2])


def _why_unfit(member: str, memory: pb.MemoryState, record: CommitRecord, generation: int) -> str:
    explained = {record.version}
    if record.decision is not Decision.RESTORE:
        explained.add(record.version - 1)
    if memory.incarnation == 0:
        return f"{member} has no model in memory"
    if memory.incarnation != record.incarnation:
        return f"memory of {member} is not of the journal's filling"
    if memory.generation != generation:
        return (
            f"memory of {member} is of generation {memory.generation}, the journal's is"
            f" {generation}: its node was replaced meanwhile"
        )
    if memory.committed not in explained:
        return f"{member} is at version {memory.committed}, the journal at {record.version}"
    return ""


MARGIN = 1.5
"""Factor of the lease that a spare node waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lease:
    machine: str
    until_s: float


class Leases:
    """When another machine may take over a node's name (``memory.mirror: partner``).

    A node without an answer from the scheduler for its lease kills its children. A spare node of
    the same name therefore waits for that time after the stream ended, plus a margin for clocks and
    for messages under way. A node on the same machine need not wait: the node's lock is free only
    when the last process of its predecessor is dead. A restarted scheduler does not know the
    machines of nodes, and lets every node join. ``lease_s`` None: no node waits.
    """

    def __init__(self, lease_s: float | None) -> None:
        self._lease_s = lease_s
        self._running: dict[str, _Lease] = {}

    def ended(self, node: str, machine: str, now_s: float) -> None:
        """Starts the lease of a node whose stream from ``machine`` (a kernel's boot id) ended."""
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
        """Forgets the lease of a node whose process has joined."""
        self._running.pop(node, None)

    def forgive(self, now_s: float) -> None:
        """Restarts all leases, after the scheduler itself was stopped."""
        for node, lease in list(self._running.items()):
            self.ended(node, lease.machine, now_s)
