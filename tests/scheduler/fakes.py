"""A prepared run directory and a cluster of fake members over real streams, for service tests."""

from __future__ import annotations

import hashlib
import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.host.errors import LostMemberError
from penstock.host.files import write_atomically
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.plan.plan import Plan, StageRange
from penstock.protocol.run.names import expected_members
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.credentials import TOKEN_KEY, Credentials
from penstock.protocol.security.token import read_token, token_path
from penstock.protocol.wire.control import ControlClient
from penstock.protocol.wire.member import MemberLink
from penstock.shm.table import BlockSpec, BlockTable, DType, TensorSpec
from tests.scheduler.conftest import make_config

DEADLINE_S = 600.0
NUM_BLOCKS = 3


def make_run(path: Path, **sections: dict[str, Any]) -> RunDirectory:
    """A run directory of three blocks, the last of them frozen.

    The timeout of heartbeats is longer than a busy machine stops a process for.
    """
    cluster = {"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 30.0}
    sections["cluster"] = cluster | sections.get("cluster", {})
    run = RunDirectory.create(path)
    config = make_config(**sections)
    write_atomically(path / "resolved.yaml", config.to_yaml())
    write_atomically(path / "table.json", make_table().to_json())
    stages = (StageRange(start=0, stop=NUM_BLOCKS, device=0),)
    empty = tuple(() for _ in range(config.num_workers))
    plan = Plan(
        scheme="gpipe",
        num_devices=config.num_workers,
        num_microbatches=8,
        forward_stages=stages,
        backward_stages=stages,
        programs=empty,
        evaluation=empty,
    )
    write_atomically(path / "plan.json", plan.to_json())
    return run


def make_table() -> BlockTable:
    """Three blocks of one tensor each."""
    blocks = []
    for index in range(NUM_BLOCKS):
        trainable = index < NUM_BLOCKS - 1
        tensor = TensorSpec(
            name=f"w{index}", shape=(4, 4), trainable=trainable, decay=True, offset=0
        )
        blocks.append(
            BlockSpec(
                index=index,
                name=f"block{index}",
                kind="layer",
                layer_index=index,
                tensors=(tensor,),
                borrows=(),
                trainable_elements=16 if trainable else 0,
                frozen_elements=0 if trainable else 16,
                contributions=1,
                forward_flops=1.0,
                activation_bytes=1.0,
                output_bytes=1.0,
            )
        )
    return BlockTable(
        blocks=tuple(blocks),
        weight_dtype=DType.FP32,
        grad_dtype=DType.FP32,
        state_arrays=("exp_avg", "exp_avg_sq"),
        vocab_size=16,
        num_parameters=48,
    )


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], Any], what: str) -> None:
    """Poll until ``condition``; fail after :data:`DEADLINE_S`."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {DEADLINE_S} s"
        time.sleep(0.005)


class SchedulerProcess:
    """schedulerd as a child process."""

    def __init__(self, run: RunDirectory, port: int) -> None:
        code = (
            "import sys; from pathlib import Path;"
            "from penstock.daemons.scheduler.main import main;"
            "sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), None))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(run.path), str(port)],
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> tuple[int, str]:
        """Exit code and what was written to stderr."""
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors

    def kill(self) -> None:
        """SIGKILL and reap."""
        self.process.kill()
        self.process.communicate()


class FakeMemory:
    """Content of the only node's shared memory, and every commit that was applied to it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.incarnation = 0
        self.committed = 0
        self.applied: list[pb.Record] = []
        self.restores: list[pb.Restore] = []

    def apply(self, record: pb.Record) -> None:
        with self.lock:
            if record.version == self.committed:
                return
            assert record.version == self.committed + 1, f"{record} at {self.committed}"
            assert record.incarnation == self.incarnation
            self.committed = record.version
            self.applied.append(record)

    def restore(self, restore: pb.Restore) -> None:
        with self.lock:
            self.incarnation, self.committed = restore.incarnation, restore.version
            self.restores.append(restore)

    def state(self) -> pb.MemoryState:
        with self.lock:
            return pb.MemoryState(incarnation=self.incarnation, committed=self.committed)


