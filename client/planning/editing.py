"""Changes of values in the text of a configuration. Comments and all other keys stay as the user
wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import yaml

from penstock.config.reading import parse_yaml
from penstock.host.errors import ConfigError


def edited(text: str, wanted: Mapping[str, Any]) -> str:
    """Returns a configuration's text with the values of ``wanted``. If the changes cannot be made
    one by one (anchors, keys merged from elsewhere), the whole text is written again, without its
    comments.
    """
    text = changed = text if text.endswith("\n") else f"{text}\n"
    for edit in sorted(_edits(text, wanted), reverse=True):
        changed = changed[: edit.start] + edit.text + changed[edit.stop :]
    try:
        matches = parse_yaml(changed, "").value == wanted
    except ConfigError:
        matches = False
    return changed if matches else yaml.safe_dump(dict(wanted), sort_keys=False)


@dataclass(frozen=True, slots=True, order=True)
class _Edit:
    """A replacement of the letters from ``start`` to ``stop``."""

    start: int
    stop: int
    text: str


def _edits(text: str, wanted: Mapping[str, Any]) -> Iterator[_Edit]:
    """Yields the edits that turn the sections of a text into the wanted ones."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    current = parse_yaml(text, "").value
    assert isinstance(root, yaml.MappingNode)
    sections = {key.value: node for key, node in root.value}
    for name, values in wanted.items():
        node = sections.get(name)
        if node is None:
            yield _Edit(len(text), len(text), f"{name}: {_flow(values)}\n")
        elif current[name] == values:
            continue
        elif isinstance(node, yaml.MappingNode) and isinstance(values, dict):
            yield from _edits_of_section(text, node, current[name], values)
        else:
            yield _Edit(node.start_mark.index, _end(text, node), _flow(values))


def _edits_of_section(
    text: str, section: yaml.MappingNode, current: Mapping[str, Any], wanted: Mapping[str, Any]
) -> Iterator[_Edit]:
    if section.flow_style and current.keys() - wanted.keys():
        yield _Edit(section.start_mark.index, section.end_mark.index, _flow(wanted))
        return
    for key, node in section.value:
        if key.value not in wanted:
            line = text.rfind("\n", 0, key.start_mark.index) + 1
            yield _Edit(line, text.find("\n", _end(text, node)) + 1, "")
        elif current[key.value] != wanted[key.value]:
            yield _Edit(node.start_mark.index, _end(text, node), _flow(wanted[key.value]))
    added = [f"{key}: {_flow(wanted[key])}" for key in wanted if key not in current]
    if added and section.flow_style:
        end = section.end_mark.index - 1
        yield _Edit(end, end, "".join(f", {words}" for words in added))
    elif added:
        last, node = section.value[-1]
        end = text.find("\n", _end(text, node))
        margin = " " * last.start_mark.column
        yield _Edit(end, end, "".join(f"\n{margin}{words}" for words in added))


def _end(text: str, node: yaml.Node) -> int:
    """Returns the end of a value, without the space after it."""
    return len(text[: node.end_mark.index].rstrip())


def _flow(value: Any) -> str:
    """Returns a value as YAML on one line."""
    return yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=inf)[1:-2]
