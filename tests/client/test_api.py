"""``penstock.train``: what it accepts, and what it says about anything else."""

from __future__ import annotations

from io import StringIO
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import pytest
import yaml

import penstock
from penstock.client import api
from penstock.client.train import TrainResult
from penstock.client.watching.display import Display, Plain, Silent
from penstock.protocol.config.schema import Config, parse_config
from penstock.protocol.errors import ConfigError

SECTIONS = {
    "run": {"name": "small"},
    "model": {"hf": {"model_type": "llama"}},
    "data": {"path": "@stdlib"},
    "train": {"steps": 3},
}
Call = tuple[Config, Path, Display]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What was trained; nothing is."""
    found: list[Call] = []

    def run_training(config: Config, run_dir: Path, display: Display) -> TrainResult:
        found.append((config, run_dir.absolute(), display))
        return TrainResult(exit_code=0, run_dir=run_dir, metrics=(), error="")

    monkeypatch.setattr(api, "run_training", run_training)
    return found


@pytest.mark.parametrize("kind", [dict, MappingProxyType, parse_config, str, Path])
@pytest.mark.parametrize("run_dir", ["x", Path("x"), PurePosixPath("x"), None])
def test_paths_are_texts_or_paths_and_configurations_also_mappings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[Call], kind: Any, run_dir: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(SECTIONS))
    given = kind(file) if kind in (str, Path) else kind(SECTIONS)
    result = penstock.train(given, ["train.steps=4"], run_dir=run_dir)
    ((config, directory, display),) = calls
    assert config.train.steps == 4 and isinstance(display, Silent)
    assert directory == tmp_path / ("runs/small" if run_dir is None else "x")
    assert result.exit_code == 0


def test_inner_mappings_need_not_be_dictionaries(calls: list[Call]) -> None:
    display = Plain(StringIO())
    penstock.train({**SECTIONS, "train": MappingProxyType({"steps": 5})}, display=display)
    assert calls[0][0].train.steps == 5 and calls[0][2] is display


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": None}, "config = None: expected the path of a YAML file, a mapping"),
        ({"config": 7}, "config = 7: expected the path of a YAML file"),
        ({"config": ""}, "config = '': expected a path"),
        ({"config": b"small.yaml"}, "config = b'small.yaml': expected the path of a YAML file"),
        ({"config": {1: {}}}, "configuration"),
        ({"config": {**SECTIONS, "train": 3}}, "train = 3"),
        ({"overrides": "train.steps=5"}, r"overrides = 'train.steps=5': expected a tuple or list"),
        ({"overrides": {"train.steps": 5}}, "overrides = .*: expected a tuple or list"),
        ({"overrides": (5,)}, "overrides: 5 is no text; expected such as 'train.steps=50'"),
        ({"overrides": None}, "overrides = None: expected a tuple or list"),
        ({"run_dir": ""}, "run_dir = '': expected a path"),
        ({"run_dir": b"x"}, "run_dir = b'x': expected a path"),
        ({"run_dir": 3}, "run_dir = 3: expected a path, as a text or pathlib.Path"),
        ({"display": True}, r"display = True: has no say\(\), show\(\), close\(\); expected"),
    ],
)
def test_other_arguments_are_refused_by_name(
    calls: list[Call], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        penstock.train(**{"config": SECTIONS, **arguments})
    assert calls == []
