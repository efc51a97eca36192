"""Changes of a configuration's text: the values are the expected ones, and comments stay."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.client.planning.editing import edited

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))

TEXT = """\
# for the small machine
run: {name: mine}

schedule:
  # as we measured it
  scheme: spipe    # the scheme
  recompute: full  # this goes
  passes:
    - mario
    - 2bp

# batches
train: {steps: 3,
  micro_batch: auto} # two lines
memory:
  host_limit: 20G"""


def changed(**sections: dict[str, Any] | str) -> dict[str, Any]:
    """The values of the text, with whole sections replaced."""
    return {**yaml.safe_load(TEXT), **sections}


def test_values_change_where_they_stand_and_comments_stay() -> None:
    expected = changed(
        schedule={"scheme": "1f1b", "passes": ["keep-what-fits"], "replicas": 2},
        train={"steps": 3, "micro_batch": 4, "global_batch": 8},
        memory={"host_limit": "20G", "device_limit": 5},
        cluster={"workers": 2},
    )
    text = edited(TEXT, expected)
    assert yaml.safe_load(text) == expected
    for words in (
        "# for the small machine\nrun: {name: mine}\n\nschedule:\n  # as we measured it\n",
        "  scheme: 1f1b    # the scheme\n  passes:\n    [keep-what-fits]\n  replicas: 2\n",
        "train: {steps: 3,\n  micro_batch: 4, global_batch: 8} # two lines\n",
        "memory:\n  host_limit: 20G\n  device_limit: 5\ncluster: {workers: 2}\n",
    ):
        assert words in text
    assert "this goes" not in text


def test_a_section_may_be_one_word() -> None:
    text = "schedule: auto  # by the tuner\n"
    expected = {"schedule": {"scheme": "gpipe", "forward_stages": 2}}
    assert edited(text, expected) == (
        "schedule: {scheme: gpipe, forward_stages: 2}  # by the tuner\n"
    )


def test_nothing_to_change_leaves_the_text() -> None:
    assert edited(TEXT + "\n", changed()) == TEXT + "\n"


@pytest.mark.parametrize(
    "text",
    [
        "a: &x {k: 1}\nb: *x\n",
        "base: &x {k: 1, m: 2}\nb: {<<: *x, k: 3}\n",
        "{a: {k: 1}, b: {k: 1}}\n",
        "a: {}\nb: {k: 1,}\n",
        'a:\n  "k": |\n    text\nb:\n  ? k\n  : 1\n',
    ],
)
def test_values_are_right_however_the_text_is_written(text: str) -> None:
    expected = {
        **yaml.safe_load(text),
        "b": {"k": 5, "new": [1, "2"]},
        "c": {"deep": {"x": 1.0e-5}},
    }
    assert yaml.safe_load(edited(text, expected)) == expected


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_any_change_of_an_example_comes_out(path: Path) -> None:
    text, draw = path.read_text(), random.Random(7)
    for _ in range(50):
        expected = yaml.safe_load(text)
        for section in draw.sample(sorted(expected), 3):
            values = expected[section]
            for key in draw.sample(sorted(values), min(len(values) - 1, 2)):
                if draw.random() < 0.4:
                    del values[key]
                else:
                    values[key] = draw.choice([7, "a: b # c", None, ["x"], {"y": "~"}, 0.5])
            values["added"] = draw.choice([True, "true", "20G"])
        new = edited(text, expected)
        assert yaml.safe_load(new) == expected
        assert new.startswith(text.splitlines()[0]), "comments stay"
