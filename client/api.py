"""Training from Python: the same as ``penstock train``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.client.display import Display, Silent
from penstock.client.train import TrainResult, run_training
from penstock.protocol.config import Config, apply_overrides, load_config, parse_config

__all__ = ["TrainResult", "train"]


def train(
    config: dict[str, Any] | Path | str | Config,
    overrides: tuple[str, ...] = (),
    *,
    run_dir: Path | None = None,
    display: Display | None = None,
) -> TrainResult:
    """Train to the end and return how it went.

    ``config`` is a mapping like the YAML file, the path of a file, or a :class:`Config`;
    ``overrides`` are ``section.key=value``. Shows nothing unless given a ``display``. In the main
    thread Ctrl-C stops cleanly (``exit_code`` 130), as does ``penstock stop`` (5); the same call
    goes on from there.

    Raises:
        PenstockError: nothing was started: bad configuration, memory short, run in use.
    """
    if isinstance(config, (str, Path)):
        resolved = load_config(Path(config), overrides)
    else:
        data = (
            config
            if isinstance(config, dict)
            else config.model_dump(mode="json", exclude_unset=True)
        )
        resolved = parse_config(apply_overrides(data, overrides))
    return run_training(resolved, run_dir or resolved.run_dir, display or Silent())
