"""Runs that share frozen weights: one base in /dev/shm, each run's own bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from penstock.host.errors import ExitCode
from penstock.protocol.run.bases.base_identity import bases_of, recorded_source
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.control import ControlClient
from penstock.shm.base_users import base_uses
from penstock.shm.bases import FILLING, base_name
from penstock.shm.memory import NodeMemory
from penstock.shm.segment import path_of
from tests.memory.test_taken_bases import take
from tests.system import conftest as H
from tests.system import test_mirror as M
from tests.system.test_exactness import obeyed

FROZEN: dict[str, Any] = {
    "run": {"seed": random.SystemRandom().randrange(2**40)},  # no other tests share these weights
    "train": {"steps": 6, "freeze": ["embed_tokens", r"layers\.[0-3]\.", "lm_head"]},
    "schedule": {"scheme": "mobius"},
    "cluster": {"heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 2.0},
}


ENDS = ("", FILLING)
"""Endings of names that a stranger takes in turn."""


def run_id(run: H.TrainProcess) -> str:
    return str(json.loads((run.run_dir / "run.json").read_text())["run_id"])


def memoryd_of(run: H.TrainProcess) -> int:
    (pid,) = (pid for name, pid in run.members().items() if name.startswith("memoryd"))
    return pid


def test_two_runs_have_one_base_and_end_as_alone(runner: Any) -> None:
    """Both start at once. One memoryd is killed on the way, and adopts the base again."""
    alone = runner.train(
        runner.configure("alone", H.merge(FROZEN, {"memory": {"share_base": "never"}}))
    )
    endless = H.merge(FROZEN, {"train": {"steps": 10**6}, "optimizer": {"schedule": "constant"}})
    stays = runner.start(runner.configure("stays", endless))
    other = runner.start(runner.configure("other", FROZEN))
    H.wait_for_step(stays, 1)
    os.kill(memoryd_of(stays), signal.SIGKILL)
    code, output = other.wait(500)
    assert code == 0, output
    assert H.state_bytes(other.run_dir) == H.state_bytes(alone)
    H.wait_for_step(stays, H.newest_step(stays.run_dir) + 2)
    uses = [use for use in base_uses() if run_id(stays) in use.runs]
    assert uses and {use.runs for use in uses} == {(run_id(stays),)}
    assert all(use.in_use and not use.filling for use in uses)
    stays.process.send_signal(signal.SIGTERM)
    code, output = stays.wait(500)
    assert code == 130, output
    left = {use.digest for use in base_uses()}
    assert left.isdisjoint(use.digest for use in uses)


def test_names_that_another_user_has_taken_change_nothing(runner: Any) -> None:
    """The stranger knows all names from an earlier run of the same weights."""
    if os.getuid() != 0:
        pytest.skip("only root can act as another user")
    alone = runner.train(runner.configure("before", FROZEN))
    directory = RunDirectory(alone)
    source = recorded_source(directory, directory.memory_spec(0).node_name)
    assert source is not None
    digests = [digest for _, digest in bases_of(directory.memory_spec(0), source)]
    taken = [base_name(digest) + end for digest, end in zip(digests, cycle(ENDS), strict=False)]
    try:
        for name in taken:
            take(name)
        other = runner.train(runner.configure("after", FROZEN))
        log = "".join(path.read_text() for path in (other / "logs").glob("memoryd*"))
        assert log.count("the run takes memory of its own for the frozen weights of") == len(taken)
    finally:
        for name in taken:
            path_of(name).unlink(missing_ok=True)
    assert H.state_bytes(other) == H.state_bytes(alone)


TARGETS = ("memoryd", "worker", "optimizerd", "schedulerd")


def kill_somebody(run: H.TrainProcess, source: random.Random) -> bool:
    """Kills a random process of a run; False where it is not there yet, or no more."""
    kind = source.choice(TARGETS)
    pids = [pid for name, pid in run.members().items() if name.startswith(kind)]
    if not pids:
        return False
    with suppress(ProcessLookupError):
        os.kill(source.choice(pids), signal.SIGKILL)
        return True
    return False


def base_bytes(runs: list[H.TrainProcess]) -> int:
    """The bytes in /dev/shm of the bases that some runs use."""
    ids = {run_id(run) for run in runs}
    digests = [use.digest for use in base_uses() if ids & set(use.runs)]
    paths = [p for p in Path("/dev/shm").glob("penstock-base-*") if p.name.endswith(tuple(digests))]
    return sum(path.stat().st_blocks * 512 for path in paths)


def stopped(run: H.TrainProcess) -> int:
    """Stops a run, and returns its last step."""
    obeyed(run, ControlClient.stop)
    code, output = run.wait(900)
    assert code == ExitCode.STOPPED, f"exit code {code}\n{output}\n{H.tail_logs(run.run_dir)}"
    return H.newest_step(run.run_dir)


def check_alone(runner: Any, changes: list[dict[str, Any]], runs: list[H.TrainProcess]) -> None:
    """Stops all runs. Each has the bytes of a run of its own, without a shared base."""
    steps = [stopped(run) for run in runs]
    for each, run, limit in zip(changes, runs, steps, strict=True):
        name = f"{run.run_dir.name}-alone"
        alone = {"memory": {"share_base": "never"}, "run": {"name": name}}
        alone = H.merge(H.merge(each, H.endless_until(limit)), alone)
        expected = runner.train(runner.configure(name, alone), timeout_s=1500.0)
        assert H.state_bytes(run.run_dir) == H.state_bytes(expected)
        print(f"{name}: {limit} steps, equal bytes", flush=True)


def disturbed(runner: Any, count: int, kills: int, source: random.Random) -> None:
    """Kills processes of runs with one base, first while the base is being filled. Each run ends
    with its own bytes, and nothing is left.
    """
    changes = [
        H.merge(H.merge(FROZEN, H.ENDLESS), {"optimizer": {"lr": rate}, "run": {"name": f"r{i}"}})
        for i, rate in enumerate((1e-3, 2e-3, 3e-3, 4e-3)[:count])
    ]
    runs = [runner.start(runner.configure(f"run{i}", each)) for i, each in enumerate(changes)]
    done = 0
    while done < kills:
        run = source.choice(runs)
        assert run.process.poll() is None, run.wait(1)[1]
        done += kill_somebody(run, source)
        time.sleep(source.random() * (0.2 if done < kills / 5 else 0.6))
    for run in runs:
        H.wait_for_step(run, H.newest_step(run.run_dir) + 2, timeout_s=600.0)
    ids = {run_id(run) for run in runs}
    uses = [use for use in base_uses() if ids & set(use.runs)]
    assert uses and all(set(use.runs) == ids for use in uses)
    check_alone(runner, changes, runs)
    left = {use.digest for use in base_uses()}
    assert left.isdisjoint(use.digest for use in uses)


def test_kills_over_two_runs_of_one_base(runner: Any) -> None:
    disturbed(runner, 2, 6, random.Random(36))


@pytest.mark.slow
@pytest.mark.timeout(7000)
def test_sixty_kills_over_four_runs_of_one_base(runner: Any) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed={seed}")
    disturbed(runner, 4, 60, random.Random(seed))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_node_is_filled_from_its_replica_and_a_new_base(runner: Any) -> None:
    """The machine's bases are lost, too."""
    two = H.merge(M.TWO_NODES, {"memory": {"mirror": "partner"}})
    changes = H.merge(H.merge(FROZEN, two), H.ENDLESS)
    run = runner.start(runner.configure("run", changes))
    M.wait_for_replicas(run, keeper="a", lost="b", times=1)
    directory = RunDirectory(run.run_dir)
    memory = NodeMemory.attach(directory.memory_spec(1), (), writable=False)
    digests = [digest for _, digest in memory.spec.bases]
    memory.close()
    assert digests
    for digest in digests:
        path_of(base_name(digest)).unlink()
    M.lose_node(run, "b")
    M.wait_for_replicas(run, keeper="a", lost="b", times=2)
    H.wait_for_step(run, H.newest_step(run.run_dir) + 2)
    assert {digest.hex() for digest in digests} <= {use.digest for use in base_uses()}
    assert M.logged(run.run_dir, "schedulerd", "memoryd.b is filled from the replica")
    check_alone(runner, [changes], [run])


