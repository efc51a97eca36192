"""A worker process against a stub of the scheduler: from Hello to its exit code."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import transformers
import yaml

from penstock.host.limits.cgroup import usable_cpus
from penstock.host.stopping import stop_signals_blocked
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.generated import scheduler_pb2_grpc as rpc
from penstock.protocol.run.hardware.cpus import threads_per_worker
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.token import ensure_token
from tests.protocol.test_numerics import RECIPE

WORKER = """
import sys
from pathlib import Path
from penstock.workers.main import main
sys.exit(main(Path(sys.argv[1]), 0, sys.argv[2], int(sys.argv[3])))
"""
IMPATIENT = """
import penstock.workers.epoch_builder
penstock.workers.epoch_builder.PLAN_TIMEOUT_S = 0.0
"""
TIMEOUT_S = 60.0


class StubScheduler(rpc.MembershipServicer):
    """One member's stream as two queues."""

    def __init__(self) -> None:
        self.said: queue.Queue[pb.MemberMessage] = queue.Queue()
        self.to_say: queue.Queue[pb.SchedulerMessage | None] = queue.Queue()
        self._pool = ThreadPoolExecutor(max_workers=4)
        self._server = grpc.server(self._pool)
        rpc.add_MembershipServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Join(self, requests: Any, context: Any) -> Iterator[pb.SchedulerMessage]:
        """The servicer's method; its name is given by the .proto file."""
        threading.Thread(target=self._read, args=(requests,)).start()
        while True:
            try:
                message = self.to_say.get(timeout=1.0)
            except queue.Empty:  # else a worker that imports for long gives its scheduler up
                yield pb.SchedulerMessage(heartbeat=pb.Heartbeat())
                continue
            if message is None:
                return
            yield message

    def _read(self, requests: Any) -> None:
        try:
            for message in requests:
                if message.WhichOneof("body") != "heartbeat":
                    self.said.put(message)
        except grpc.RpcError:
            pass  # the worker is gone
        finally:
            self.to_say.put(None)

    def say(self, **body: Any) -> None:
        self.to_say.put(pb.SchedulerMessage(**body))

    def hear(self, kind: str) -> Any:
        message = self.said.get(timeout=TIMEOUT_S)
        assert message.WhichOneof("body") == kind, message
        return getattr(message, kind)

    def close(self) -> None:
        self.to_say.put(None)
        self._server.stop(0.5).wait()
        self._pool.shutdown()


@pytest.fixture
def scheduler() -> Iterator[StubScheduler]:
    stub = StubScheduler()
    yield stub
    stub.close()


def write_run(cluster: Any, run_dir: Path) -> None:
    """What a worker finds in its run directory."""
    (run_dir / "data").mkdir()
    run_id = cluster.memories[0].spec.run_id
    identity = {"run_id": run_id, "created": "2026-01-01T00:00:00Z", "format": 1}
    (run_dir / "run.json").write_text(json.dumps(identity))
    ensure_token(run_dir)
    (run_dir / "resolved.yaml").write_text(cluster.config.to_yaml())
    (run_dir / "table.json").write_text(cluster.table.to_json())
    (run_dir / "plan.json").write_text(cluster.plan.to_json())
    cluster.hf_config.save_pretrained(run_dir / "model")
    tokens = np.random.default_rng(5).integers(0, 61, 2000).astype(np.uint16)
    tokens.tofile(run_dir / "data" / "train.bin")
    meta = {
        "path": "train.bin",
        "token_dtype": "uint16",
        "first_token": 0,
        "num_tokens": 2000,
        "eos": None,
    }
    (run_dir / "data" / "meta.json").write_text(json.dumps({"train": meta}))


