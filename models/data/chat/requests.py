"""Requests for samples: the content of one record of fine-tuning data in one of five kinds. No
torch.

A request is a plain value. :mod:`penstock.models.data.chat.conversation` makes requests of records,
and :mod:`penstock.models.data.chat.masks` makes samples of requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from reprlib import Repr
from typing import Any, TypeAlias

from penstock.host.errors import ConfigError
from penstock.models.data.batch import IGNORED_LABEL

ASSISTANT = "assistant"
SYSTEM = "system"
USER = "user"
TOOL = "tool"

_SHOWN = Repr()
"""Shows the start of a value in errors: values may be long, and nested deeply."""
_SHOWN.maxlevel, _SHOWN.maxstring, _SHOWN.maxother = 3, 60, 60


class Format(Enum):
    """Formats of records, as ``format`` of a source names them."""

    AUTO = "auto"
    TEXT = "text"
    CHAT = "chat"
    COMPLETION = "completion"
    ALPACA = "alpaca"
    """LLaMA-Factory's meaning: a conversation, which the chat template renders."""
    STANFORD = "stanford"
    """Stanford's meaning, which Axolotl calls ``alpaca``: a prompt in a fixed form of text."""
    TOKENS = "tokens"
    PREFERENCE = "preference"
    """Two answers to a prompt, of which one is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordForm:
    """The way to read records of a source.

    ``columns`` maps names of this package to columns of the data; None stands for a name without a
    column. ``roles`` maps roles of the data to roles of the chat template. ``is_closed``: columns
    without a name are left out, as LLaMA-Factory does; otherwise some of them are refused.
    """

    format: Format = Format.AUTO
    columns: Mapping[str, str | None] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    is_closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A message of a conversation.

    ``fields`` are the values that a chat template reads: role, content, tool_calls and others.
    ``counts`` is the message's own ``train`` or ``weight``; None without one.
    """

    fields: Mapping[str, Any]
    counts: bool | None = None

    @property
    def role(self) -> str:
        """The role that the chat template reads."""
        role: str = self.fields["role"]
        return role


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A text of which all tokens count."""

    place: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A text with the text that completes it."""

    place: str
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation.

    ``prompt_turns`` is the number of turns of the prompt where a record has prompt and completion;
    None otherwise. ``variables`` are the record's ``chat_template_kwargs``.
    """

    place: str
    turns: tuple[Turn, ...]
    prompt_turns: int | None = None
    tools: tuple[Any, ...] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdsRequest:
    """Ready token ids, with labels of the same positions (not shifted) or None.

    ``completion`` are the places of a completion, which all count unless the user takes all tokens.
    """

    place: str
    ids: tuple[int, ...]
    labels: tuple[int, ...] | None = None
    completion: tuple[bool, ...] | None = None

    def chosen_labels(self, *, all_count: bool) -> tuple[int, ...] | None:
        """Returns the labels, with those outside the completion ignored; None if no column chooses.
        ``all_count``: ignores the completion, as TRL does with completion_only_loss false.
        """
        if self.completion is None or all_count:
            return self.labels
        given = zip(self.labels or self.ids, self.completion, strict=True)
        return tuple(label if counts else IGNORED_LABEL for label, counts in given)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRequest:
    """Two answers to one prompt, the better one first: both are texts with a completion, or both
    are conversations with ``prompt_turns``.
    """

    place: str
    chosen: CompletionRequest | ChatRequest
    rejected: CompletionRequest | ChatRequest


Request: TypeAlias = TextRequest | CompletionRequest | ChatRequest | IdsRequest | PairRequest


def refused(place: str, name: str, value: Any, remedy: str) -> ConfigError:
    """Returns the error for a field of a record; ``remedy`` names the cause and accepted values."""
    return ConfigError(f"{place}: {name} = {shown(value)}: {remedy}")


def shown(value: Any) -> str:
    """Returns the start of a value's ``repr``, on one line."""
    return _SHOWN.repr(value)


def names(values: Sequence[str]) -> str:
    """Returns names as a list for an error."""
    listed = [shown(name).strip("'\"") for name in values[:12]]
    return ", ".join([*listed, "…"] if len(values) > len(listed) else listed) or "none"
