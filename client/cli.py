"""What all commands share: options, and how errors reach the user."""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.protocol.errors import ConfigError, ExitCode, PenstockError

if TYPE_CHECKING:
    from penstock.protocol.config import Config

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG.yaml", help="Configuration; see the README.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key: --set train.steps=100."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def errors_explained(log_dir: Path | None = None) -> Iterator[None]:
    """Turn errors into one line and an exit code; what we did not foresee goes to a file."""
    try:
        yield
    except PenstockError as error:
        sys.stderr.write(f"penstock: {error}\n")
        raise typer.Exit(int(error.exit_code)) from error
    except KeyboardInterrupt as error:
        sys.stderr.write("penstock: interrupted\n")
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from error
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        path = _write_trace(log_dir)
        sys.stderr.write(f"penstock: internal error: {error!r}; details are in {path}\n")
        raise typer.Exit(int(ExitCode.LOST_MEMBERS)) from error


def _write_trace(log_dir: Path | None) -> Path:
    directory = log_dir if log_dir is not None and log_dir.is_dir() else None
    with tempfile.NamedTemporaryFile(
        "w", prefix="penstock-error-", suffix=".txt", dir=directory, delete=False
    ) as file:
        traceback.print_exc(file=file)
    return Path(file.name)


def load(config: Path, settings: list[str] | None) -> Config:
    """Read a configuration with its overrides.

    Raises:
        ConfigError: as :func:`penstock.protocol.config.load_config`; where an example was meant,
            says how to get it.
    """
    from penstock.client.examples import example_names
    from penstock.protocol.config import load_config

    if not config.exists() and config.suffix in (".yaml", "") and config.stem in example_names():
        raise ConfigError(
            f"configuration {config}: does not exist; this example is written into the current"
            f" folder by penstock init --example {config.stem}"
        )
    return load_config(config, tuple(settings or ()))


def terminal_width() -> int:
    """Columns to fill with text."""
    import shutil

    return min(160, shutil.get_terminal_size((100, 24)).columns)
