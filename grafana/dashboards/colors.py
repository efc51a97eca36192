"""One colour for each name in all dashboards: computing is green, waiting is not."""

from __future__ import annotations

from collections.abc import Mapping

COLORS: Mapping[str, str] = {
    # resources of a step
    "compute": "green",
    "h2d": "blue",
    "d2h": "light-blue",
    "peer_links": "purple",
    "network": "dark-purple",
    # causes of waiting
    "computing": "green",
    "weights": "blue",
    "activations": "light-blue",
    "gradients": "super-light-blue",
    "peers": "purple",
    "recovery": "dark-red",
    # both
    "optimizer": "orange",
    "data": "yellow",
    "scheduler": "light-red",
    "overhead": "#808080",
    # decisions
    "commit": "green",
    "amend": "orange",
    "skip": "red",
    # members
    "ready": "green",
    "joining": "yellow",
    "missing": "orange",
    "fencing": "red",
}

RESOURCES = (
    "compute",
    "h2d",
    "d2h",
    "peer_links",
    "network",
    "optimizer",
    "data",
    "scheduler",
    "overhead",
)
CAUSES = (
    "weights",
    "activations",
    "gradients",
    "optimizer",
    "peers",
    "data",
    "scheduler",
    "recovery",
    "overhead",
)
STATES = ("computing", *CAUSES)
"""States of a device; the index of a state is its number in time lines."""
DECISIONS = ("commit", "amend", "skip")
MEMBERS = ("ready", "joining", "missing", "fencing")
