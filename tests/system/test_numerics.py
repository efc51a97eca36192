"""The recipe of real runs: kept by recoveries and resumes, made for runs of an older Penstock."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import transformers

from penstock.protocol.run.numerics import Numerics
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.control import ControlClient
from tests.system import conftest as H


def rows(run_dir: Path) -> list[tuple[int, str, dict[str, Any]]]:
    """Returns the journal's rows of recipes."""
    with closing(sqlite3.connect(run_dir / "journal.sqlite")) as connection:
        found = connection.execute("SELECT step, digest, json FROM numerics ORDER BY step")
        return [(step, digest, json.loads(text)) for step, digest, text in found]


def stopped_at(run: Any, step: int) -> int:
    """Stops a run that has no end, after ``step`` at the earliest; returns the saved step."""
    H.wait_for_step(run, step)
    with ControlClient.for_run(run.run_dir) as client:
        client.stop()
    code, output = run.wait(500)
    assert code == 5, output + H.tail_logs(run.run_dir)
    return int(H.newest_state(run.run_dir).name.removeprefix("step-"))


def test_a_killed_worker_and_an_older_run_go_on_with_equal_bytes(runner: Any) -> None:
    """A run is stopped after some steps, and loses all that an older Penstock does not know. Its
    second start makes a recipe, journals the recipe from its first step on, and a worker of it is
    killed.
    """
    config = runner.configure("run", H.ENDLESS)
    run = runner.start(config)
    saved, run_dir = stopped_at(run, 2), run.run_dir
    recipe = RunDirectory(run_dir).numerics
    assert recipe is not None
    [(step, digest, fields)] = rows(run_dir)
    assert (step, digest) == (1, recipe.digest)
    assert Numerics.from_json(json.dumps(fields["recipe"]), "journal") == recipe
    assert fields["devices"].keys() == {"worker.0", "worker.1"}
    assert fields["devices"]["worker.0"]["torch"] == recipe.software["torch"]
    manifest = json.loads((H.newest_state(run_dir) / "manifest.json").read_text())
    assert (manifest["version"], manifest["numerics"]) == (saved, digest)

    for name in ("numerics.json", "model/kernels.json", "inputs.json"):
        (run_dir / name).unlink()
    with closing(sqlite3.connect(run_dir / "journal.sqlite")) as connection:
        connection.execute("DROP TABLE numerics")
        connection.commit()
    run = runner.start(config)
    H.wait_for_step(run, saved + 1)
    os.kill(run.members()["worker.1"], signal.SIGKILL)
    last = stopped_at(run, H.newest_step(run_dir) + 2)
    assert [row[:2] for row in rows(run_dir)] == [(saved + 1, digest)]
    assert [line["step"] for line in H.metrics(run_dir)] == list(range(1, last + 1))
    undisturbed = runner.train(runner.configure("undisturbed", H.endless_until(last)))
    assert H.state_bytes(run_dir) == H.state_bytes(undisturbed)


def test_a_replacement_with_other_software_is_refused_and_a_start_goes_on(runner: Any) -> None:
    """The version of transformers that a process finds changes while the run goes on."""
    folder = runner.root / "packages"
    folder.mkdir()
    env = {"PYTHONPATH": str(folder)}
    config = runner.configure("run", H.merge(H.ENDLESS, {"cluster": {"max_restarts": 2}}))
    run = runner.start(config, env=env)
    H.wait_for_step(run, 1)
    metadata = folder / "transformers-99.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 99.0\n")
    os.kill(run.members()["worker.1"], signal.SIGKILL)
    code, output = run.wait(500)
    change = f"transformers: {transformers.__version__} -> 99.0"
    assert code == 4, output
    assert (
        "refused by the scheduler: worker.1: its device differs from the device of the process"
        f" before: {change};" in output
    )
    [(step, before, _)] = rows(run.run_dir)
    assert step == 1

    code, output = runner.start(config, "--strict", env=env).wait(500)
    assert (
        code == 2
        and f"run.strict: software or hardware has changed since the run's last start ({change})"
        in output
    ), output
    kept = H.newest_step(run.run_dir)
    run = runner.start(config, env=env)
    stopped_at(run, kept + 1)
    (_, first, _), (step, second, fields) = rows(run.run_dir)
    assert (first, step) == (before, kept + 1)
    assert second != first and fields["devices"]["worker.1"]["transformers"] == "99.0"
