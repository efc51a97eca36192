"""What may change between the start of a run and its resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError

FIXED = (
    "run.seed",
    "model",
    "data",
    "train.freeze",
    "optimizer.name",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.grad_dtype",
    "optimizer.rollback",
    "emulation.scale",
)
"""Keys (and all keys below them) that saved state, data order or a pending update depend on."""

FREE = ("data.eval_path",)
"""Exceptions to :data:`FIXED`."""


SPLITTING = ("train.eval_every", "data.eval_path")
"""Free as long as they hold out as much of the training text as before: the data order depends on
how many sequences there are.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A key whose value differs. ``allowed``: the run can go on with the new value."""

    key: str
    old: Any
    new: Any
    allowed: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def find_changes(old: Config, new: Config) -> tuple[Change, ...]:
    """All keys with different values, in the order of the configuration."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    same_split = _held_out(old) == _held_out(new)
    # An emulated device brings its model: another one would be another model.
    emulated = any(config.cluster.emulated is not None for config in (old, new))
    return tuple(
        Change(
            key=key,
            old=before.get(key),
            new=after.get(key),
            allowed=_allowed(key)
            and (same_split or key not in SPLITTING)
            and (key != "cluster.device" or not emulated),
        )
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    )


def fixed_values(config: Config) -> dict[str, Any]:
    """Key -> value of every key that a resume must not change."""
    flat = _flat(config.model_dump(mode="json"))
    return {key: value for key, value in flat.items() if not _allowed(key)}


def edited_keys(fixed: Mapping[str, Any], config: Config) -> list[str]:
    """Every fixed key whose value differs from what it was, with both values.

    ``fixed``: earlier :func:`fixed_values`, maybe of another Penstock with other keys.
    """
    now = fixed_values(config)
    return [
        f"{key}: {value!r} -> {now[key]!r}"
        for key, value in fixed.items()
        if key in now and now[key] != value
    ]


def check_resume(changes: tuple[Change, ...], run_dir: Path) -> None:
    """Refuse to go on with another model, other data, or another optimizer.

    Raises:
        ConfigError: naming every such key with its old and new value.
    """
    refused = [str(change) for change in changes if not change.allowed]
    if refused:
        raise ConfigError(
            f"{run_dir} holds a run that was started with other values of keys that cannot change:"
            f" {'; '.join(refused)}. Restore them, or start a new run in another run.dir"
        )


def _held_out(config: Config) -> bool:
    """Whether the last sequences of the training text are kept for evaluation."""
    return config.train.eval_every > 0 and config.data.eval_path is None


def _allowed(key: str) -> bool:
    return _below(key, FREE) or not _below(key, FIXED)


def _below(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings -> one level with dotted keys; lists stay values."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        path = f"{prefix}{key}"
        if isinstance(inner, dict):
            flat |= _flat(inner, f"{path}.")
        else:
            flat[path] = inner
    return flat