@pytest.mark.slow
@pytest.mark.timeout(7000)
def test_four_runs_have_a_base_of_one_gigabyte_once(runner: Any, tmp_path: Path) -> None:
    disable_progress_bar()
    torch.manual_seed(3)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 22}
    hf = {**H.TINY_LLAMA, **sizes, "num_attention_heads": 8, "vocab_size": 257}
    hf |= {"num_key_value_heads": 8, "head_dim": 128, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(**hf)).save_pretrained(tmp_path / "model")
    changes: list[dict[str, Any]] = [
        H.merge(
            H.ENDLESS,
            {
                "run": {"name": f"r{i}"},
                "model": {"hf": None, "path": str(tmp_path / "model")},
                "adapter": {"r": 8, "alpha": 16},
                "data": {"sequence_length": 8},
                "train": {"global_batch": 2, "micro_batch": 1},
                "optimizer": {"lr": rate, "threads": 1},
                "schedule": {"scheme": "1f1b"},
                "cluster": {"workers": 1},
            },
        )
        for i, rate in enumerate((1e-3, 2e-3, 3e-3, 4e-3))
    ]
    runs = [runner.start(runner.configure("run0", changes[0]))]
    H.wait_for_step(runs[0], 1, timeout_s=600.0)
    one = base_bytes(runs)
    assert one > 2**30
    runs += [runner.start(runner.configure(f"run{i}", changes[i])) for i in (1, 2, 3)]
    for run in runs:
        H.wait_for_step(run, 2, timeout_s=900.0)
    arrays = {
        run.run_dir.name: sum(
            path.stat().st_blocks * 512
            for path in Path("/dev/shm").glob(f"penstock-{run_id(run)}-*")
        )
        for run in runs
    }
    four = base_bytes(runs)
    print(f"bases of one run {one:,} bytes, of four {four:,}; own arrays {arrays}")
    assert four <= 1.01 * one
    check_alone(runner, changes, runs)
    assert base_bytes(runs) == 0
