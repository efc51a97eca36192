"""Two hosts with nothing in common but files, and a network that forgets their connections."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.netbed import NetBed, missing
from tests.integration.nodes import BedRun, bed_cluster
from tests.shelf import prepared
from tests.system.conftest import CLIPPED, Runner, merge, state_bytes

pytestmark = pytest.mark.skipif(missing() != "", reason=missing())


def test_a_run_goes_on_when_its_connections_are_forgotten(
    runner: Runner, clipped_run: Path, tmp_path: Path
) -> None:
    """All connections fall silent at once, for ever, without an end; new ones work."""
    with NetBed(tmp_path) as bed:
        cluster = bed_cluster(bed, heartbeat_interval_s=0.2, heartbeat_timeout_s=2.0)
        config = runner.configure("two", merge(CLIPPED, {"cluster": cluster}))
        run = BedRun(bed, config, tmp_path / "two")
        prepared(clipped_run, run.run_dir)
        run.start()
        run.wait_for_step(8)
        bed.half_open("alpha", "beta")
        run.wait_for_step(24)  # its limit is below the quarter of an hour after which TCP gives up
        assert run.wait() == {"alpha": 0, "beta": 0}, run.told()
    assert state_bytes(run.run_dir) == state_bytes(clipped_run)
