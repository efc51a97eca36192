"""Commands for saved states: ``snapshots``, ``rollback`` and ``export``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.client.cli import JsonOption, errors_explained
from penstock.host.errors import ConfigError


def snapshots(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run.")],
    action: Annotated[str, typer.Argument(help="list, verify, or delete.")] = "list",
    steps: Annotated[
        list[int] | None, typer.Argument(metavar="[STEP]...", help="All, if none is named.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List what is saved of a run, check every byte of it, or delete some of it.

    Ends with 2 if a saved state is damaged.
    """
    damaged = False
    with errors_explained():
        from penstock.client import states

        if action not in ("list", "verify", "delete"):
            raise ConfigError(f"{action!r}: an action is list, verify, or delete")
        every_byte = action == "verify"
        if action == "delete":
            found = states.delete_states(run, steps or ())
        else:
            found = states.report_states(run, steps or (), every_byte=every_byte)
        text = states.to_text(found, every_byte=every_byte)
        typer.echo(json.dumps(states.to_dicts(found), indent=1) if as_json else text)
        damaged = action != "delete" and any(report.damage for report in found)
    raise typer.Exit(2 if damaged else 0)


def rollback(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run.")],
    to: Annotated[int, typer.Option("--to", metavar="STEP", help="A step that is saved.")],
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete what is newer; else it is kept aside.")
    ] = False,
) -> None:
    """Go back: the next start of a stopped run goes on from a saved step, with the same bytes."""
    with errors_explained():
        from penstock.client import states

        aside = states.rollback(run, to, delete=delete)
        kept = "" if aside is None else f"; what is newer, journal and metrics are in {aside}"
        typer.echo(f"{run}: the next start goes on from step {to}{kept}")


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write.")],
    form: Annotated[str, typer.Option("--format", help="hf is the only one.")] = "hf",
    step: Annotated[int | None, typer.Option(help="A saved step; default: the newest.")] = None,
    whole: Annotated[bool, typer.Option("--whole", help="With its other parts, too.")] = False,
) -> None:
    """Write a saved state as a directory that transformers loads."""
    with errors_explained():
        from penstock.client.export import export as write

        if form != "hf":
            raise ConfigError(f"--format {form}: accepted is hf")
        version = write(run, output, step, whole=whole).version
        typer.echo(f"step {version} of {run} is in {output}")


def register(app: typer.Typer) -> None:
    """Adds the commands to ``penstock``."""
    app.command(epilog="Example: penstock snapshots runs/tiny verify 400 800")(snapshots)
    app.command(epilog="Example: penstock rollback runs/tiny --to 400")(rollback)
    app.command(epilog="Example: penstock export runs/tiny --format hf tiny-hf")(export)