class FakeCluster:
    """All members of a run, each with its own link. ``attempts``: every RunAttempt, in order."""

    def __init__(self, run: RunDirectory, port: int) -> None:
        self.run = run
        self.address = f"127.0.0.1:{port}"
        self.access = Credentials(token_path(run.path))
        self.memory = FakeMemory()
        self.attempts: list[pb.RunAttempt] = []
        self.links: dict[str, MemberLink] = {}
        self.pids: dict[str, int] = {}
        self.epochs: dict[str, int] = {}
        self.fences: list[str] = []
        self.shutdowns: dict[str, pb.Shutdown] = {}
        self.refused: list[str] = []
        self.silent: set[str] = set()
        """Members that take part in nothing although their stream lives, until they are fenced."""
        self.stuck: set[str] = set()
        """Members with processes, also new ones, that never progress in an attempt."""
        self.sum_squares = 0.125
        self.save_error = ""
        self._pids = itertools.count(1000)
        self._old: list[MemberLink] = []

    def start(self, *names: str) -> None:
        """Start members, all by default."""
        for name in names or expected_members(self.run.config):
            self.pids[name] = next(self._pids)
            self.epochs[name] = 0
            self._connect(name)

    def die(self, name: str) -> None:
        """The process is gone; its node notices when it is asked."""
        self._old.append(link := self.links.pop(name))
        link.close(timeout_s=0.0)

    def close(self) -> None:
        for link in (*self.links.values(), *self._old):
            link.close(timeout_s=0.2)

    def control(self) -> ControlClient:
        return ControlClient(self.address, self.access)

    def shown(self) -> tuple[tuple[str, str], ...]:
        """The metadata of calls that are not a stranger's."""
        return ((TOKEN_KEY, read_token(token_path(self.run.path))),)

    def status(self) -> pb.StatusReply | None:
        with self.control() as client:
            try:
                return client.status()
            except LostMemberError:
                return None

    def wait_for_version(self, version: int) -> None:
        wait_for(lambda: self.memory.committed >= version, f"version {version}")

    def _connect(self, name: str) -> None:
        pid = self.pids[name]

        def hello() -> pb.Hello:
            return pb.Hello(run_id=self.run.run_id, member=name, pid=pid, epoch=self.epochs[name])

        cluster = self.run.config.cluster
        link = MemberLink(
            address=self.address,
            access=self.access,
            hello=hello,
            heartbeat_interval_s=cluster.heartbeat_interval_s,
            silence_timeout_s=cluster.heartbeat_timeout_s,
            listener=lambda message: self._hear(name, link, message),
        )
        self.links[name] = link
        link.start()

    def _hear(self, name: str, link: MemberLink, message: pb.SchedulerMessage) -> None:
        kind = str(message.WhichOneof("body"))
        if name in self.silent:
            return
        handler = getattr(self, f"_on_{kind}")
        for answer in handler(name, getattr(message, kind)) or ():
            link.send(answer)

    def _on_refused(self, name: str, body: pb.Refused) -> None:
        self.refused.append(name)

    def _on_fence(self, name: str, body: pb.Fence) -> list[pb.MemberMessage]:
        self.fences.append(body.member)
        if self.pids.get(body.member) == body.pid:
            if body.member in self.links:
                threading.Thread(target=self.die, args=(body.member,)).start()
                wait_for(lambda: body.member not in self.links, "end of the link")
            self.silent.discard(body.member)
            self.start(body.member)
        return [pb.MemberMessage(fenced=pb.Fenced(member=body.member, pid=body.pid))]

    def _on_drain(self, name: str, body: pb.Drain) -> list[pb.MemberMessage]:
        self.epochs[name] = body.epoch
        memory = self.memory.state() if name.startswith("memoryd") else None
        return [pb.MemberMessage(drained=pb.Drained(epoch=body.epoch, memory=memory))]

    def _on_restore(self, name: str, body: pb.Restore) -> list[pb.MemberMessage]:
        self.memory.restore(body)
        restored = pb.Restored(epoch=body.epoch, incarnation=body.incarnation)
        return [pb.MemberMessage(restored=restored)]

    def _on_begin(self, name: str, body: pb.Begin) -> list[pb.MemberMessage]:
        if name.startswith("optimizerd"):
            self.memory.apply(body.record)
        return [pb.MemberMessage(ready=pb.Ready(epoch=body.epoch))]

    def _on_run_attempt(self, name: str, body: pb.RunAttempt) -> list[pb.MemberMessage]:
        if name in self.stuck:
            return []
        place = {"epoch": body.epoch, "attempt": body.attempt}
        if name.startswith("worker"):
            done = pb.AttemptDone(
                loss_sum=3.0, loss_tokens=2, busy_seconds=0.5, wall_seconds=1.0, **place
            )
            return [pb.MemberMessage(attempt_done=done)]
        self.attempts.append(body)
        return [
            pb.MemberMessage(
                block_status=pb.BlockStatus(
                    block=block, finite=True, sum_squares=self.sum_squares, **place
                )
            )
            for block in range(NUM_BLOCKS - 1)
        ]

    def _on_amend(self, name: str, body: pb.Amend) -> list[pb.MemberMessage]:
        amended = pb.Amended(epoch=body.epoch, attempt=body.attempt)
        return [pb.MemberMessage(amended=amended)]

    def _on_commit(self, name: str, body: pb.Commit) -> None:
        if name.startswith("optimizerd"):
            self.memory.apply(body.record)

    def _on_skip(self, name: str, body: pb.Skip) -> None:
        pass

    def _on_settle(self, name: str, body: pb.Settle) -> list[pb.MemberMessage]:
        return [pb.MemberMessage(settled=pb.Settled(epoch=body.epoch, version=body.version))]

    def _on_save(self, name: str, body: pb.Save) -> list[pb.MemberMessage]:
        files = []
        for block in range(NUM_BLOCKS):
            content = f"block {block} of version {body.version}".encode()
            path = Path(body.directory) / f"block-{block:04d}.safetensors"
            path.write_bytes(content)
            sha256 = hashlib.sha256(content).hexdigest()
            files.append(pb.SavedFile(name=path.name, bytes=len(content), sha256=sha256))
        of = {"epoch": body.epoch, "number": body.number, "version": body.version}
        saved = pb.Saved(
            files=[] if self.save_error else files,
            error=self.save_error,
            **of,
        )
        return [pb.MemberMessage(pinned=pb.Pinned(**of)), pb.MemberMessage(saved=saved)]

    def _on_evaluate(self, name: str, body: pb.Evaluate) -> list[pb.MemberMessage]:
        done = pb.EvaluationDone(
            epoch=body.epoch, evaluation=body.evaluation, loss_sum=2.0, loss_tokens=1
        )
        return [pb.MemberMessage(evaluation_done=done)]

    def _on_shutdown(self, name: str, body: pb.Shutdown) -> None:
        self.shutdowns[name] = body
        link = self.links.pop(name, None)
        if link is not None:
            self._old.append(link)
            threading.Thread(target=link.close, args=(0.2,)).start()
