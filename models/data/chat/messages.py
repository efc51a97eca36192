"""Messages of a record as turns: role and content under several names, tool calls, own marks. No
torch.

Values that a chat template reads pass through as the record has them, since TRL does the same. Keys
with null are dropped, as ``apply_chat_template`` of transformers drops them.
:mod:`penstock.models.data.chat.forms` changes values that a template cannot take.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.models.data.chat.forms import joined
from penstock.models.data.chat.requests import (
    ASSISTANT,
    SYSTEM,
    TOOL,
    USER,
    Turn,
    names,
    refused,
)

_CALL = "function_call"
"""ShareGPT's role of an assistant's message that holds tool calls as JSON."""

_ROLES: Mapping[str, str] = {
    **{role: role for role in (SYSTEM, USER, ASSISTANT, TOOL, _CALL)},
    **{role: role for role in ("developer", "ipython", "function", "tool_results")},
    "human": USER,
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot"), ASSISTANT),
    **dict.fromkeys(("observation", "function_response"), TOOL),
}
"""Roles of data and those of chat templates."""

_OWN_KEYS = frozenset(("role", "from", "content", "value", "train", "weight"))
_MARKS = ("train", "weight")
_KEYS: Mapping[str, tuple[str, ...]] = {"role": ("role", "from"), "content": ("content", "value")}
"""Names of a message's parts, and the keys that are tried for them."""


def turns_of(place: str, name: str, value: Any, roles: Mapping[str, str]) -> tuple[Turn, ...]:
    """Returns the turns of the list of messages in the field ``name``.

    Raises:
        ConfigError: the value is no list of messages, or a message has an unknown form.
    """
    if not isinstance(value, list | tuple) or not value:
        raise refused(
            place, name, value, 'needs a list such as [{"role": "user", "content": "…"}, …]'
        )
    return tuple(
        _turn(place, f"{name}[{number}]", message, roles) for number, message in enumerate(value)
    )


def renamed(value: Any, columns: Mapping[str, str | None]) -> Any:
    """Returns a list of messages with the keys ``role`` and ``content``, where ``columns`` names
    other keys for them. Other values are returned as they are.
    """
    keys = {name: columns.get(name) for name in _KEYS if columns.get(name) is not None}
    if not keys or not isinstance(value, list | tuple):
        return value
    taken = {key for name in keys for key in _KEYS[name]} | set(keys.values())
    return [
        {
            **{key: field for key, field in message.items() if key not in taken},
            **{name: message[key] for name, key in keys.items() if key in message},
        }
        if isinstance(message, Mapping)
        else message
        for message in value
    ]


def is_conversation(value: Any) -> bool:
    """Returns whether a value is a list of messages, which TRL decides by the first message."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return isinstance(value[0], Mapping) and not {"role", "from"}.isdisjoint(value[0])


def text_turn(role: str, content: str) -> Turn:
    """Returns a turn with a text alone."""
    return Turn(fields={"role": role, "content": content})


def tools_of(place: str, name: str, value: Any) -> tuple[Any, ...] | None:
    """Returns the tools of a record, a list of objects or the JSON text of one; None without tools.

    Raises:
        ConfigError: the value is no list of objects.
    """
    if value is None or value == "":
        return None
    tools = _parsed(value) if isinstance(value, str) else value
    if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
        raise refused(place, name, value, "needs a list of JSON schemas, or the JSON text of one")
    return tuple(tools)


def _turn(place: str, name: str, message: Any, roles: Mapping[str, str]) -> Turn:
    """Returns the turn of one message.

    Raises:
        ConfigError: the message has no known form.
    """
    if not isinstance(message, Mapping):
        raise refused(place, name, message, "needs an object with role and content")
    given = {key: value for key, value in message.items() if value is not None}
    role = _role(place, name, given, roles)
    fields: dict[str, Any] = {"role": role}
    key = "content" if "content" in given else "value"
    content = None if key not in given else _content(place, f"{name}.{key}", given[key])
    calls = given.get("tool_calls") or None
    if role == _CALL:
        fields["role"], calls = ASSISTANT, _calls(place, f"{name}.{key}", content)
    elif content is not None:
        fields["content"] = content
    elif calls is None:
        raise refused(
            place, name, dict(message), "needs content (a text, which may be empty) or tool_calls"
        )
    fields.update(
        {k: value for k, value in given.items() if k not in _OWN_KEYS and k != "tool_calls"}
    )
    if calls is not None:
        if not isinstance(calls, list | tuple) or not all(isinstance(c, Mapping) for c in calls):
            raise refused(place, f"{name}.tool_calls", calls, "needs a list of objects")
        fields["tool_calls"] = list(calls)
    return Turn(fields=fields, counts=_mark(place, name, given))


def _role(place: str, name: str, given: Mapping[str, Any], roles: Mapping[str, str]) -> str:
    """Returns the role of a message in the words of chat templates.

    Raises:
        ConfigError: there is no role, or none that is known.
    """
    key = "role" if "role" in given else "from"
    if key not in given:
        raise refused(place, name, dict(given), "has no role; needs role (or from) and content")
    role = given[key]
    known = {**_ROLES, **roles}
    if not isinstance(role, str) or role not in known:
        accepted = names(list(known))
        raise refused(
            place,
            f"{name}.{key}",
            role,
            f"is no known role ({accepted}); map yours in roles: {{YOURS: {USER}}}",
        )
    return known[role]


def _content(place: str, name: str, content: Any) -> str | list[Any]:
    """Returns a content: a text, or a list of parts that all are texts.

    Raises:
        ConfigError: the content is of another kind.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise refused(
            place, name, content, 'needs a text, or parts like {"type": "text", "text": "…"}'
        )
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) else part
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text" or not isinstance(text, str):
            raise refused(
                place,
                f"{name}[{number}]",
                part,
                'only texts are read, such as {"type": "text", "text": "…"}',
            )
    return list(content)


def _calls(place: str, name: str, content: str | list[Any] | None) -> list[Mapping[str, Any]]:
    """Returns the tool calls that ShareGPT's ``function_call`` holds as JSON.

    Raises:
        ConfigError: the text is no JSON of calls.
    """
    parsed = _parsed(joined(content) if isinstance(content, list) else content or "")
    calls = [parsed] if isinstance(parsed, Mapping) else parsed
    if not isinstance(calls, list) or not calls or not all(_is_call(call) for call in calls):
        raise refused(
            place,
            name,
            content,
            'needs the JSON of calls, {"name": "…", "arguments": {…}}, or map the role in roles:'
            f" {{{_CALL}: {ASSISTANT}}}",
        )
    return [{"type": "function", "function": call} for call in calls]


def _is_call(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("name"), str) and "arguments" in call


def _parsed(text: str) -> Any:
    """Returns the value of a JSON text; None for other texts."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _mark(place: str, name: str, given: Mapping[str, Any]) -> bool | None:
    """Returns whether a message counts by its own ``train`` or ``weight``; None without one.

    Raises:
        ConfigError: the value is not 0 or 1, or both keys disagree.
    """
    marks = {key: given[key] for key in _MARKS if key in given}
    for key, value in marks.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise refused(place, f"{name}.{key}", value, "needs 0, 1, false or true")
    values = {bool(value) for value in marks.values()}
    if len(values) > 1:
        raise refused(place, f"{name}.train", given["train"], "weight says the opposite; keep one")
    return next(iter(values), None)
