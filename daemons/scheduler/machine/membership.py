"""Who is there: streams, heartbeats, and processes that must be dead before anything goes on.

Only death fences memory. A member whose stream ended or whose heartbeats stopped may still live,
and even be writing; it counts as dead when its node has killed and reaped it and says so. From the
moment that is ordered, the process is refused, should it come back.

A node itself is never fenced: nobody could. Its children die with it, and a new node starts only
when they are dead; so the run waits for the node to come back.

A network may be what fails. On another machine than the scheduler's an ended stream says little:
the process has the time of a heartbeat to come back before it is fenced, and none of it passes
while its node is not heard either, since then nobody could be told to fence it. Who comes back as
the same process answers the next Drain like all others, so nothing of its old work is left. One
that died is replaced by its node without being asked.

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
"""Characters of a name that a stranger gave."""
MAX_NAMED = 8
"""Members that a message names; those of a large cluster would fill pages."""
MISSING_S = 60.0
"""How often a node is told who is missing."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One expected member. ``pid`` 0: no process is known that could be alive.

    ``fence_at_s``: without a stream until then, its process is taken for lost. ``gone_s``: since
    when it has none, and ``why``, as far as is known; None while it has one. ``took_part``: the
    nonce of the process that was in the last epoch that began. ``told_s``: when its node was told
    that it is missing.
    """

    spec: MemberSpec
    stream: int | None = None
    pid: int = 0
    heard_s: float = 0.0
    fence_at_s: float | None = None
    restarts: int = 0
    hello: pb.Hello | None = None
    gone_s: float | None = None
    why: str = "not started yet"
    took_part: int | None = None
    told_s: float = float("-inf")


class Membership:
    """All members of the run. Methods return effects; whether an epoch breaks is the caller's."""

    def __init__(self, rules: Rules, journaled_pids: tuple[tuple[str, int], ...] = ()) -> None:
        self._run_id = rules.run_id
        self._timeout_s = rules.config.cluster.heartbeat_timeout_s
        self._leases = Leases(self._timeout_s if rules.mirrords else None)
        self.members = {spec.name: Member(spec=spec) for spec in rules.members}
        self._nodes = {s.node: s.name for s in rules.members if s.role is Role.NODE}
        here = nodes_beside(rules.config, 0)
        nodes = enumerate(rules.config.cluster.nodes)
        self._elsewhere = {node.name for index, node in nodes if index not in here}
        self._on_node: dict[str, list[Member]] = {}
        for member in self.members.values():
            self._on_node.setdefault(member.spec.node, []).append(member)
        self._changed: set[str] = set()  # members that validate() has not looked at since
        self._names: dict[int, str] = {}
        self._journaled = dict(journaled_pids)
        self._dying: dict[tuple[str, int], None] = {}  # in the order they were ordered
        self._refused: dict[tuple[str, int], int] = {}  # what they drew; 0: not known
        self._patient_until_s = float("-inf")
        self._complained_s, self._uncomplained = float("-inf"), 0
        self._began_s = 0.0
        self.facts: dict[str, dict[str, str]] = {}
        """Facts of each worker's device, from the first Hello to this scheduler."""

    # ---- looking ----

    @property
    def complete(self) -> bool:
        """Whether every member has a stream and nobody is being fenced."""
        return not self._dying and len(self._names) == len(self.members)

    @property
    def fencing(self) -> tuple[str, ...]:
        """Members whose old process is not known to be dead yet."""
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
        """Nodes that were here and have no stream now."""
        return tuple(
            name
            for name, m in self.members.items()
            if m.spec.role is Role.NODE and m.hello is not None and m.stream is None
        )

    def name_of(self, stream: int) -> str | None:
        """Returns the member at the other end of a stream; None when the stream is not believed."""
        return self._names.get(stream)

    def role_of(self, name: str) -> Role:
        """Returns what a member does."""
        return self.members[name].spec.role

    def epochs_seen(self) -> tuple[int, ...]:
        """Returns the epochs members said they took part in."""
        return tuple(m.hello.epoch for m in self.members.values() if m.hello is not None)

    def pids(self) -> tuple[tuple[str, int], ...]:
        """Returns the process of every member."""
        return tuple((name, m.pid) for name, m in self.members.items())

    def processes(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Returns pid and nonce of members' processes, as their last Hello said them."""
        hellos = {name: self.members[name].hello for name in names}
        return {
            name: (0, 0) if hello is None else (hello.pid, hello.nonce)
            for name, hello in hellos.items()
        }

    def newcomers(self, names: Iterable[str]) -> frozenset[str]:
        """Returns those whose processes took part in no epoch yet: they remember nothing."""
        found = ((name, self.members[name]) for name in names)
        return frozenset(
            name
            for name, m in found
            if m.hello is None or (not m.hello.epoch and m.took_part != m.hello.nonce)
        )

    def take_part(self) -> None:
        """An epoch has begun with the processes that are here."""
        for member in self.members.values():
            member.took_part = None if member.hello is None else member.hello.nonce

    def address(self, name: str) -> str:
        """Returns where a member's data socket is; empty if it has not said."""
        hello = self.members[name].hello
        return "" if hello is None else hello.data_endpoint

    def endpoints(self, name: str) -> list[pb.Endpoint]:
        """Returns where the data sockets are of the members that ``name`` asked for."""
        asking = self.members[name].hello
        asked: Iterable[str] = self.members
        if asking is not None and asking.HasField("peers"):
            asked = asking.peers.members
        found = ((peer, self.members[peer].hello) for peer in asked if peer in self.members)
        return [
            pb.Endpoint(member=peer, address=hello.data_endpoint)
            for peer, hello in found
            if hello is not None and hello.data_endpoint
        ]

    def status(self, now_s: float, ready: bool) -> list[pb.MemberStatus]:
        """For :class:`StatusReply`; ``ready``: whether joined members take part in an epoch."""
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
        """Returns since when a member is missing, why, and what happens next."""
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
        """Returns since when a member has no stream; one that never had, since this is waiting."""
        return self._began_s if member.gone_s is None else member.gone_s

    # ---- changes ----

    def began(self, now_s: float) -> None:
        """The scheduler begins to wait for members."""
        self._began_s = now_s

    def join(self, stream: int, hello: pb.Hello, now_s: float) -> tuple[str | None, list[Effect]]:
        """Hear the Hello of a stream; returns the member's name if it was accepted.

        While a member's process is believed to live, nobody else is the member: who says so is sent
        away, to come again. A process that was replaced comes when the stream of the one before has
        ended, or its node has reported it dead.
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
        """Any message is a sign of life."""
        self.members[name].heard_s = now_s

    def closed(self, stream: int, now_s: float) -> tuple[str | None, list[Effect]]:
        """Forget a stream that ended; returns the member that is lost by it, if any."""
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
        """A stream ended as it was to: its process was told to shut down."""
        name = self._names.get(stream)
        if name is not None:
            self._disconnect(self.members[name], stream)

    def lose(self, name: str, reason: str, now_s: float) -> list[Effect]:
        """Stop believing a member: end its stream and have its process killed, or wait until its
        node is there to do so.
        """
        member = self.members[name]
        said = f"{name} (pid {member.pid}) is lost: {reason}"
        if member.gone_s is None:
            member.gone_s = now_s
        member.why = reason
        effects: list[Effect] = [LogLine(text=said, warning=True), *self._drop_stream(member)]
        if member.spec.role is Role.NODE:
            self._end_lease(member, now_s)
            return effects
        if self._out_of_reach(member, now_s):
            member.fence_at_s = now_s + self._timeout_s
            return effects
        return effects + self._fence(member)

    def gave_up(self, name: str, body: pb.Failed) -> bool:
        """Whether a worker ends because something in an epoch took too long. If nobody goes on with
        that epoch, then somebody was lost, and is waited for, perhaps for hours; else somebody
        hangs.
        """
        return self.role_of(name) is Role.WORKER and body.timed_out and body.epoch > 0

    def overdue(self, now_s: float) -> dict[str, str]:
        """Returns the members to :meth:`lose` now, and why."""
        found = {}
        for name, m in self.members.items():
            if m.stream is not None and now_s - m.heard_s > self._timeout_s:
                found[name] = f"no heartbeat for {now_s - m.heard_s:.1f} s"
            elif m.stream is None and m.fence_at_s is not None:
                if self._out_of_reach(m, now_s):
                    m.fence_at_s = now_s + self._timeout_s
                elif m.fence_at_s <= now_s:
                    found[name] = "it did not come back"
        return found

    def missed(self, now_s: float) -> list[Effect]:
        """Tell nodes that nobody is heard of a member, whoever that is by now."""
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
        """A node says that a process is dead and reaped; ``death``: how, if by itself."""
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
        """The scheduler itself was stopped: silence and ended streams prove nothing for a while."""
        self._patient_until_s = now_s + self._timeout_s
        self._leases.forgive(now_s)
        self._changed.update(self.members)
        for member in self.members.values():
            member.heard_s = now_s
            if member.fence_at_s is not None:
                member.fence_at_s = self._patient_until_s

    def validate(self) -> None:
        """Check the invariants, of members that changed since the last time: with all of them every
        event would take longer in a larger cluster.

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

    # ---- inside ----

    def _complain(self, hello: pb.Hello, reason: str, now_s: float) -> list[Effect]:
        """Say who was turned away, at most once a second: it may be somebody who does not stop."""
        if now_s - self._complained_s < COMPLAINT_INTERVAL_S:
            self._uncomplained += 1
            return []
        others = f" ({self._uncomplained} more since the last time)" if self._uncomplained else ""
        self._complained_s, self._uncomplained = now_s, 0
        said = f"refused {hello.member[:MAX_SHOWN]} (pid {hello.pid}): {reason}{others}"
        return [LogLine(text=said, warning=True)]

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
        """Repeat orders it may have missed; find out whether it still has the journaled processes.

        The same node process has the same children, or has reaped them. They get the time of a
        heartbeat to come back to a scheduler that was restarted.
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
                # The network was away, for all of the machine: others reconnect just now.
                member.heard_s = now_s
        return [
            _fence_order(node.spec.name, name, pid)
            for name, pid in self._dying
            if self.members[name].spec.node == node.spec.node
        ]

    def _out_of_reach(self, member: Member, now_s: float) -> bool:
        """Whether a member's machine is behind a network that fails: its node, too, is not heard.

        Half of the deadline, because the last heartbeats before a cut are not of one moment.
        """
        node = self.members[self._nodes[member.spec.node]]
        silent = node.stream is None or now_s - node.heard_s > self._timeout_s / 2
        return silent and member.spec.node in self._elsewhere

    def _end_lease(self, node: Member, now_s: float) -> None:
        machine = "" if node.hello is None else node.hello.machine
        self._leases.ended(node.spec.name, machine, now_s)

    def _fence(self, member: Member) -> list[Effect]:
        """Order the death of the member's process; without its node the order waits."""
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
    """Returns the facts of a device that a Hello brings, by name."""
    return {fact.name: fact.value for fact in hello.facts}


def _same_process(member: Member, hello: pb.Hello) -> bool:
    """Returns whether a Hello is of the process that is the member already."""
    known = member.hello
    return known is not None and (known.pid, known.nonce) == (hello.pid, hello.nonce)


def _fence_order(node: str, member: str, pid: int) -> Send:
    fence = pb.Fence(member=member, pid=pid)
    return Send(member=node, message=pb.SchedulerMessage(fence=fence))
