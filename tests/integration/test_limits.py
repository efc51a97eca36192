"""Real control groups: what starves a run is refused by doctor and train, and what suffices trains.

Slurm's limits of CPUs and memory are control groups, too; the virtual Slurm of the other tests
enforces none, so they are tried here by themselves.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.groups import V1_ROOT, group, needs_groups, run_in

pytestmark = [pytest.mark.integration, needs_groups]

MIB = 2**20
PENSTOCK = (sys.executable, "-m", "penstock.client.main")
SLURM = {"SLURM_JOB_ID": "5"}
EMULATED = {
    "run": {"name": "emulated"},
    "model": {"hf": {"model_type": "llama"}},
    "data": {"path": "@stdlib"},
    "schedule": {"scheme": "spipe"},
    "cluster": {"workers": 2, "device": "emulated:analytic:V100-32:spipe-10b"},
}
REAL = {
    "run": {"name": "limits"},
    "model": {
        "dtype": "fp32",
        "hf": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
    },
    "data": {"path": "@stdlib", "tokenizer": "byte", "sequence_length": 32},
    "train": {"steps": 3, "global_batch": 2, "micro_batch": 1},
    "schedule": {"scheme": "spipe", "forward_stages": 2, "backward_stages": 2},
    "cluster": {"workers": 2},
}


def config(folder: Path, content: dict[str, object]) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def shown(path: Path, controller: str) -> str:
    return f"cgroup /{path.relative_to(V1_ROOT / controller)}"


def test_doctor_refuses_a_quota_of_cpus_and_says_what_slurm_wants(tmp_path: Path) -> None:
    wanted = {**EMULATED, "optimizer": {"threads": 2}}
    with group("cpu", cpu_cfs_period_us=100_000, cpu_cfs_quota_us=100_000) as one:
        command = (*PENSTOCK, "doctor", config(tmp_path, wanted), "--json")
        done = run_in((one,), command, environ=SLURM)
        name = shown(one, "cpu")
    print(f"\n{name}, one CPU's time: penstock doctor ends with {done.returncode}")
    assert done.returncode == 3, done.stderr
    found = json.loads(done.stdout)["capacity"]
    assert (found["cpus"], found["cpus_needed"]) == (1, 2)
    assert found["cpus_from"] == f"quota of {name}"
    (refused,) = found["refused"]
    assert "--cpus-per-task=2" in refused and "SRUN_CPUS_PER_TASK=2" in refused
    print(refused)


def test_doctor_refuses_a_cpuset_and_too_little_memory(tmp_path: Path) -> None:
    wanted = {**EMULATED, "optimizer": {"threads": 2}}
    with (
        group("cpuset", cpuset_cpus="0") as cpuset,
        group("memory", memory_limit_in_bytes=700 * MIB) as memory,
    ):
        done = run_in((cpuset, memory), (*PENSTOCK, "doctor", config(tmp_path, wanted)))
        names = shown(cpuset, "cpuset"), shown(memory, "memory")
    print(
        f"\n{names[0]} (CPU 0), {names[1]} (700 MiB): penstock doctor ends with {done.returncode}"
    )
    assert done.returncode == 3, done.stderr
    assert f"cpuset of {names[0]}" in done.stdout
    assert re.search(rf"{names[1]}: 700.0 MiB +\S+ \w+ +\S+ MiB  <-- short", done.stdout)
    assert "docker run --memory" in done.stdout
    print(done.stdout[done.stdout.index("capacity") :])


def test_train_is_refused_in_a_small_group_and_trains_in_a_sufficient_one(tmp_path: Path) -> None:
    """The second has the time of one and a half CPUs of two, which is one thread's: accepted when
    the configuration says so.
    """
    run_dir = tmp_path / "run"
    command = (*PENSTOCK, "train", config(tmp_path, REAL), "--run-dir", str(run_dir))
    with group("memory", memory_limit_in_bytes=900 * MIB) as small:
        done = run_in((small,), command)
    assert done.returncode == 3, done.stderr
    assert "900.0 MiB" in done.stderr and "<-- short" in done.stderr
    assert not (run_dir / "plan.json").exists()
    with (
        group("memory", memory_limit_in_bytes=3072 * MIB) as memory,
        group("cpu", cpu_cfs_period_us=100_000, cpu_cfs_quota_us=150_000) as cpu,
    ):
        groups, accepted = (memory, cpu), ("--set", "cluster.cpus_per_node=1")
        refused = run_in(groups, command)
        done = run_in(groups, (*command, *accepted))
        peak = int((memory / "memory.max_usage_in_bytes").read_text())
    assert refused.returncode == 3 and "node a needs 2, there are 1 of" in refused.stderr
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    print(
        f"\n900 MiB: refused; 3 GiB and 1.5 CPUs' time: refused, then trained 3 steps with"
        f" cpus_per_node: 1; most memory {peak / MIB:.0f} MiB"
    )
