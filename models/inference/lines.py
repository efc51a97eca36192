"""Lines of JSON on stdout, by which a tool answers the command that started it. No torch.

A line has one field: ``note`` (a message about progress), ``text`` (a piece of generated text), or
``result`` (the answer, the last line).
"""

from __future__ import annotations

import json
import sys
from typing import Any


def write_line(field: str, value: Any) -> None:
    """Writes a line with one field for the parent process."""
    sys.stdout.write(json.dumps({field: value}) + "\n")
    sys.stdout.flush()


def note(message: str) -> None:
    """Writes a message about progress for the parent process."""
    write_line("note", message)
