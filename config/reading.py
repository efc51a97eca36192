"""YAML of users as plain values: texts, numbers, booleans, null, lists and mappings.

PyYAML's safe loader runs no code. But it accepts a key twice and keeps the last value, and a few
hundred bytes of aliases can stand for gigabytes. It also raises the errors of int(). Here each of
these is an error that names line and key, and the size of values is bounded. Dates are texts, as no
key of the configuration is a date.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from penstock.host.errors import ConfigError, reason
from penstock.host.inputs import read_text

MAX_BYTES = 1 << 20
"""Most bytes of a file."""

MAX_WEIGHT = 20_000
"""Most values of a file, with aliases written out; a long text counts as several."""

MAX_DEPTH = 50
"""Most levels of lists and mappings."""

_WEIGHED_LETTERS = 100
"""Letters of a text that weigh as much as one more value."""

_NUMBER_LETTERS = 100
"""Most letters of a number."""

_SHOWN_LETTERS = 60

_YAML = "tag:yaml.org,2002:"
_MERGE = f"{_YAML}merge"
_TEXT = f"{_YAML}str"
_LEFT_AS_TEXTS = (f"{_YAML}timestamp", f"{_YAML}value")

Place = tuple[str | int, ...]
"""Keys and positions that lead to a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Values of a YAML text, and the lines (from 1) on which they begin. ``empty`` has places of
    values that are left out, as in ``adapter:``, and not written as ``null``.
    """

    value: Any
    lines: dict[Place, int] = field(default_factory=dict)
    empty: tuple[Place, ...] = ()


def read_mapping(path: Path) -> Document:
    """Reads a configuration file; its value is a mapping.

    Raises:
        ConfigError: the file cannot be read, is no YAML, passes a bound, or is no mapping.
    """
    source = f"configuration {path}"
    try:
        text = read_text(path, MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{source}: cannot read it: {reason(error)}") from error
    document = parse_yaml(text, source)
    if not isinstance(document.value, dict):
        shown = "nothing" if document.value is None else _cut(repr(document.value))
        raise ConfigError(f"{source}: expected sections (run, model, data, …), got {shown}")
    return document


def parse_yaml(text: str, source: str) -> Document:
    """Returns the values of a YAML text; ``source`` begins each error.

    Raises:
        ConfigError: no YAML, a key given twice, an unknown tag, or a bound is passed; names line
            and key.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {_located(error)}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{source}: line {line}: the character U+{error.character:04X} is not allowed in YAML"
        ) from error
    except _Refused as error:
        raise ConfigError(f"{source}: {error}") from error
    empty = () if node is None else tuple(_empty_places(node, ()))
    return Document(value=value, lines=loader.lines, empty=empty)


def _empty_places(node: yaml.Node, place: Place) -> Iterator[Place]:
    """Yields the places of values that are left out. Merges (``<<``) are already carried out."""
    if isinstance(node, yaml.MappingNode):
        parts = {key.value: value for key, value in node.value}  # own keys follow merged ones
        for key, value in parts.items():
            yield from _empty_places(value, (*place, key))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _empty_places(value, (*place, index))
    elif node.tag == f"{_YAML}null" and not node.value:
        yield place


class _Refused(Exception):
    """The mistake, with line and key."""


