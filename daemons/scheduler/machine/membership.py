"""Membership: streams, heartbeats, and processes that must die before the next epoch.

Only death fences memory. A process without a stream or heartbeats may still be alive, and may even
be writing. It counts as dead when its node has killed and reaped it, and has reported so. From the
order on, the scheduler refuses the process if it returns.

A node itself is never fenced, since no process could do so. Its children die with it, and a new
node starts only when they are dead. So the run waits until the node returns.

The network may fail instead. On a machine other than the scheduler's, an ended stream proves
little. The process has one heartbeat timeout to return before it is fenced. The timeout does not
run while its node is silent as well, since no node could then fence the process. The same process
may return: it drains like all members, so none of its old work is left. A dead process is replaced
by its node without an order.

:class:`Membership` notices a dead or stopped process by its stream and its heartbeats.
``HangDetector`` of :mod:`~penstock.daemons.scheduler.machine.activities.activity` notices a process
that sends heartbeats while its work is stuck in a driver, a lock or a file system. A process that
hangs before it could join has no process id here: its node receives ``Missing``, and knows the age
of the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.daemons.kit.events import LogLine
from penstock.daemons.scheduler.machine.events import Accept, Disconnect, Effect, Refuse, Send
from penstock.daemons.scheduler.machine.node_loss import Leases
from penstock.daemons.scheduler.machine.rules import MemberSpec, Role, Rules
from penstock.daemons.scheduler.machine.states import MemberState
from penstock.host.logs import COMPLAINT_INTERVAL_S
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.names import nodes_beside
from penstock.protocol.run.numerics import differences

MAX_SHOWN = 60
"""Characters shown of a name that an unknown process sent."""
MAX_NAMED = 8
"""Members that a message names. The names of a large cluster would fill pages."""
MISSING_S = 60.0
"""Seconds between two Missing messages to a node about the same member."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One expected member. Only :class:`Membership` writes its fields."""

    spec: MemberSpec
    """Name, role and node. Never changes."""
    stream: int | None = None
    """Number of the stream; None without one. ``Membership._names`` is the inverse."""
    pid: int = 0
    """Process that may be alive; 0 if none is known. Never a refused process."""
    heard_s: float = 0.0
    """Time of the last message of the member, or of the last pardon after a pause."""
    fence_at_s: float | None = None
    """Time at which a process without a stream is fenced; None while a stream is there."""
    restarts: int = 0
    """Deaths that the node has reported."""
    hello: pb.Hello | None = None
    """The last accepted Hello; None before the first."""
    gone_s: float | None = None
    """Time at which the last stream ended; None while there is one, or before the first."""
    why: str = "not started yet"
    """Reason of the missing stream, as far as known."""
    took_part: int | None = None
    """Nonce of the process that took part in the last epoch that began."""
    told_s: float = float("-inf")
    """Time of the last Missing message to the node about this member."""


