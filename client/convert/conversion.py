"""Conversion of a trainer's file, and its forms: YAML, text and JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock.client.convert import axolotl, llamafactory, peft, trl
from penstock.client.convert.keys import Effect, Table
from penstock.client.convert.reading import KeyReading, shown
from penstock.config.schema import parse_config
from penstock.config.values import PAIR_OBJECTIVES
from penstock.host.errors import ConfigError
from penstock.host.files import write_new
from penstock.host.trust import printable

_SECTIONS = ("run", "model", "adapter", "data", "eval", "train", "optimizer")
_REST = {"model": {"path": "model"}, "data": {"tokens": "tokens.bin"}}
"""Sections that a file about adapters alone leaves open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A trainer: its name, the table of its keys, earlier names of keys, and the conversion."""

    title: str
    table: Table
    old: Mapping[str, str]
    convert: Callable[[KeyReading], None]
    whole: bool = True
    """False if the conversion makes some sections of a configuration."""


TOOLS: Mapping[str, Tool] = {
    "trl": Tool(title="TRL", table=trl.TABLE, old=trl.OLD_NAMES, convert=trl.convert),
    "llamafactory": Tool(
        title="LLaMA-Factory",
        table=llamafactory.TABLE,
        old=llamafactory.OLD_NAMES,
        convert=llamafactory.convert,
    ),
    "axolotl": Tool(
        title="Axolotl", table=axolotl.TABLE, old=axolotl.OLD_NAMES, convert=axolotl.convert
    ),
    "peft": Tool(
        title="PEFT", table=peft.TABLE, old=peft.OLD_NAMES, convert=peft.convert, whole=False
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A configuration made of another trainer's file, and the fate of each key of the file."""

    tool: str
    path: Path
    config: Mapping[str, Any]
    mapped: Sequence[Mapping[str, Any]]
    dropped: Sequence[Mapping[str, Any]]

    @property
    def is_whole(self) -> bool:
        """True if the configuration can be trained as it is."""
        return TOOLS[self.tool].whole

    @property
    def changes_result(self) -> bool:
        """True if a dropped key changes the result of the training."""
        return any(entry["effect"] == Effect.RESULT.value for entry in self.dropped)

    def to_dict(self) -> dict[str, Any]:
        """Returns the value of ``--json``."""
        return {"config": self.config, "mapped": self.mapped, "dropped": self.dropped}

    def to_yaml(self) -> str:
        """Returns the configuration with a comment for each note and each dropped key."""
        lines = [f"# Made of {printable(self.path)} by penstock convert {self.tool}"]
        lines += [f"#   {line}" for line in self.remarks()]
        return "\n".join(lines) + "\n" + yaml.safe_dump(dict(self.config), sort_keys=False)

    def remarks(self) -> list[str]:
        """Returns a line for each note, and one for each dropped key."""
        notes = {entry["note"]: entry["key"] for entry in reversed(self.mapped) if "note" in entry}
        lines = [f"{key}: {note}" for note, key in reversed(notes.items())]
        for effect in reversed(Effect):
            lines += [
                f"dropped ({entry['effect']}): {entry['key']} = {shown(entry['value'])}:"
                f" {entry['why']}"
                for entry in self.dropped
                if entry["effect"] == effect.value
            ]
        return [*map(printable, lines)]  # a line end in a key would end the comment in a YAML


def convert(tool: str, path: Path, devices: int, objective: str | None = None) -> Conversion:
    """Converts a trainer's file. ``devices`` of the trainer's run multiply the batch of a step.
    ``objective`` names that of pairs, which a file of TRL may not tell.

    Raises:
        ConfigError: the trainer is unknown, the file cannot be read, or the values make no
            configuration.
    """
    if tool not in TOOLS:
        raise ConfigError(f"{tool!r}: expected {', '.join(TOOLS)}")
    entry = TOOLS[tool]
    if objective is not None and (tool != "trl" or objective not in PAIR_OBJECTIVES):
        raise ConfigError(
            f"--objective {objective}: goes with trl alone, and takes {', '.join(PAIR_OBJECTIVES)}"
        )
    reading = KeyReading.of(path, entry.table, devices, entry.old, objective)
    entry.convert(reading)
    reading.drop_rest()
    config = {name: reading.config[name] for name in _SECTIONS if name in reading.config}
    checked = config if entry.whole else _REST | config
    parse_config(checked, source=f"{path}: the configuration made of it")
    return Conversion(
        tool=tool, path=path, config=config, mapped=reading.mapped, dropped=reading.dropped
    )


def write(conversion: Conversion, output: Path) -> None:
    """Writes the configuration to a new file.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    write_new(output, conversion.to_yaml())
