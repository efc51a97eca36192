"""The loss of a node with its memory: unfit memory, replicas that can fill it, and leases of names.

Journal and owners are the truth. A replica counts if it belongs to the journal's filling of memory,
has all blocks, and is at the committed version. A replica may also be one step behind, if it has
the gradients of that commit. A replica that was complete at a commit has them: the commit waited.

A new optimizerd lost the gradients that its predecessor pulled from other nodes. If such a node is
unfit, or was filled since the last commit (*bereft* of its gradients), the pending step cannot be
applied. The memory of the new optimizerd's node then counts as lost, too; its partner has the step.
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
    """A memoryd to fill from the replica of ``mirrord``, with the reason."""

    memoryd: str
    mirrord: str
    reason: str


@dataclass(slots=True, kw_only=True)
class Holdings:
    """Reports of members at a Drain, compared with the journal."""

    memory: dict[str, pb.MemoryState] = field(default_factory=dict)
    """Content of each memoryd's shared memory, as ``Drained`` reports it."""
    replicas: dict[str, pb.ReplicaState] = field(default_factory=dict)
    """Content of each mirrord's replica, as ``Drained`` reports it."""
    forgetful: frozenset[str] = frozenset()
    """optimizerds that have taken part in no epoch yet."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """Tokens of members' segments in the journal, hexadecimal."""

    def unfit(
        self, rules: Rules, record: CommitRecord | None, generations: Mapping[str, int]
    ) -> dict[str, str]:
        """Returns the memoryds with memory that contradicts the journal, mapped to reasons.

        A memoryd may be one version behind: the commit was journaled and not announced to its node.
        It is never two behind: an attempt is decided after a message of each optimizerd about it.
        Earlier commits came first on the same stream.
        """
        if record is None:
            return dict.fromkeys(sorted(self.memory), "the journal has no committed version")
        reasons = {
            member: _why_unfit(member, memory, record, generations.get(member, 0))
            or self._why_strange(member, memory)
            for member, memory in sorted(self.memory.items())
        }
        unfit = {member: reason for member, reason in reasons.items() if reason}
        return unfit | self._dependent(rules, record, unfit) if rules.mirrords else unfit

    def recognisable(self, record: CommitRecord) -> dict[str, str]:
        """Returns the tokens to journal once all memory is at ``record``, or is filled. The token
        of a replica that claims content is included only if the journal has no token of its member.
        """
        states: dict[str, pb.MemoryState | pb.ReplicaState] = dict(self.memory)
        for member, replica in self.replicas.items():
            if not _claims(replica, record) or member not in self.tokens:
                states[member] = replica
        return {member: state.tokens.hex() for member, state in states.items() if state.tokens}

    def strange(self, record: CommitRecord) -> tuple[str, ...]:
        """Returns the mirrords with a replica that claims content under a foreign token. Such a
        replica fills no memory: its mirrord starts over with an empty replica.
        """
        return tuple(
            member
            for member, replica in sorted(self.replicas.items())
            if _claims(replica, record) and self._why_strange(member, replica)
        )

    def _why_strange(self, member: str, state: pb.MemoryState | pb.ReplicaState) -> str:
        """Returns why a member's segments are not the journal's; empty if they are."""
        expected = self.tokens.get(member)
        if expected is None or expected == state.tokens.hex():
            return ""
        return f"memory of {member} does not bear the tokens that the journal has of it"

    def bereft(self, record: CommitRecord | None) -> frozenset[str]:
        """Returns the memoryds that partners filled with the state of this commit. They lack the
        gradients of the commit.
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
        """Returns one refill for each unfit memoryd; none if a partner cannot fill one of them."""
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
        dependent: dict[str, str] = {}
        bereft = self.bereft(record)
        while True:
            lost = {*unfit, *dependent, *bereft}
            more = {
                member: f"its optimizerd is new, and needs gradients of {', '.join(on)}"
                for member, sources in rules.contributors.items()
                if member not in lost and _optimizerd_of(rules, member) in self.forgetful
                if (on := sorted(sources & lost))
            }
            if not more:
                return dependent
            dependent |= more

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
    """Maps each memoryd to the mirrord that keeps the replica of its memory."""
    nodes = rules.config.cluster.nodes
    return {
        memoryd_name(node.name): mirrord_name(nodes[partner_of(rules.config, index)].name)
        for index, node in enumerate(nodes)
    }


def _claims(replica: pb.ReplicaState, record: CommitRecord) -> bool:
    """Returns whether a replica claims to be complete and of the record's incarnation."""
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

    A node that receives nothing from the scheduler for its lease kills its children. A spare node
    of the same name therefore waits after the stream ended. The wait is the lease plus a margin for
    clocks and messages under way. A node on the same machine need not wait: the node's lock is free
    only when the last process of its predecessor is dead. A restarted scheduler does not know the
    machines of nodes, and lets every node join. ``lease_s`` None: no node waits.
    """

    def __init__(self, lease_s: float | None) -> None:
        self._lease_s = lease_s
        self._running: dict[str, _Lease] = {}

    def ended(self, node: str, machine: str, now_s: float) -> None:
        """Starts a node's lease, after its stream from ``machine`` (a kernel's boot id) ended."""
        if self._lease_s is not None and machine:
            until_s = now_s + MARGIN * self._lease_s
            self._running[node] = _Lease(machine=machine, until_s=until_s)

    def objection(self, node: str, machine: str, now_s: float) -> str:
        """Returns why a node on ``machine`` must not join yet; empty if it may join."""
        lease = self._running.get(node)
        if lease is None or machine == lease.machine or now_s >= lease.until_s:
            return ""
        return (
            f"{node} was on another machine, which may still run for"
            f" {lease.until_s - now_s:.1f} s without an answer from this scheduler; join again then"
        )

    def taken(self, node: str) -> None:
        """Forgets the lease of a node: a process of the node has joined."""
        self._running.pop(node, None)

    def forgive(self, now_s: float) -> None:
        """Restarts all leases, after the scheduler itself was stopped."""
        for node, lease in list(self._running.items()):
            self.ended(node, lease.machine, now_s)
