"""Which addresses only this machine reaches, and the refusal of others without protection."""

from __future__ import annotations

import ipaddress

from penstock.config.schema import Config
from penstock.host.errors import ConfigError

_REMEDY = (
    "set cluster.security: tls (penstock keys make), or cluster.security: insecure if everybody on"
    " the network may read and change the run"
)


def is_loopback(host: str) -> bool:
    """Returns whether only processes of this machine reach ``host``: 127.0.0.0/8, ::1, or the name
    ``localhost``. Any other name is not believed to be loopback, whatever it resolves to here.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_addresses(config: Config) -> None:
    """Refuse to serve strangers.

    Raises:
        ConfigError: an address that is not loopback without ``cluster.security: tls`` or
            ``insecure``; or ``tls`` without keys.
    """
    cluster = config.cluster
    if cluster.uses_keys:
        if cluster.keys is None:
            raise ConfigError(
                "cluster.keys is not set, and cluster.security: tls needs the folder of the run's"
                " keys: make one with penstock keys make DIR --config FILE, and name it here"
            )
        return
    if cluster.opens_addresses:
        return
    places = [
        (f"cluster.nodes: host of {node.name}", node.host)
        for node in cluster.nodes
        if not is_loopback(node.host)
    ]
    metrics_host = config.observability.metrics_host
    if not is_loopback(metrics_host):
        places.append(("observability.metrics_host", metrics_host))
    if places:
        key, host = places[0]
        raise ConfigError(
            f"{key} = {host!r}: others than this machine reach it, and cluster.security is none:"
            f" {_REMEDY}"
        )
