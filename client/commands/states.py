"""Commands for saved states: ``snapshots``, ``rollback`` and ``export``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.client.cli import JsonOption, errors_explained
from penstock.host.errors import ConfigError


def snapshots(
    run: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run, such as runs/tiny.")
    ],
    action: Annotated[
        str, typer.Argument(help="Action: list, verify (reads every byte), or delete.")
    ] = "list",
    steps: Annotated[
        list[int] | None,
        typer.Argument(
            metavar="[STEP]...", help="Saved steps. Default: all; delete needs at least one."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Lists, verifies or deletes the saved states of a run.

    A damaged state ends with exit code 2.
    """
    damaged = False
    with errors_explained():
        from penstock.client import states

        if action not in ("list", "verify", "delete"):
            raise ConfigError(f"{action!r}: expected list, verify or delete")
        every_byte = action == "verify"
        if action == "delete":
            reports = states.delete_states(run, steps or ())
        else:
            reports = states.report_states(run, steps or (), every_byte=every_byte)
        text = states.to_text(reports, every_byte=every_byte)
        typer.echo(json.dumps(states.to_dicts(reports), indent=1) if as_json else text)
        damaged = action != "delete" and any(report.damage for report in reports)
    raise typer.Exit(2 if damaged else 0)


def rollback(
    run: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run, such as runs/tiny.")
    ],
    to: Annotated[
        int,
        typer.Option(
            "--to", metavar="STEP", help="Saved step to go back to; penstock snapshots lists them."
        ),
    ],
    delete: Annotated[
        bool,
        typer.Option(
            "--delete", help="Deletes newer states. Default: moves them to RUN_DIR/state/aside."
        ),
    ] = False,
) -> None:
    """Sets a stopped run back to a saved step.

    The next start continues from that step, with the bytes that were saved.
    """
    with errors_explained():
        from penstock.client import states

        aside = states.rollback(run, to, delete=delete)
        kept = "" if aside is None else f"; newer states, journal and metrics are in {aside}"
        typer.echo(f"{run}: the next start resumes from step {to}{kept}")


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of the run, such as runs/tiny.")
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist or be empty.")
    ],
    form: Annotated[
        str, typer.Option("--format", help="Format: hf (Hugging Face), the only one.")
    ] = "hf",
    step: Annotated[
        int | None, typer.Option(metavar="STEP", help="Saved step. Default: the newest.")
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="Also writes the untrained parts of a multimodal model.",
        ),
    ] = False,
) -> None:
    """Writes a saved state as a Hugging Face model directory."""
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
