"""Commands that start training: ``init``, ``config``, ``train`` and ``doctor``."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from penstock.client.cli import (
    Command,
    ConfigArgument,
    JsonOption,
    RunDirOption,
    SetOption,
    begin_to_import,
    errors_explained,
    load,
)
from penstock.client.commands.nodes import GraceOption, StrictOption, strict_setting
from penstock.host.errors import ConfigError
from penstock.host.stopping import interrupted_by_stop_signals


def init(
    example: Annotated[str, typer.Option("--example", metavar="NAME", help="Which one.")] = "tiny",
    output: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to; default: NAME.yaml, right here."),
    ] = None,
) -> None:
    """Write an example configuration to start from."""
    with errors_explained():
        from penstock.client.cli import first_commands, write_example

        typer.echo(first_commands(write_example(example, output)))


def train(
    config: ConfigArgument,
    settings: SetOption = None,
    run_dir: RunDirOption = None,
    grace_seconds: GraceOption = None,
    strict: StrictOption = False,
) -> None:
    """Train on this machine: starts every process, shows progress, ends with the run."""
    with errors_explained(), interrupted_by_stop_signals(), ExitStack() as stack:
        from penstock.host.logs import forgive_streams

        forgive_streams()  # first of all: the terminal may be gone while the run is saved
        preloading = begin_to_import()
        stack.callback(preloading.close)
        from penstock.daemons.memory.states import refuse_damage
        from penstock.protocol.run.rundir import run_of

        grace = [] if grace_seconds is None else [f"cluster.grace_seconds={grace_seconds}"]
        resolved = load(config, [*(settings or []), *grace, *strict_setting(strict)])
        moved = any(setting.startswith("run.dir=") for setting in settings or ())
        directory = run_dir or (None if moved else run_of(config)) or resolved.run_dir
        refuse_damage(directory, lambda warning: None)  # before all else is even imported

        from penstock.client.train import run_training
        from penstock.client.views.screen.following import facts_of
        from penstock.client.views.screen.screen import choose_display
        from penstock.daemons.node.joining.rendezvous import check_alone
        from penstock.protocol.wire.control import ControlClient

        advice = check_alone(os.environ)
        if advice is not None:
            sys.stderr.write(f"penstock: {advice}\n")
        display = choose_display(
            facts_of(resolved, directory.absolute(), leaves=False),
            lambda: ControlClient.for_run(directory),
        )
        result = run_training(
            resolved, directory, display, process_ends=True, preloading=preloading
        )
        if result.error:
            sys.stderr.write(f"penstock: {result.error}\n")
    raise typer.Exit(result.exit_code)


def explain_keys(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY|SECTION",
            help="Such as optimizer.lr, lr or optimizer; default: everything.",
            show_default=False,
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--json-schema", help="Print a JSON schema, for editors.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/CONFIGURATION.md.")
    ] = False,
) -> None:
    """Explain the configuration: keys, what they accept, defaults, what a resume may change."""
    with errors_explained():
        from penstock.client.cli import terminal_width
        from penstock.client.configuration import describe, json_schema, page

        if sum((name is not None, schema, markdown)) > 1:
            raise ConfigError("penstock config: give a name, --json-schema or --markdown")
        if schema or markdown:
            typer.echo(json_schema() if schema else page(), nl=schema)
        else:
            typer.echo(describe(name, terminal_width()))


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", help="Say what this configuration would get, and refuse too little."
        ),
    ] = None,
    run_dir: RunDirOption = None,
    remove: Annotated[bool, typer.Option("--clean", help="Remove unused entries.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --clean: also memory with steps not saved.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List what Penstock left on this machine, what the machine offers, and whether that will do.

    With CONFIG it refuses (exit code 2 or 3) what would be starved of CPUs or memory here.
    """
    code = 0
    with errors_explained():
        from penstock.client.capacity import CapacityReport
        from penstock.client.doctor import clean, examine

        if force and not remove:
            raise ConfigError("--force: goes with --clean")
        loaded = None if config is None else load(config, None)
        report = examine(run_dir, loaded)
        if config is not None and loaded is not None:
            report = replace(report, capacity=CapacityReport.of(config, loaded))
        if remove:
            report = clean(report, run_dir, force=force)
        typer.echo(json.dumps(report.to_dict(), indent=1) if as_json else report.to_text())
        code = report.exit_code
    raise typer.Exit(code)


def register(app: typer.Typer) -> None:
    """Adds the commands to ``penstock``."""
    app.command(epilog="Example: penstock init --example tiny, then penstock train tiny.yaml")(init)
    app.command(
        cls=Command,
        epilog="The same command resumes a run that was stopped or killed. Ctrl-C, SIGTERM,"
        " SIGUSR1, SIGUSR2, or SIGHUP without nohup, finishes the step under way and saves; a"
        " second Ctrl-C kills, and the state stays in memory."
        " Example: penstock train tiny.yaml --set train.steps=50 --run-dir runs/short",
    )(train)
    app.command(
        "config",
        epilog="\b\nExamples:\n  penstock config\n  penstock config train\n"
        "  penstock config optimizer.settle\n"
        "  penstock config --json-schema > penstock.schema.json",
    )(explain_keys)
    app.command(
        epilog="--clean removes only what belongs to dead processes, and says what was in it."
    )(doctor)
