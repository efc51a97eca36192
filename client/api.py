"""Trains from Python, as ``penstock train`` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.client.train import TrainResult, run_training
from penstock.client.watching.display import Display, Silent
from penstock.protocol.config.schema import Config, load_config, parse_config
from penstock.protocol.config.words import apply_overrides
from penstock.protocol.errors import ConfigError
from penstock.protocol.run.rundir import run_of

__all__ = ["TrainResult", "train"]


def train(
    config: Mapping[str, Any] | str | PathLike[str] | Config,
    overrides: Sequence[str] = (),
    *,
    run_dir: str | PathLike[str] | None = None,
    display: Display | None = None,
) -> TrainResult:
    """Trains to the end and returns how it went.

    ``config`` is a mapping like the YAML file, the path of a file, or a :class:`Config`;
    ``overrides`` are ``section.key=value``. ``run_dir`` goes before ``run.dir``. Shows nothing
    unless given a ``display``. In the main thread Ctrl-C and SIGTERM stop cleanly (``exit_code``
    130), as does ``penstock stop`` (5); the same call goes on from there. So do SIGHUP, SIGUSR1 and
    SIGUSR2 where the program neither handles nor ignores them.

    Raises:
        PenstockError: nothing was started, because the configuration or an argument is bad, memory
            is short, or the run is in use.
    """
    texts = _override_texts(overrides)
    resolved = _resolved(config, texts)
    continued = run_of(_path("config", config)) if isinstance(config, str | PathLike) else None
    if continued is None or any(text.startswith("run.dir=") for text in texts):
        continued = resolved.run_dir
    directory = continued if run_dir is None else _path("run_dir", run_dir)
    return run_training(resolved, directory, Silent() if display is None else _shown_on(display))


def _resolved(config: object, overrides: tuple[str, ...]) -> Config:
    if isinstance(config, str | PathLike):
        return load_config(_path("config", config), overrides)
    if isinstance(config, Config):
        config = config.model_dump(mode="json", exclude_unset=True)
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"config = {config!r}: expected the path of a YAML file, a mapping of sections (run,"
            " model, data, …), or a Config"
        )
    return parse_config(apply_overrides(_as_dicts(config), overrides))


def _as_dicts(value: Any) -> Any:
    """Returns mappings of any kind as the dictionaries that YAML files have."""
    return {k: _as_dicts(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _override_texts(overrides: object) -> tuple[str, ...]:
    if not isinstance(overrides, Sequence) or isinstance(overrides, str | bytes):
        raise ConfigError(
            f"overrides = {overrides!r}: expected a tuple or list of texts, such as"
            " ('train.steps=50',)"
        )
    for override in overrides:
        if not isinstance(override, str):
            raise ConfigError(
                f"overrides: {override!r} is no text; expected such as 'train.steps=50'"
            )
    return tuple(overrides)


def _path(name: str, value: object) -> Path:
    """Returns a path that says something: no empty text, no bytes."""
    if isinstance(value, str | PathLike):
        path = value if isinstance(value, str) else value.__fspath__()
        if isinstance(path, str) and path:
            return Path(path)
    raise ConfigError(f"{name} = {value!r}: expected a path, as a text or pathlib.Path")


def _shown_on(display: Display) -> Display:
    missing = [
        name for name in ("say", "show", "close") if not callable(getattr(display, name, None))
    ]
    if missing:
        raise ConfigError(
            f"display = {display!r}: has no {', '.join(f'{name}()' for name in missing)}; expected"
            " a Display (penstock.client.watching.display), or nothing to show nothing"
        )
    return display
