"""The doctor finds what is there, and removes only what belongs to nobody alive."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.client import capacity
from penstock.client.capacity import CapacityReport
from penstock.client.doctor import LAUNCH_MODULE, Finding, _is_about, _program, clean, examine
from penstock.client.placement import PlacementFacts, PlacementReport
from penstock.config.schema import load_config
from penstock.daemons.node.run_lock import RunLock, train_lock_path
from penstock.host.limits.cgroup import CpuLimit
from penstock.host.topology import Topology, format_cpus
from penstock.protocol.run.names import socket_folder
from penstock.protocol.wire.local_names import prepare_folder
from penstock.shm.bases import Base
from penstock.shm.control import ControlView, control_bytes
from penstock.shm.pages import HugePages
from penstock.shm.segment import Segment, exists, unlink

DEAD_OWNER = """
import sys
from penstock.shm.control import ControlView, control_bytes
from penstock.shm.segment import Segment
segment = Segment.create(sys.argv[1], control_bytes(2, 64))
view = ControlView.initialize(
    segment.buffer, run_id=sys.argv[2], digest=bytes(32), num_blocks=2, undo_bytes=64
)
view.set_incarnation(1)
view.set_committed(17)
"""


@pytest.fixture
def run_id() -> Iterator[str]:
    """An identity nobody else has; its segments are gone afterwards."""
    identity = secrets.token_hex(6)
    yield identity
    for kind in ("control", "weights"):
        unlink(f"/penstock-{identity}-a-{kind}")


def findings(run_id: str, run_dir: Path | None = None) -> list[Finding]:
    """What concerns one run (other runs may be active on this machine)."""
    return [f for f in examine(run_dir).findings if run_id in f.name]


def make_dead(run_id: str) -> str:
    """A control segment whose owner has ended."""
    name = f"/penstock-{run_id}-a-control"
    subprocess.run([sys.executable, "-c", DEAD_OWNER, name, run_id], check=True, timeout=600)
    return name


def test_dead_memory_is_described_and_removed(run_id: str, tmp_path: Path) -> None:
    name = make_dead(run_id)
    (tmp_path / "run.json").write_text(json.dumps({"run_id": run_id, "format": 1}))
    (tmp_path / "state" / "step-00000012").mkdir(parents=True)
    [finding] = findings(run_id, tmp_path)
    assert finding.removable
    assert "holds step 17; saved on disk: step 12" in finding.detail
    report = examine(tmp_path)
    assert report.findings == (finding,)
    kept = clean(report, tmp_path)
    lost = "steps 13 to 17, which are not saved, are lost"
    assert exists(name) and not kept.removed
    assert (
        kept.kept[0].endswith(f"With --force {lost}") and f"kept {kept.kept[0]}" in kept.to_text()
    )
    cleaned = clean(report, tmp_path, force=True)
    assert not exists(name)
    assert [text for text in cleaned.removed if text.endswith(f"So {lost}")]


@pytest.mark.parametrize(
    ("saved", "loses"),
    [
        (None, "all steps up to 17 that are not saved are lost"),
        (16, "step 17, which is not saved, is lost"),
        (17, ""),
        (0, "steps 1 to 17, which are not saved, are lost"),
    ],
)
def test_what_is_lost_with_memory_is_said(
    run_id: str, tmp_path: Path, saved: int | None, loses: str
) -> None:
    name = make_dead(run_id)
    (tmp_path / "run.json").write_text(json.dumps({"run_id": run_id, "format": 1}))
    if saved:
        (tmp_path / "state" / f"step-{saved:08d}").mkdir(parents=True)
    run_dir = None if saved is None else tmp_path
    [finding] = findings(run_id, run_dir)
    assert (finding.removable, finding.loses) == (True, loses)
    clean(replace(examine(run_dir), findings=(finding,)), run_dir)
    assert exists(name) == bool(loses)


def test_bases_are_listed_and_the_unused_ones_removed() -> None:
    """One base is in use by this process, the other one was left behind."""
    made = [Base.claim(secrets.token_bytes(32), 64, "test-a") for _ in range(2)]
    used, unused = (base for base in made if base is not None)
    try:
        for base in (used, unused):
            os.pwrite(base.descriptor, bytes(64), 0)
            assert base.seal()
        unused.close()
        names = {base.name.removeprefix("/") for base in (used, unused)}
        report = examine(None)
        runs = {entry["digest"]: entry["runs"] for entry in report.to_dict()["bases"]}
        assert all(runs[base.digest.hex()] == [] for base in (used, unused))
        ours = tuple(finding for finding in report.findings if finding.name in names)
        assert len(clean(replace(report, findings=ours), None).removed) == 1
        assert exists(used.name) and not exists(unused.name)
    finally:
        used.close()
        for base in (used, unused):
            unlink(base.name)


def test_a_run_directory_shows_nothing_of_other_runs(run_id: str, tmp_path: Path) -> None:
    make_dead(run_id)
    (tmp_path / "run.json").write_text(json.dumps({"run_id": secrets.token_hex(6), "format": 1}))
    assert examine(tmp_path).findings == ()
    assert clean(examine(tmp_path), tmp_path, force=True).removed == ()
    assert findings(run_id)
    (tmp_path / "run.json").write_text("{")
    assert examine(tmp_path).findings == ()


def test_sockets_of_a_killed_node_may_go(run_id: str, tmp_path: Path) -> None:
    folder = socket_folder(run_id, "a")
    (tmp_path / "run.json").write_text(json.dumps({"run_id": run_id, "format": 1}))
    name = prepare_folder(run_id, "a")
    assert findings(run_id) == []
    name.release()
    folder.mkdir(mode=0o700)
    (folder / "memory.lock").touch()
    [finding] = findings(run_id, tmp_path)
    assert (finding.kind, finding.name, finding.removable) == ("sockets", str(folder), True)
    assert [finding] == findings(run_id)
    clean(examine(tmp_path), tmp_path)
    assert not folder.exists()


def test_memory_is_not_dead_while_its_run_directory_is_held(run_id: str, tmp_path: Path) -> None:
    """Processes of another container may hold it, whose pids mean nothing here."""
    make_dead(run_id)
    (tmp_path / "run.json").write_text(json.dumps({"run_id": run_id, "format": 1}))
    with RunLock.acquire(train_lock_path(tmp_path), wait_s=0.0):
        [finding] = findings(run_id, tmp_path)
    assert not finding.removable and "processes hold the run directory" in finding.detail


def test_processes_of_other_runs_are_not_shown(tmp_path: Path) -> None:
    words = ["python", "-m", LAUNCH_MODULE, "worker", "--parent-pid", "1", "--device", "0"]
    ours = [*words, "--config", str(tmp_path / "resolved.yaml")]
    assert _is_about(ours, tmp_path) and _is_about(ours, None)
    assert not _is_about(ours, tmp_path / "other")
    assert not _is_about(["python", "-m", LAUNCH_MODULE, "node", "--config", "x"], None)
    assert _program(ours) == f"worker.0 of {tmp_path}"


def test_living_memory_is_left_alone(run_id: str) -> None:
    segment = Segment.create(f"/penstock-{run_id}-a-control", control_bytes(2, 64))
    ControlView.initialize(
        segment.buffer, run_id=run_id, digest=bytes(32), num_blocks=2, undo_bytes=64
    )
    try:
        [finding] = findings(run_id)
        assert not finding.removable
        assert f"owner pid {os.getpid()} alive" in finding.detail
    finally:
        segment.close()


def test_memory_without_control_segment_was_cut_short(run_id: str) -> None:
    segment = Segment.create(f"/penstock-{run_id}-a-weights", 4096)
    segment.close()
    [finding] = findings(run_id)
    assert (finding.removable, "interrupted" in finding.detail) == (True, True)


def test_run_directory_leftovers(tmp_path: Path) -> None:
    half = tmp_path / "state" / ".tmp-step-00000003"
    half.mkdir(parents=True)
    (half / "block-0000.safetensors").write_text("half")
    endpoint = tmp_path / "endpoint.json"
    endpoint.write_text("{}")
    ours = (str(half), str(endpoint))
    with RunLock.acquire(train_lock_path(tmp_path), wait_s=0.0):
        held = [f for f in examine(tmp_path).findings if f.name in ours]
        assert [f.removable for f in held] == [False, False]
    report = examine(tmp_path)
    loose = tuple(f for f in report.findings if f.name in ours)
    assert [f.removable for f in loose] == [True, True]
    clean(replace(report, findings=loose), tmp_path)
    assert not half.exists() and not endpoint.exists()


def test_machine_facts_need_no_torch() -> None:
    program = (
        "import sys; from penstock.client.doctor import examine; report = examine(None);"
        "assert report.machine['torch'][0].isdigit() and report.to_text() and report.to_dict();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=600).returncode == 0


def test_imports_that_compile_anew_are_told(tmp_path: Path) -> None:
    program = (
        "from penstock.client import doctor as d; print(d.machine_facts()['compiled modules'])"
    )

    def told(place: Path | str) -> str:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(place)}
        return subprocess.check_output([sys.executable, "-c", program], text=True, env=environment)

    assert told("").strip() == "found"
    advice = told(tmp_path)
    assert advice.startswith("none of torch's: ") and "-m compileall -q -j 0 /" in advice


def test_placement_says_what_a_configuration_gets_and_what_to_change(tmp_path: Path) -> None:
    machine = PlacementFacts(
        topology=Topology(
            node_of={0: 0, 1: 0, 2: 1, 3: 1},
            siblings={cpu: (cpu,) for cpu in range(4)},
            nodes=(0, 1, 2),
        ),
        allowed=frozenset({0, 1, 2, 3}),
        huge_pages=HugePages.NEVER,
        huge_bytes=0,
        memlock=8 << 20,
        num_gpus=1,
        numa_balancing=True,
        binds=False,
    )
    file = tmp_path / "config.yaml"
    file.write_text("{model: {hf: {model_type: llama}}, data: {path: '@stdlib'}}")
    config = load_config(file, ("cluster.device=cuda", "cluster.workers=1"))
    lines = "\n".join(PlacementReport.of(machine, config).to_lines())
    expected = """\
