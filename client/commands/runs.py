"""Commands that show and control runs: ``status``, ``list``, ``watch``, ``trace``, ``report``,
``pause``, ``resume``, ``snapshot`` and ``stop``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from penstock.client.cli import JsonOption, RunDirOption, errors_explained

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


def status(
    run_dir: RunDirOption = None,
    endpoint: EndpointOption = None,
    keys: KeysOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a run is doing, and its processes."""
    with errors_explained():
        from rich.console import Console

        from penstock.client.views.control import connect, show_status
        from penstock.client.views.ended import EndedRun
        from penstock.protocol.security.identity import Role

        ended = EndedRun.find(run_dir) if endpoint is None else None
        if ended is not None:
            typer.echo(ended.to_text(as_json=as_json))
            return
        with connect(run_dir, endpoint, keys, Role.LOOK) as client:
            show_status(client, as_json=as_json, console=Console(), run_dir=run_dir)


def list_runs(as_json: JsonOption = False) -> None:
    """Show the runs of this machine, and what dead ones left in its memory."""
    with errors_explained():
        from rich.console import Console

        from penstock.client.views.runs import junk_lines, listing, runs_here, to_dicts

        found = runs_here()
        if as_json:
            typer.echo(json.dumps(to_dicts(found), indent=1))
            return
        console = Console()
        console.print(listing(found, console.width), overflow="fold", highlight=False)
        typer.echo("".join(f"{line}\n" for line in junk_lines(found)), nl=False)


def watch(
    run_dir: RunDirOption = None, endpoint: EndpointOption = None, keys: KeysOption = None
) -> None:
    """Follow a run until it ends."""
    code = 0
    with errors_explained():
        from penstock.client.views.control import connect
        from penstock.client.views.ended import EndedRun
        from penstock.client.views.screen.following import facts_for
        from penstock.client.views.screen.following import watch as follow
        from penstock.client.views.screen.screen import choose_display
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


_REQUESTS = {
    "pause": "Pause after the attempt under way.",
    "resume": "Go on after a pause.",
    "snapshot": "Save the committed state now; returns when it is on disk.",
    "stop": "Finish the step under way, save, and end the run.",
}
"""Commands that send one request to the scheduler, with their help."""


def _request(name: str) -> Callable[..., None]:
    """Returns a command that sends one request to the scheduler and prints the answer."""

    def command(
        run_dir: RunDirOption = None, endpoint: EndpointOption = None, keys: KeysOption = None
    ) -> None:
        with errors_explained():
            from penstock.client.views.control import SIMPLE, connect
            from penstock.client.views.ended import EndedRun
            from penstock.protocol.security.identity import Role

            ended = EndedRun.find(run_dir) if endpoint is None else None
            if ended is not None:
                typer.echo(ended.answer(name))
                return
            with connect(run_dir, endpoint, keys, Role.CONTROL) as client:
                typer.echo(SIMPLE[name](client))

    return command


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
        from penstock.client.views.trace.comparison import (
            TraceOutputs,
            make_trace_report,
            parse_attempts,
        )

        outputs = TraceOutputs(chrome=out, svg=svg, png=png)
        report = make_trace_report(run, parse_attempts(attempt, attempts), profile, outputs)
        typer.echo(json.dumps(report.to_dict()) if as_json else report.to_text())


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
        from penstock.client.views.report.command import write_report

        typer.echo(str(write_report(run, out, compare, show=show)))


def register(app: typer.Typer) -> None:
    """Adds the commands to ``penstock``."""
    app.command(epilog="Example: penstock status --run-dir runs/tiny --json")(status)
    app.command("list", epilog="Example: penstock list --json")(list_runs)
    app.command()(watch)
    for name, explanation in _REQUESTS.items():
        app.command(name, help=explanation)(_request(name))
    app.command(
        epilog="\b\nExamples:\n  penstock train examples/tiny.yaml --set observability.trace=true\n"
        "  penstock trace runs/tiny --out tiny.json --svg tiny.svg\n\n"
        "tiny.json opens in https://ui.perfetto.dev. The picture shows the typical step, whose time"
        " is nearest to the median, over its simulation; figures are medians over all attempts but"
        " the first three."
    )(trace)
    app.command(
        epilog="\b\nExamples:\n  penstock report runs/tiny --open\n"
        "  penstock report runs/tiny --compare runs/other --out compared.html\n\n"
        "The page needs no network and no other file. It works for runs that still go on."
    )(report)
