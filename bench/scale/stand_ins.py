"""Members that are not there: one process speaks for those of several nodes, each on a stream of
its own, and answers everything at once. Nothing is computed; what a stand-in says is what a member
says whose work took no time.

    python -m bench.scale.stand_ins HOST:PORT RUN_DIR FIRST_NODE LAST_NODE

Reads commands, one a line: ``report`` is answered with the counts so far as a line of JSON, ``lose
MEMBER`` ends a member's stream, and the end of the input ends the process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import secrets
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from penstock.daemons.scheduler.machine.rules import MemberSpec, Role, member_specs
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.names import ownership
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.credentials import TOKEN_KEY
from penstock.protocol.security.token import read_token, token_path
from penstock.protocol.wire.member import CHANNEL_OPTIONS
from penstock.workers.peers import Peers

_JOIN = "/penstock.v1.Membership/Join"
RETRY_S = 0.2


@dataclass(slots=True, kw_only=True)
class NodeMemory:
    """What the shared memory of a node would hold."""

    incarnation: int = 0
    committed: int = 0


@dataclass(slots=True)
class Counts:
    """Messages and bytes by kind, both ways, and the longest Begin."""

    sent: Counter[str] = field(default_factory=Counter)
    heard: Counter[str] = field(default_factory=Counter)
    heard_bytes: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    longest_begin: int = 0

    def to_json(self) -> str:
        """Returns the counts as a line of JSON."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields)


class StandIn:
    """One member. ``blocks``: whose statuses it reports, of an optimizerd; ``peers``: whose
    addresses it asks for.
    """

    def __init__(
        self,
        address: str,
        run: RunDirectory,
        spec: MemberSpec,
        memory: NodeMemory,
        blocks: tuple[int, ...],
        peers: Sequence[str],
        counts: Counts,
    ) -> None:
        self.pid = 0
        self.siblings: dict[str, StandIn] = {}
        """Of a node: its processes."""
        self._address = address
        self._run_id = run.run_id
        self._shown = ((TOKEN_KEY, read_token(token_path(run.path))),)
        self._spec = spec
        self._memory = memory
        self._blocks = blocks
        self._peers = pb.Peers(members=peers)
        self._counts = counts
        self._epoch = 0
        self._outgoing: asyncio.Queue[pb.MemberMessage] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def live(self) -> None:
        """Replaces the member by a new process id."""
        self.pid = next(_PIDS)
        self._epoch = 0
        self._task = asyncio.create_task(self._connect())

    def die(self) -> None:
        """Ends its stream; only its node can have it replaced."""
        assert self._task is not None
        self._task.cancel()

    def beat(self, sequence: int) -> None:
        """Queues a heartbeat."""
        self._say(heartbeat=pb.Heartbeat(sequence=sequence))

    async def _connect(self) -> None:
        nonce = secrets.randbits(64)
        while True:
            self._outgoing = asyncio.Queue()
            self._say(
                hello=pb.Hello(
                    run_id=self._run_id,
                    member=self._spec.name,
                    pid=self.pid,
                    epoch=self._epoch,
                    data_endpoint=f"tcp://10.0.0.1:{20000 + self.pid % 40000}",
                    nonce=nonce,
                    peers=self._peers,
                )
            )
            async with grpc.aio.insecure_channel(self._address, CHANNEL_OPTIONS) as channel:
                call = channel.stream_stream(_JOIN)(metadata=self._shown)
                writer = asyncio.create_task(self._write(call))
                try:
                    while (data := await call.read()) is not grpc.aio.EOF:
                        self._hear(data)
                except grpc.aio.AioRpcError as error:
                    self._counts.broken[str(error.code())] += 1
                finally:
                    writer.cancel()
                    call.cancel()
            await asyncio.sleep(RETRY_S)

    async def _write(self, call: Any) -> None:
        while True:
            message = await self._outgoing.get()
            await call.write(message.SerializeToString())

    def _say(self, **body: Any) -> None:
        [kind] = body
        self._counts.sent[kind] += 1
        self._outgoing.put_nowait(pb.MemberMessage(**body))

    def _hear(self, data: bytes) -> None:
        message = pb.SchedulerMessage.FromString(data)
        kind = str(message.WhichOneof("body"))
        self._counts.heard[kind] += 1
        self._counts.heard_bytes[kind] += len(data)
        handler = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(getattr(message, kind))

    def _on_fence(self, body: pb.Fence) -> None:
        lost = self.siblings[body.member]
        if lost.pid == body.pid:
            lost.die()
            lost.live()
        self._say(fenced=pb.Fenced(member=body.member, pid=body.pid))

    def _on_drain(self, body: pb.Drain) -> None:
        self._epoch = body.epoch
        memory = None
        if self._spec.role is Role.MEMORYD:
            memory = pb.MemoryState(
                incarnation=self._memory.incarnation, committed=self._memory.committed
            )
        self._say(drained=pb.Drained(epoch=body.epoch, memory=memory))

    def _on_restore(self, body: pb.Restore) -> None:
        self._memory.incarnation, self._memory.committed = body.incarnation, body.version
        self._say(restored=pb.Restored(epoch=body.epoch, incarnation=body.incarnation))

    def _on_begin(self, body: pb.Begin) -> None:
        self._counts.longest_begin = max(self._counts.longest_begin, body.ByteSize())
        if self._spec.role is Role.OPTIMIZERD:
            self._memory.committed = body.record.version
        self._say(ready=pb.Ready(epoch=body.epoch))

    def _on_run_attempt(self, body: pb.RunAttempt) -> None:
        place = {"epoch": body.epoch, "attempt": body.attempt}
        if self._spec.role is Role.WORKER:
            done = pb.AttemptDone(
                loss_sum=1.0, loss_tokens=1, busy_seconds=0.1, wall_seconds=0.1, **place
            )
            self._say(attempt_done=done)
        for block in self._blocks:
            status = pb.BlockStatus(block=block, finite=True, sum_squares=1e-6, **place)
            self._say(block_status=status)

    def _on_commit(self, body: pb.Commit) -> None:
        if self._spec.role is Role.OPTIMIZERD:
            self._memory.committed = body.record.version


