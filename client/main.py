"""``penstock``: the command line. A failing command prints one line and exits with its code.

Commands import what they need when they run, so that ``penstock --help`` and the processes of a
run start fast; nothing here imports torch.
"""

from __future__ import annotations

from penstock.client.processes.importing import imported  # before imports that take long

# isort: split
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from penstock.client import keys as key_commands
from penstock.client.chaos import commands as chaos_commands
from penstock.client.cli import (
    Command,
    ConfigArgument,
    JsonOption,
    SectionedHelp,
    SetOption,
    begin_to_import,
    errors_explained,
    load,
)
from penstock.client.deploying import app as deploy_app
from penstock.client.planning import commands as plan_commands
from penstock.client.processes import commands as process_commands
from penstock.client.processes.commands import GraceOption, StrictOption, strict_setting
from penstock.client.watching import state_commands
from penstock.host.errors import ConfigError
from penstock.host.stopping import interrupted_by_stop_signals

imported()

EXIT_CODES = (
    "Exit codes: 0 done, 2 bad configuration or state, 3 not enough memory, space or CPUs,"
    " 4 lost members or internal error, 5 stopped by command before the last step (saved),"
    " 130 interrupted (state kept)."
)

app = typer.Typer(
    name="penstock",
    help="Train language models that do not fit in the memory of the GPUs at hand.",
    epilog=EXIT_CODES
    + "\n\nStart with: penstock init, then penstock train tiny.yaml; while it runs, in another"
    " terminal: penstock status --run-dir runs/tiny",
    cls=SectionedHelp,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RunDirOption = Annotated[
    Path | None, typer.Option("--run-dir", metavar="DIR", help="Directory of the run.")
]
EndpointOption = Annotated[
    str | None,
    typer.Option("--endpoint", metavar="HOST:PORT", help="Scheduler, instead of --run-dir."),
]
KeysOption = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        metavar="DIR",
        help="Keys to show, such as KEYS/look; or a run directory, for its token. Default: those"
        " of the run in --run-dir.",
    ),
]


def _show_versions(wanted: bool) -> None:
    """Prints the version, and those of what training depends on, and ends."""
    if wanted:
        from penstock.client.cli import versions

        typer.echo(versions())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_versions, is_eager=True, help="Show versions and exit."
        ),
    ] = False,
) -> None:
    """Train language models that do not fit in the memory of the GPUs at hand."""


@app.command(epilog="Example: penstock init --example tiny, then penstock train tiny.yaml")
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


@app.command(
    cls=Command,
    epilog="The same command resumes a run that was stopped or killed. Ctrl-C, SIGTERM, SIGUSR1,"
    " SIGUSR2, or SIGHUP without nohup, finishes the step under way and saves; a second Ctrl-C"
    " kills, and the state stays in memory."
    " Example: penstock train tiny.yaml --set train.steps=50 --run-dir runs/short",
)
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

        from penstock.client.screen.following import facts_of
        from penstock.client.screen.screen import choose_display
        from penstock.client.train import run_training
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


@app.command(
    "config",
    epilog="\b\nExamples:\n  penstock config\n  penstock config train\n"
    "  penstock config optimizer.settle\n"
    "  penstock config --json-schema > penstock.schema.json",
)
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


plan_commands.register(app)
chaos_commands.register(app)
state_commands.register(app)
app.add_typer(key_commands.app)
app.add_typer(deploy_app)
process_commands.register(app)


