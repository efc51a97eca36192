"""The Python interface: :func:`train` trains as ``penstock train`` does."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast

from penstock.client.convert.aliases import TRAINERS
from penstock.client.states import mend_base
from penstock.client.train import TrainResult, run_training
from penstock.client.views.display import Display, Plain, Silent
from penstock.client.views.programs import Bar, OnStep, check_function
from penstock.config.schema import Config, load_config, parse_config
from penstock.config.words import apply_overrides
from penstock.host.errors import ConfigError
from penstock.protocol.run.rundir import run_of

__all__ = ["TrainResult", "train"]


def train(
    config: Mapping[str, Any] | str | PathLike[str] | Config,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    run_dir: str | PathLike[str] | None = None,
    display: Display | str | None = None,
    on_step: OnStep | None = None,
) -> TrainResult:
    """Trains to the end, and returns the result.

    ``config`` is a mapping like the YAML file, the path of a file, or a :class:`Config`.
    ``overrides`` are texts ``section.key=value``, or a mapping of such keys or of sections.
    ``run_dir`` takes precedence over ``run.dir``. ``display`` is "plain" for lines, "bar" for a
    progress bar, None for nothing, or a :class:`Display`. ``on_step`` gets the line of
    metrics.jsonl of each step, soon after its commit, while training continues. If ``on_step``
    returns True, the run saves and stops (``exit_code`` 5).

    In the main thread, Ctrl-C and SIGTERM stop the run cleanly (``exit_code`` 130), as does
    ``penstock stop`` (5). SIGHUP, SIGUSR1 and SIGUSR2 do so, too, unless the program handles or
    ignores them. The same call resumes a stopped run.

    Raises:
        PenstockError: nothing was started: bad configuration or argument, too little memory, or the
            run is in use.
        Exception: the exception of ``on_step``, after the run has saved and stopped.
    """
    texts = _override_texts(overrides)
    resolved = _resolved(config, texts)
    if on_step is not None:
        check_function(on_step)
    continued = run_of(_path("config", config)) if isinstance(config, str | PathLike) else None
    if continued is None or any(text.startswith("run.dir=") for text in texts):
        continued = resolved.run_dir
    directory = continued if run_dir is None else _path("run_dir", run_dir)
    mend_base(directory, lambda line: sys.stderr.write(f"{line}\n"))
    return run_training(resolved, directory, _display_of(display), on_step=on_step)


def _resolved(config: object, overrides: tuple[str, ...]) -> Config:
    if isinstance(config, str | PathLike):
        return load_config(_path("config", config), overrides, translation=TRAINERS)
    if isinstance(config, Config):
        config = config.model_dump(mode="json", exclude_unset=True)
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"config = {config!r}: expected the path of a YAML file, a mapping of sections (run,"
            " model, data, …), or a Config"
        )
    return parse_config(apply_overrides(_as_dicts(config), overrides), translation=TRAINERS)


def _as_dicts(value: Any) -> Any:
    """Returns a value with all mappings as dictionaries, as YAML files have them."""
    return {k: _as_dicts(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _override_texts(overrides: object) -> tuple[str, ...]:
    if isinstance(overrides, Mapping):
        return tuple(_texts_of(overrides, ""))
    if not isinstance(overrides, Sequence) or isinstance(overrides, str | bytes):
        raise ConfigError(
            f"overrides = {overrides!r}: expected a mapping such as {{'train.steps': 50}}, or a"
            " list of texts such as 'train.steps=50'"
        )
    for override in overrides:
        if not isinstance(override, str):
            raise ConfigError(
                f"overrides: {override!r} is no str; expected a text such as 'train.steps=50'"
            )
    return tuple(overrides)


def _texts_of(overrides: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    """Yields the values of a mapping as ``section.key=value``. A section, or the value of a key,
    may be a mapping.
    """
    for key, value in overrides.items():
        if not isinstance(key, str) or not key:
            raise ConfigError(
                f"overrides: key {key!r} is no str; expected a text such as 'train.steps'"
            )
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and not prefix and "." not in key:
            yield from _texts_of(value, f"{name}.")
        else:
            text = json.dumps(_as_dicts(value), default=str, ensure_ascii=False)
            yield f"{name}={text}"


def _path(name: str, value: object) -> Path:
    """Returns the path; refuses an empty text and bytes."""
    if isinstance(value, str | PathLike):
        path = value if isinstance(value, str) else value.__fspath__()
        if isinstance(path, str) and path:
            return Path(path)
    raise ConfigError(f"{name} = {value!r}: expected a path as str or pathlib.Path")


def _display_of(display: object) -> Display:
    if display is None:
        return Silent()
    if display == "plain":
        return Plain(sys.stdout)
    if display == "bar":
        return Bar(sys.stderr)
    missing = [
        name for name in ("say", "show", "close") if not callable(getattr(display, name, None))
    ]
    if isinstance(display, str) or missing:
        lacks = (
            "" if isinstance(display, str) else " has no " + ", ".join(f"{m}()" for m in missing)
        )
        raise ConfigError(
            f"display = {display!r}:{lacks or ' is unknown'}; expected 'plain', 'bar', None, or a"
            " Display (penstock.client.views.display)"
        )
    return cast(Display, display)
