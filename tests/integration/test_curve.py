"""Two nodes in network namespaces with keys, and 100,000 frames of strangers at their sockets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.authority import make
from tests.integration.netbed import NetBed, missing
from tests.integration.nodes import BedRun, bed_cluster
from tests.system import conftest as H
from tests.system.conftest import runner as runner
from tests.system.strangers import ATTACKS
from tests.system.test_curve import places_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(missing() != "", reason=missing()),
]

FRAMES = 100_000


def test_strangers_change_nothing_between_hosts(runner: Any, tmp_path: Path) -> None:
    with NetBed(tmp_path) as bed:
        make(tmp_path / "keys", "two", tuple(host.name for host in bed))
        (tmp_path / "keys" / "authority").rename(tmp_path / "authority")  # no node may have it
        cluster = bed_cluster(bed, security="tls", keys=str(tmp_path / "keys"))
        run = BedRun(
            bed, runner.configure("two", {**H.ENDLESS, "cluster": cluster}), tmp_path / "two"
        )
        run.start()
        run.wait_for_step(1)
        places = places_of(H.TrainProcess(run.nodes["alpha"].process, run.run_dir), check=False)
        assert len(places) >= 6, places
        per_place = -(-FRAMES // (len(ATTACKS) * len(places)))
        words = [f"{host}:{port}" for host, port in places.values()]
        argv = [sys.executable, "-m", "tests.system.strangers", RunDirectory(run.run_dir).run_id]
        strangers = bed["beta"].start([*argv, str(per_place), *words], tmp_path / "strangers.txt")
        assert strangers.wait(900.0) == 0, strangers.text()
        said = json.loads(strangers.text())
        run.wait_for_step(H.newest_step(run.run_dir) + 2)
        control = ("--keys", str(tmp_path / "keys" / "control"))
        stop = (sys.executable, "-m", "penstock.client.main", "stop", *control)
        bed["alpha"].run(*stop, "--run-dir", str(run.run_dir))
        assert run.wait(600) == {"alpha": 5, "beta": 5}, run.told()
    assert said["answers"] == 0 and said["sent"] >= FRAMES
    found, steps = H.arrays(run.run_dir), H.newest_step(run.run_dir)
    alone = H.arrays(runner.train(runner.configure("alone", H.endless_until(steps))))
    assert all(found[name].tobytes() == alone[name].tobytes() for name in alone)
    print(f"two hosts with keys, {said['sent']} frames of strangers at {len(places)} sockets")
