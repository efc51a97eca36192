"""Calls to the scheduler that keys trigger: one at a time, on a separate thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import MappingProxyType

from penstock.host.errors import PenstockError
from penstock.protocol.wire.control import ControlClient

END_TIMEOUT_S = 2.0


def _save(client: ControlClient) -> str:
    return f"step {client.snapshot().version} is saved"


_CALLS: MappingProxyType[str, tuple[str, Callable[[ControlClient], str]]] = MappingProxyType(
    {
        "pause": ("requesting a pause", ControlClient.pause),
        "resume": ("requesting to continue", ControlClient.resume),
        "save": ("saving after the current step", _save),
    }
)


class Commands:
    """Calls over a connection that ``connect`` makes for the first call. ``tell`` gets messages
    for the user, on any thread.
    """

    def __init__(
        self,
        connect: Callable[[], ControlClient],
        tell: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._connect = connect
        self.tell = tell
        self._client: ControlClient | None = None
        self._thread: threading.Thread | None = None

    def ask(self, name: str) -> None:
        """Starts a call, or reports that the previous call has no answer yet."""
        if self._thread is not None and self._thread.is_alive():
            self.tell("wait: the last request has no answer yet")
            return
        words, call = _CALLS[name]
        self.tell(f"{words} …")
        self._thread = threading.Thread(
            target=self._call, args=(name, call), name="command", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Closes the connection, which ends a pending call."""
        if self._client is not None:
            self._client.close()
        if self._thread is not None:
            self._thread.join(END_TIMEOUT_S)

    def _call(self, name: str, call: Callable[[ControlClient], str]) -> None:
        try:
            if self._client is None:
                self._client = self._connect()
            self.tell(call(self._client))
        except (PenstockError, ValueError) as error:  # ValueError: gRPC's, of a closed connection
            self._forget()
            self.tell(f"{name}: {error}")

    def _forget(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
