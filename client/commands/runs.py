"""Commands that show and control runs: ``status``, ``list``, ``watch``, ``trace``, ``report``,
``pause``, ``resume``, ``snapshot`` and ``stop``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from penstock.client.cli import (
    JsonOption,
    OptionalRunArgument,
    RunDirOption,
    errors_explained,
    one_run,
)

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Directory of the run, such as runs/tiny.")
]
EndpointOption = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="HOST:PORT",
        help="Address of the scheduler, instead of RUN. Needs --keys.",
    ),
]
KeysOption = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        metavar="DIR",
        help="Folder of keys to authenticate with, such as KEYS/look; or a run directory with a"
        " token. Default: the keys of RUN.",
    ),
]


def status(
    run: OptionalRunArgument = None,
    run_dir: RunDirOption = None,
    endpoint: EndpointOption = None,
    keys: KeysOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shows the progress of a run and the state of its processes."""
    with errors_explained():
        from penstock.client.views.console import Console
        from penstock.client.views.control import connect, show_status
        from penstock.client.views.ended import EndedRun, transition_of
        from penstock.protocol.security.identity import Role

        run_dir = one_run(run, run_dir)
        ended = EndedRun.find(run_dir) if endpoint is None else None
        if ended is not None:
            typer.echo(ended.to_text(as_json=as_json))
            return
        if endpoint is None and (transition := transition_of(run_dir)) is not None:
            fields = {"phase": transition.split()[-1], "ended": False}
            typer.echo(json.dumps(fields, indent=1) if as_json else f"{run_dir}: {transition}")
            return
        with connect(run_dir, endpoint, keys, Role.LOOK) as client:
            show_status(client, as_json=as_json, console=Console(), run_dir=run_dir)


def list_runs(as_json: JsonOption = False) -> None:
    """Lists the runs on this machine, and the memory of dead runs."""
    with errors_explained():
        from penstock.client.views.console import Console
        from penstock.client.views.runs import junk_lines, listing, runs_here, to_dicts

        runs = runs_here()
        if as_json:
            typer.echo(json.dumps(to_dicts(runs), indent=1))
            return
        console = Console()
        console.print(listing(runs, console.width), overflow="fold", highlight=False)
        typer.echo("".join(f"{line}\n" for line in junk_lines(runs)), nl=False)


def watch(
    run: OptionalRunArgument = None,
    run_dir: RunDirOption = None,
    endpoint: EndpointOption = None,
    keys: KeysOption = None,
) -> None:
    """Shows a run live until the run ends."""
    code = 0
    with errors_explained():
        from penstock.client.views.control import connect
        from penstock.client.views.ended import EndedRun, await_start
        from penstock.client.views.screen.following import facts_for
        from penstock.client.views.screen.following import watch as follow
        from penstock.client.views.screen.screen import choose_display
        from penstock.protocol.security.identity import Role

        run_dir = one_run(run, run_dir)
        ended = EndedRun.find(run_dir) if endpoint is None else None
        if ended is not None:
            typer.echo(ended.to_text(as_json=False))
            raise typer.Exit(int(ended.exit_code))
        if endpoint is None:
            await_start(run_dir, lambda line: typer.echo(line, err=True))
        with connect(run_dir, endpoint, keys, Role.LOOK) as client:
            display = choose_display(
                facts_for(run_dir), lambda: connect(run_dir, endpoint, keys, Role.CONTROL)
            )
            code = follow(client, display, run_dir)
    raise typer.Exit(code)


_REQUESTS = {
    "pause": "Pauses a run after the current attempt of a step.",
    "resume": "Continues a paused run.",
    "snapshot": "Saves the committed state, and returns once it is on disk.",
    "stop": "Finishes the current step, saves the state, and ends the run.",
}
"""Commands that send one request to the scheduler, with their help."""


def _request(name: str) -> Callable[..., None]:
    """Returns a command that sends one request to the scheduler and prints the answer."""

    def command(
        run: OptionalRunArgument = None,
        run_dir: RunDirOption = None,
        endpoint: EndpointOption = None,
        keys: KeysOption = None,
    ) -> None:
        with errors_explained():
            from penstock.client.views.control import SIMPLE, connect
            from penstock.client.views.ended import EndedRun
            from penstock.protocol.security.identity import Role

            run_dir = one_run(run, run_dir)
            ended = EndedRun.find(run_dir) if endpoint is None else None
            if ended is not None:
                typer.echo(ended.answer(name))
                return
            with connect(run_dir, endpoint, keys, Role.CONTROL) as client:
                typer.echo(SIMPLE[name](client))

    return command


def trace(
    run: RunArgument,
    attempt: Annotated[
        int | None, typer.Option(metavar="N", help="Number of the only attempt to evaluate.")
    ] = None,
    attempts: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="First and last attempt to evaluate: 10:20, 10: or :20."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="File for the trace as Chrome-trace JSON."),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the measured and simulated step as SVG."),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the measured and simulated step as PNG."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Costs for the simulation, from penstock profile. Default: costs fitted to the"
            " trace.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compares a traced run with a simulation of its plan."""
    with errors_explained():
        from penstock.client.views.trace.comparison import (
            TraceOutputs,
            make_trace_report,
            parse_attempts,
        )

        outputs = TraceOutputs(chrome=out, svg=svg, png=png)
        report = make_trace_report(run, parse_attempts(attempt, attempts), profile, outputs)
        typer.echo(json.dumps(report.to_dict()) if as_json else report.to_text())


def report(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="File to write. Default: RUN/report.html."),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            "--compare", metavar="RUN2", help="Directory of a second run to compare with RUN."
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Opens the page in a browser.")] = False,
) -> None:
    """Writes an HTML report of one run, or of two compared."""
    with errors_explained():
        from penstock.client.views.report.command import write_report

        typer.echo(str(write_report(run, out, compare, show=show)))


def register(app: typer.Typer) -> None:
    """Adds the commands to ``penstock``."""
    app.command(epilog="Example: penstock status runs/tiny --json")(status)
    app.command("list", epilog="Example: penstock list --json")(list_runs)
    app.command(epilog="Example: penstock watch runs/tiny")(watch)
    for name, explanation in _REQUESTS.items():
        example = f"Example: penstock {name} runs/tiny"
        app.command(name, help=explanation, epilog=example)(_request(name))
    app.command(
        epilog="\b\nExamples:\n  penstock train examples/tiny.yaml --set observability.trace=true\n"
        "  penstock trace runs/tiny --out tiny.json --svg tiny.svg\n\n"
        "https://ui.perfetto.dev opens tiny.json. The picture shows the step nearest to the median"
        " time above its simulation. Figures are medians of all attempts except the first three."
    )(trace)
    app.command(
        epilog="\b\nExamples:\n  penstock report runs/tiny --open\n"
        "  penstock report runs/tiny --compare runs/other --out compared.html\n\n"
        "The page is one file and needs no network. The run may still be training."
    )(report)