@app.command(epilog="Example: penstock status --run-dir runs/tiny --json")
def status(
    run_dir: RunDirOption = None,
    endpoint: EndpointOption = None,
    keys: KeysOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a run is doing, and its processes."""
    with errors_explained():
        from rich.console import Console

        from penstock.client.watching.control import connect, show_status
        from penstock.client.watching.ended import EndedRun
        from penstock.protocol.security.identity import Role

        ended = EndedRun.find(run_dir) if endpoint is None else None
        if ended is not None:
            typer.echo(ended.to_text(as_json=as_json))
            return
        with connect(run_dir, endpoint, keys, Role.LOOK) as client:
            show_status(client, as_json=as_json, console=Console(), run_dir=run_dir)


@app.command("list", epilog="Example: penstock list --json")
def list_runs(as_json: JsonOption = False) -> None:
    """Show the runs of this machine, and what dead ones left in its memory."""
    with errors_explained():
        from rich.console import Console

        from penstock.client.watching.runs import junk_lines, listing, runs_here, to_dicts

        found = runs_here()
        if as_json:
            typer.echo(json.dumps(to_dicts(found), indent=1))
            return
        console = Console()
        console.print(listing(found, console.width), overflow="fold", highlight=False)
        typer.echo("".join(f"{line}\n" for line in junk_lines(found)), nl=False)


@app.command()
def watch(
    run_dir: RunDirOption = None, endpoint: EndpointOption = None, keys: KeysOption = None
) -> None:
    """Follow a run until it ends."""
    code = 0
    with errors_explained():
        from penstock.client.screen.following import facts_for
        from penstock.client.screen.following import watch as follow
        from penstock.client.screen.screen import choose_display
        from penstock.client.watching.control import connect
        from penstock.client.watching.ended import EndedRun
        from penstock.protocol.security.identity import Role

        ended = EndedRun.find(run_dir) if endpoint is None else None
        if ended is not None:
            typer.echo(ended.to_text(as_json=False))
            raise typer.Exit(int(ended.exit_code))
        with connect(run_dir, endpoint, keys, Role.LOOK) as client:
            display = choose_display(
                facts_for(run_dir), lambda: connect(run_dir, endpoint, keys, Role.CONTROL)
            )
            code = follow(client, display, run_dir)
    raise typer.Exit(code)


def _add_simple_command(name: str, explanation: str) -> None:
    """Adds a command that asks the scheduler for one thing and prints its answer."""

    def command(
        run_dir: RunDirOption = None, endpoint: EndpointOption = None, keys: KeysOption = None
    ) -> None:
        with errors_explained():
            from penstock.client.watching.control import SIMPLE, connect
            from penstock.client.watching.ended import EndedRun
            from penstock.protocol.security.identity import Role

            ended = EndedRun.find(run_dir) if endpoint is None else None
            if ended is not None:
                typer.echo(ended.answer(name))
                return
            call: Callable[..., str] = SIMPLE[name]
            with connect(run_dir, endpoint, keys, Role.CONTROL) as client:
                typer.echo(call(client))

    app.command(name, help=explanation)(command)


_add_simple_command("pause", "Pause after the attempt under way.")
_add_simple_command("resume", "Go on after a pause.")
_add_simple_command("snapshot", "Save the committed state now; returns when it is on disk.")
_add_simple_command("stop", "Finish the step under way, save, and end the run.")


@app.command(epilog="Example: penstock export runs/tiny --format hf tiny-hf")
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


@app.command(
    epilog="\b\nExamples:\n  penstock train examples/tiny.yaml --set observability.trace=true\n"
    "  penstock trace runs/tiny --out tiny.json --svg tiny.svg\n\n"
    "tiny.json opens in https://ui.perfetto.dev. The picture shows the typical step, whose"
    " time is nearest to the median, over its simulation; figures are medians over all attempts but"
    " the first three."
)
def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    attempt: Annotated[int | None, typer.Option(help="This attempt only.")] = None,
    attempts: Annotated[
        str | None, typer.Option(metavar="A:B", help="These attempts only.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write Chrome-trace JSON.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw measured over simulated, as SVG.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw measured over simulated, as PNG.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Simulate with a profile, not with the trace's costs."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a traced run did when, beside a simulation of its plan."""
    with errors_explained():
        from penstock.client.watching.trace import TraceOutputs, make_trace_report, parse_attempts

        outputs = TraceOutputs(chrome=out, svg=svg, png=png)
        report = make_trace_report(run, parse_attempts(attempt, attempts), profile, outputs)
        typer.echo(json.dumps(report.to_dict()) if as_json else report.to_text())


@app.command(
    epilog="\b\nExamples:\n  penstock report runs/tiny --open\n"
    "  penstock report runs/tiny --compare runs/other --out compared.html\n\n"
    "The page needs no network and no other file. It works for runs that still go on."
)
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to; default: RUN/report.html."),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option("--compare", metavar="RUN2", help="Show RUN2 beside it.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write one page of HTML about a run, or about two side by side."""
    with errors_explained():
        from penstock.client.reporting.command import write_report

        typer.echo(str(write_report(run, out, compare, show=show)))


@app.command(epilog="--clean removes only what belongs to dead processes, and says what was in it.")
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


def main() -> None:
    """Runs the ``penstock`` command."""
    app()


if __name__ == "__main__":
    main()
