"""The file that ``penstock tune CONFIG --out FILE`` writes: the user's configuration, with the keys
of the fastest schedule in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.config.editing import edited
from penstock.config.execution import ScheduleConfig
from penstock.config.reading import MAX_BYTES, read_mapping
from penstock.config.schema import parse_config
from penstock.config.words import apply_overrides
from penstock.daemons.node.preparing.places import FILES, PLACES, with_absolute_paths
from penstock.host.inputs import read_text

_PATHS = (*PLACES, *FILES, "cluster.device")
"""Keys with a path as their value, or inside of it."""


def tuned_text(
    source: Path, settings: tuple[str, ...], parts: Mapping[str, Mapping[str, Any]], folder: Path
) -> str:
    """Returns the text of the configuration file ``source`` with ``settings`` (``--set``) and the
    keys of ``parts``, to be written into ``folder``. Keys of the schedule with default values are
    left out. In another folder than that of ``source`` paths are absolute.

    Raises:
        ConfigError: the result is no configuration.
    """
    values_by_section = apply_overrides(read_mapping(source).value, settings)
    for name, keys in parts.items():
        values_by_section[name] = _merged(values_by_section.get(name), keys)
    home = source.absolute().parent
    config = parse_config(values_by_section, source=str(source), folder=home)
    if folder.resolve() != home.resolve():
        absolute = with_absolute_paths(config).model_dump(mode="json")
        for section, _, key in (path.partition(".") for path in _PATHS):
            if absolute[section][key] is not None and (key in values_by_section.get(section, ())):
                values_by_section[section][key] = absolute[section][key]
        if config.has_own_modules:
            values_by_section["model"]["import_path"] = absolute["model"]["import_path"]
    return edited(read_text(source, MAX_BYTES), values_by_section)


def _merged(section: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a section with other values of some keys; ``scheme`` alone may stand for it."""
    values = {"scheme": section} if isinstance(section, str) else dict(section or {})
    defaults = ScheduleConfig().model_dump(mode="json")
    for key, value in keys.items():
        values[key] = value
        if key in defaults and key != "scheme" and value == defaults[key]:
            del values[key]
    return values
