"""The example configurations for Prometheus, read by its own checker."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from penstock.protocol.security.authority import make

EXAMPLES = sorted((Path(__file__).parents[2] / "grafana" / "prometheus").glob("*.yml"))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="not installed: promtool")
def test_prometheus_accepts_the_examples(tmp_path: Path) -> None:
    """Debian's is built without Kubernetes' discovery: there the rest of the job is checked."""
    make(tmp_path / "keys", "tiny", ["a", "b"])
    assert len(EXAMPLES) == 6
    for example in EXAMPLES:
        found = yaml.safe_load(example.read_text())
        for job in found["scrape_configs"]:
            assert job["job_name"].startswith("penstock") and job["honor_labels"] is True
            job.pop("kubernetes_sd_configs", None)
        path = tmp_path / example.name
        path.write_text(yaml.safe_dump(found))
    files = [str(tmp_path / example.name) for example in EXAMPLES]
    command = ["promtool", "check", "config", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") == len(EXAMPLES), done.stdout
