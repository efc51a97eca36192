"""``penstock node``, and the hidden commands for the processes of a node."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.client.cli import (
    Command,
    SetOption,
    begin_to_import,
    errors_explained,
    load,
    say_preparation,
)
from penstock.host.errors import ConfigError, ExitCode
from penstock.host.stopping import ignore_stop_signals, interrupted_by_stop_signals

if TYPE_CHECKING:
    from penstock.config.schema import Config

ProcessConfig = Annotated[
    Path,
    typer.Option(
        "--config", metavar="FILE", help="File resolved.yaml in the directory of a prepared run."
    ),
]
NodeOption = Annotated[
    str, typer.Option("--node", metavar="NAME", help="Name of the node in cluster.nodes.")
]
SchedulerOption = Annotated[
    str,
    typer.Option(
        "--scheduler",
        metavar="HOST:PORT",
        help="Address of the scheduler; penstock status shows it.",
    ),
]
ParentOption = Annotated[
    int | None,
    typer.Option(
        "--parent-pid",
        hidden=True,
        help="Process id of the parent; the process ends with its parent.",
    ),
]


GraceOption = Annotated[
    float | None,
    typer.Option(
        "--grace-seconds",
        metavar="N",
        min=1.0,
        help="Seconds between a stop request and the kill by the batch system. A state that cannot"
        " be saved in time stays in shared memory. Default: cluster.stop_grace_s, else the end of"
        " the Slurm job.",
    ),
]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Refuses to resume with other software or hardware than at the last start.",
    ),
]


def strict_setting(strict: bool) -> list[str]:
    """Returns the ``--set`` value of ``--strict``."""
    return ["run.strict=true"] if strict else []


NODE_HELP = (
    "Start the same command on every machine. --node and cluster.nodes name this node, the other"
    " nodes and the scheduler. Without --node, the launcher names them: Slurm (srun), a Kubernetes"
    " JobSet or Indexed Job (JOB_COMPLETION_INDEX, JOBSET_NAME, REPLICATED_JOB_NAME, NNODES), or"
    " torchrun (--nproc-per-node=1; GROUP_RANK or NODE_RANK, NNODES, MASTER_ADDR, MASTER_PORT; the"
    " scheduler listens on the port after MASTER_PORT). The launcher starts the command once on"
    " each machine. Contradictions are refused."
    "\n\nAll nodes use one run directory (run.dir) on a shared file system. The first node prepares"
    " the directory; the other nodes wait. SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 to any node saves"
    " and stops the run. A second Ctrl-C, or a SIGTERM 5 s after the first, kills the processes of"
    " this node; the state stays in shared memory."
    "\n\nExample: srun --ntasks-per-node=1 penstock node --config tiny.yaml"
)
"""Explanation of node names, launchers and signals in ``penstock node --help``."""


def node(
    config: Annotated[
        Path,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Configuration file, or resolved.yaml of a prepared run.",
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--node",
            metavar="NAME",
            help="Name of this machine in cluster.nodes. Default: the name from the launcher"
            " (Slurm, Kubernetes, torchrun), else the first node, which runs the scheduler.",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler",
            metavar="HOST:PORT",
            help="Address of the scheduler. Default: host of the first node and"
            " cluster.scheduler_port; on one machine, the address in endpoint.json.",
        ),
    ] = None,
    settings: SetOption = None,
    grace_seconds: GraceOption = None,
    strict: StrictOption = False,
    parent_pid: ParentOption = None,
) -> None:
    """Runs one node of a run on several machines."""
    with interrupted_by_stop_signals():
        with errors_explained(interrupted=ExitCode.STOPPED):
            from penstock.client.views.output import forgive_output

            forgive_output()
            if config.name == "resolved.yaml":
                _require_run(config)
                _refuse_settings(config, settings)
            loaded = load(config, [*(settings or []), *strict_setting(strict)])
            chosen = name or loaded.cluster.nodes[0].name
            if parent_pid is None:
                chosen, config = _take_part(config, loaded, name, scheduler)
        _launch(
            "node",
            config,
            parent_pid,
            node=chosen,
            scheduler=scheduler,
            grace_seconds=grace_seconds,
        )


def _refuse_settings(config: Path, settings: list[str] | None) -> None:
    """Refuses ``--set`` for a prepared run: its other processes read the file."""
    if settings:
        raise ConfigError(
            f"--set {settings[0]}: {config} belongs to a prepared run, and all its processes read"
            " the file; give --set with the configuration from which the run is prepared"
        )


def _take_part(
    config: Path, loaded: Config, name: str | None, scheduler: str | None
) -> tuple[str, Path]:
    """Finds the name of this node. Prepares the run, or waits until the first node has done so.

    Returns the name, and the path of the resolved configuration. Meanwhile a child imports torch
    for the processes that the node forks.
    """
    from penstock.daemons.node.joining.rendezvous import meet
    from penstock.daemons.node.service_manager import ServiceManager

    with ExitStack() as stack:
        starter = stack.enter_context(begin_to_import()) if loaded.cluster.preload else None
        called = (os.environ, socket.getfqdn)
        meeting = meet(config, loaded, name, scheduler, *called, say_preparation, starter)
        if meeting.ended is not None:
            ServiceManager.of(os.environ, os.getpid()).over()
            sys.stderr.write(f"penstock: the run has ended: {meeting.ended.reason}\n")
            raise typer.Exit(int(meeting.ended.code))
        if starter is not None:
            starter.hand_over()
    return meeting.node, meeting.resolved


def _require_run(resolved: Path) -> None:
    """Refuses to start on a machine without the directory of the run."""
    from penstock.protocol.run.rundir import SHARED

    if not resolved.exists():
        raise ConfigError(f"--config {resolved}: does not exist here; {SHARED}")


def memoryd(
    config: ProcessConfig,
    node_name: NodeOption,
    scheduler: SchedulerOption,
    parent_pid: ParentOption = None,
) -> None:
    """Serves the shared memory of one node, in the foreground."""
    _launch("memoryd", config, parent_pid, node=node_name, scheduler=scheduler)


def optimizerd(
    config: ProcessConfig,
    node_name: NodeOption,
    scheduler: SchedulerOption,
    parent_pid: ParentOption = None,
) -> None:
    """Runs the optimizer threads of one node, in the foreground."""
    _launch("optimizerd", config, parent_pid, node=node_name, scheduler=scheduler)


def fetchd(
    config: ProcessConfig,
    node_name: NodeOption,
    parent_pid: ParentOption = None,
) -> None:
    """Reads the memory of other nodes for one node, in the foreground."""
    _launch("fetchd", config, parent_pid, node=node_name)


def observerd(config: ProcessConfig, parent_pid: ParentOption = None) -> None:
    """Analyses sampled traces of a run from its files, in the foreground."""
    _launch("observerd", config, parent_pid)


def metricsd(
    config: ProcessConfig,
    node_name: NodeOption,
    processes: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Names of the processes of the node, separated by commas."
        ),
    ] = None,
    parent_pid: ParentOption = None,
) -> None:
    """Serves the metrics of the processes of one node, in the foreground."""
    _launch("metricsd", config, parent_pid, node=node_name, processes=processes)


def schedulerd(
    config: ProcessConfig,
    port: Annotated[int, typer.Option(help="TCP port to listen on.")],
    parent_pid: ParentOption = None,
) -> None:
    """Runs the scheduler of a run, in the foreground."""
    _launch("schedulerd", config, parent_pid, port=port, grace_seconds=None)


def worker(
    config: ProcessConfig,
    device: Annotated[
        int, typer.Option(help="Number of the device, counted over all nodes from 0.")
    ],
    scheduler: SchedulerOption,
    parent_pid: ParentOption = None,
) -> None:
    """Executes the instructions of one device, in the foreground."""
    _launch("worker", config, parent_pid, device=device, scheduler=scheduler)


def _launch(
    process: str, config: Path, parent_pid: int | None, **arguments: str | int | float | None
) -> None:
    code = 0
    with errors_explained(config.parent / "logs", ExitCode.STOPPED):
        from penstock.client.launch import launch

        _require_run(config)
        code = launch(process, config, parent_pid, arguments)
        if parent_pid is None:
            ignore_stop_signals()  # a late signal must not change the exit code
    raise typer.Exit(code)


def register(app: typer.Typer) -> None:
    """Adds the commands; the help lists only ``node``."""
    app.command(cls=Command, epilog=NODE_HELP)(node)
    for process in (memoryd, optimizerd, fetchd, observerd, metricsd, schedulerd, worker):
        app.command(hidden=True)(process)
