"""``penstock deploy``: files for the engine that starts a run's nodes, and for what watches it."""

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
    "Write what Slurm, systemd or Kubernetes need to run one penstock node a machine, and what"
    " Prometheus and Grafana need to watch runs.",
)

ConfigOption = Annotated[
    Path, typer.Option("--config", metavar="FILE", help="Configuration of the run.")
]


@app.command(
    epilog="Installs penstock-node@RUN.NODE.service and penstock-run@RUN.target, and says how to"
    " start them; run it on each machine, or with --root on its image. See docs/SYSTEMD.md."
)
def systemd(
    config: ConfigOption,
    node: Annotated[
        str, typer.Option("--node", metavar="NAME", help="Which of cluster.nodes this machine is.")
    ],
    user: Annotated[
        str,
        typer.Option(
            metavar="USER", help="User that the node runs as. Default: the system user penstock."
        ),
    ] = "penstock",
    cores: Annotated[
        str, typer.Option(metavar="LIST", help="CPUAffinity of the node: 0-7,16; default: all.")
    ] = "",
    root: Annotated[
        Path, typer.Option(metavar="DIR", help="Write below this folder: an image, another system.")
    ] = Path("/"),
    remove: Annotated[bool, typer.Option("--remove", help="Take the node away again.")] = False,
) -> None:
    """Install units for one node of a run on this machine."""
    with errors_explained():
        from penstock.deploy.systemd import installing
        from penstock.deploy.systemd.units import NodeUnit
        from penstock.protocol.security.identity import Identity, Role

        loaded = load(config, None)
        keys = loaded.cluster.keys
        own = Identity(run=loaded.run.name, role=Role.NODE, node=known_node(loaded, node))
        unit = NodeUnit(
            run=own.run,
            node=own.node,
            user=user,
            python=Path(sys.executable),
            config=config.absolute(),
            run_dir=loaded.run_dir.absolute(),
            targets=loaded.observability.targets and loaded.observability.targets.absolute(),
            folder=Path.cwd(),
            gpus=loaded.cluster.platform.pins_host_memory,
            keys=None if keys is None else keys.absolute() / own.folder,
            cores=cores,
        )
        act = installing.remove if remove else installing.install
        for line in act(unit, root.absolute()):
            typer.echo(line)
        if not remove:
            typer.echo(installing.next_commands(unit, root.absolute()))


@app.command(
    epilog="Start it with sbatch FILE; options there, such as --partition, replace those inside. It"
    " goes on after its time limit and after a machine failed, also on other machines. Example:"
    " penstock deploy slurm --config tiny.yaml --nodes 2 --time 12:00:00. See docs/SLURM.md."
)
def slurm(
    config: ConfigOption,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="So many machines.")],
    time: Annotated[
        str,
        typer.Option("--time", metavar="TIME", help="Time limit of one start, as sbatch takes it."),
    ],
    cpus: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="A machine has at least so many CPUs; default: the threads that the configuration"
            " names, and one where it names none.",
        ),
    ] = 0,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory of a machine, such as 200G; 0: all of it.")
    ] = "0",
    lead: Annotated[
        int,
        typer.Option(
            metavar="SECONDS", min=1, help="So long before the time limit the run saves and ends."
        ),
    ] = 120,
    output: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to; default: RUN.sbatch, right here."),
    ] = None,
) -> None:
    """Write a batch script that trains on machines of a Slurm cluster."""
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
    """Writes a file that is not there yet.

    Raises:
        ConfigError: it is there, or cannot be written.
    """
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"--out {target}: exists; remove it, or name another file") from error
    except OSError as error:
        raise ConfigError(f"--out {target}: cannot write it: {reason(error)}") from error


@app.command(
    epilog="Writes Containerfile, storage.yaml, jobset.yaml and trainjob.yaml, and says what to do"
    " with them. Memory and CPUs of the pods are what the plan needs. See docs/KUBERNETES.md."
)
def kubernetes(
    config: ConfigOption,
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Image of Penstock, as the cluster pulls it.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the files go.")],
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Of all objects; default: run.name.")
    ] = "",
    nodes: Annotated[
        int, typer.Option(metavar="N", min=0, help="Pods; default: as many as cluster.nodes.")
    ] = 0,
    cpus: Annotated[
        int, typer.Option(metavar="N", min=0, help="CPUs a pod; default: what the node needs.")
    ] = 0,
    kueue: Annotated[str, typer.Option(metavar="QUEUE", help="Queue of Kueue's.")] = "",
    volcano: Annotated[str, typer.Option(metavar="QUEUE", help="Queue of Volcano's.")] = "",
    older: Annotated[
        bool,
        typer.Option(
            "--older-cluster",
            help="For Kubernetes before 1.35: containers restart after every exit code.",
        ),
    ] = False,
) -> None:
    """Write manifests that run one pod a node on Kubernetes (JobSet)."""
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
        pod_config(order, loaded, raw)  # refused before the model is looked at
        files = manifests(order, loaded, raw, pod_needs(loaded, order.num_nodes, cpus))
        out.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            write_atomically(out / file, text)
        typer.echo(f"{out} has {', '.join(files)}; next:\n{next_commands(order, loaded, out)}")


@app.command(
    epilog="Dashboards, alert rules, and configurations of Prometheus, Alertmanager and Grafana"
    " with a compose file that starts them. It can be repeated: what you have edited"
    " stays. See docs/SEEING.md."
)
def monitoring(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files go.")],
) -> None:
    """Write dashboards and alerts for Prometheus and Grafana."""
    with errors_explained():
        from penstock.grafana import files

        for line in files.write(folder):
            typer.echo(line)
        typer.echo(files.next_commands(folder))


def known_node(config: Config, name: str) -> str:
    """Returns the name of a node of the configuration.

    Raises:
        ConfigError: there is no such node; names those that are there.
    """
    names = [node.name for node in config.cluster.nodes]
    if name not in names:
        raise ConfigError(f"--node {name}: cluster.nodes has {', '.join(names)}")
    return name
