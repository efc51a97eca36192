"""The command ``convert``: configurations of other trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.client.cli import JsonOption, errors_explained

if TYPE_CHECKING:
    from penstock.client.convert.conversion import Conversion


def convert(
    tool: Annotated[str, typer.Argument(help="Trainer: trl, llamafactory, axolotl or peft.")],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The trainer's YAML, or adapter_config.json.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="OUT", help="File to write. Default: the terminal (standard output)."
        ),
    ] = None,
    devices: Annotated[
        int,
        typer.Option(
            "--devices",
            metavar="N",
            min=1,
            help="Devices of the trainer's run: the batch of a step counts sequences of all.",
        ),
    ] = 1,
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            metavar="NAME",
            help="dpo, orpo or simpo: the trainer of a file of TRL with pairs of answers."
            " Default: simpo if the file has its keys, else dpo.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Writes even if a dropped key changes the trained model."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Converts a configuration of TRL, LLaMA-Factory, Axolotl or PEFT.

    Reports each key that has no counterpart, and whether the key changes the result or the speed.
    """
    refused = False
    with errors_explained():
        from penstock.client.convert.conversion import convert as converted
        from penstock.client.convert.conversion import write

        conversion = converted(tool, file, devices, objective)
        refused = conversion.changes_result and not force
        if output is not None and not refused:
            write(conversion, output)
        _report(conversion, file, output, refused=refused, as_json=as_json)
    raise typer.Exit(2 if refused else 0)


def _report(
    conversion: Conversion, file: Path, output: Path | None, *, refused: bool, as_json: bool
) -> None:
    """Prints a conversion: its configuration without ``output``, and its remarks."""
    if as_json:
        typer.echo(json.dumps(conversion.to_dict(), indent=1))
    else:
        if output is None and not refused:
            typer.echo(conversion.to_yaml(), nl=False)
        for line in conversion.remarks():
            typer.echo(line, err=True)
        if refused:
            typer.echo(
                f"penstock: {file}: keys that change the result were dropped; remove the keys,"
                " or write the configuration with --force",
                err=True,
            )
        elif output is not None:
            rest = (
                f"start with: penstock train {output}"
                if conversion.is_whole
                else "add its sections to a configuration"
            )
            typer.echo(f"{output} is written; {rest}")


def register(app: typer.Typer) -> None:
    """Adds the command to ``penstock``."""
    app.command(
        epilog="Exit code 2: a dropped key changes the result, and --force is not given."
        " penstock docs COMING_FROM lists the keys.\n\n\b\nExamples:\n"
        "  penstock convert trl sft.yaml --out mine.yaml\n"
        "  penstock convert trl pairs.yaml --objective orpo\n"
        "  penstock convert llamafactory train.yaml --devices 8 --json\n"
        "  penstock convert peft adapter_config.json"
    )(convert)
