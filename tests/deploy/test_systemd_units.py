"""The files of ``penstock deploy systemd``: their content, what systemd says of them, refusals."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.client.main import app
from penstock.deploy.systemd import installing, units
from penstock.deploy.systemd.units import NodeUnit
from penstock.host.errors import ConfigError

UNIT = NodeUnit(
    run="tiny.v2",
    node="a-1",
    user="penstock",
    python=Path(shutil.which("python3") or "/usr/bin/python3"),
    config=Path('/srv/my runs/50% "new"/$tiny.yaml'),
    run_dir=Path('/srv/my runs/50% "new"/run'),
    folder=Path("/srv/my runs"),
    gpus=False,
    cores="0,2-3",
    targets=Path("/srv/my targets"),
)
WORST_SCORE = 2.5


def analyze(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``systemd-analyze`` with the units below ``root``, and then those of the system."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing (Debian: systemd)")
    path = f"{root}/etc/systemd/system:"
    return subprocess.run(
        ["systemd-analyze", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "SYSTEMD_UNIT_PATH": path},
        timeout=600,
    )


@pytest.mark.parametrize("gpus", [False, True], ids=["cpu", "gpu"])
def test_systemd_takes_the_units_as_they_are_meant(tmp_path: Path, gpus: bool) -> None:
    unit = replace(UNIT, gpus=gpus)
    installing.install(unit, tmp_path)
    # Exits with 0 on keys that it does not know, and says so.
    verified = analyze(tmp_path, "verify", unit.service, unit.target)
    assert (verified.returncode, verified.stderr) == (0, "")
    rated = analyze(tmp_path, "security", "--offline=true", "--no-pager", unit.service)
    score = re.search(r"Overall exposure level for .*: ([\d.]+)", rated.stdout)
    assert score is not None and float(score[1]) <= WORST_SCORE, rated.stdout


def test_names_with_signs_that_mean_something_to_systemd_are_quoted(tmp_path: Path) -> None:
    installing.install(UNIT, tmp_path)
    drop_in = tmp_path / f"etc/systemd/system/{UNIT.service}.d/10-node.conf"
    lines = drop_in.read_text().splitlines()
    place = r'"/srv/my runs/50%% \"new\"/'
    assert f'ReadWritePaths={place}run" -"/srv/my targets"' in lines
    command = next(line for line in lines if line.startswith("ExecStart="))
    assert command.endswith(f'node --config {place}$$tiny.yaml" --node a-1')
    assert "CPUAffinity=0,2-3" in lines and "User=penstock" in lines
    with pytest.raises(ConfigError, match="control characters"):
        replace(UNIT, config=Path("/srv/a\nUser=root"))
    with pytest.raises(ConfigError, match="/tmp/x: a service has a private /tmp and /var/tmp"):
        replace(UNIT, run_dir=Path("/tmp/x"))
    with pytest.raises(ConfigError, match="--cores 0-: expected a list such as"):
        replace(UNIT, cores="0-")


def test_install_can_be_repeated_and_taken_back(tmp_path: Path) -> None:
    other = replace(UNIT, node="b")
    for unit in (UNIT, other):
        installing.install(unit, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    said = installing.install(UNIT, tmp_path)
    assert all("up to date" in line for line in said if line.startswith("wrote"))
    assert before == {path: path.stat().st_mtime_ns for path in before}
    wants = tmp_path / f"etc/systemd/system/{UNIT.target}.wants"
    assert {entry.name for entry in wants.iterdir()} == {UNIT.service, other.service}
    assert (wants / UNIT.service).resolve().read_text().startswith("# One node of a run")
    installing.remove(UNIT, tmp_path)
    assert [entry.name for entry in wants.iterdir()] == [other.service]
    installing.remove(other, tmp_path)
    assert not wants.exists()
    assert "not installed" in installing.remove(other, tmp_path)[0]


def test_the_command_writes_for_another_system_and_refuses_what_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(units, "HIDDEN", ())  # the test itself may be there
    runner = CliRunner()

    def deploy(*words: str) -> tuple[int, str]:
        result = runner.invoke(app, ["deploy", "systemd", "--config", "tiny.yaml", *words])
        return result.exit_code, result.output

    runner.invoke(app, ["init"])
    code, output = deploy("--node", "a", "--root", "image")
    assert code == 0 and "systemctl enable penstock-run@tiny.target" in output
    assert (tmp_path / "image/etc/systemd/system/penstock-node@tiny.a.service.d").is_dir()
    assert deploy("--node", "b", "--root", "image") == (
        2,
        "penstock: --node b: cluster.nodes has a\n",
    )


@pytest.mark.parametrize(
    ("uid", "manager", "said"),
    [
        (1000, True, "penstock deploy systemd: needs root"),
        (0, False, "does not exist, so systemd does not run this machine"),
    ],
)
def test_a_system_that_cannot_be_changed_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, manager: bool, said: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(installing, "_RUNS_SYSTEMD", tmp_path if manager else tmp_path / "none")
    acts: tuple[Callable[[NodeUnit, Path], list[str]], ...] = (
        installing.install,
        installing.remove,
    )
    for act in acts:
        with pytest.raises(ConfigError, match=said):
            act(UNIT, installing.SYSTEM)


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")
def test_paths_that_the_user_cannot_get_at_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "HIDDEN", ())  # the test itself may be there
    config = tmp_path / "tiny.yaml"
    config.touch(mode=0o600)
    python, keys = Path("/bin/true"), tmp_path / "keys/node.a"
    keys.mkdir(parents=True, mode=0o700)
    paths = {"config": config, "python": python, "run_dir": Path("/tmp"), "keys": keys}
    unit = replace(UNIT, user="nobody", **paths)
    with pytest.raises(ConfigError, match=r"tiny\.yaml: user nobody cannot read it; move it to"):
        installing.check_access(unit)
    with pytest.raises(ConfigError, match=r"keys/node\.a: user nobody cannot use it"):
        installing.check_access(replace(unit, config=Path("/etc/passwd")))
    with pytest.raises(ConfigError, match="--user x-y: no such user; make the user"):
        installing.check_access(replace(unit, user="x-y"))
