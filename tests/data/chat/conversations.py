"""500 conversations that test masks: tools, thoughts, empty turns, odd Unicode and odd orders.

Each is made of the same random bits in every Python. A case has the record that TRL takes. Where
TRL refuses a form (contents as parts, ShareGPT's names of roles), Penstock takes the conversation
in that form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

NUM_CONVERSATIONS = 500
Message = dict[str, Any]
T = TypeVar("T")

WORDS = "river stone naïve café 日本 blue 7 <b>x</b> 'walk' \"light\" & tea 1e5 x_y Ω".split()
ODD = (
    *("e\u0301\u0323", "\u202eabc\u202c", "👩‍👩‍👧‍👦", "🏳️‍🌈", "\ufeff", "\u2028", "\u2029", "\x00"),
    *("\r\n", "\r", "\t\v\f", "\x1b[31m", "\u00a0", "\u3000", "\u200b\u200d", "\U000f0000"),
    *(
        "\U0010fffd",
        "\uffff",
        "नमस्ते",
        "السلام عليكم",
        "ก็",
        "\U0001d518\U0001d52b",
        "ﬁ",
        "İı",
        "ß",
        "\x7f\x85",
    ),
)
EMPTY = ("", " ", "\n", "\n\n  \t", "\u00a0", "\u200b", "\r\n")
LIKE_TEMPLATES = (
    *("{{ messages }}", "{% generation %}", "{% endgeneration %}", "{# no #}", "{%- raw -%}"),
    *("<tool_response>", "<think>", "</think>", "[INST]", "<|im_end|>", "<|eot_id|>", "<|end|>"),
    *("<end_of_turn>", "<|endoftext|>", "<s>", "<bos>", "<|im_start|>assistant\n", "assistant\n"),
)
"""Texts of templates and of special tokens."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Returns the {name} <b>of</b> a place & time.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    }
    for name in ("weather", "traffic")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A conversation for Penstock and for TRL. ``kind`` names its peculiarity."""

    kind: str
    ours: Mapping[str, Any]
    theirs: Mapping[str, Any]


class Draws:
    """Choices by random bits that are the same in every NumPy."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def below(self, stop: int) -> int:
        """Returns a number from 0 to ``stop`` - 1."""
        return int(self._bits.random_raw()) % stop

    def of(self, values: Sequence[T]) -> T:
        """Returns one of the values."""
        return values[self.below(len(values))]

    def text(self, extra: Sequence[str] = ()) -> str:
        """Returns a text of 1 to 8 words, of which some are ``extra``."""
        count = 1 + self.below(8)
        words = [self.of(extra) if extra and self.below(3) == 0 else self.of(WORDS)
                 for _ in range(count)]  # fmt: skip
        return self.of((" ", " ", "\n", "")).join(words)


def talk(draws: Draws, extra: Sequence[str] = (), turns: int | None = None) -> list[Message]:
    """Returns a conversation of user and assistant in turns."""
    count = turns or 2 * (1 + draws.below(3))
    return [
        {"role": ("user", "assistant")[number % 2], "content": draws.text(extra)}
        for number in range(count)
    ]


def plain(draws: Draws) -> list[Message]:
    """Returns a conversation, often behind a message of the system."""
    first = {"role": "system", "content": draws.of(("Be brief.", "", " Be kind. "))}
    return [first, *talk(draws)] if draws.below(2) else talk(draws)


def unicode(draws: Draws) -> list[Message]:
    """Returns a conversation with odd characters."""
    return talk(draws, ODD)


def blank(draws: Draws) -> list[Message]:
    """Returns a conversation with empty turns."""
    messages = talk(draws)
    for message in messages:
        if draws.below(2):
            message["content"] = draws.of(EMPTY)
    return messages


def in_the_middle(draws: Draws) -> list[Message]:
    """Returns a conversation with messages of the system or developer behind its first."""
    messages = talk(draws, turns=4)
    role = draws.of(("system", "system", "developer"))
    messages.insert(1 + draws.below(len(messages)), {"role": role, "content": draws.text()})
    return messages


def unordered(draws: Draws) -> list[Message]:
    """Returns a conversation in which roles follow in any order."""
    count = 1 + draws.below(6)
    return [
        {"role": draws.of(("user", "assistant", "assistant")), "content": draws.text()}
        for _ in range(count)
    ]


def thoughts(draws: Draws) -> list[Message]:
    """Returns a conversation with thoughts: as a part of the content, or as a field."""
    messages = talk(draws, turns=2 * (1 + draws.below(3)))
    for message in messages[1::2]:
        thought = draws.of((draws.text(), "", "\n", f"{draws.text()}\n\n{draws.text()}"))
        form = draws.below(5)
        if form == 0:
            message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
        elif form == 1:
            message["reasoning_content"] = thought
        elif form == 2:
            message["content"] = f"{message['content']}</think>{thought}"
        elif form == 3:
            message["content"] = f"<think>{thought}</think>{message['content']}"
    return messages