@pytest.fixture
def start(scheduler: StubScheduler, tmp_path: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def run(script: str = WORKER) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, str(tmp_path), f"127.0.0.1:{scheduler.port}"]
        command.append(str(os.getpid()))
        with stop_signals_blocked():  # as a node starts its children
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_from_hello_to_shutdown(
    make_cluster: Any, scheduler: StubScheduler, start: Any, tmp_path: Path
) -> None:
    cluster = make_cluster(workers=1, undo=True)
    write_run(cluster, tmp_path)
    process = start()
    hello = scheduler.hear("hello")
    assert (hello.member, hello.pid, hello.epoch) == ("worker.0", process.pid, 0)
    assert hello.data_endpoint.startswith("ipc:///dev/shm/.penstock-")
    scheduler.say(drain=pb.Drain(epoch=1))
    assert scheduler.hear("drained").epoch == 1
    scheduler.say(begin=pb.Begin(epoch=1, plan_digest=RunDirectory(tmp_path).plan_digest))
    assert scheduler.hear("ready").epoch == 1
    losses = []
    for number in (1, 2):
        scheduler.say(run_attempt=pb.RunAttempt(epoch=1, attempt=number, loss_scale=1.0))
        done = scheduler.hear("attempt_done")
        assert (done.epoch, done.attempt, done.loss_tokens) == (1, number, 8 * 12)
        assert [m[0] for m in cluster.announced(0, len(cluster.table.blocks))] == [number] * 8
        losses.append(done.loss_sum)
        gradients = cluster.gradient_bytes()
    assert losses[0] == losses[1]
    # A new epoch repeats the attempt: the same memory, the same bits.
    scheduler.say(drain=pb.Drain(epoch=2))
    assert scheduler.hear("drained").epoch == 2
    scheduler.say(begin=pb.Begin(epoch=2, plan_digest=RunDirectory(tmp_path).plan_digest))
    assert scheduler.hear("ready").epoch == 2
    scheduler.say(run_attempt=pb.RunAttempt(epoch=2, attempt=3, loss_scale=1.0))
    assert scheduler.hear("attempt_done").loss_sum == losses[0]
    assert cluster.gradient_bytes() == gradients
    scheduler.say(shutdown=pb.Shutdown(reason="done"))
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors) == (0, "")


def test_sigterm_ends_it_cleanly(
    make_cluster: Any, scheduler: StubScheduler, start: Any, tmp_path: Path
) -> None:
    cluster = make_cluster(workers=1, undo=True)
    write_run(cluster, tmp_path)
    process = start()
    scheduler.hear("hello")
    scheduler.say(begin=pb.Begin(epoch=1, plan_digest=RunDirectory(tmp_path).plan_digest))
    scheduler.hear("ready")
    # Version 5 is never committed, so the attempt waits.
    scheduler.say(run_attempt=pb.RunAttempt(epoch=1, attempt=1, base_version=5, loss_scale=1.0))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.3)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors) == (0, "")


def test_a_wait_that_runs_out_is_told_apart_from_other_failures(
    make_cluster: Any, scheduler: StubScheduler, start: Any, tmp_path: Path
) -> None:
    """Somebody else hangs: the run goes on without it, and ends at other failures."""
    write_run(make_cluster(workers=1, undo=True), tmp_path)
    path = tmp_path / "resolved.yaml"
    settings = yaml.safe_load(path.read_text())
    settings["cluster"]["attempt_timeout_s"] = 1.0
    path.write_text(yaml.safe_dump(settings))
    process = start()
    scheduler.hear("hello")
    scheduler.say(begin=pb.Begin(epoch=1, plan_digest=RunDirectory(tmp_path).plan_digest))
    scheduler.hear("ready")
    scheduler.say(run_attempt=pb.RunAttempt(epoch=1, attempt=1, base_version=5, loss_scale=1.0))
    failed = scheduler.hear("failed")
    assert "LostMemberError: waited 2 s for weights of block 0 at version 5" in failed.error
    assert (failed.timed_out, failed.exit_code, failed.epoch) == (True, 4, 1)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 4


def test_a_drain_and_a_stop_are_heard_while_memoryd_is_awaited(
    make_cluster: Any, scheduler: StubScheduler, start: Any, tmp_path: Path
) -> None:
    """A memoryd that ended with the run answers nobody any more: 60 s would be waited for it."""
    write_run(make_cluster(workers=1, undo=True), tmp_path)
    identity = json.loads((tmp_path / "run.json").read_text())
    identity["run_id"] = identity["run_id"][::-1]
    (tmp_path / "run.json").write_text(json.dumps(identity))
    process = start()
    scheduler.hear("hello")
    for epoch in (1, 2):
        digest = RunDirectory(tmp_path).plan_digest
        scheduler.say(begin=pb.Begin(epoch=epoch, plan_digest=digest))
        time.sleep(0.3)
        scheduler.say(drain=pb.Drain(epoch=epoch + 1))
        assert scheduler.hear("drained").epoch == epoch + 1
    scheduler.say(begin=pb.Begin(epoch=3, plan_digest=RunDirectory(tmp_path).plan_digest))
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors) == (0, "")


