"""``penstock deploy monitoring``: what it writes fits together, and can be written again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from penstock.grafana import files
from penstock.host.errors import ConfigError

MOUNTED = {"/etc/prometheus": "prometheus", "/etc/targets": "targets"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    command = [sys.executable, "-m", "penstock.client.main", "deploy", "monitoring", "watch"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"observability.targets: {tmp_path / 'watch/targets'}" in done.stdout
    return tmp_path / "watch"


def test_what_is_mounted_and_named_is_there(folder: Path) -> None:
    compose = yaml.safe_load((folder / "compose.yml").read_text())
    inside = {}
    for service in compose["services"].values():
        assert service["network_mode"] == "host"
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("./"):
                assert (folder / source).is_dir(), source
                inside[target] = folder / source
            else:
                assert source in compose["volumes"]
    provider = yaml.safe_load(
        (folder / "grafana/provisioning/dashboards/penstock.yml").read_text()
    )["providers"][0]
    dashboards = inside[provider["options"]["path"]]
    uids = {json.loads(path.read_text())["uid"] for path in dashboards.iterdir()}
    home = Path(
        compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    )
    assert home.stem in uids and len(uids) == 5
    assert (folder / "prometheus" / "penstock.rules.yml").is_file()
    assert (folder / "alertmanager" / "alertmanager.yml").is_file()
    assert list((folder / "targets").iterdir()) == []


def test_writing_again_replaces_ours_and_leaves_what_was_edited(tmp_path: Path) -> None:
    first = files.write(tmp_path)
    assert len(first) == len(list(files.placed())) and files.write(tmp_path) == []
    (tmp_path / "compose.yml").write_text("services: {}")
    (tmp_path / "grafana/dashboards/penstock-node.json").write_text("{}")
    assert files.write(tmp_path) == [
        f"kept, since it was edited: {tmp_path / 'compose.yml'}",
        f"replaced: {tmp_path / 'grafana/dashboards/penstock-node.json'}",
    ]
    assert (tmp_path / "compose.yml").read_text() == "services: {}"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/watch: cannot write it"):
        files.write(tmp_path / "file" / "watch")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_what_is_written_as_it_lies_there(tmp_path: Path) -> None:
    """With the rules beside its configuration, and the folder that runs write into."""
    files.write(tmp_path)
    config = tmp_path / "prometheus" / "prometheus.yml"
    command = ["promtool", "check", "config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "penstock.rules.yml" in done.stdout and "0 rules found" not in done.stdout
    jobs = {job["job_name"]: job for job in yaml.safe_load(config.read_text())["scrape_configs"]}
    pattern = jobs["penstock"]["file_sd_configs"][0]["files"][0]
    (tmp_path / "targets" / "run.node.json").write_text("[]")
    assert [path.name for path in config.parent.glob(pattern)] == ["run.node.json"]
