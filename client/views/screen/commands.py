"""What keys ask of the scheduler: one call at a time, on a thread of its own."""

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
        "pause": ("asking for a pause", ControlClient.pause),
        "resume": ("asking to go on", ControlClient.resume),
        "save": ("saving after the step under way", _save),
    }
)


class Commands:
    """Calls over a connection that ``connect`` makes when it is needed first. ``tell`` is called
    with what is to be shown, on any thread.
    """

    def __init__(
        self, connect: Callable[[], ControlClient], tell: Callable[[str], None] = lambda said: None
    ) -> None:
        self._connect = connect
        self.tell = tell
        self._client: ControlClient | None = None
        self._thread: threading.Thread | None = None

    def ask(self, name: str) -> None:
        """Start a call; while one is under way, only say so."""
        if self._thread is not None and self._thread.is_alive():
            self.tell("one thing at a time: the last request is not answered yet")
            return
        words, call = _CALLS[name]
        self.tell(f"{words} …")
        self._thread = threading.Thread(
            target=self._call, args=(name, call), name="command", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends a call that is under way."""
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