class Membership:
    """All members of the run. Methods return effects; the caller may break the epoch."""

    def __init__(self, rules: Rules, journaled_pids: tuple[tuple[str, int], ...] = ()) -> None:
        self._run_id = rules.run_id
        """Run that a Hello must name. Constant."""
        self._timeout_s = rules.config.cluster.heartbeat_timeout_s
        """Seconds of silence after which a member is lost. Constant."""
        self._leases = Leases(self._timeout_s if rules.mirrords else None)
        """Machines that may still run a lost node."""
        self.members = {spec.name: Member(spec=spec) for spec in rules.members}
        """All members by name, in the order of the rules. The keys never change."""
        self._nodes = {s.node: s.name for s in rules.members if s.role is Role.NODE}
        """Member name of each node's supervisor. Constant."""
        here = nodes_beside(rules.config, 0)
        nodes = enumerate(rules.config.cluster.nodes)
        self._elsewhere = {node.name for index, node in nodes if index not in here}
        """Nodes on machines other than the scheduler's. Constant."""
        self._on_node: dict[str, list[Member]] = {}
        """Members of each node. Constant."""
        for member in self.members.values():
            self._on_node.setdefault(member.spec.node, []).append(member)
        self._changed: set[str] = set()
        """Members changed since the last :meth:`validate`, which clears the set."""
        self._names: dict[int, str] = {}
        """Member of each stream. Written with ``Member.stream``."""
        self._journaled = dict(journaled_pids)
        """Processes of an earlier scheduler's epoch. A joining member or node removes its entry."""
        self._dying: dict[tuple[str, int], None] = {}
        """Processes with an ordered and unreported death, oldest order first. All are refused."""
        self._refused: dict[tuple[str, int], int] = {}
        """Processes that may not join, with their nonces (0: unknown). Fencing adds entries."""
        self._patient_until_s = float("-inf")
        """Time until which ended streams prove nothing. Written after a pause of this process."""
        self._complained_s, self._uncomplained = float("-inf"), 0
        """Time of the last logged refusal, and refusals since."""
        self._began_s = 0.0
        """Time at which this scheduler began to wait. Written once, by :meth:`began`."""
        self.facts: dict[str, dict[str, str]] = {}
        """Facts of each worker's device, from the first Hello to this scheduler."""

    # ---- state ----

    @property
    def complete(self) -> bool:
        """True if every member has a stream and no process is being fenced."""
        return not self._dying and len(self._names) == len(self.members)

    @property
    def fencing(self) -> tuple[str, ...]:
        """Members with an old process that is not reported dead yet."""
        return tuple(dict.fromkeys(name for name, _ in self._dying))

    @property
    def missing(self) -> tuple[str, ...]:
        """Members without a stream."""
        return tuple(name for name, m in self.members.items() if m.stream is None)

    @property
    def present(self) -> tuple[str, ...]:
        """Members with a stream."""
        return tuple(name for name, m in self.members.items() if m.stream is not None)

    @property
    def lost_nodes(self) -> tuple[str, ...]:
        """Nodes that have joined before and have no stream now."""
        return tuple(
            name
            for name, m in self.members.items()
            if m.spec.role is Role.NODE and m.hello is not None and m.stream is None
        )

    def name_of(self, stream: int) -> str | None:
        """Returns the member of a stream; None if the stream is not accepted."""
        return self._names.get(stream)

    def role_of(self, name: str) -> Role:
        """Returns the role of a member."""
        return self.members[name].spec.role

    def epochs_seen(self) -> tuple[int, ...]:
        """Returns the epochs that members report in their Hellos."""
        return tuple(m.hello.epoch for m in self.members.values() if m.hello is not None)

    def pids(self) -> tuple[tuple[str, int], ...]:
        """Returns the process of every member."""
        return tuple((name, m.pid) for name, m in self.members.items())

    def processes(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Returns pid and nonce of members' processes, from their last Hellos."""
        hellos = {name: self.members[name].hello for name in names}
        return {
            name: (0, 0) if hello is None else (hello.pid, hello.nonce)
            for name, hello in hellos.items()
        }

    def newcomers(self, names: Iterable[str]) -> frozenset[str]:
        """Returns members with a process that took part in no epoch yet: it remembers nothing."""
        members = ((name, self.members[name]) for name in names)
        return frozenset(
            name
            for name, m in members
            if m.hello is None or (not m.hello.epoch and m.took_part != m.hello.nonce)
        )

    def take_part(self) -> None:
        """Notes that the processes that are here take part in an epoch."""
        for member in self.members.values():
            member.took_part = None if member.hello is None else member.hello.nonce

    def address(self, name: str) -> str:
        """Returns the address of a member's data socket; empty if unknown."""
        hello = self.members[name].hello
        return "" if hello is None else hello.data_endpoint

    def endpoints(self, name: str) -> list[pb.Endpoint]:
        """Returns the data sockets of the peers that ``name`` requested in its Hello."""
        request = self.members[name].hello
        peers: Iterable[str] = self.members
        if request is not None and request.HasField("peers"):
            peers = request.peers.members
        hellos = ((peer, self.members[peer].hello) for peer in peers if peer in self.members)
        return [
            pb.Endpoint(member=peer, address=hello.data_endpoint)
            for peer, hello in hellos
            if hello is not None and hello.data_endpoint
        ]

    def status(self, now_s: float, ready: bool) -> list[pb.MemberStatus]:
        """Returns all members for a StatusReply. ``ready``: whether an epoch is live."""
        dying = frozenset(self.fencing)
        return [
            pb.MemberStatus(
                member=name,
                state=self._state(m, dying, ready),
                pid=m.pid,
                silent_seconds=max(0.0, now_s - m.heard_s) if m.stream is not None else 0.0,
                restarts=m.restarts,
                **self._absence(m, dying, now_s),
            )
            for name, m in self.members.items()
        ]

    def _absence(self, member: Member, dying: frozenset[str], now_s: float) -> dict[str, Any]:
        """Returns the fields about a missing member: seconds, reason and next action."""
        name = member.spec.name
        if member.stream is not None and name not in dying:
            return {}
        node = self.members[self._nodes[member.spec.node]]
        if member.spec.role is Role.NODE:
            again = "again " if member.hello is not None else ""
            then = f"the run waits until it is started {again}on its machine (penstock node)"
        elif name in dying and node.stream is None:
            then = f"{node.spec.name} must come back: only it can say that the process is dead"
        elif name in dying:
            then = f"{node.spec.name} kills it and starts another"
        elif member.fence_at_s is not None:
            left_s = max(0.0, member.fence_at_s - now_s)
            then = f"it has {left_s:.0f} s to come back, then it is killed and replaced"
        elif node.stream is None:
            then = f"it starts when {node.spec.name} does"
        else:
            then = f"{node.spec.name} starts it, and another if it hangs before it joins"
        gone_s = max(0.0, now_s - self._missing_since_s(member))
        return {"gone_seconds": gone_s, "why": member.why, "next": then}

    def _missing_since_s(self, member: Member) -> float:
        """Returns the time at which a member's last stream ended, or the scheduler began."""
        return self._began_s if member.gone_s is None else member.gone_s

    # ---- changes ----

    def began(self, now_s: float) -> None:
        """Notes the time at which the scheduler begins to wait for members."""
        self._began_s = now_s

    def join(self, stream: int, hello: pb.Hello, now_s: float) -> tuple[str | None, list[Effect]]:
        """Handles the Hello of a stream; returns the member's name if it is accepted.

        While a member's process is believed alive, no other process is the member. Another process
        is disconnected, and retries. It is accepted when the stream of its predecessor has ended,
        or the node has reported the predecessor dead.
        """
        reason = self._objection(hello)
        if reason:
            refusal = Refuse(stream=stream, reason=reason)
            return None, [refusal, *self._complain(hello, reason, now_s)]
        if (hello.member, hello.pid) in self._dying:
            reason = f"a process {hello.pid} of that name is not known to be dead yet"
            return None, [Disconnect(stream=stream), *self._complain(hello, reason, now_s)]
        self._refused.pop((hello.member, hello.pid), None)
        member = self.members[hello.member]
        if member.stream is not None and not _same_process(member, hello):
            reason = f"process {member.pid} has that name, and lives as far as is known"
            return None, [Disconnect(stream=stream), *self._complain(hello, reason, now_s)]
        leased = self._leases.objection(hello.member, hello.machine, now_s)
        if leased:
            return None, [Disconnect(stream=stream), *self._complain(hello, leased, now_s)]
        self._leases.taken(hello.member)
        effects: list[Effect] = []
        if member.stream is not None:
            effects += self._drop_stream(member)
        if member.pid not in (0, hello.pid) and member.spec.role is not Role.NODE:
            effects += self._fence(member)
        self._connect(member, stream)
        member.pid, member.hello = hello.pid, hello
        if hello.facts:
            self.facts.setdefault(hello.member, facts_in(hello))
        member.heard_s, member.fence_at_s, member.gone_s = now_s, None, None
        effects.append(Accept(stream=stream, member=hello.member))
        if member.spec.role is Role.NODE:
            effects += self._node_joined(member, now_s)
        else:
            self._journaled.pop(hello.member, None)
        return hello.member, effects

    def heard(self, name: str, now_s: float) -> None:
        """Notes a message of a member, of any kind."""
        self.members[name].heard_s = now_s

    def closed(self, stream: int, now_s: float) -> tuple[str | None, list[Effect]]:
        """Forgets a stream that ended; returns the member that lost it, if any."""
        name = self._names.get(stream)
        if name is None:
            return None, []
        member = self.members[name]
        self._disconnect(member, stream)
        member.gone_s, member.why = now_s, "its connection to the scheduler ended"
        effects: list[Effect] = [
            LogLine(text=f"{name} (pid {member.pid}): stream ended", warning=True)
        ]
        if member.spec.role is Role.NODE:
            self._end_lease(member, now_s)
            return name, effects
        patient_until_s = self._patient_until_s
        if member.spec.node in self._elsewhere:
            patient_until_s = max(patient_until_s, now_s + self._timeout_s)
        if now_s < patient_until_s:
            member.fence_at_s = patient_until_s
            return name, effects
        return name, effects + self._fence(member)

    def leave(self, stream: int) -> None:
        """Forgets a stream that ended because of a Shutdown."""
        name = self._names.get(stream)
        if name is not None:
            self._disconnect(self.members[name], stream)

    def lose(self, name: str, reason: str, now_s: float) -> list[Effect]:
        """Ends a member's stream and has its process killed, now or when its node is back."""
        member = self.members[name]
        text = f"{name} (pid {member.pid}) is lost: {reason}"
        if member.gone_s is None:
            member.gone_s = now_s
        member.why = reason
        effects: list[Effect] = [LogLine(text=text, warning=True), *self._drop_stream(member)]
        if member.spec.role is Role.NODE:
            self._end_lease(member, now_s)
            return effects
        if self._out_of_reach(member, now_s):
            member.fence_at_s = now_s + self._timeout_s
            return effects
        return effects + self._fence(member)

    def gave_up(self, name: str, body: pb.Failed) -> bool:
        """Returns whether a worker failed because of a timeout in an epoch. If the epoch is over, a
        lost member is the reason, for which the run may wait for hours. Otherwise a member hangs.
        """
        return self.role_of(name) is Role.WORKER and body.timed_out and body.epoch > 0

    def overdue(self, now_s: float) -> dict[str, str]:
        """Returns the members to :meth:`lose` now, mapped to reasons."""
        reasons = {}
        for name, m in self.members.items():
            if m.stream is not None and now_s - m.heard_s > self._timeout_s:
                reasons[name] = f"no heartbeat for {now_s - m.heard_s:.1f} s"
            elif m.stream is None and m.fence_at_s is not None:
                if self._out_of_reach(m, now_s):
                    m.fence_at_s = now_s + self._timeout_s
                elif m.fence_at_s <= now_s:
                    reasons[name] = "it did not come back"
        return reasons

    def missed(self, now_s: float) -> list[Effect]:
        """Tells each node which of its members are missing."""
        if self.complete:
            return []
        effects: list[Effect] = []
        for name in self.missing:
            member = self.members[name]
            node = self.members[self._nodes[member.spec.node]]
            since_s = max(member.told_s, self._missing_since_s(member))
            if member is node or node.stream is None or now_s - since_s < MISSING_S:
                continue
            member.told_s = now_s
            message = pb.SchedulerMessage(missing=pb.Missing(member=name))
            effects.append(Send(member=node.spec.name, message=message))
        return effects

    def fenced(self, node_member: str, name: str, pid: int, death: str) -> list[Effect]:
        """Handles a node's report of a death. ``death``: its cause, unless the node killed it."""
        if (name, pid) not in self._dying:
            return []
        if self._nodes[self.members[name].spec.node] != node_member:
            return []
        del self._dying[name, pid]
        self.members[name].restarts += 1
        if death:
            self.members[name].why = f"it {death}"
        return [LogLine(text=f"{name} (pid {pid}) {death or 'is dead'}")]

    def forgive(self, now_s: float) -> None:
        """Restarts all deadlines after a pause of this process: silence in it proves nothing."""
        self._patient_until_s = now_s + self._timeout_s
        self._leases.forgive(now_s)
        self._changed.update(self.members)
        for member in self.members.values():
            member.heard_s = now_s
            if member.fence_at_s is not None:
                member.fence_at_s = self._patient_until_s

    def validate(self) -> None:
        """Checks the invariants of members changed since the last call. A check of all members
        would make each event slower in a larger cluster.

        Raises:
            ValueError: naming the member.
        """
        changed, self._changed = self._changed, set()
        for name in changed:
            m = self.members[name]
            if m.stream is not None and self._names.get(m.stream) != name:
                known = self._names.get(m.stream)
                raise ValueError(f"stream {m.stream} of {name} is known as that of {known}")
            if (name, m.pid) in self._refused:
                raise ValueError(f"{name}: process {m.pid} was ordered dead and is believed")
            if m.stream is not None and m.fence_at_s is not None:
                raise ValueError(f"{name}: has a stream and is about to be fenced")
        latest = next(reversed(self._dying), None)
        if latest is not None and latest not in self._refused:
            raise ValueError(f"dying {latest} but not refused")

    # ---- helpers ----

    def _complain(self, hello: pb.Hello, reason: str, now_s: float) -> list[Effect]:
        """Logs a refused process, at most once a second: a process may retry without end."""
        if now_s - self._complained_s < COMPLAINT_INTERVAL_S:
            self._uncomplained += 1
            return []
        others = f" ({self._uncomplained} more since the last time)" if self._uncomplained else ""
        self._complained_s, self._uncomplained = now_s, 0
        text = f"refused {hello.member[:MAX_SHOWN]} (pid {hello.pid}): {reason}{others}"
        return [LogLine(text=text, warning=True)]

    def _objection(self, hello: pb.Hello) -> str:
        if hello.member not in self.members:
            nodes = ", ".join(list(self._nodes.values())[:MAX_NAMED])
            return (
                f"this run has no member {hello.member[:MAX_SHOWN]!r}: it has {len(self.members)},"
                f" of {nodes}{' and others' if len(self._nodes) > MAX_NAMED else ''}"
            )
        if hello.run_id != self._run_id:
            return f"this is run {self._run_id}, not {hello.run_id[:MAX_SHOWN]!r}"
        if not hello.pid:
            return "its Hello says no process id"
        if (hello.member, hello.pid) in self._refused:
            # In a container that was started again, another process may have the number.
            drew = self._refused[hello.member, hello.pid]
            if drew in (0, hello.nonce):
                return f"process {hello.pid} was lost and has been replaced"
        changed = differences(self.facts.get(hello.member, {}), facts_in(hello))
        if changed:
            return (
                f"{hello.member}: its device differs from the device of the process before:"
                f" {'; '.join(changed)}; layers would round otherwise from the next step on: give"
                " the worker an equal device, or start the run again"
            )
        return ""

    def _node_joined(self, node: Member, now_s: float) -> list[Effect]:
        """Repeats orders that the node may have missed, and adopts journaled processes.

        The same node process has the same children, or has reaped them. The children have one
        heartbeat timeout to return to a restarted scheduler.
        """
        if self._journaled.pop(node.spec.name, None) == node.pid:
            for member in self._on_node[node.spec.node]:
                pid = self._journaled.get(member.spec.name, 0)
                if pid and not member.pid:
                    member.pid, member.fence_at_s = pid, now_s + self._timeout_s
                    self._changed.add(member.spec.name)
        for member in self._on_node[node.spec.node]:
            self._journaled.pop(member.spec.name, None)
            if node.spec.node in self._elsewhere:
                # The network had failed for the whole machine: other members reconnect now.
                member.heard_s = now_s
        return [
            _fence_order(node.spec.name, name, pid)
            for name, pid in self._dying
            if self.members[name].spec.node == node.spec.node
        ]

    def _out_of_reach(self, member: Member, now_s: float) -> bool:
        """Returns whether the network to a member's machine may have failed: its node is silent,
        too.

        The limit is half of the timeout: the last heartbeats before a cut differ in time.
        """
        node = self.members[self._nodes[member.spec.node]]
        silent = node.stream is None or now_s - node.heard_s > self._timeout_s / 2
        return silent and member.spec.node in self._elsewhere

    def _end_lease(self, node: Member, now_s: float) -> None:
        machine = "" if node.hello is None else node.hello.machine
        self._leases.ended(node.spec.name, machine, now_s)

    def _fence(self, member: Member) -> list[Effect]:
        """Orders the death of a member's process. Without its node, the order waits."""
        member.fence_at_s = None
        if not member.pid:
            return []
        key = (member.spec.name, member.pid)
        hello = member.hello
        self._refused[key] = hello.nonce if hello is not None and hello.pid == member.pid else 0
        member.pid = 0
        self._dying[key] = None
        self._changed.add(member.spec.name)
        node = self.members[self._nodes[member.spec.node]]
        return [] if node.stream is None else [_fence_order(node.spec.name, *key)]

    def _drop_stream(self, member: Member) -> list[Effect]:
        if member.stream is None:
            return []
        stream = member.stream
        self._disconnect(member, stream)
        return [Disconnect(stream=stream)]

    def _connect(self, member: Member, stream: int) -> None:
        member.stream = stream
        self._names[stream] = member.spec.name
        self._changed.add(member.spec.name)

    def _disconnect(self, member: Member, stream: int) -> None:
        member.stream = None
        del self._names[stream]
        self._changed.add(member.spec.name)

    def _state(self, member: Member, dying: frozenset[str], ready: bool) -> MemberState:
        if member.spec.name in dying:
            return MemberState.FENCING
        if member.stream is None:
            return MemberState.MISSING
        return MemberState.READY if ready else MemberState.JOINING


def facts_in(hello: pb.Hello) -> dict[str, str]:
    """Returns the device facts of a Hello, by name."""
    return {fact.name: fact.value for fact in hello.facts}


def _same_process(member: Member, hello: pb.Hello) -> bool:
    """Returns whether a Hello comes from the member's present process."""
    known = member.hello
    return known is not None and (known.pid, known.nonce) == (hello.pid, hello.nonce)


def _fence_order(node: str, member: str, pid: int) -> Send:
    fence = pb.Fence(member=member, pid=pid)
    return Send(member=node, message=pb.SchedulerMessage(fence=fence))
