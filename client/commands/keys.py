"""``penstock keys``: makes, shows, renews and packs the keys of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.client.cli import command_group, errors_explained, load

if TYPE_CHECKING:
    from penstock.config.schema import Config

app = command_group("keys", "Make and renew the keys of a run (cluster.security: tls).")

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the keys.")]
CountOption = Annotated[
    int | None,
    typer.Option(
        "--count",
        metavar="N",
        min=1,
        help="Where an engine names the nodes: for node-0 to node-(N-1), not for cluster.nodes.",
    ),
]
DaysOption = Annotated[
    float, typer.Option("--days", metavar="N", min=0.0, help="Certificates are valid so long.")
]


def _nodes(config: Config, count: int | None) -> list[str]:
    if count is None:
        return [node.name for node in config.cluster.nodes]
    return [f"node-{number}" for number in range(count)]


@app.command(epilog="Example: penstock keys make keys --config run.yaml")
def make(
    folder: FolderArgument,
    config: Annotated[
        Path, typer.Option("--config", metavar="FILE", help="Run name and nodes are read from it.")
    ],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")
    ] = None,
    authority: Annotated[
        Path | None,
        typer.Option(
            "--authority",
            metavar="DIR",
            help="Where to put ca.key, for keys in a folder that nodes read; default:"
            " DIR/authority.",
        ),
    ] = None,
    count: CountOption = None,
    days: DaysOption = 90.0,
) -> None:
    """Make an authority for a run, and keys for its nodes, control clients and Prometheus."""
    with errors_explained():
        from penstock.protocol.security.authority import make as make_keys

        loaded = load(config, settings)
        nodes = _nodes(loaded, count)
        make_keys(folder, loaded.run.name, nodes, days, authority)
        typer.echo(
            f"{folder}: keys for run {loaded.run.name}: nodes {', '.join(nodes)}, roles control and"
            f" look, and Prometheus, valid for {days:g} days\n"
            f"{authority or folder / 'authority'} stays here and goes to no node; a node needs only"
            f" its own folder: penstock keys pack {folder} {nodes[0]} --out {nodes[0]}.tar"
        )


@app.command()
def show(folder: FolderArgument) -> None:
    """Show whose keys there are, and when they expire."""
    with errors_explained():
        from penstock.protocol.security.authority import expiries
        from penstock.protocol.security.folders import days_left, expiry_warning

        found = expiries(folder)
        width = max(len(expiry.what) for expiry in found)
        for expiry in found:
            typer.echo(
                f"{expiry.what:<{width}}  {expiry.identity}, until"
                f" {expiry.expires:%Y-%m-%d %H:%M} UTC ({days_left(expiry.expires):.1f} days)"
            )
        for expiry in found:
            if warning := expiry_warning(expiry.what, expiry.expires):
                sys.stderr.write(f"warning: {warning}\n")


@app.command(
    epilog="Running processes read the new files at their next connection, incoming or outgoing."
    " Copy the folders of nodes to where the nodes read them."
)
def renew(
    folder: FolderArgument,
    authority: Annotated[
        Path | None,
        typer.Option("--authority", metavar="DIR", help="Where ca.key is; default: DIR/authority."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Make keys for new nodes of it, too."),
    ] = None,
    count: CountOption = None,
    days: DaysOption = 90.0,
) -> None:
    """Issue new certificates of the same authority for everybody who has some."""
    with errors_explained():
        from penstock.protocol.security.authority import renew as renew_keys

        nodes = [] if config is None else _nodes(load(config, None), count)
        renewed = renew_keys(folder, authority, days, nodes)
        typer.echo(f"{folder}: renewed for {days:g} days: {', '.join(renewed)}")


@app.command(epilog="Example: penstock keys pack keys b | ssh b 'mkdir -p keys && tar xC keys'")
def pack(
    folder: FolderArgument,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name in cluster.nodes.")],
    output: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write here, not to stdout.")
    ] = None,
) -> None:
    """Write a tar archive of what one node needs: nobody else's keys, not the authority's."""
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
