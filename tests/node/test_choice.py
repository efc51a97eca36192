"""``schedule: auto`` in run directories: chosen once, kept by a resume, made anew for a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from penstock.config.schema import Config, load_config, parse_config
from penstock.daemons.node.preparing.changes import (
    keep_choice,
    keep_defaults,
    keep_micro_batch,
    read_constraints,
    write_constraints,
)
from penstock.daemons.node.preparing.prepare import prepare_run
from penstock.host.errors import CapacityError, StateError

DEVICE = "emulated:analytic:V100-PCIE-32:gpt3-125m"


def config(
    *, workers: int = 2, steps: int = 2, limit: str | None = None, **schedule: object
) -> Config:
    """A small model on emulated GPUs."""
    return parse_config(
        {
            "model": {"dtype": "fp16"},
            "data": {"path": "@stdlib", "sequence_length": 128},
            "train": {"steps": steps, "global_batch": 4},
            "schedule": {"scheme": "auto", **schedule},
            "cluster": {"workers": workers, "device": DEVICE},
            "memory": {"device_limit": limit},
        }
    )


def resolved(**changes: object) -> Config:
    """A run's configuration with a schedule that was chosen."""
    chosen = {"forward_stages": 2, "backward_stages": 2, "recompute": "none"}
    return config(**{"scheme": "1f1b", **chosen, **changes})  # type: ignore[arg-type]


def kept(
    new: Config, old: Config | None, constraints: dict[str, object] | None
) -> tuple[str, list[str]]:
    """The scheme, and what was said."""
    said: list[str] = []
    return keep_choice(new, old, constraints, said.append).schedule.scheme, said


def test_a_resume_keeps_the_choice() -> None:
    scheme, said = kept(config(steps=9), resolved(), {})
    assert scheme == "1f1b"
    assert said == [
        "schedule: auto keeps what it chose for this run: 1f1b, 2 stages, recompute none (for a new"
        " search give another run.dir, or say the schedule)"
    ]


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (config(workers=4), "cluster.workers: 2 -> 4"),
        (
            config(limit="1G"),
            "memory: {'host_limit': None, 'device_limit': None, 'mirror': 'none', 'share_base'",
        ),
        (config(recompute="full"), "schedule: {} -> {'recompute': 'full'}"),
    ],
    ids=["workers", "limit", "constraints"],
)
def test_a_choice_is_made_anew_for_a_reason_that_is_said(new: Config, words: str) -> None:
    scheme, said = kept(new, resolved(), {})
    assert scheme == "auto"
    assert said[0].startswith(f"schedule: auto chooses again, because of {words}")


def test_nothing_to_keep() -> None:
    assert kept(config(), None, None) == ("auto", [])
    assert kept(config(), resolved(), None) == ("auto", []), "the schedule was the user's own"
    assert kept(config(scheme="gpipe"), resolved(), {}) == ("gpipe", [])


def test_a_run_directory_from_the_first_choice_to_another(tmp_path: Path) -> None:
    run_dir, said = tmp_path / "run", list[str]()
    directory = prepare_run(config(), run_dir, said.append)
    first = load_config(run_dir / "resolved.yaml").schedule
    assert first.scheme != "auto" and read_constraints(run_dir, first) == {}
    assert "asked" not in yaml.safe_load((run_dir / "resolved.yaml").read_text())["schedule"]
    assert directory.plan.scheme == first.scheme and directory.config.schedule == first
    assert said[-1].startswith(f"schedule: auto chose {first.scheme}, ")
    assert " a step, simulated; spipe, the default, " in said[-1]

    (run_dir / "journal.sqlite").touch()  # changes are named once steps were done
    said.clear()
    again = prepare_run(config(steps=9), run_dir, said.append)
    assert again.plan == directory.plan
    assert [text.split(":")[0] for text in said] == ["schedule", "changed"]
    assert said[1].startswith("changed: train.steps: 2 -> 9 (")

    said.clear()
    other = prepare_run(config(workers=1, steps=9), run_dir, said.append)
    assert other.plan.num_devices == 1
    assert said[0].startswith("schedule: auto chooses again, because of cluster.workers: 2 -> 1")
    assert said[1] == "changed: cluster.workers: 2 -> 1"
    assert said[-1].startswith("schedule: auto chose ")

    before = (run_dir / "resolved.yaml").read_bytes()
    with pytest.raises(CapacityError, match=r"V100-PCIE-32 memory .* 1.0 MiB  <-- short"):
        prepare_run(config(workers=1, steps=9, limit="1M"), run_dir)
    assert (run_dir / "resolved.yaml").read_bytes() == before


