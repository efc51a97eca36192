"""The units of ``penstock deploy systemd``, in hosts that systemd runs."""

from __future__ import annotations

import re
import resource
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.hosts import SHARED, Host, require_hosts, wait_until

UNIT = "penstock-node@run.{}.service"
TARGET = "penstock-run@run.target"
WORST_SCORE = 2.5


def configure(shared: Path, hosts: dict[str, str], **sections: dict[str, object]) -> Path:
    """Writes ``run.yaml``, a small model with a worker on each of ``hosts`` (addresses by name)."""
    config: dict[str, dict[str, object]] = {
        "run": {"name": "run", "seed": 7, "dir": str(SHARED / "runs/run")},
        "model": {
            "dtype": "fp32",
            "hf": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 4,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
            },
        },
        "data": {
            "path": str(Path(sysconfig.get_paths()["stdlib"]) / "a*.py"),
            "tokenizer": "byte",
            "sequence_length": 32,
        },
        "train": {"steps": 6, "global_batch": 4, "micro_batch": 2, "clip_grad_norm": 1.0},
        "optimizer": {"lr": 1.0e-3, "threads": 1},
        "schedule": {"scheme": "1f1b"},
        "cluster": {
            "workers": 1,
            "threads_per_worker": 1,
            "nodes": [{"name": name, "host": host} for name, host in hosts.items()],
        },
    }
    for section, values in sections.items():
        config[section] |= values
    path = shared / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o644)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder for hosts and what they share."""
    require_hosts()
    (tmp_path / "shared").mkdir(mode=0o755)
    yield tmp_path


@pytest.mark.timeout(240)
def test_a_training_runs_under_the_installed_unit(place: Path) -> None:
    """The gate's taste of the below: one host, from deploy to the end of the run."""
    shared = place / "shared"
    configure(shared, {"a": "127.0.0.1"})
    host, unit = Host(place, "single", shared), UNIT.format("a")
    try:
        print(f"\nbooted {host.name} in {host.boot():.1f} s")
        print(host.penstock("deploy", "systemd", *CONFIG, "--node", "a"))
        host.run("systemctl", "enable", "--now", TARGET)
        assert host.show(unit, "ActiveState") == "active"
        wait_until("a step is shown", lambda: "step" in host.show(unit, "StatusText"))
        print(host.run("systemctl", "status", "--no-pager", unit))
        check_confinement(host, unit)
        wait_until("the run is over", lambda: host.show(unit, "ActiveState") == "inactive")
        assert host.show(unit, "Result") == "success"
        assert host.show(unit, "ExecMainStatus") == "0"
        assert list((shared / "runs/run/state").glob("step-00000006"))
        assert host.run("ls", "/dev/shm") == ""
        assert "removed" in host.penstock("deploy", "systemd", *CONFIG, "--node", "a", "--remove")
        assert unit not in host.run("systemctl", "list-unit-files", "penstock-*")
    except BaseException:
        print(host.story())
        raise
    finally:
        host.close()


CONFIG = ("--config", str(SHARED / "run.yaml"))


def check_confinement(host: Host, unit: str) -> None:
    """The score of the unit that is running, and what the kernel holds its main process to."""
    said = host.run("systemd-analyze", "security", "--no-pager", unit)
    score = re.search(r"Overall exposure level for .*: ([\d.]+)", said)
    assert score is not None, said
    print(score[0])
    assert float(score[1]) <= WORST_SCORE
    status = Path(f"/proc/{host.main_pid(unit)}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    assert fields["NoNewPrivs"] == "1" and fields["Seccomp"] == "2"
    assert int(fields["CapBnd"], 16) == 0 and fields["Uid"].split()[0] != "0"
    assert host.show(unit, "LimitMEMLOCK") == "infinity"
    limits = Path(f"/proc/{host.main_pid(unit)}/limits").read_text()
    locked = next(line for line in limits.splitlines() if line.startswith("Max locked memory"))
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY:
        assert locked.split()[3:5] == ["unlimited", "unlimited"]
    else:
        print(f"this machine lets nobody raise the limit, so not tested: {locked}")