def _located(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or error.context or "no reason is given"
    words = _cut(problem, 200)
    if error.problem_mark is not None:
        words = f"line {error.problem_mark.line + 1}: {words}"
    first = error.context_mark
    if error.problem and error.context and first is not None:
        words += f" (line {first.line + 1}: {_cut(error.context, 200)})"
    return words


def _cut(text: str, limit: int = _SHOWN_LETTERS) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


class _Loader(yaml.SafeLoader):
    """Checks each node of the document when it is composed, and knows where it stands."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lines: dict[Place, int] = {}
        self._place: list[str | int] = []
        self._depth = 0
        self._weight = 0
        self._weights: dict[yaml.Node, int] = {}
        """Finished nodes, with aliases inside them written out."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Composes the next node; ``index`` is the key's node or the position in a list."""
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1  # type: ignore[union-attr]
        if index is not None:
            self._place.append(index if isinstance(index, int) else _cut(index.value))
            self.lines[tuple(self._place)] = line
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._refused(line, f"nested too deeply: more than {MAX_DEPTH} levels")
        before = self._weight
        node = super().compose_node(parent, index)
        is_key = index is None and parent is not None
        if is_key and not isinstance(node, yaml.ScalarNode):
            raise self._refused(line, "a key is a list or a mapping, and must be a text")
        if isinstance(event, yaml.AliasEvent):
            self._weigh_alias(node, str(event.anchor), line)
        elif node is not None:
            self._check(node, line, is_key=is_key)
            self._weight += 1 + _letters(node) // _WEIGHED_LETTERS
            self._weights[node] = self._weight - before
        if self._weight > MAX_WEIGHT:
            raise self._refused(
                line, f"too many values: more than {MAX_WEIGHT:,}, with aliases written out"
            )
        self._depth -= 1
        if index is not None:
            self._place.pop()
        return node

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        """Returns the tag of a node that has none written."""
        tag = str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]
        return _TEXT if tag in _LEFT_AS_TEXTS else tag

    def _refused(self, line: int, words: str) -> _Refused:
        where = [".".join(map(str, self._place))] if self._place else []
        return _Refused(": ".join([f"line {line}", *where, words]))

    def _weigh_alias(self, node: yaml.Node | None, anchor: str, line: int) -> None:
        weight = None if node is None else self._weights.get(node)
        if weight is None:
            name = _cut(anchor)
            raise self._refused(line, f"*{name} stands inside of what &{name} names")
        self._weight += weight

    def _check(self, node: yaml.Node, line: int, *, is_key: bool) -> None:
        if not isinstance(node, yaml.ScalarNode):
            kind = "map" if isinstance(node, yaml.MappingNode) else "seq"
            if node.tag != _YAML + kind:
                raise self._unknown_tag(node, line)
            if isinstance(node, yaml.MappingNode):
                self._check_keys(node)
            return
        if is_key and node.tag == _MERGE:
            return
        if node.tag == _MERGE:  # a text, where no key is due
            node.tag = _TEXT
        if node.tag not in _SCALARS:
            raise self._unknown_tag(node, line)
        self._check_scalar(node, line)

    def _unknown_tag(self, node: yaml.Node, line: int) -> _Refused:
        tag = node.tag.replace(_YAML, "!!", 1)
        return self._refused(line, f"the tag {_cut(tag)} is not taken here; leave it out")

    def _check_keys(self, node: yaml.MappingNode) -> None:
        """Refuses a key that stands twice in one mapping. Keys that ``<<`` merges from another
        mapping do not count, because keys next to ``<<`` replace them.
        """
        first: dict[Any, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            value = "<<" if key.tag == _MERGE else self.construct_object(key)
            if value in first:
                self._place.append(_cut(key.value))
                remedy = "; list both in one: <<: [*a, *b]" if key.tag == _MERGE else ""
                raise self._refused(line, f"is given twice, first on line {first[value]}{remedy}")
            first[value] = line

    def _check_scalar(self, node: yaml.ScalarNode, line: int) -> None:
        number = _SCALARS[node.tag]
        if number and len(node.value) > _NUMBER_LETTERS:
            raise self._refused(
                line, f"a number of {len(node.value):,} characters; at most {_NUMBER_LETTERS} do"
            )
        try:
            value = self.construct_object(node)
        except (ValueError, LookupError, ArithmeticError) as error:
            tag = node.tag.replace(_YAML, "!!", 1)
            raise self._refused(line, f"{_cut(node.value)!r} is no {tag}") from error
        wrong = _objection(node.value, value)
        if wrong is not None:
            raise self._refused(line, wrong)


_SCALARS = {
    _TEXT: False,
    f"{_YAML}null": False,
    f"{_YAML}bool": False,
    f"{_YAML}int": True,
    f"{_YAML}float": True,
}
"""Tags of scalars that are taken, and whether they are numbers."""


def _letters(node: yaml.Node) -> int:
    return len(node.value) if isinstance(node, yaml.ScalarNode) else 0


def _objection(written: str, value: Any) -> str | None:
    """Returns the reason why no key can have this value; None: some key may."""
    if isinstance(value, str):
        if "\0" in value:
            return "a text with a NUL character"
        # Names of files may have bytes that are no UTF-8, which Python writes as U+DC80 to U+DCFF.
        try:
            value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            return f"U+{ord(value[error.start]):04X} is half a character"
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        return f"{_cut(written)}: a whole number beyond 64 bits"
    elif isinstance(value, float) and math.isnan(value):
        return "not a number (.nan)"
    elif isinstance(value, float) and math.isinf(value) and "inf" not in written.lower():
        return f"{_cut(written)}: a number too large for 64 bits"
    return None