def test_a_plan_it_cannot_execute_is_reported(
    make_cluster: Any, scheduler: StubScheduler, start: Any, tmp_path: Path
) -> None:
    cluster = make_cluster(workers=1, undo=True)
    write_run(cluster, tmp_path)
    text = cluster.plan.to_json().replace("B 0 3", "SO 0 3 fraction=0.5 peer=1")
    (tmp_path / "plan.json").write_text(text)
    process = start()
    scheduler.hear("hello")
    scheduler.say(begin=pb.Begin(epoch=1, plan_digest=RunDirectory(tmp_path).plan_digest))
    failed = scheduler.hear("failed")
    assert "peer=1', and workers do not swap to devices of other nodes" in failed.error
    assert (failed.timed_out, failed.exit_code) == (False, 2)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert "workers do not swap to devices of other nodes" in errors


def test_a_begin_of_another_recipe_is_refused(
    make_cluster: Any, scheduler: StubScheduler, start: Any, tmp_path: Path
) -> None:
    cluster = make_cluster(workers=1, undo=True)
    write_run(cluster, tmp_path)
    (tmp_path / "numerics.json").write_text(RECIPE.to_json())
    start(IMPATIENT + WORKER)
    facts = {fact.name: fact.value for fact in scheduler.hear("hello").facts}
    assert facts == {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(threads_per_worker(cluster.config, 0, usable_cpus())),
    }
    digest = RunDirectory(tmp_path).plan_digest
    scheduler.say(begin=pb.Begin(epoch=1, plan_digest=digest, numerics_digest=RECIPE.digest))
    assert scheduler.hear("ready").epoch == 1
    scheduler.say(begin=pb.Begin(epoch=2, plan_digest=digest, numerics_digest="00ff"))
    failed = scheduler.hear("failed")
    assert failed.exit_code == 2
    assert failed.error == (
        f"{tmp_path / 'numerics.json'} (recipe {RECIPE.digest}) is not the recipe (00ff) that the"
        " scheduler runs: stop the run and start it again"
    )


def test_a_plan_that_arrives_late_is_awaited(
    make_cluster: Any, scheduler: StubScheduler, start: Any, tmp_path: Path
) -> None:
    """As over NFS: this machine still sees the file of before when Begin names the new plan."""
    cluster = make_cluster(workers=1, undo=True)
    write_run(cluster, tmp_path)
    path = tmp_path / "plan.json"
    text = path.read_text()
    path.write_text(text.replace("}", " }", 1))
    process = start()
    assert list(scheduler.hear("hello").peers.members) == [], "it is alone"
    scheduler.say(begin=pb.Begin(epoch=1, plan_digest=hashlib.sha256(text.encode()).hexdigest()))
    time.sleep(0.3)
    path.write_text(text)
    assert scheduler.hear("ready").epoch == 1
    scheduler.say(shutdown=pb.Shutdown(reason="done"))
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors) == (0, "")


def test_a_process_group_is_awaited_until_a_drain_and_its_members_must_be_named(
    make_cluster: Any, scheduler: StubScheduler, start: Any, tmp_path: Path
) -> None:
    """Worker 1 never opens the epoch; then Begin does not name it."""
    cluster = make_cluster(workers=2, undo=True)
    write_run(cluster, tmp_path)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(resolved.read_text().replace("transport: auto", "transport: gloo"))
    process, plan = start(), RunDirectory(tmp_path).plan_digest
    scheduler.hear("hello")
    address = cluster.workers[1].context.transport.address
    peer = pb.Endpoint(member="worker.1", address=address)
    scheduler.say(begin=pb.Begin(epoch=2, plan_digest=plan, endpoints=[peer]))
    time.sleep(0.5)
    scheduler.say(drain=pb.Drain(epoch=3))
    assert scheduler.hear("drained").epoch == 3, "and it was not ready before"
    scheduler.say(begin=pb.Begin(epoch=3, plan_digest=plan))
    assert "Begin names no endpoint of worker.1" in scheduler.hear("failed").error
    process.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("workers", "nodes", "hosts", "configured", "wanted"),
    [
        (2, 1, ["127.0.0.1"], 0, 4),
        (2, 2, ["127.0.0.1"] * 2, 0, 2),
        (2, 2, ["10.0.0.1", "10.0.0.2"], 0, 4),
        (16, 1, ["127.0.0.1"], 0, 1),
        (16, 1, ["127.0.0.1"], 3, 3),
    ],
)
def test_threads_are_shared_among_the_workers_of_a_machine(
    config_of: Any, workers: int, nodes: int, hosts: list[str], configured: int, wanted: int
) -> None:
    cluster = {
        "workers": workers,
        "nodes": [{"name": "ab"[i], "host": host} for i, host in enumerate(hosts)],
        "threads_per_worker": configured,
    }
    assert threads_per_worker(config_of(cluster), 0, num_cores=8) == wanted
