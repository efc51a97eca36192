"""Keys given on the command line: ``section.key=value`` over a configuration's mapping."""

from __future__ import annotations

import copy
from typing import Any

import yaml

from penstock.protocol.errors import ConfigError, reason


def apply_overrides(data: dict[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    """A copy of a nested mapping with ``section.key=value`` overrides applied in order.

    Raises:
        ConfigError: an override is not of this form.
    """
    changed = copy.deepcopy(data)
    for override in overrides:
        _apply_override(changed, override)
    return changed


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    path = key.strip().split(".")
    if not separator or not all(path):
        raise ConfigError(f"--set {override!r}: write section.key=value, such as train.steps=100")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}: {text!r} is not valid YAML: {reason(error)}") from error
    target = data
    for part in path[:-1]:
        inner = target[part] = {} if target.get(part) is None else target[part]
        if not isinstance(inner, dict):
            raise ConfigError(
                f"--set {key}: {part} is {inner!r}, which has no keys; give {part} as a mapping"
            )
        target = inner
    target[path[-1]] = value
