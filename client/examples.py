"""Configurations that come with the package."""

from __future__ import annotations

from pathlib import Path

from penstock.protocol.errors import ConfigError, reason

_FOLDER = Path(__file__).parents[1] / "examples"


def example_names() -> tuple[str, ...]:
    """What ``penstock init --example`` knows."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def write_example(name: str, output: Path | None) -> Path:
    """Write an example to ``output``, by default under its own name into the current folder.

    Raises:
        ConfigError: no such example, or the file exists or cannot be written.
    """
    if name not in example_names():
        raise ConfigError(f"--example {name}: accepted is {', '.join(example_names())}")
    target = Path(f"{name}.yaml") if output is None else output
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    except FileExistsError as error:
        raise ConfigError(
            f"{target}: exists, and init overwrites nothing; name another file with --out"
        ) from error
    except OSError as error:
        raise ConfigError(f"{target}: cannot write it: {reason(error)}") from error
    return target
