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
from penstock.client.views.display import Display, Plain, Silent
from penstock.client.views.programs import Bar, Stepping
from penstock.client.views.run_view import RunView
from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError

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

    def run_training(
        config: Config, run_dir: Path, display: Display, on_step: object
    ) -> TrainResult:
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
        ({"overrides": "train.steps=5"}, r"overrides = 'train.steps=5': expected a mapping such"),
        ({"overrides": {5: 5}}, "overrides: key 5 is no str"),
        ({"overrides": {"train": {"stepz": 5}}}, "train.stepz"),
        ({"overrides": (5,)}, "overrides: 5 is no str; expected a text such as 'train.steps=50'"),
        ({"overrides": None}, "overrides = None: expected a mapping"),
        ({"run_dir": ""}, "run_dir = '': expected a path"),
        ({"run_dir": b"x"}, "run_dir = b'x': expected a path"),
        ({"run_dir": 3}, "run_dir = 3: expected a path as str or pathlib.Path"),
        ({"display": "rich"}, "display = 'rich': is unknown; expected 'plain', 'bar', None"),
        ({"on_step": 3}, "on_step = 3: expected a function with one argument"),
        ({"display": True}, r"display = True: has no say\(\), show\(\), close\(\); expected"),
    ],
)
def test_other_arguments_are_refused_by_name(
    calls: list[Call], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        penstock.train(**{"config": SECTIONS, **arguments})
    assert calls == []


@pytest.mark.parametrize(
    "overrides",
    [
        {"train.steps": 5, "optimizer.lr": 1e-5, "data.path": Path("a b: #c.txt")},
        {"train": {"steps": 5}, "optimizer": {"lr": 1e-5}, "data": {"path": "a b: #c.txt"}},
    ],
)
def test_overrides_may_be_mappings(calls: list[Call], overrides: dict[str, Any]) -> None:
    penstock.train(SECTIONS, overrides)
    config = calls[0][0]
    assert (config.train.steps, config.optimizer.lr) == (5, 1e-5)
    assert config.data.path == "a b: #c.txt"


def test_results_are_short_and_names_are_exported(tmp_path: Path) -> None:
    metrics = tuple({"phase": "train", "step": n, "loss": 2.0} for n in range(1, 5001))
    result = penstock.TrainResult(exit_code=0, run_dir=tmp_path, metrics=metrics, error="")
    assert repr(result) == f"TrainResult(exit_code=0, run_dir='{tmp_path}', steps=5000, loss=2.0)"
    assert issubclass(ConfigError, penstock.PenstockError)
    assert set(penstock.__all__) >= {"train", "TrainResult", "PenstockError"}


def view(*steps: int) -> RunView:
    """A run of ten steps with new metrics."""
    fresh = tuple({"phase": "train", "step": n, "loss": 2.5, "epoch": 1} for n in steps)
    return RunView(steps=10, status=None, fresh=fresh)


def test_a_function_gets_each_step_once_and_may_stop() -> None:
    seen: list[int] = []
    stops: list[bool] = []

    def on_step(row: dict[str, Any]) -> bool:
        seen.append(row["step"])
        return row["step"] == 3

    stepping = Stepping(Silent(), on_step, lambda: stops.append(True))
    stepping.show(view(1, 2))
    stepping.show(view(3, 4))
    stepping.show(view(5))
    assert seen == [1, 2, 3] and stops == [True]
    assert stepping.code_of(130) == 5 and stepping.code_of(4) == 4


def test_an_error_of_the_function_stops_the_run_and_comes_out() -> None:
    stops: list[bool] = []
    stepping = Stepping(Silent(), lambda row: 1 / 0, lambda: stops.append(True))
    stepping.show(view(1, 2))
    assert stops == [True]
    with pytest.raises(ZeroDivisionError):
        stepping.code_of(130)


def test_a_bar_shows_steps_and_loss() -> None:
    stream = StringIO()
    bar = Bar(stream)
    bar.say("training small")
    bar.show(view(7))
    bar.close()
    assert "training small" in stream.getvalue()
    assert "loss 2.5000" in stream.getvalue() and "7/10" in stream.getvalue()


def test_a_bar_shows_passes_over_the_data() -> None:
    stream = StringIO()
    bar = Bar(stream)
    step = {"phase": "train", "step": 8, "data_epoch": 2.375}
    bar.show(RunView(steps=10, status=None, fresh=(step,)))
    bar.close()
    assert "epoch 2.38" in stream.getvalue() and "8/10" in stream.getvalue()
