"""A console of rich behind the door of the output. Importing rich takes a tenth of a second."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

import rich.console
from rich.segment import Segment

from penstock.client.views.output import KEPT, behind
from penstock.host.trust import printable


class Console(rich.console.Console):
    """Writes colours and cursor movements as they are, and escapes those inside of texts."""

    @property
    def file(self) -> IO[str]:
        """The stream, behind the door."""
        return behind(super().file)

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            segment if segment.control else segment._replace(text=printable(segment.text, KEPT))
            for segment in buffer
        )