def test_a_run_of_an_older_version_has_the_constraints_in_its_configuration(tmp_path: Path) -> None:
    """They go into a file of the run; a resume keeps the choice, and the key leaves."""
    run_dir, said = tmp_path / "run", list[str]()
    plan = prepare_run(config(recompute="full"), run_dir).plan
    path, record = run_dir / "resolved.yaml", run_dir / "search.json"
    older = yaml.safe_load(path.read_text())
    older["schedule"]["asked"] = {"recompute": "full"}
    path.write_text(yaml.safe_dump(older))
    record.unlink()
    (run_dir / "inputs.json").unlink()
    (run_dir / "journal.sqlite").touch()  # a run that has started keeps its attention, too
    again = prepare_run(config(steps=9, recompute="full"), run_dir, said.append)
    assert again.plan == plan
    assert any(line.startswith("schedule: auto keeps what it chose") for line in said)
    assert "asked" not in yaml.safe_load(path.read_text())["schedule"]
    assert read_constraints(run_dir, again.config.schedule) == {"recompute": "full"}


def test_a_record_is_of_one_schedule(tmp_path: Path) -> None:
    chosen, other = resolved().schedule, resolved(scheme="gpipe").schedule
    (tmp_path / "resolved.yaml").write_text("schedule: 1f1b\n")
    write_constraints(tmp_path, chosen, None)
    assert not (tmp_path / "search.json").exists()
    write_constraints(tmp_path, chosen, {"replicas": 1})
    assert read_constraints(tmp_path, chosen) == {"replicas": 1}
    assert read_constraints(tmp_path, other) is None, "the schedule is the user's own"
    text = (tmp_path / "search.json").read_text()
    (tmp_path / "search.json").write_text(text.replace('"replicas": 1', '"replicas": 2', 1))
    with pytest.raises(StateError, match=r"search\.json: its checksum does not match"):
        read_constraints(tmp_path, chosen)


def test_a_run_that_has_started_keeps_its_micro_batch() -> None:
    """Before the start a change of what the choice depends on has the micro-batch chosen anew."""
    new, old = config(workers=4).with_micro_batch(0), resolved().with_micro_batch(2)
    said: list[str] = []
    assert keep_micro_batch(new, old, said.append, started=True).train.micro_batch == 2
    assert said == ["train.micro_batch: auto keeps this run's micro-batch: 2"]
    assert keep_micro_batch(new, old, said.append, started=False) == new
    same = config(steps=9).with_micro_batch(0)
    assert keep_micro_batch(same, old, said.append, started=False).train.micro_batch == 2
    assert keep_micro_batch(new, None, said.append, started=True) == new


def test_an_older_run_on_a_gpu_keeps_its_schedule() -> None:
    data = {"model": {"hf": {"model_type": "llama"}}, "data": {"path": "@stdlib"}}
    new = parse_config({**data, "cluster": {"device": "cuda", "workers": 1}})
    older = parse_config(new.model_dump(mode="json"))
    kept_keys = keep_defaults(new, older, None)
    assert kept_keys.schedule == older.schedule and kept_keys.train.micro_batch == 1
    assert keep_defaults(new, None, None).chooses
