"""``penstock node``, and the processes that a node starts, as commands."""

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
    Path, typer.Option("--config", metavar="FILE", help="RUN_DIR/resolved.yaml of a prepared run.")
]
NodeOption = Annotated[str, typer.Option("--node", metavar="NAME", help="Name in cluster.nodes.")]
SchedulerOption = Annotated[
    str,
    typer.Option(
        "--scheduler", metavar="HOST:PORT", help="Where the run's scheduler listens; see status."
    ),
]
ParentOption = Annotated[
    int | None, typer.Option("--parent-pid", hidden=True, help="Die with this process.")
]


GraceOption = Annotated[
    float | None,
    typer.Option(
        "--grace-seconds",
        metavar="N",
        min=1.0,
        help="Seconds between a stop request and the external kill: save within them, or keep the"
        " memory. Default: cluster.grace_seconds, SLURM_JOB_END_TIME.",
    ),
]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Refuse to go on with other software or hardware than at the last start.",
    ),
]


def strict_setting(strict: bool) -> list[str]:
    """Returns the setting that ``--strict`` stands for."""
    return ["run.strict=true"] if strict else []


NODE_HELP = (
    "The same command on every machine. Which node this is, where the others are and where"
    " the scheduler listens, say --node and cluster.nodes; or else the engine that started the"
    " command, once on each machine: Slurm (srun), a Kubernetes JobSet or Indexed Job"
    " (JOB_COMPLETION_INDEX, JOBSET_NAME, REPLICATED_JOB_NAME, and NNODES), or torchrun"
    " (--nproc-per-node=1; GROUP_RANK or NODE_RANK, NNODES, MASTER_ADDR, MASTER_PORT: the scheduler"
    " takes the port after it). What contradicts each other is refused."
    "\n\nAll nodes use one run directory, on a file system that they share. The first prepares it"
    " (run.dir), the others wait for that. SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 to any of them"
    " saves and stops the run; a second Ctrl-C, or SIGTERM 5 s later, kills this node's processes"
    " and keeps the memory."
    "\n\nExample: srun --ntasks-per-node=1 penstock node --config tiny.yaml"
)
"""What ``penstock node --help`` says of the nodes' places and of signals."""


def node(
    config: Annotated[
        Path, typer.Option("--config", metavar="FILE", help="resolved.yaml, or a configuration.")
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--node",
            metavar="NAME",
            help="Which of cluster.nodes this machine is; default: what the engine says, else the"
            " first, which runs the scheduler.",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler",
            metavar="HOST:PORT",
            help="Where the scheduler listens, for nodes on other machines than the first; default:"
            " the first node's host and cluster.scheduler_port, or endpoint.json on one machine.",
        ),
    ] = None,
    settings: SetOption = None,
    grace_seconds: GraceOption = None,
    strict: StrictOption = False,
    parent_pid: ParentOption = None,
) -> None:
    """Run one node of several (Slurm, systemd, Kubernetes): the same command on each machine."""
    with interrupted_by_stop_signals():
        with errors_explained(interrupted=ExitCode.STOPPED):
            from penstock.host.logs import forgive_streams

            forgive_streams()
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
    """Refuses to change a run that is prepared: its other processes read the file."""
    if settings:
        raise ConfigError(
            f"--set {settings[0]}: {config} is the configuration of a prepared run, which all its"
            " processes read; give --set with the configuration that the run is prepared from"
        )


def _take_part(
    config: Path, loaded: Config, name: str | None, scheduler: str | None
) -> tuple[str, Path]:
    """Finds this node's place, and prepares the run or waits until the first node has; returns its
    name and the configuration to run with. It imports meanwhile what the node will fork.
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
    """Refuses to start on a machine that does not have the run's directory."""
    from penstock.protocol.run.rundir import SHARED

    if not resolved.exists():
        raise ConfigError(f"--config {resolved}: does not exist here; {SHARED}")


def memoryd(
    config: ProcessConfig,
    node_name: NodeOption,
    scheduler: SchedulerOption,
    parent_pid: ParentOption = None,
) -> None:
    """Own one node's shared memory, in the foreground."""
    _launch("memoryd", config, parent_pid, node=node_name, scheduler=scheduler)


def optimizerd(
    config: ProcessConfig,
    node_name: NodeOption,
    scheduler: SchedulerOption,
    parent_pid: ParentOption = None,
) -> None:
    """Run one node's optimizer threads, in the foreground."""
    _launch("optimizerd", config, parent_pid, node=node_name, scheduler=scheduler)


def fetchd(
    config: ProcessConfig,
    node_name: NodeOption,
    parent_pid: ParentOption = None,
) -> None:
    """Read other nodes' memory for the processes of one node, in the foreground."""
    _launch("fetchd", config, parent_pid, node=node_name)


def observerd(config: ProcessConfig, parent_pid: ParentOption = None) -> None:
    """Analyse samples of a run from its files, in the foreground."""
    _launch("observerd", config, parent_pid)


def metricsd(
    config: ProcessConfig,
    node_name: NodeOption,
    processes: Annotated[
        str | None, typer.Option(help="Names of the node's processes, with commas between them.")
    ] = None,
    parent_pid: ParentOption = None,
) -> None:
    """Serve the metrics of one node's processes, in the foreground."""
    _launch("metricsd", config, parent_pid, node=node_name, processes=processes)


def schedulerd(
    config: ProcessConfig,
    port: Annotated[int, typer.Option(help="Port to listen on.")],
    parent_pid: ParentOption = None,
) -> None:
    """Decide steps and keep the journal of a run, in the foreground."""
    _launch("schedulerd", config, parent_pid, port=port, grace_seconds=None)


def worker(
    config: ProcessConfig,
    device: Annotated[int, typer.Option(help="Device number, counted over all nodes.")],
    scheduler: SchedulerOption,
    parent_pid: ParentOption = None,
) -> None:
    """Execute one device's instructions, in the foreground."""
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
            ignore_stop_signals()  # a late one must not change how the process ends
    raise typer.Exit(code)


def register(app: typer.Typer) -> None:
    """Adds the commands; only ``node`` is in the help."""
    app.command(cls=Command, epilog=NODE_HELP)(node)
    for process in (memoryd, optimizerd, fetchd, observerd, metricsd, schedulerd, worker):
        app.command(hidden=True)(process)