def called(draws: Draws) -> Message:
    """Returns a message of the assistant with calls of tools."""
    calls = []
    for _ in range(1 + draws.below(2)):
        arguments = {"place": draws.of(("Köln", 'a"b', "日本", "</tool_call>")), "days": 2}
        function = {"name": draws.of(("weather", "traffic")), "arguments": arguments}
        calls.append({"id": "abcdefgh1", "type": "function", "function": function})
    return {"role": "assistant", "content": draws.of(("", "I ask.", "\n")), "tool_calls": calls}


def tools(draws: Draws) -> list[Message]:
    """Returns a conversation with calls of tools and their results."""
    messages = talk(draws, turns=1)
    for _ in range(1 + draws.below(2)):
        call = called(draws)
        if draws.below(4) == 0:
            call["reasoning_content"] = draws.text()
        messages.append(call)
        for _ in call["tool_calls"][: draws.below(3)]:
            content = json.dumps({"sky": draws.text()}, ensure_ascii=bool(draws.below(2)))
            messages.append({"role": "tool", "content": content, "tool_call_id": "abcdefgh1"})
    if draws.below(4):
        messages.append({"role": "assistant", "content": draws.text()})
    return [*messages, *talk(draws, turns=2)] if draws.below(2) else messages


def like_templates(draws: Draws) -> list[Message]:
    """Returns a conversation with texts of templates and of special tokens."""
    return talk(draws, LIKE_TEMPLATES)


def in_parts(draws: Draws, messages: list[Message]) -> dict[str, Any]:
    """Returns a record with lists of parts as contents."""
    cut = []
    for message in messages:
        text, at = message["content"], draws.below(len(message["content"]) + 1)
        pieces = [text] if draws.below(2) else [text[:at], text[at:]]
        cut.append(message | {"content": [{"type": "text", "text": piece} for piece in pieces]})
    return {"messages": cut}


def from_value(draws: Draws, messages: list[Message]) -> dict[str, Any]:
    """Returns a record with ShareGPT's names of keys and roles."""
    roles = {"user": draws.of(("human", "user")), "assistant": draws.of(("gpt", "assistant"))}
    return {
        "conversations": [
            {"from": roles.get(m["role"], m["role"]), "value": m["content"]} for m in messages
        ]
    }


def extra_keys(draws: Draws, messages: list[Message]) -> dict[str, Any]:
    """Returns a record of messages with null and with keys that no template reads."""
    more = {"name": None, "tool_calls": None, "id": 7}
    return {
        "id": "conversation 1",
        "messages": [message | more if draws.below(2) else message for message in messages],
    }


_MAKERS: Mapping[str, tuple[int, Callable[[Draws], list[Message]]]] = {
    "plain": (6, plain),
    "unicode": (8, unicode),
    "blank": (6, blank),
    "in the middle": (4, in_the_middle),
    "unordered": (4, unordered),
    "thoughts": (8, thoughts),
    "tools": (8, tools),
    "like templates": (4, like_templates),
    "in parts": (4, unicode),
    "from and value": (4, unicode),
    "extra keys": (2, plain),
    "thinking off": (4, thoughts),
}
"""Weight of each kind, and the function that makes its messages."""

_FORMS = {"in parts": in_parts, "from and value": from_value, "extra keys": extra_keys}


def cases() -> Iterator[Case]:
    """Yields the conversations, kind by kind."""
    total = sum(weight for weight, _ in _MAKERS.values())
    numbers = {kind: NUM_CONVERSATIONS * weight // total for kind, (weight, _) in _MAKERS.items()}
    numbers["plain"] += NUM_CONVERSATIONS - sum(numbers.values())
    draws = Draws(35)
    for kind, number in numbers.items():
        for _ in range(number):
            messages = _MAKERS[kind][1](draws)
            theirs: dict[str, Any] = {"messages": messages}
            if kind == "tools":
                theirs["tools"] = json.dumps(TOOLS[: 1 + draws.below(2)])
            if kind == "thinking off":
                theirs["chat_template_kwargs"] = {"enable_thinking": False}
            form = _FORMS.get(kind)
            ours = theirs if form is None else form(draws, messages)
            yield Case(kind=kind, ours=ours, theirs=theirs)


def pair(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a record as prompt and completion: the assistant's messages at the end complete.

    None for a record without a prompt or a completion.
    """
    key = "messages" if "messages" in record else "conversations"
    messages = record[key]
    number = len(messages)
    while number and messages[number - 1].get("role", messages[number - 1].get("from")) in (
        "assistant",
        "gpt",
    ):
        number -= 1
    if number in (0, len(messages)):
        return None
    more = {name: value for name, value in record.items() if name != key}
    return {"prompt": messages[:number], "completion": messages[number:], **more}
