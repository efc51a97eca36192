"""The one door of the command line's output.

Names of tensors, files, keys and models are texts of strangers, and so are messages of their
templates. A terminal obeys some characters in such a text. :func:`guard` puts :class:`Door` around
standard output and standard error: only text, line ends and tabs pass. Colours and cursor movements
of our own go around the door, through :func:`behind`; their authors escape the texts in between.
"""

from __future__ import annotations

import sys
from typing import IO, Any, TextIO, cast

from penstock.host.logs import forgive_streams
from penstock.host.trust import printable

KEPT = "\n\t"
"""Characters without a shape that texts of several lines have."""


class Door:
    """A text stream that escapes characters with a meaning for terminals."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Writes a text; returns its length.

        Raises:
            TypeError: the text is another value. click finds out by bytes what a stream takes.
        """
        if not isinstance(text, str):
            raise TypeError(f"write() takes a str, not {type(text).__name__}")
        self.stream.write(printable(text, KEPT))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Writes texts one after another."""
        for line in lines:
            self.write(line)


def guard() -> None:
    """Puts the door around standard output and standard error of this process."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Door):
            setattr(sys, name, cast(IO[str], Door(stream)))


def forgive_output() -> None:
    """Drops bytes that cannot be written to standard output or error, from this call on
    (:func:`penstock.host.logs.forgive_streams`). A door stays in front of both streams.
    """
    guarded = isinstance(sys.stdout, Door) or isinstance(sys.stderr, Door)
    sys.stdout = cast(TextIO, behind(sys.stdout))
    sys.stderr = cast(TextIO, behind(sys.stderr))
    forgive_streams()
    if guarded:
        guard()


def behind(stream: IO[str]) -> IO[str]:
    """Returns the stream behind the door, for text with escape sequences of our own."""
    return stream.stream if isinstance(stream, Door) else stream