placement
  NUMA node 0: CPUs 0-1
  NUMA node 1: CPUs 2-3
  NUMA node 2: memory only
  usable: CPUs 0-3 on 4 physical cores
  huge pages behind /dev/shm: never; shared memory in huge pages now: 0 B
  node a: optimizer 1-3, numa nodes 0-1, workers 0
  advice: model state gets no huge pages; as root: mount -o remount,huge=advise"""
    assert lines.startswith(expected)
    for advice in ("memlock limit is 8.0 MiB", "CAP_SYS_NICE", "kernel.numa_balancing=0"):
        assert advice in lines
    wrong = PlacementReport.of(machine, load_config(file, ("optimizer.cores=2-4",)))
    assert (
        "optimizer.cores = 2-4: 4 not on this machine" in wrong.to_dict()["cluster"]["a"]["refused"]
    )


def test_a_configuration_that_would_starve_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an emulated device: its plan needs no torch. In a job it has as many nodes as the job."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "{model: {hf: {model_type: llama}}, data: {path: '@stdlib'}, optimizer: {threads: 12},"
        " cluster: {device: 'emulated:analytic:V100-32:spipe-10b'}}"
    )
    given = CpuLimit(
        allowed=frozenset({0, 1}), online=64, quota=None, owner="cpuset of cgroup /slurm/job_5"
    )
    monkeypatch.setattr(capacity, "cpu_limit", lambda: given)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    found = CapacityReport.of(file, load_config(file))
    (refused,) = found.to_dict()["refused"]
    assert "needs 12, there are 2 of the machine's 64" in refused and "task=12" in refused
    report = replace(examine(tmp_path), capacity=found)
    assert report.exit_code == 3 and f"REFUSED: {refused}" in report.to_text()
    accepted = CapacityReport.of(file, load_config(file, ("cluster.cpus_per_node=2",)))
    assert accepted.refusals == () and accepted.warning == ""
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    of_job = CapacityReport.of(file, load_config(file, ("cluster.cpus_per_node=2",)))
    here = {n.what: n.needed for n in of_job.demands if n.place == "machine"}
    assert here["/dev/shm"] < {n.what: n.needed for n in accepted.demands}["/dev/shm"]


def test_this_machine_has_a_placement_section() -> None:
    found = examine(None).to_dict()["placement"]
    assert found["allowed_cpus"] == format_cpus(os.sched_getaffinity(0))
    assert found["physical_cores"] >= 1 and found["cluster"] == {}
