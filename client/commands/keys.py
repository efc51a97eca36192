"""``penstock keys``: makes, lists, renews and packs the TLS keys of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.client.cli import SetOption, command_group, errors_explained, load

if TYPE_CHECKING:
    from penstock.config.schema import Config

app = command_group("keys", "Makes and renews the TLS keys of a run (cluster.security: tls).")

FolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of the keys (cluster.keys).")
]
CountOption = Annotated[
    int | None,
    typer.Option(
        "--count",
        metavar="N",
        min=1,
        help="Number of nodes that Slurm or Kubernetes will name node-0 to node-(N-1). Default: the"
        " nodes in cluster.nodes.",
    ),
]
DaysOption = Annotated[
    float, typer.Option("--days", metavar="N", min=0.0, help="Validity of certificates, in days.")
]


def _nodes(config: Config, count: int | None) -> list[str]:
    if count is None:
        return [node.name for node in config.cluster.nodes]
    return [f"node-{number}" for number in range(count)]


@app.command(epilog="Example: penstock keys make keys --config run.yaml")
def make(
    folder: FolderArgument,
    config: Annotated[
        Path,
        typer.Option(
            "--config", metavar="FILE", help="Configuration with the name of the run and its nodes."
        ),
    ],
    settings: SetOption = None,
    authority: Annotated[
        Path | None,
        typer.Option(
            "--authority",
            metavar="DIR",
            help="Folder for the authority's secret key (ca.key); nodes must not read it. Default:"
            " DIR/authority.",
        ),
    ] = None,
    count: CountOption = None,
    days: DaysOption = 90.0,
) -> None:
    """Makes keys for the nodes, clients and Prometheus of a run.

    Makes a certificate authority first, which signs the keys.
    """
    with errors_explained():
        from penstock.protocol.security.authority import make as make_keys

        loaded = load(config, settings)
        nodes = _nodes(loaded, count)
        make_keys(folder, loaded.run.name, nodes, days, authority)
        typer.echo(
            f"{folder}: keys for run {loaded.run.name}: nodes {', '.join(nodes)}, roles control"
            f" and look, Prometheus, valid for {days:g} days\n"
            f"keep {authority or folder / 'authority'} on this machine; a node needs only its own"
            f" folder: penstock keys pack {folder} {nodes[0]} --out {nodes[0]}.tar"
        )


@app.command(epilog="Example: penstock keys show keys")
def show(folder: FolderArgument) -> None:
    """Lists keys with the identity and expiry date of each."""
    with errors_explained():
        from penstock.protocol.security.authority import expiries
        from penstock.protocol.security.folders import days_left, expiry_warning

        certificates = expiries(folder)
        width = max(len(expiry.what) for expiry in certificates)
        for expiry in certificates:
            typer.echo(
                f"{expiry.what:<{width}}  {expiry.identity}, until"
                f" {expiry.expires:%Y-%m-%d %H:%M} UTC ({days_left(expiry.expires):.1f} days)"
            )
        for expiry in certificates:
            if warning := expiry_warning(expiry.what, expiry.expires):
                sys.stderr.write(f"warning: {warning}\n")


@app.command(
    epilog="Copy the folder of each node to the node's machine. Running processes read the new"
    " files at the next connection, incoming or outgoing. Example: penstock keys renew keys --days"
    " 90"
)
def renew(
    folder: FolderArgument,
    authority: Annotated[
        Path | None,
        typer.Option(
            "--authority", metavar="DIR", help="Folder of ca.key. Default: DIR/authority."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="Configuration; new nodes in it get keys, too."
        ),
    ] = None,
    count: CountOption = None,
    days: DaysOption = 90.0,
) -> None:
    """Issues new certificates from the same authority."""
    with errors_explained():
        from penstock.protocol.security.authority import renew as renew_keys

        nodes = [] if config is None else _nodes(load(config, None), count)
        renewed = renew_keys(folder, authority, days, nodes)
        typer.echo(f"{folder}: renewed for {days:g} days: {', '.join(renewed)}")


@app.command(epilog="Example: penstock keys pack keys b | ssh b 'mkdir -p keys && tar xC keys'")
def pack(
    folder: FolderArgument,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of the node in cluster.nodes.")],
    output: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File to write. Default: stdout.")
    ] = None,
) -> None:
    """Writes a tar archive with the keys of one node.

    The archive holds no keys of other nodes, and no secret key of the authority.
    """
    with errors_explained():
        from penstock.host.errors import ConfigError, reason
        from penstock.protocol.security.authority import pack as pack_keys
        from penstock.protocol.security.folders import write_private

        archive = pack_keys(folder, node)
        if output is not None:
            write_private(output, archive)
        elif sys.stdout.isatty():
            raise ConfigError("penstock keys pack: stdout is a terminal; give --out FILE")
        else:
            try:
                sys.stdout.buffer.write(archive)
                sys.stdout.buffer.flush()
            except OSError as error:
                raise ConfigError(f"stdout: cannot write: {reason(error)}") from error
