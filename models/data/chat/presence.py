"""Texts of a record that a rendering has to have. No torch.

A template may leave a part of a record out without a word: tools, messages of a role, thoughts.
Each text has to occur in the rendering, after trimming. A text that the template changes counts as
read if another text at its place gives another rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.host.errors import ConfigError
from penstock.models.data.chat.forms import parsed_object
from penstock.models.data.chat.remarks import Remark
from penstock.models.data.chat.requests import USER, Turn, refused
from penstock.models.data.chat.templates import Conversation, Template

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message with thoughts, as transformers knows them."""
_BOUNDS = re.compile("</?think>")
_END_OF_THOUGHTS = "</think>"
_MARK = "zqxmark"
"""A text that no record has."""
_SHORT = 16
"""Characters of a text that may occur in a rendering by chance."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A text of a record, at the keys of ``path`` in a message. ``start`` and ``end`` are its
    characters in the value there. ``is_thought`` is True for thoughts. ``is_json`` is True for the
    JSON text of an object, which a template must not write as a text inside of JSON.
    """

    path: tuple[str | int, ...]
    text: str
    start: int
    end: int
    is_thought: bool = False
    is_json: bool = False

    @property
    def name(self) -> str:
        """The path in the words of errors."""
        return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)


@dataclass(slots=True, kw_only=True)
class Presence:
    """The search for a record's texts in renderings of its conversation by a template.
    ``training`` is True for renderings of the template's training text.
    """

    conversation: Conversation
    template: Template
    training: bool = False

    def check(self, text: str, numbers: Sequence[int], counted: set[int]) -> tuple[Remark, ...]:
        """Returns remarks about the rendering ``text``, which ends with the last of the turns
        ``numbers``. See :meth:`check_turns`.

        Raises:
            ConfigError: a text is missing.
        """
        self.check_tools(text)
        cut = self.check_turns(text, numbers, counted, numbers[-1] + 1)
        return (Remark.THOUGHTS,) if cut else ()

    def check_tools(self, text: str) -> None:
        """Refuses tools that the rendering ``text`` does not have.

        Raises:
            ConfigError: the name of a tool is missing.
        """
        tools = self.conversation.tools or ()
        for number, tool in enumerate(tools):
            function = tool.get("function")
            path = ("function", "name") if isinstance(function, Mapping) else ("name",)
            name = function.get("name") if isinstance(function, Mapping) else tool.get("name")
            if not isinstance(name, str) or (
                _occurs(name, text) and self.template.forms.shows("tools", USER)
            ):
                continue
            renamed = list(tools)
            renamed[number] = _replaced(tool, path, 0)
            if self._rendered() == self._rendered(tools=renamed):
                raise refused(
                    self.conversation.place,
                    f"tools[{number}].{'.'.join(path)}",
                    name,
                    f"data.chat_template = {self.template.name!r} leaves tools out of its"
                    " rendering; name a template with tools in data.chat_template, or train"
                    " without them by columns: {tools: null}",
                )

    def check_turns(self, text: str, numbers: Sequence[int], counted: set[int], stop: int) -> int:
        """Returns the number of turns with thoughts that the template leaves out of the rendering
        ``text`` of the first ``stop`` turns. Only the turns ``numbers`` are searched. A template
        may cut thoughts from the content of a turn that is not ``counted``. It may also have no
        form for thoughts in a field of their own.

        Raises:
            ConfigError: another text is missing.
        """
        cut: set[int] = set()
        place = 0
        for number in numbers:
            turn = self.conversation.turns[number]
            for piece in _pieces(turn):
                first = text.find(piece.text, place)
                if first >= 0:
                    place = first + len(piece.text)
                if self._is_present(piece, turn.role, text, first):
                    continue
                if piece.is_thought and (number not in counted or piece.path[0] in _THOUGHTS):
                    cut.add(number)
                elif not self._changes(number, piece, stop):
                    raise self._missing(number, piece)
        return len(cut)

    def _is_present(self, piece: _Piece, role: str, text: str, first: int) -> bool:
        """Returns whether a piece occurs, and not by chance. ``first`` is -1 unless the piece
        occurs behind the pieces before it.
        """
        if first < 0 and piece.text not in text:
            return _occurs(piece.text, text) and not piece.is_json
        if len(piece.text) >= _SHORT or (piece.path[0] == "content" and len(piece.path) > 1):
            return True  # a list of parts is left to templates that walk over parts
        return self.template.forms.shows(str(piece.path[0]), role)

    def _missing(self, number: int, piece: _Piece) -> ConfigError:
        """Returns the error for a text that the rendering does not have."""
        turn = self.conversation.turns[number]
        template = f"data.chat_template = {self.template.name!r}"
        forms = self.template.forms
        parts = piece.path == ("content",) and forms.takes_parts(turn.role)
        if piece.is_json:
            remedy = (
                f"{template} writes the JSON text as a text inside of JSON; give an object in place"
                " of its text"
            )
        elif piece.is_thought:
            remedy = (
                f"{template} cuts these thoughts from an answer that counts; remove them, or name"
                " a template that keeps them in data.chat_template"
            )
        elif parts and not forms.shows("content", turn.role):
            remedy = (
                f'{template} reads contents as parts; write [{{"type": "text", "text": "…"}}], or'
                " name a template for texts in data.chat_template"
            )
        else:
            remedy = (
                f"{template} leaves it out of the rendering; remove it from the record, or name a"
                " template that renders it in data.chat_template"
            )
        place = f"{self.conversation.place}: turn {number} (role {turn.role})"
        return refused(place, piece.name.lstrip("."), piece.text, remedy)

    def _changes(self, number: int, piece: _Piece, stop: int) -> bool:
        """Returns whether other text at each end of a piece changes the rendering of the first
        ``stop`` turns.
        """
        before = self._rendered(stop=stop)
        turn = self.conversation.turns[number]
        for at in (piece.start, piece.end):
            turns = list(self.conversation.turns)
            turns[number] = Turn(fields=_replaced(turn.fields, piece.path, at))
            if self._rendered(turns=turns, stop=stop) == before:
                return False
        return not piece.is_json

    def _rendered(
        self,
        turns: Sequence[Turn] | None = None,
        tools: Sequence[Any] | None = None,
        stop: int | None = None,
    ) -> str | None:
        """Returns the rendering of other turns or tools; None where the template refuses it."""
        changed = Conversation(
            place=self.conversation.place,
            turns=tuple(turns or self.conversation.turns),
            tools=self.conversation.tools if tools is None else tuple(tools),
            variables=self.conversation.variables,
        )
        try:
            return changed.render(self.template, stop, training=self.training).text
        except ConfigError:
            return None


