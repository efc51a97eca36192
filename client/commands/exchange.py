"""Commands for checkpoints of other trainers: ``import`` and ``inspect``."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from penstock.client.cli import (
    JsonOption,
    RunDirOption,
    SetOption,
    begin_to_import,
    exchange_errors_explained,
    load,
    one_run,
    say_preparation,
)
from penstock.host.errors import ConfigError
from penstock.host.stopping import interrupted_by_stop_signals

NewConfigOption = Annotated[
    Path, typer.Option("--config", metavar="FILE", help="Configuration of the new run.")
]
NewRunArgument = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", help="Directory of the new run.", show_default=False),
]


VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Reads the files back, and compares every number.")
]
_NO_RUN = "RUN: missing; name the directory of the new run, such as runs/mine"


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="Checkpoint of torch DCP, torchtitan, DeepSpeed or transformers' Trainer.",
        ),
    ],
    config: NewConfigOption,
    run: NewRunArgument = None,
    run_dir: RunDirOption = None,
    samples_seen: Annotated[
        int | None,
        typer.Option(
            "--samples-seen",
            min=0,
            metavar="N",
            help="Samples consumed so far. Default: the checkpoint's count, else its steps times"
            " train.global_batch.",
        ),
    ] = None,
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="Takes the weights alone: zero moments, step 0."),
    ] = False,
    verify: VerifyOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Reports every tensor, and writes nothing.")
    ] = False,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Makes a run that continues from another trainer's checkpoint, with Adam's moments.

    Compares every tensor with the configuration's model before a byte is written. RUN/import.json
    names the source of each tensor.
    """
    with (
        exchange_errors_explained(as_json),
        interrupted_by_stop_signals(),
        begin_to_import() as preloading,
    ):
        from penstock.client.exchange import imports

        directory = one_run(run, run_dir)
        if directory is None:
            raise ConfigError(_NO_RUN)

        request = imports.Import(
            source=source, samples_seen=samples_seen, weights_only=weights_only, verify=verify
        )
        loaded = load(config, settings)
        starter = preloading if loaded.cluster.preload else None
        if dry_run:
            report = imports.check(loaded, request, say_preparation, starter)
        else:
            report = imports.import_run(loaded, directory, request, say_preparation, starter)
        text = imports.to_text(report, directory, config, settings or (), dry=dry_run)
        typer.echo(json.dumps(report, indent=1) if as_json else text)


def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Checkpoint, model folder, or run directory.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Lists the tensors of a checkpoint with roles, types and shapes; executes nothing of it."""
    with exchange_errors_explained(as_json), interrupted_by_stop_signals():
        from penstock.client.exchange import inspection

        fields = inspection.inspect(path, partial(typer.echo, err=True))
        typer.echo(json.dumps(fields, indent=1) if as_json else inspection.to_text(fields))


def register(app: typer.Typer) -> None:
    """Adds the commands to ``penstock``."""
    app.command(
        "import",
        epilog="\b\nExamples:\n  penstock import checkpoint-2000 runs/mine --config"
        " mine.yaml\n  penstock import zero3 runs/mine --config mine.yaml --dry-run",
    )(import_)
    app.command(epilog="Example: penstock inspect checkpoint-2000")(inspect)
