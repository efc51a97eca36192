"""The command line ``penstock``. A failing command prints one line and exits with its code.

Commands import their dependencies when they run, so that ``penstock --help`` and the processes of a
run start fast. No module of the command line imports torch.
"""

from __future__ import annotations

from penstock.client.importing import imported  # before slow imports

# isort: split
from importlib import import_module
from typing import Annotated

import typer

from penstock.client.cli import SectionedHelp
from penstock.client.commands import (
    convert,
    deploy,
    exchange,
    keys,
    nodes,
    pages,
    runs,
    states,
    training,
)
from penstock.client.planning import commands as plan_commands
from penstock.client.views.output import guard

imported()

EXIT_CODES = (
    "Exit codes: 0 success, 2 bad configuration or state, 3 not enough memory, disk space or CPUs,"
    " 4 lost processes or internal error, 5 stopped on request before the last step (state saved),"
    " 130 interrupted (state kept)."
)

app = typer.Typer(
    name="penstock",
    help="Trains language models that do not fit in the memory of the GPUs at hand.",
    epilog=EXIT_CODES
    + "\n\nFirst steps: penstock init, then penstock train tiny.yaml. In another terminal, while"
    " the run trains: penstock watch runs/tiny",
    cls=SectionedHelp,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_versions(wanted: bool) -> None:
    """Prints the versions of Penstock and of the packages that training depends on, and exits."""
    if wanted:
        from penstock.client.cli import versions

        typer.echo(versions())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_versions,
            is_eager=True,
            help="Shows the versions of Penstock, Python, torch and transformers.",
        ),
    ] = False,
) -> None:
    """Trains language models that do not fit in the memory of the GPUs at hand."""


ABOVE = ("penstock.chaos.commands",)
"""Modules of packages above the client that add commands. They import the client, so the client
imports them by name only.
"""

for module in (
    training,
    convert,
    pages,
    runs,
    states,
    exchange,
    plan_commands,
    nodes,
    *map(import_module, ABOVE),
):
    module.register(app)
app.add_typer(keys.app)
app.add_typer(deploy.app)


def main() -> None:
    """Runs the ``penstock`` command."""
    guard()
    app()


if __name__ == "__main__":
    main()
