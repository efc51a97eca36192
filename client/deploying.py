"""``penstock deploy``: files for the engine that starts the nodes of a run."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="deploy",
    help="Write what Slurm, systemd or Kubernetes need to run one penstock node a machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
