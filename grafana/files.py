"""What ``penstock deploy monitoring`` writes, and where in the folder.

Files are either Penstock's (dashboards, rules), which an update replaces, or the user's own after
they were written once: configurations that everybody edits.
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
    """A file of ours and its place below the folder; ``edited``: by users, so written only once."""

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
    """Writes everything into a folder, again if need be; returns what was done, a line each.

    Raises:
        ConfigError: it cannot be written.
    """
    done = []
    try:
        (folder / _TARGETS).mkdir(parents=True, exist_ok=True)
        for file in placed():
            target, text = folder / file.place, file.source.read_text(encoding="utf-8")
            there = target.read_text(encoding="utf-8") if target.exists() else None
            if file.edited and there not in (None, text):
                done.append(f"left as it is, since it was edited: {target}")
            elif there != text:
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(target, text)
                done.append(f"{'written' if there is None else 'replaced'}: {target}")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write it: {reason(error)}") from error
    return done


def next_commands(folder: Path) -> str:
    """Returns what to do with them."""
    return (
        f"In the configuration of runs: observability.targets: {folder.absolute() / _TARGETS}\n"
        f"then: cd {folder} && docker compose up -d, and open http://127.0.0.1:3000\n"
        f"{folder / 'README.md'} says more, also for those without Docker."
    )
