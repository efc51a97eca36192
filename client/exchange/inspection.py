"""``penstock inspect``: the tensors of a checkpoint, from headers; nothing of it is executed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.config.values import human_bytes
from penstock.daemons.node.preparing.hub import WHOLE, local_folder
from penstock.daemons.node.preparing.tool import run_tool
from penstock.host.trust import printable

_MAX_TENSORS = 40


def inspect(path: Path, progress: Callable[[str], None]) -> dict[str, Any]:
    """Returns kind, step, tensors, groups and problems of a checkpoint. ``progress`` gets lines
    about a fetch from the Hub.

    Raises:
        ConfigError: no kind of checkpoint has these files; names those that are read.
        StateError: a file is missing or damaged; names the file.
    """
    lines: list[str] = []
    path = local_folder("PATH", path, WHOLE, progress)
    run_tool("penstock.models.exchange.inspecting", str(path), progress=lines.append)
    fields: dict[str, Any] = json.loads(lines[-1])
    return fields


def to_text(fields: Mapping[str, Any]) -> str:
    """Returns a description in lines: kind and step, roles, groups, problems, tensors."""
    tensors = fields["tensors"]
    step = "unknown" if fields["step"] is None else f"{fields['step']:,}"
    lines = [f"kind      {fields['kind']}", f"step      {step}"]
    for role, count in Counter(tensor["role"] for tensor in tensors).items():
        chosen = [tensor for tensor in tensors if tensor["role"] == role]
        dtypes = ", ".join(sorted({tensor["dtype"] for tensor in chosen}))
        size = human_bytes(sum(tensor["bytes"] for tensor in chosen))
        lines.append(f"{role:<9} {count:,} tensors, {size}, {dtypes}")
    for group in fields["groups"]:
        values = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        words = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
        size = f"{len(group['names']):,}" if group["names"] else "unnamed"
        lines.append(f"group     {size} tensors: {words}")
    lines += [f"note      {note}" for note in fields["notes"]]
    lines += [f"problem   {problem}" for problem in fields["problems"]]
    lines.append("")
    for tensor in tensors[:_MAX_TENSORS]:
        shape = "flat" if tensor["shape"] is None else "x".join(map(str, tensor["shape"]))
        lines.append(
            f"{tensor['role']:<12} {tensor['dtype']:<9} {shape:<16} {tensor['name']}"
            f"  ({tensor['file']})"
        )
    if len(tensors) > _MAX_TENSORS:
        lines.append(f"and {len(tensors) - _MAX_TENSORS:,} more tensors; --json lists all")
    return "\n".join(map(printable, lines))
