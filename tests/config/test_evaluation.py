"""Sets of held-out data in the configuration: old short forms, names, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.evaluation import EvaluationSet
from penstock.config.schema import Config, parse_config
from penstock.daemons.node.preparing.changes import find_changes
from penstock.host.errors import ConfigError


def config(*sets: dict[str, Any], data: Any = None, **train: Any) -> Config:
    """A configuration with evaluation sets."""
    return parse_config(
        {
            "model": {"hf": {"model_type": "llama"}},
            "data": {"path": "@stdlib", **(data or {})},
            "train": train,
            "eval": {"sets": list(sets)},
        }
    )


def test_the_old_keys_are_a_set_of_their_own() -> None:
    assert config().evaluation_sets == () and not config().holds_out
    old = config(eval_every=3, eval_batches=5)
    expected = EvaluationSet(name="eval", split="eval", every=3, batches=5, repeats=True)
    assert old.evaluation_sets == (expected,) and old.holds_out
    beside = config({"name": "a", "path": "a.txt"}, data={"eval_path": "b.txt"}, eval_every=3)
    assert [(each.name, each.split) for each in beside.evaluation_sets] == [
        ("eval", "eval"),
        ("a", "eval.a"),
    ]


def test_named_sets_replace_the_end_of_the_training_data() -> None:
    sets = config({"name": "a", "path": "a.txt"}, {"name": "b", "every": 7}, eval_every=2)
    assert sets.evaluation_sets == (
        EvaluationSet(name="a", split="eval.a", every=2, batches=None, repeats=False),
        EvaluationSet(name="b", split="eval", every=7, batches=None, repeats=False),
    )
    assert sets.holds_out
    assert not config({"name": "a", "path": "a.txt"}, eval_every=2).holds_out


@pytest.mark.parametrize(
    ("sets", "more", "message"),
    [
        ([{"name": "a", "path": "x", "every": 1}] * 2, {}, "2 sets have the name a; give each"),
        ([{"name": "a", "path": "x"}], {}, "set a is never evaluated: give it every, or all sets"),
        ([{"name": "a.b", "path": "x", "every": 1}], {}, "letters, digits, underscores and hyph"),
        ([{"name": "a", "every": 1}, {"name": "b", "every": 1}], {}, "a and b have no path"),
        (
            [{"name": "a", "every": 0, "path": "x"}],
            {},
            r"eval.sets.0.every = 0: accepted is a whole number, 1 or more",
        ),
        ([{"name": "a", "every": 1, "path": "x", "registry": "y"}], {}, "remove one"),
        ([{"name": "a", "every": 1, "path": "x", "entry": "y"}], {}, "give registry, or remove"),
        ([{"name": "a", "every": 1, "limit": 3}], {}, "limit without a path"),
        ([{"name": "a", "every": 1, "split": "[:5%]"}], {}, "split without a path"),
        (
            [{"name": "a", "every": 1, "path": "x", "split": "train+test"}],
            {},
            r"eval.sets.0.split = 'train\+test': accepted are a split, a part of it",
        ),
        (
            [{"name": "a", "every": 1, "registry": "x", "split": "test"}],
            {},
            "split: the registry's entry decides that",
        ),
        (
            [{"name": "a", "every": 1, "registry": "x", "format": "chat"}],
            {},
            "format: the registry's entry decides that",
        ),
        (
            [{"name": "a"}],
            {"data": {"eval_path": "b"}, "eval_every": 1},
            "set a has no path, and nothing of the training data is held out with data.eval_path",
        ),
        (
            [{"name": "eval", "path": "x"}],
            {"data": {"eval_path": "b"}, "eval_every": 1},
            "the set of data.eval_path 'b' has the name eval, too; give one of the two another",
        ),
    ],
)
def test_mistakes_are_named(sets: list[dict[str, Any]], more: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*sets, **more)


def test_a_resume_takes_sets_of_other_names_and_no_other_data_of_a_name() -> None:
    old = config({"name": "a", "path": "a.txt"}, eval_every=2)

    def changed(*sets: dict[str, Any]) -> tuple[bool, str]:
        (change,) = find_changes(old, config(*sets, eval_every=2))
        return change.allowed, change.note

    more = {"name": "b", "path": "b.txt", "every": 3}
    assert changed({"name": "a", "path": "a.txt", "every": 5}, more) == (True, "")
    assert changed() == (False, "it changes how many sequences are held out of the training text")
    assert changed(more)[0]
    refused, note = changed({"name": "a", "path": "c.txt"})
    assert not refused and note.startswith("earlier results of a are of other data")
    refused, note = changed({"name": "a", "path": "a.txt", "split": "[:5%]"})
    assert not refused and note.startswith("earlier results of a are of other data")
    refused, note = changed({"name": "a", "path": "a.txt"}, {"name": "b"})
    assert not refused and note.startswith("it changes how many sequences")