_PIDS = itertools.count(1000)


def _stand_ins(
    address: str, run: RunDirectory, nodes: range, counts: Counts
) -> Iterator[tuple[str, StandIn]]:
    config = run.config
    owner = ownership(config, run.table, run.plan).owner
    like = {
        device: Peers.of(config, run.table, run.plan, device, "zmq")
        for device in range(min(2 * config.cluster.workers, config.num_workers))
    }
    for node in nodes:
        name, memory = config.cluster.nodes[node].name, NodeMemory()
        own = tuple(block for block, by in enumerate(owner) if by == node)
        found = {
            spec.name: StandIn(
                address,
                run,
                spec,
                memory,
                own if spec.role is Role.OPTIMIZERD else (),
                _peers(run, node, spec, like),
                counts,
            )
            for spec in member_specs(config)
            if spec.node == name
        }
        for member in found.values():
            member.siblings = found
        yield from found.items()


def _peers(
    run: RunDirectory, node: int, spec: MemberSpec, like: Mapping[int, Peers]
) -> Sequence[str]:
    """Returns whom a member asks for. Workers of the first two nodes ask for what the real ones ask
    for; those of the others for the same as the second node's, with their own node in its place.
    """
    if spec.role is not Role.WORKER:
        return ()
    width = run.config.cluster.workers
    shift = max(0, node - 1) * width
    peers = like[int(spec.name.partition(".")[2]) - shift]
    workers = frozenset(peer + shift if peer >= width else peer for peer in peers.workers)
    return replace(peers, workers=workers).members(run.config)


async def _speak(address: str, run: RunDirectory, nodes: range) -> None:
    counts = Counts()
    members = dict(_stand_ins(address, run, nodes, counts))
    for member in members.values():
        member.live()
    beating = asyncio.create_task(_beat(members, run.config.cluster.heartbeat_interval_s))
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    while line := (await lines.readline()).decode().split():
        if line[0] == "lose":
            members[line[1]].die()
        else:
            sys.stdout.write(counts.to_json() + "\n")
            sys.stdout.flush()
    beating.cancel()
    for member in members.values():
        member.die()


async def _beat(members: dict[str, StandIn], interval_s: float) -> None:
    for sequence in itertools.count(1):
        for member in members.values():
            member.beat(sequence)
        await asyncio.sleep(interval_s)


def main() -> None:
    """Speaks for the members of the nodes that the arguments say."""
    address, path, first, last = sys.argv[1:]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a connection a member
    asyncio.run(_speak(address, RunDirectory(Path(path)), range(int(first), int(last) + 1)))


if __name__ == "__main__":
    main()
