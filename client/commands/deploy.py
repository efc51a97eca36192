"""``penstock deploy``: files for the systems that start the nodes of a run, and for monitoring."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.client.cli import command_group, errors_explained, load
from penstock.host.errors import ConfigError, reason

if TYPE_CHECKING:
    from penstock.config.schema import Config

app = command_group(
    "deploy",
    "Writes files for Slurm, systemd, Kubernetes and Grafana. Slurm, systemd and Kubernetes run one"
    " penstock node on each machine; Prometheus and Grafana watch runs.",
)

ConfigOption = Annotated[
    Path, typer.Option("--config", metavar="FILE", help="Configuration file of the run.")
]


@app.command(
    epilog="Installs penstock-node@RUN.NODE.service and penstock-run@RUN.target, and prints the"
    " commands that start them. Run it on each machine, or with --root on an image of the machine."
    " See penstock docs SYSTEMD. Example: penstock deploy systemd --config run.yaml --node b"
)
def systemd(
    config: ConfigOption,
    node: Annotated[
        str,
        typer.Option("--node", metavar="NAME", help="Name of this machine in cluster.nodes."),
    ],
    user: Annotated[
        str,
        typer.Option(metavar="USER", help="User that the node runs as."),
    ] = "penstock",
    cores: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="CPUs of the node (CPUAffinity), such as 0-7,16. Default: all."
        ),
    ] = "",
    root: Annotated[
        Path, typer.Option(metavar="DIR", help="Root folder of the system to install on.")
    ] = Path("/"),
    remove: Annotated[
        bool, typer.Option("--remove", help="Removes the units of the node.")
    ] = False,
) -> None:
    """Installs systemd units for one node of a run."""
    with errors_explained():
        from penstock.deploy.systemd import installing
        from penstock.deploy.systemd.units import NodeUnit
        from penstock.protocol.security.identity import Identity, Role

        loaded = load(config, None)
        keys = loaded.cluster.keys
        identity = Identity(run=loaded.run.name, role=Role.NODE, node=known_node(loaded, node))
        unit = NodeUnit(
            run=identity.run,
            node=identity.node,
            user=user,
            python=Path(sys.executable),
            config=config.absolute(),
            run_dir=loaded.run_dir.absolute(),
            targets=loaded.observability.targets and loaded.observability.targets.absolute(),
            folder=Path.cwd(),
            gpus=loaded.cluster.platform.pins_host_memory,
            keys=None if keys is None else keys.absolute() / identity.folder,
            cores=cores,
        )
        act = installing.remove if remove else installing.install
        for line in act(unit, root.absolute()):
            typer.echo(line)
        if not remove:
            typer.echo(installing.next_commands(unit, root.absolute()))


@app.command(
    epilog="Submit the script with sbatch FILE; options of sbatch, such as --partition, replace"
    " those in the script. The job requeues itself at its time limit and after a machine failure,"
    " also on other machines. See penstock docs SLURM. Example: penstock deploy slurm"
    " --config tiny.yaml --nodes 2 --time 12:00:00"
)
def slurm(
    config: ConfigOption,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="Number of machines.")],
    time: Annotated[
        str,
        typer.Option(
            "--time",
            metavar="TIME",
            help="Time limit of one start, in the format of sbatch: 12:00:00.",
        ),
    ],
    cpus: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="CPUs of a machine, at least. Default (0): the threads in the configuration, else"
            " 1.",
        ),
    ] = 0,
    memory: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Memory of a machine, such as 200G. Default (0): all."),
    ] = "0",
    lead: Annotated[
        int,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="Seconds before the time limit at which the run saves and ends.",
        ),
    ] = 120,
    output: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="File to write. Default: RUN.sbatch in the current folder.",
        ),
    ] = None,
) -> None:
    """Writes a batch script for a Slurm cluster."""
    with errors_explained():
        from penstock.deploy.slurm.script import SlurmJob

        loaded = load(config, None)
        job = SlurmJob(
            config=config.absolute(),
            penstock=Path(sys.executable).with_name("penstock"),
            folder=Path.cwd(),
            nodes=nodes,
            cpus=cpus,
            memory=memory,
            time=time,
            lead_s=lead,
        )
        target = Path(f"{loaded.run.name}.sbatch") if output is None else output
        write_new(target, job.script(loaded))
        typer.echo(f"{target} is written; start it with: sbatch {target}")


def write_new(target: Path, text: str) -> None:
    """Writes a new file.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"--out {target}: exists; remove it, or name another file") from error
    except OSError as error:
        raise ConfigError(f"--out {target}: cannot write it: {reason(error)}") from error


@app.command(
    epilog="Writes Containerfile, storage.yaml, jobset.yaml and trainjob.yaml, and prints the next"
    " commands. The pods request the memory and CPUs that the plan needs. See"
    " penstock docs KUBERNETES. Example: penstock deploy kubernetes --config run.yaml"
    " --image registry/penstock:1 --out k8s"
)
def kubernetes(
    config: ConfigOption,
    image: Annotated[
        str,
        typer.Option(metavar="IMAGE", help="Container image of Penstock that the cluster pulls."),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder to write the files to.")
    ],
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Name of all objects. Default: run.name.")
    ] = "",
    nodes: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Number of pods. Default (0): number of cluster.nodes."
        ),
    ] = 0,
    cpus: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="CPUs of a pod. Default (0): the need of a node."),
    ] = 0,
    kueue: Annotated[str, typer.Option(metavar="QUEUE", help="Kueue queue of the job.")] = "",
    volcano: Annotated[str, typer.Option(metavar="QUEUE", help="Volcano queue of the job.")] = "",
    older: Annotated[
        bool,
        typer.Option(
            "--older-cluster",
            help="For Kubernetes before 1.35: restarts containers after every exit code.",
        ),
    ] = False,
) -> None:
    """Writes Kubernetes manifests (JobSet) with one pod a node."""
    with errors_explained():
        from penstock.client.capacity import pod_needs
        from penstock.config.reading import read_mapping
        from penstock.deploy.kubernetes.manifests import Order, manifests, next_commands, pod_config
        from penstock.host.files import write_atomically

        loaded = load(config, None)
        order = Order(
            name=name or loaded.run.name,
            image=image,
            num_nodes=nodes or len(loaded.cluster.nodes),
            kueue=kueue,
            volcano=volcano,
            older=older,
        )
        raw = read_mapping(config).value
        pod_config(order, loaded, raw)  # refuses a bad configuration before the model is planned
        files = manifests(order, loaded, raw, pod_needs(loaded, order.num_nodes, cpus))
        out.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            write_atomically(out / file, text)
        typer.echo(f"{out} has {', '.join(files)}; next:\n{next_commands(order, loaded, out)}")


@app.command(
    epilog="Writes dashboards, alert rules, configurations of Prometheus, Alertmanager and Grafana,"
    " and a compose file that starts the three. A repeated call keeps files that you edited."
    " See penstock docs SEEING. Example: penstock deploy monitoring watch"
)
def monitoring(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write the files to.")],
) -> None:
    """Writes dashboards and alerts for Prometheus and Grafana."""
    with errors_explained():
        from penstock.grafana import files

        for line in files.write(folder):
            typer.echo(line)
        typer.echo(files.next_commands(folder))


def known_node(config: Config, name: str) -> str:
    """Returns the name of a node of the configuration.

    Raises:
        ConfigError: the configuration has no such node.
    """
    names = [node.name for node in config.cluster.nodes]
    if name not in names:
        raise ConfigError(f"--node {name}: cluster.nodes has {', '.join(names)}")
    return name
