"""The part of NIXL that fetchd uses: registered memory, peers, reads. Host to host only.

The library's progress thread is off, because it spins a whole core. The agent's owner calls
:meth:`Agent.progress` instead. Over TCP a peer's reads progress only during these calls, so readers
send hints, and the peer then polls frequently for a while. UCX chooses the fabric (``UCX_TLS``,
``UCX_NET_DEVICES``).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.host.errors import ConfigError, PenstockError

MODULES = ("nixl_cu12", "nixl_cu13")
"""The package's name in the wheels for each CUDA; neither needs a GPU here."""
INFINIBAND = Path("/sys/class/infiniband")

Piece = tuple[int, int, int]
"""(local address, remote address, bytes)."""


class TransferError(PenstockError):
    """A transfer or a peer failed, in the library's words."""


def find_module() -> str | None:
    """Returns the name of the module that is installed here, or None."""
    return next((name for name in MODULES if importlib.util.find_spec(name)), None)


def why_not(*, asked_for: bool, infiniband: Path = INFINIBAND) -> str:
    """Returns why this node has no agent, or an empty text.

    ``asked_for``: by name; otherwise only where a device for remote memory access is.
    """
    if platform.machine() != "x86_64":
        return f"a {platform.machine()} processor may show stores in another order"
    if find_module() is None:
        return f"{' or '.join(MODULES)} is not installed (pip install 'penstock[rdma]')"
    if not asked_for and not (infiniband.is_dir() and any(infiniband.iterdir())):
        return "there is no RDMA device (fetch: nixl uses TCP and shared memory, too)"
    return ""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A read under way."""

    peer: str
    handle: Any


class Agent:
    """One NIXL agent with UCX. Belongs to one thread."""

    def __init__(self, name: str) -> None:
        """Opens the library.

        Raises:
            ConfigError: it is not installed, or has no UCX.
        """
        module = find_module()
        if module is None:
            raise ConfigError(f"cluster.fetch: {why_not(asked_for=True)}")
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        library: Any = importlib.import_module(module)
        self.name = name
        self._agent = library.nixl_agent(name, library.nixl_agent_config(enable_prog_thread=False))
        if "UCX" not in self._agent.backends:
            raise ConfigError(f"cluster.fetch: {module} has no UCX backend")
        self._hints: set[str] = set()

    def register(self, regions: Sequence[tuple[int, int]]) -> Any:
        """Makes (address, bytes) readable for peers, or usable as a target.

        Raises:
            TransferError: the fabric refuses the memory.
        """
        descriptors = [(address, size, 0, "") for address, size in regions]
        return self._call(self._agent.register_memory, descriptors, "DRAM")

    def deregister(self, registration: Any) -> None:
        """Unregisters the memory of a :meth:`register`; no transfer may be using it."""
        self._call(self._agent.deregister_memory, registration)

    @property
    def metadata(self) -> bytes:
        """Metadata that peers need to read the registered memory."""
        return bytes(self._call(self._agent.get_agent_metadata))

    def add_peer(self, metadata: bytes) -> str:
        """Returns the peer's name.

        Raises:
            TransferError: the metadata are none.
        """
        name = self._call(self._agent.add_remote_agent, metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Removes a peer without running transfers."""
        self._call(self._agent.remove_remote_agent, name)

    def read(self, peer: str, pieces: Sequence[Piece]) -> Transfer:
        """Begins a read.

        Raises:
            TransferError: the peer is gone, or its memory is not there.
        """
        local = [(here, size, 0) for here, _, size in pieces]
        remote = [(start, size, 0) for _, start, size in pieces]
        descriptors = self._agent.get_xfer_descs
        handle = self._call(
            self._agent.initialize_xfer,
            "READ",
            descriptors(local, "DRAM"),
            descriptors(remote, "DRAM"),
            peer,
        )
        if self._call(self._agent.transfer, handle) == "ERR":
            self._release(handle)
            raise TransferError(f"a read from {peer} could not begin")
        return Transfer(peer, handle)

    def is_done(self, transfer: Transfer) -> bool:
        """Returns whether all bytes have arrived; the transfer is released then, or after an error.

        Raises:
            TransferError: it failed.
        """
        try:
            state = self._call(self._agent.check_xfer_state, transfer.handle)
        except TransferError:
            self._release(transfer.handle)
            raise
        if state == "PROC":
            return False
        self._release(transfer.handle)
        if state != "DONE":
            raise TransferError(f"a read from {transfer.peer} failed")
        return True

    def hint(self, peer: str) -> None:
        """Tells a peer that reads are on their way."""
        self._call(self._agent.send_notif, peer, b"reading")

    def progress(self) -> bool:
        """Lets the library work; returns whether a peer has sent a hint."""
        return bool(self._call(self._agent.get_new_notifs))

    def _release(self, handle: Any) -> None:
        self._call(self._agent.release_xfer_handle, handle)

    def _call(self, function: Any, *arguments: Any) -> Any:
        """Calls the library. Its bindings raise their own exceptions, which have no common base."""
        try:
            return function(*arguments)
        except Exception as error:
            raise TransferError(f"NIXL: {type(error).__name__}: {error}") from error
