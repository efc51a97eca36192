"""Loopback addresses, and the refusal of other addresses without protection."""

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
    ``localhost``. Other names do not count as loopback, even if they resolve to it here.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_addresses(config: Config) -> None:
    """Refuses addresses that strangers reach without protection.

    Raises:
        ConfigError: an address is not loopback, and ``cluster.security`` is none; or ``tls`` has no
            keys.
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
