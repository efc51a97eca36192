"""The files of ``penstock deploy monitoring`` and their places.

An update replaces Penstock's files (dashboards, rules). Configurations are written once and
then belong to the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.host.errors import ConfigError, reason
from penstock.host.files import write_atomically

_HERE = Path(__file__).parent
_TARGETS = "targets"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A file and its place below the folder. Users edit an ``edited`` file: written only once."""

    source: Path
    place: Path
    edited: bool


def placed() -> Iterator[Placed]:
    """Yields all files."""
    for name in ("README.md", "compose.yml"):
        yield Placed(source=_HERE / name, place=Path(name), edited=name != "README.md")
    for source in sorted(_HERE.glob("prometheus/*.yml")):
        yield Placed(source=source, place=Path("prometheus") / source.name, edited=True)
    for source in sorted(_HERE.glob("alerts/*.yml")):
        rules = source.name.endswith(".rules.yml")
        folder = "prometheus" if rules else "alertmanager"
        yield Placed(source=source, place=Path(folder) / source.name, edited=not rules)
    for source in sorted(_HERE.glob("provisioning/*/*.yml")):
        place = Path("grafana") / source.relative_to(_HERE)
        yield Placed(source=source, place=place, edited=True)
    for source in sorted(_HERE.glob("generated/*.json")):
        place = Path("grafana/dashboards") / source.name
        yield Placed(source=source, place=place, edited=False)


def write(folder: Path) -> list[str]:
    """Writes all files into a folder, or updates them; returns a line for each action.

    Raises:
        ConfigError: a file cannot be written.
    """
    done = []
    try:
        (folder / _TARGETS).mkdir(parents=True, exist_ok=True)
        for file in placed():
            target, text = folder / file.place, file.source.read_text(encoding="utf-8")
            current = target.read_text(encoding="utf-8") if target.exists() else None
            if file.edited and current not in (None, text):
                done.append(f"kept, since it was edited: {target}")
            elif current != text:
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(target, text)
                done.append(f"{'written' if current is None else 'replaced'}: {target}")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write it: {reason(error)}") from error
    return done


def next_commands(folder: Path) -> str:
    """Returns the commands to type after :func:`write`."""
    return (
        f"In the configuration of runs: observability.targets: {folder.absolute() / _TARGETS}\n"
        f"then: cd {folder} && docker compose up -d, and open http://127.0.0.1:3000\n"
        f"{folder / 'README.md'} has the details, also without Docker."
    )
