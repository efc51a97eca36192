"""Forms of values that a chat template takes: contents as parts or texts, arguments of calls as
objects or JSON texts. No torch.

transformers gives a template the values of a record as they are. A template shows the forms it
takes by its renderings of short probes. Values in another form are changed to the template's form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from penstock.host.limits.bounds import limited
from penstock.models.data.chat.requests import ASSISTANT, TOOL, USER, Turn

_WORD = "zqxprobe"
"""A text that no template has."""
_OBJECT = {"zqxname": _WORD}
_JSON = json.dumps(_OBJECT)
_TOOL, _ID = "zqxtool", "zqxcall01"
"""Name and id of a probe's call; some templates refuse an id of another length."""
_TOOL_OF_PROBE = {
    "type": "function",
    "function": {
        "name": _WORD,
        "description": "zqx",
        "parameters": {"type": "object", "properties": {}},
    },
}
_QUESTION = "zqxquestion"
"""Content of a probe's other messages."""
_LISTED = re.compile(rf"['\"]text['\"]:\s*['\"]{_WORD}")
"""A list of parts that a template has printed as a value of Python or of JSON."""


_RENDERING_S, _RENDERING_BYTES = 30.0, 2 << 30
"""CPU seconds and memory of a rendering. A template may loop for years, or multiply a text."""


class Arguments(Enum):
    """Forms of a tool call's arguments that a template takes."""

    ANY = "any"
    OBJECT = "object"
    TEXT = "text"


def render_template(text: str, messages: Sequence[Any], **variables: Any) -> tuple[str, Any]:
    """Returns a conversation as the template ``text`` renders it, and its marked spans.

    Any error of the template passes through.

    Raises:
        ConfigError: the template takes too long, or too much memory.
    """
    # The import takes a second, and data without conversations never needs it.
    from transformers.utils.chat_template_utils import render_jinja_template

    # The function is annotated with a result that it does not have.
    render: Any = render_jinja_template
    with limited("rendering", _RENDERING_S, _RENDERING_BYTES):
        (rendered,), spans = render(conversations=[messages], chat_template=text, **variables)
    return rendered, spans


class Forms:
    """Forms that a template takes. Probes are rendered when the first record needs them."""

    def __init__(self, text: str, variables: Mapping[str, Any]) -> None:
        self._text, self._variables = text, variables
        self._parts: dict[str, bool] = {}
        self._shown: dict[tuple[str, str], bool] = {}
        self._arguments: Arguments | None = None

    def fitted(self, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        """Returns turns in the template's forms. Parts become one text, unless the template walks
        over the parts of a role.
        """
        return tuple(self._fitted(turn) if _has_forms(turn) else turn for turn in turns)

    def takes_parts(self, role: str) -> bool:
        """Returns whether the template walks over the parts of a role's content."""
        if role not in self._parts:
            self._parts[role] = any(
                _WORD in rendered and not _LISTED.search(rendered)
                for rendered in self._probed(role, content=[{"type": "text", "text": _WORD}])
            )
        return self._parts[role]

    def shows(self, key: str, role: str) -> bool:
        """Returns whether the template prints a text at a key of a role's messages, such as
        ``content``. True where it refuses all probes.
        """
        if (key, role) not in self._shown:
            if key == "tool_calls":
                probes = list(self._called(_OBJECT))
            elif key == "tools":
                probes = list(self._probed(USER, tools=[_TOOL_OF_PROBE], content=_QUESTION))
            else:
                probes = list(self._probed(role, **{"content": "", key: _WORD}))
            self._shown[key, role] = not probes or any(_WORD in made for made in probes)
        return self._shown[key, role]

    @property
    def arguments(self) -> Arguments:
        """The form of arguments. A template that prints a text as it is takes any text."""
        if self._arguments is None:
            texts = any(_JSON in made for made in self._called(_JSON))
            objects = any(
                _WORD in made and str(_OBJECT) not in made for made in self._called(_OBJECT)
            )
            forms = {(True, False): Arguments.TEXT, (False, True): Arguments.OBJECT}
            self._arguments = forms.get((texts, objects), Arguments.ANY)
        return self._arguments

    def _fitted(self, turn: Turn) -> Turn:
        fields = dict(turn.fields)
        content = fields.get("content")
        if isinstance(content, list) and not self.takes_parts(turn.role):
            fields["content"] = joined(content)
        if "tool_calls" in fields:
            fields["tool_calls"] = [self._call(call) for call in fields["tool_calls"]]
        return Turn(fields=fields, counts=turn.counts)

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a tool call with arguments in the template's form."""
        function = call.get("function")
        if isinstance(function, Mapping):
            return {**call, "function": self._call(function)}
        arguments = call.get("arguments")
        if isinstance(arguments, str) and self.arguments is Arguments.OBJECT:
            parsed = parsed_object(arguments)
            return call if parsed is None else {**call, "arguments": parsed}
        if isinstance(arguments, Mapping) and self.arguments is Arguments.TEXT:
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return call

    def _called(self, arguments: Any) -> Iterator[str]:
        """Yields renderings of a call of a tool."""
        empty: tuple[Any, ...] = ("", [])
        for content in empty:
            yield from self._probed(ASSISTANT, content=content, tool_calls=[probe_call(arguments)])

    def _probed(self, role: str, tools: Any = None, **fields: Any) -> Iterator[str]:
        """Yields renderings of a short conversation with a message; none where the template
        refuses the conversation.
        """
        for content in contents(_QUESTION):
            question = {"role": USER, "content": content}
            caller = {"role": ASSISTANT, "content": content, "tool_calls": [probe_call({})]}
            before: Mapping[str, list[Any]] = {
                USER: [],
                ASSISTANT: [question],
                TOOL: [question, caller],
            }
            after = [] if role in before else [question]
            named = {"tool_call_id": _ID, "name": _TOOL} if role == TOOL else {}
            messages = [*before.get(role, []), {"role": role, **named, **fields}, *after]
            try:
                rendered, _ = render_template(self._text, messages, tools=tools, **self._variables)
            except Exception:  # a template may raise anything
                continue
            yield rendered


def contents(text: str) -> tuple[Any, ...]:
    """Returns the forms of a content with a text: the text itself, and a list of parts."""
    return text, [{"type": "text", "text": text}]


def probe_call(arguments: Any) -> Mapping[str, Any]:
    """Returns a probe's call of a tool."""
    return {"id": _ID, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}


def joined(parts: Sequence[Any]) -> str:
    """Returns the text of a list of parts that all are texts."""
    return "".join(part if isinstance(part, str) else part["text"] for part in parts)


def parsed_object(text: str) -> dict[str, Any] | None:
    """Returns the object of a JSON text; None for other texts."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _has_forms(turn: Turn) -> bool:
    return "tool_calls" in turn.fields or isinstance(turn.fields.get("content"), list)
