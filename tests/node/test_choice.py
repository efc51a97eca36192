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
)
from penstock.daemons.node.preparing.prepare import prepare_run
from penstock.host.errors import CapacityError

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


def resolved(asked: dict[str, object] | None, **changes: object) -> Config:
    """A run's configuration with a schedule that was chosen (or not)."""
    chosen = {"forward_stages": 2, "backward_stages": 2, "recompute": "none", "asked": asked}
    return config(**{"scheme": "1f1b", **chosen, **changes})  # type: ignore[arg-type]


def kept(new: Config, old: Config | None) -> tuple[str, list[str]]:
    """The scheme, and what was said."""
    said: list[str] = []
    return keep_choice(new, old, said.append).schedule.scheme, said


def test_a_resume_keeps_the_choice() -> None:
    scheme, said = kept(config(steps=9), resolved({}))
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
            "memory: {'host_limit': None, 'device_limit': None, 'mirror': 'none'}",
        ),
        (config(recompute="full"), "schedule: {} -> {'recompute': 'full'}"),
    ],
    ids=["workers", "limit", "asked"],
)
def test_a_choice_is_made_anew_for_a_reason_that_is_said(new: Config, words: str) -> None:
    scheme, said = kept(new, resolved({}))
    assert scheme == "auto"
    assert said[0].startswith(f"schedule: auto chooses again, because of {words}")


def test_nothing_to_keep() -> None:
    assert kept(config(), None) == ("auto", [])
    assert kept(config(), resolved(None)) == ("auto", []), "the schedule was the user's own"
    assert kept(config(scheme="gpipe"), resolved({})) == ("gpipe", [])


def test_a_run_directory_from_the_first_choice_to_another(tmp_path: Path) -> None:
    run_dir, said = tmp_path / "run", list[str]()
    directory = prepare_run(config(), run_dir, said.append)
    first = load_config(run_dir / "resolved.yaml").schedule
    assert first.scheme != "auto" and first.asked == {}
    assert yaml.safe_load((run_dir / "resolved.yaml").read_text())["schedule"]["asked"] == {}
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
    with pytest.raises(CapacityError, match=r"none of \d+ candidates .* devices have 1.0 MiB"):
        prepare_run(config(workers=1, steps=9, limit="1M"), run_dir)
    assert (run_dir / "resolved.yaml").read_bytes() == before


def test_a_run_that_has_started_keeps_its_micro_batch() -> None:
    """Before the start a change of what the choice depends on has the micro-batch chosen anew."""
    new, old = config(workers=4).with_micro_batch(0), resolved({}).with_micro_batch(2)
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
    kept_keys = keep_defaults(new, older)
    assert kept_keys.schedule == older.schedule and kept_keys.train.micro_batch == 1
    assert keep_defaults(new, None).chooses
