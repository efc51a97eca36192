"""Programs side by side as text: one column per device, one row per instruction."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from penstock.protocol.instructions import Program, format_instruction


def program_grid(programs: Sequence[Program], *, mark: tuple[int, int] | None = None) -> str:
    """All instructions of all devices; ``mark`` (device, position) stands between ``>>`` and
    ``<<``.
    """
    columns: list[list[str]] = []
    for device, program in enumerate(programs):
        cells = [format_instruction(instruction) for instruction in program]
        if mark is not None and mark[0] == device and mark[1] < len(cells):
            cells[mark[1]] = f">>{cells[mark[1]]}<<"
        columns.append([f"device {device}", *cells])
    widths = [max(map(len, column)) for column in columns]
    rows = []
    for position, row in enumerate(zip_longest(*columns, fillvalue="")):
        number = "" if position == 0 else str(position - 1)
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        rows.append("  ".join([number.rjust(4), *cells]).rstrip())
    return "\n".join(rows) + "\n"