def _pieces(turn: Turn) -> Iterator[_Piece]:
    """Yields the texts of a turn that a rendering has to have, without empty ones."""
    fields = turn.fields
    for name in _THOUGHTS:
        if isinstance(fields.get(name), str):
            yield from _trimmed((name,), fields[name], is_thought=True)
    content = fields.get("content")
    if isinstance(content, str):
        yield from _of_content(("content",), content)
    elif isinstance(content, list):
        for number, part in enumerate(content):
            if isinstance(part, str):
                yield from _of_content(("content", number), part)
            else:
                yield from _of_content(("content", number, "text"), part["text"])
    for number, call in enumerate(fields.get("tool_calls") or ()):
        yield from _of_call(("tool_calls", number), call)
    if isinstance(fields.get("function_call"), Mapping):
        yield from _of_call(("function_call",), fields["function_call"])


def _of_content(path: tuple[str | int, ...], text: str) -> Iterator[_Piece]:
    """Yields the pieces of a content: thoughts up to the last end of thoughts, then the rest."""
    if _END_OF_THOUGHTS not in text:
        yield from _trimmed(path, text)
        return
    last = text.rindex(_END_OF_THOUGHTS)
    start = 0
    for match in _BOUNDS.finditer(text):
        yield from _trimmed(path, text, start, match.start(), is_thought=start < last)
        start = match.end()
    yield from _trimmed(path, text, start)


def _trimmed(
    path: tuple[str | int, ...],
    text: str,
    start: int = 0,
    end: int | None = None,
    *,
    is_thought: bool = False,
) -> Iterator[_Piece]:
    part = text[start:end]
    trimmed = part.strip()
    if trimmed:
        first = start + part.index(trimmed)
        yield _Piece(path, trimmed, first, first + len(trimmed), is_thought)


def _of_call(path: tuple[str | int, ...], call: Any) -> Iterator[_Piece]:
    """Yields name and arguments of a tool call: a text, or all texts of an object."""
    if not isinstance(call, Mapping):
        return
    if isinstance(call.get("function"), Mapping):
        yield from _of_call((*path, "function"), call["function"])
        return
    if isinstance(call.get("name"), str):
        yield from _trimmed((*path, "name"), call["name"])
    arguments, path = call.get("arguments"), (*path, "arguments")
    if isinstance(arguments, str) and parsed_object(arguments) is not None:
        yield _Piece(path, arguments, 0, len(arguments), is_json=True)
    else:
        yield from _of_value(path, arguments)


def _of_value(path: tuple[str | int, ...], value: Any) -> Iterator[_Piece]:
    """Yields all texts of a nested value."""
    if isinstance(value, str):
        yield from _trimmed(path, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _of_value((*path, key), item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _of_value((*path, number), item)


def _occurs(value: str, text: str) -> bool:
    """Returns whether a text occurs, with other white space, or as JSON writes it."""
    forms = (value, json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1])
    return any(form in text for form in forms) or "".join(value.split()) in "".join(text.split())


def _replaced(value: Any, path: Sequence[str | int], at: int) -> Any:
    """Returns a nested value with a mark at the character ``at`` of the text at ``path``."""
    if not path:
        return value[:at] + _MARK + value[at:]
    key, rest = path[0], path[1:]
    if isinstance(value, Mapping):
        return {**value, key: _replaced(value[key], rest, at)}
    assert isinstance(key, int)
    return [_replaced(item, rest, at) if n == key else item for n, item in enumerate(value)]
