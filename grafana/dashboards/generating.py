"""All dashboards as Grafana reads them."""

from __future__ import annotations

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from penstock.grafana.dashboards import memory, node, overview, recovery, time

DASHBOARDS = (overview, time, memory, recovery, node)


def documents() -> dict[str, str]:
    """Returns the JSON of each dashboard by the name of its file."""
    made = [module.make() for module in DASHBOARDS]
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {f"{dashboard.uid}.json": encoder.encode(dashboard) + "\n" for dashboard in made}
