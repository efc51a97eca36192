"""Names in the certificates of a run: ``penstock://RUN/node/NAME`` and ``penstock://RUN/role/ROLE``.

The name is the certificate's only URI. Addresses are not in it, so they may change. Servers show
strangers another certificate, which names neither run nor node. It has the DNS name
:data:`SCHEDULER_HOST` where the scheduler may run, and :data:`METRICS_HOST`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote, unquote

SCHEDULER_HOST = "scheduler.penstock"
"""DNS name in the certificate that the scheduler serves with; clients ask for it."""
METRICS_HOST = "metrics.penstock"
"""DNS name in the certificate that every process serves metrics with."""


class Role(StrEnum):
    """Role of a key's owner in a run."""

    NODE = "node"
    """Joins as the members of one node; may ask the run to stop, as a node's Ctrl-C does."""
    CONTROL = "control"
    """Asks for everything that ``penstock`` can ask of a run."""
    LOOK = "look"
    """Sees what the run is doing, and changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """``run`` is ``run.name``; ``node`` is the node's name where the role is a node's."""

    run: str
    role: Role
    node: str = ""

    @property
    def uri(self) -> str:
        """Returns the name as it stands in a certificate."""
        path = f"node/{self.node}" if self.role is Role.NODE else f"role/{self.role}"
        return f"penstock://{quote(self.run, safe='')}/{path}"

    @property
    def folder(self) -> str:
        """Returns the name of the folder that holds the keys."""
        return f"node.{self.node}" if self.role is Role.NODE else str(self.role)

    def __str__(self) -> str:
        what = f"node {self.node}" if self.role is Role.NODE else f"role {self.role}"
        return f"{what} of run {self.run}"

    @classmethod
    def parse(cls, uri: str) -> Identity | None:
        """Returns the identity in a certificate's URI; None for any other text."""
        scheme, _, rest = uri.partition("://")
        words = rest.split("/")
        if scheme != "penstock" or len(words) != 3:
            return None
        run, kind, name = (unquote(word, errors="replace") for word in words)
        if kind == "node":
            identity = cls(run=run, role=Role.NODE, node=name)
        elif kind == "role" and name in (Role.CONTROL, Role.LOOK):
            identity = cls(run=run, role=Role(name))
        else:
            return None
        return identity if run and name and identity.uri == uri else None
