"""Old names of keys. Each is accepted for one version with the same meaning, and a hint names the
key or the environment variable that replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.config.reading import Place
from penstock.host.errors import ConfigError

RENAMED: Mapping[Place, str] = {("cluster", "grace_seconds"): "stop_grace_s"}
"""Old name -> new name in the same section."""

Hint = Callable[[str], None]


def with_new_names(data: Mapping[str, Any], hint: Hint = lambda text: None) -> dict[str, Any]:
    """Returns a configuration's mapping in which old keys have their new names. ``hint`` receives
    a line for each old key with another value than its default.

    Raises:
        ConfigError: an old key and the key that replaces it are both given, or an old key has an
            impossible value.
    """
    renewed = dict(data)
    for place, new in RENAMED.items():
        section, old = map(str, place)
        keys = renewed.get(section)
        if isinstance(keys, dict) and old in keys:
            if new in keys:
                raise ConfigError(
                    f"{section}.{old} is the old name of {section}.{new}, and both are given;"
                    f" remove {section}.{old}"
                )
            value = keys[old]
            renewed[section] = {new if key == old else key: keys[key] for key in keys}
            if value is not None:
                hint(f"{section}.{old} is called {section}.{new} now; rename the key")
    if isinstance(cluster := renewed.get("cluster"), dict):
        renewed["cluster"] = _with_security(cluster, hint)
    if isinstance(observability := renewed.get("observability"), dict):
        renewed["observability"] = _without_tracker_keys(observability, hint)
    return renewed


def new_place(place: Place) -> Place:
    """Returns the place of a value with the new name of an old key."""
    new = RENAMED.get(place[:2])
    return place if new is None else (place[0], new, *place[2:])


def _with_security(cluster: dict[str, Any], hint: Hint) -> dict[str, Any]:
    """Returns the section with the value of ``security`` that stands for its old keys, too."""
    old_keys = [key for key in ("insecure", "trusted_fabric") if key in cluster]
    rest = {key: value for key, value in cluster.items() if key not in old_keys}
    security = str(rest.get("security", "none")).strip().lower()
    for key in old_keys:
        if not isinstance(cluster[key], bool):
            raise ConfigError(f"cluster.{key} = {cluster[key]!r}: accepted is true or false")
        if security not in ("none", "tls"):
            raise ConfigError(
                f"cluster.{key} is an old key that cluster.security replaces, which is"
                f" {security!r}; remove cluster.{key}"
            )
    if security == "none" and cluster.get("insecure"):
        rest["security"] = "insecure"
    if security == "tls" and cluster.get("trusted_fabric"):
        rest["security"] = "tls-trusted-fabric"
    for key in old_keys:
        if cluster[key]:
            hint(
                f"cluster.{key} is an old key; write cluster.security:"
                f" {rest.get('security', 'none')} and remove cluster.{key}"
            )
    return rest


TRACKER_KEYS = {
    "tracker_project": "WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME or TRACKIO_PROJECT",
    "wandb_mode": "WANDB_MODE",
    "mlflow_uri": "MLFLOW_TRACKING_URI",
}
"""Old keys of ``observability`` -> environment variables that replace them."""

DEFAULT_PROJECT = "penstock"
"""Project of wandb and trackio, and experiment of mlflow, where no variable names another."""


def _without_tracker_keys(observability: dict[str, Any], hint: Hint) -> dict[str, Any]:
    """Returns the section without old keys that have their defaults."""
    rest = {
        key: value
        for key, value in observability.items()
        if key not in TRACKER_KEYS or value not in (None, DEFAULT_PROJECT)
    }
    for key in sorted(TRACKER_KEYS.keys() & rest.keys()):
        hint(
            f"observability.{key} is an old key; set the environment variable"
            f" {TRACKER_KEYS[key]} instead"
        )
    return rest
