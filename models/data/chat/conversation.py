"""A record's columns as a request for a sample: text, conversation, completion or ids. No torch.

Columns decide as in TRL: ``input_ids``, then ``prompt`` with ``completion``, then ``messages`` or
``conversations``, then ``text``. ``instruction`` with ``output`` (alpaca) comes before ``text``.
Null counts as absent, since the records of a Parquet file share their columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.host.errors import ConfigError
from penstock.models.data.chat.messages import (
    is_conversation,
    renamed,
    text_turn,
    tools_of,
    turns_of,
)
from penstock.models.data.chat.ready_ids import IDS, NAMES, Column, ready_ids
from penstock.models.data.chat.requests import (
    ASSISTANT,
    SYSTEM,
    USER,
    ChatRequest,
    CompletionRequest,
    Format,
    PairRequest,
    RecordForm,
    Request,
    TextRequest,
    Turn,
    names,
    refused,
    shown,
)
from penstock.models.data.chat.unread import Unread, occurs

_DEFAULTS: Mapping[str, str] = {
    **{name: name for name in ("text", "messages", "conversations", "prompt", "completion")},
    **{name: name for name in (*NAMES, "tools", "chat_template_kwargs")},
    **{name: name for name in ("chosen", "rejected")},
}
_WITH_MESSAGES = (
    *("messages", "conversations", "prompt", "completion"),
    *("chosen", "rejected"),
)
"""Names of columns that may hold lists of messages."""

_ALPACA: Mapping[str, str] = {
    **{"prompt": "instruction", "query": "input", "response": "output"},
    **{"system": "system", "history": "history"},
}
"""LLaMA-Factory's names of an alpaca record, and their columns."""

_ANSWERS = ("chosen", "rejected")
"""Columns of a pair of answers, the better one first."""

_RESERVED = frozenset(
    {
        *("messages", "conversations", "conversation", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "return_assistant_tokens_mask", "continue_final_message"),
        *("tokenize", "return_dict"),
    }
)
"""Names of a rendering's own arguments, which ``chat_template_kwargs`` cannot set."""

_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further"
    " context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{prompt}\n\n### Input:\n{query}\n\n### Response:\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes"
    " the request.\n\n### Instruction:\n{prompt}\n\n### Response:\n"
)
"""Stanford's forms of a prompt."""


def request_of(
    place: str,
    fields: Mapping[str, Any],
    reading: RecordForm | None = None,
    also: Collection[str] = (),
    unread: Counter[str] | None = None,
) -> Request:
    """Returns the request of a record's ``fields``; ``place`` names the record in errors.

    ``also`` are names that another reader takes. ``unread`` counts columns that none takes.

    Raises:
        ConfigError: columns are missing, a value has no known form, or a column with a meaning for
            training has no reader.
    """
    reading = reading or RecordForm()
    kind = reading.format
    if kind is Format.AUTO:
        kind = _format(_Columns(place, fields, reading))
    columns = _Columns(place, fields, reading)
    request = _READERS[kind](columns)
    _check_unread(columns, kind, also, unread)
    return request


def pair_of(
    place: str,
    fields: Mapping[str, Any],
    reading: RecordForm,
    also: Collection[str] = (),
    unread: Counter[str] | None = None,
) -> Request:
    """Returns the request of a record with two answers; formats without answers have their own.

    Raises:
        ConfigError: see :func:`request_of`.
    """
    reader = _PAIR_READERS.get(reading.format, _READERS.get(reading.format))
    assert reader is not None, reading.format
    columns = _Columns(place, fields, reading)
    request = reader(columns)
    kind = Format.PREFERENCE if reading.format is Format.AUTO else reading.format
    _check_unread(columns, kind, also, unread)
    return request


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of a record by the names of this package."""

    place: str
    fields: Mapping[str, Any]
    reading: RecordForm
    taken: dict[str, str] = field(default_factory=dict)
    """Columns of the data that a reader has asked for, and their names."""

    def name(self, name: str, defaults: Mapping[str, str] = _DEFAULTS) -> str | None:
        """Returns the data's column of a name; None for a name without a column."""
        return self.reading.columns.get(name, defaults.get(name))

    def get(self, name: str, defaults: Mapping[str, str] = _DEFAULTS) -> Any:
        """Returns the value of a name; None without one."""
        column = self.name(name, defaults)
        if column is None:
            return None
        self.taken[column] = name
        value = self.fields.get(column)
        if name in _WITH_MESSAGES:
            return renamed(value, self.reading.columns)
        return value

    def text(
        self, name: str, defaults: Mapping[str, str] = _DEFAULTS, default: str | None = None
    ) -> str:
        """Returns the text of a name, or ``default`` for an absent one.

        Raises:
            ConfigError: there is no value, or one that is no text.
        """
        value = self.get(name, defaults)
        if value is None and default is not None:
            return default
        column = self.name(name, defaults) or name
        if value is None:
            raise self.missing(column)
        if not isinstance(value, str):
            raise refused(self.place, column, value, "needs a text")
        return value

    def missing(self, column: str) -> ConfigError:
        """Returns the error for a record without a column that its format needs."""
        return ConfigError(
            f"{self.place}: has no value in the column {column}; its columns are"
            f" {names(list(self.fields))}. Name yours in columns, or choose another format"
        )


def _check_unread(
    columns: _Columns, kind: Format, also: Collection[str], unread: Counter[str] | None
) -> None:
    """Counts the columns of a record that no reader takes.

    Raises:
        ConfigError: such a column has a meaning for training.
    """
    given = columns.reading.columns
    others = {str(given.get(name, name)) for name in also}
    nameless = [name for name, column in given.items() if column is None]
    defaults = {name: _ALPACA.get(name, name) for name in nameless}
    left_out = frozenset({*others, *nameless, *defaults.values()})
    rest = Unread(
        place=columns.place,
        fields=columns.fields,
        taken=columns.taken,
        columns=given,
        kind=kind,
    )
    for column in rest.names(left_out):
        if not columns.reading.is_closed:
            rest.check(column)
        if unread is not None:
            unread[column] += 1


def _format(columns: _Columns) -> Format:
    """Returns the format that the columns of a record decide.

    Raises:
        ConfigError: no format has these columns.
    """
    if columns.get("input_ids") is not None:
        return Format.TOKENS
    if columns.get("prompt") is not None and columns.get("completion") is not None:
        return Format.COMPLETION
    if _messages_name(columns) is not None:
        return Format.CHAT
    if all(columns.get(name, _ALPACA) is not None for name in ("prompt", "response")):
        return Format.ALPACA
    if columns.get("text") is not None:
        return Format.TEXT
    given = names([name for name, value in columns.fields.items() if value is not None])
    cause = ""
    if all(columns.fields.get(name) is not None for name in _ANSWERS):
        whole = "messages" if is_conversation(columns.fields["chosen"]) else "text"
        name = whole if columns.get("prompt") is None else "completion"
        cause = (
            " Pairs of chosen and rejected answers train with data.objective: dpo, orpo or simpo;"
            f" to train on the chosen ones alone, set columns: {{{name}: chosen}}."
        )
    raise ConfigError(
        f"{columns.place}: its columns with values ({given}) are of no known format; needs text,"
        " messages, conversations, prompt with completion, instruction with output, or input_ids."
        f"{cause} Name yours in columns"
    )


def _messages_name(columns: _Columns) -> str | None:
    names_ = ("messages", "conversations")
    return next((name for name in names_ if columns.get(name) is not None), None)


def _text(columns: _Columns) -> Request:
    return TextRequest(place=columns.place, text=columns.text("text"))


def _chat(columns: _Columns) -> Request:
    """Returns the request of a record with messages.

    A column ``system`` counts only if ``columns`` names it, since TRL ignores such a column.
    """
    return _request(columns, _turns(columns))


def _turns(columns: _Columns) -> tuple[Turn, ...]:
    """Returns the turns of a record's messages.

    Raises:
        ConfigError: there are no messages, or a message has no known form.
    """
    name = _messages_name(columns)
    if name is None:
        raise columns.missing(columns.name("messages") or "messages")
    column = str(columns.name(name))
    turns = turns_of(columns.place, column, columns.get(name), columns.reading.roles)
    system = columns.text("system", {}, default="")
    if system and turns[0].role != SYSTEM:
        turns = (text_turn(SYSTEM, system), *turns)
    return turns


def _completion(columns: _Columns) -> Request:
    """Returns the request of a record with prompt and completion, texts or messages.

    Raises:
        ConfigError: one of them is a text and the other a list of messages, or one is missing.
    """
    prompt, completion = columns.get("prompt"), columns.get("completion")
    if not is_conversation(prompt) and not is_conversation(completion):
        texts = columns.text("prompt"), columns.text("completion")
        return CompletionRequest(place=columns.place, prompt=texts[0], completion=texts[1])
    parts = []
    for name in ("prompt", "completion"):
        column = str(columns.name(name))
        if columns.get(name) is None:
            raise columns.missing(column)
        if isinstance(columns.get(name), str):
            raise refused(
                columns.place,
                column,
                columns.get(name),
                "is a text, but the record's other part is a list of messages; use one form",
            )
        parts.append(turns_of(columns.place, column, columns.get(name), columns.reading.roles))
    return _request(columns, (*parts[0], *parts[1]), prompt_turns=len(parts[0]))


def _request(
    columns: _Columns, turns: tuple[Turn, ...], prompt_turns: int | None = None
) -> ChatRequest:
    """Returns the request of a conversation with the record's tools and variables.

    Raises:
        ConfigError: tools or variables have no known form.
    """
    name = str(columns.name("chat_template_kwargs"))
    variables = columns.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, Mapping):
        raise refused(columns.place, name, variables, "needs an object: name -> value")
    return ChatRequest(
        place=columns.place,
        turns=turns,
        prompt_turns=prompt_turns,
        tools=tools_of(columns.place, str(columns.name("tools")), columns.get("tools")),
        variables=checked_variables(columns.place, name, variables or {}),
    )


def checked_variables(place: str, name: str, variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns variables of a chat template.

    Raises:
        ConfigError: a variable has the name of an argument that a rendering sets.
    """
    taken = [variable for variable in variables if variable in _RESERVED]
    if taken:
        raise refused(
            place, f"{name}.{taken[0]}", variables[taken[0]], "is set by Penstock; remove it"
        )
    return variables


def _alpaca(columns: _Columns) -> Request:
    """Returns the conversation of an alpaca record, as LLaMA-Factory reads it.

    Instruction and input are joined by a line break, and pairs of ``history`` come first.
    """
    answer = text_turn(ASSISTANT, columns.text("response", _ALPACA))
    return _request(columns, (*_alpaca_prompt(columns), answer))


def _alpaca_prompt(columns: _Columns) -> tuple[Turn, ...]:
    query = columns.text("query", _ALPACA, default="")
    prompt = columns.text("prompt", _ALPACA)
    system = columns.text("system", _ALPACA, default="")
    turns = [text_turn(SYSTEM, system)] if system else []
    for question, answer in _history(columns):
        turns += [text_turn(USER, question), text_turn(ASSISTANT, answer)]
    turns.append(text_turn(USER, f"{prompt}\n{query}" if query else prompt))
    return tuple(turns)


def _history(columns: _Columns) -> Iterator[tuple[str, str]]:
    """Yields the earlier questions and answers of an alpaca record.

    Raises:
        ConfigError: the history is no list of pairs of texts.
    """
    history = columns.get("history", _ALPACA)
    for number, pair in enumerate(history if isinstance(history, list | tuple) else [history]):
        if history is None:
            return
        match pair:
            case [str() as question, str() as answer]:
                yield question, answer
            case _:
                column = f"{columns.name('history', _ALPACA)}[{number}]"
                raise refused(columns.place, column, pair, "needs a pair [question, answer]")


def _stanford(columns: _Columns) -> Request:
    """Returns the prompt and completion of an alpaca record in Stanford's form.

    Raises:
        ConfigError: the record has parts that the form has no place for.
    """
    for name in ("system", "history"):
        if columns.get(name, _ALPACA):
            column = str(columns.name(name, _ALPACA))
            value = shown(columns.get(name, _ALPACA))
            raise ConfigError(
                f"{columns.place}: {column} = {value}: the form has no place for it; use the"
                " format alpaca, which a chat template renders"
            )
    query = columns.text("query", _ALPACA, default="")
    form = _WITH_INPUT if query else _WITHOUT_INPUT
    prompt = form.format(prompt=columns.text("prompt", _ALPACA), query=query)
    completion = columns.text("response", _ALPACA)
    return CompletionRequest(place=columns.place, prompt=prompt, completion=completion)


def _preference(columns: _Columns) -> Request:
    """Returns the request of a pair of answers.

    As in TRL, a record without a prompt has one at the front of both answers: their common first
    turns, or characters. At least the last turn or character is no part of the prompt.

    Raises:
        ConfigError: a part is missing, or the parts are texts and messages.
    """
    values = {name: columns.get(name) for name in _ANSWERS}
    for name in _ANSWERS:
        if values[name] is None:
            raise columns.missing(columns.name(name) or name)
    prompt = columns.get("prompt")
    if any(is_conversation(values[name]) for name in _ANSWERS):
        return _pair_of_chats(columns, prompt)
    texts = [columns.text(name) for name in _ANSWERS]
    if prompt is None:
        if column := columns.reading.columns.get("prompt"):
            raise columns.missing(column)
        prompt = _common_text(texts[0], texts[1])
        if not prompt and columns.name("prompt") is not None:
            raise ConfigError(
                f"{columns.place}: has no value in the column prompt, and chosen and rejected begin"
                " in two ways; name the column in columns: {prompt: NAME}, or set columns: {prompt:"
                " null} for answers to no prompt"
            )
        texts = [text[len(prompt) :] for text in texts]
    else:
        prompt = columns.text("prompt")
    chosen, rejected = (
        CompletionRequest(place=columns.place, prompt=prompt, completion=text) for text in texts
    )
    return PairRequest(place=columns.place, chosen=chosen, rejected=rejected)


def _pair_of_chats(columns: _Columns, prompt: Any) -> Request:
    """Returns the pair of two conversations. A prompt that is a text repeats a question of both, as
    data sets have it.

    Raises:
        ConfigError: the conversations have no first turns in common, or another prompt.
    """
    chosen, rejected = (
        turns_of(columns.place, str(columns.name(name)), columns.get(name), columns.reading.roles)
        for name in _ANSWERS
    )
    if is_conversation(prompt):
        name = str(columns.name("prompt"))
        first = turns_of(columns.place, name, prompt, columns.reading.roles)
    else:
        shared = _common(chosen, rejected)
        first, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if not first:
            raise ConfigError(
                f"{columns.place}: {columns.name('chosen')} and {columns.name('rejected')} have no"
                " first turn in common; give the turns before both answers as prompt"
            )
        contents = [turn.fields.get("content") for turn in first]
        if isinstance(prompt, str) and prompt.strip() and not occurs(prompt, contents):
            name = str(columns.name("prompt"))
            raise refused(
                columns.place,
                name,
                prompt,
                "is in no turn that both answers begin with; set columns: {prompt: null} of its"
                " source to train without it, or give the turns before both answers as prompt",
            )
    return _pair(columns, first, chosen, rejected)


def _chat_pair(columns: _Columns) -> Request:
    """Returns the pair of answers to a conversation in ``messages``."""
    return _answered(columns, _turns(columns))


def _alpaca_pair(columns: _Columns) -> Request:
    """Returns the pair of answers to the prompt of an alpaca record."""
    return _answered(columns, _alpaca_prompt(columns))


def _answered(columns: _Columns, prompt: tuple[Turn, ...]) -> Request:
    """Returns the pair of answers to a prompt: each is a text, or a message of the assistant.

    Raises:
        ConfigError: an answer is missing, or has another form.
    """
    answers = []
    for name in _ANSWERS:
        column, value = str(columns.name(name)), columns.get(name)
        if value is None:
            raise columns.missing(column)
        if isinstance(value, str):
            answers.append(text_turn(ASSISTANT, value))
            continue
        if isinstance(value, Mapping):
            value = renamed([value], columns.reading.columns)
        turns = turns_of(columns.place, column, value, columns.reading.roles)
        if len(turns) > 1 or turns[0].role != ASSISTANT:
            raise refused(
                columns.place,
                column,
                value,
                "needs a text, or one message of the assistant; format preference reads"
                " conversations with their prompt",
            )
        answers.append(turns[0])
    return _pair(columns, prompt, answers[:1], answers[1:])


def _pair(
    columns: _Columns, first: Sequence[Turn], chosen: Sequence[Turn], rejected: Sequence[Turn]
) -> PairRequest:
    """Returns the pair of two conversations with the same first turns.

    Raises:
        ConfigError: a message says whether it counts.
    """
    for turn in (*first, *chosen, *rejected):
        if turn.counts is not None:
            raise ConfigError(
                f"{columns.place}: a message has train or weight, and all of an answer of a pair"
                " counts; remove them"
            )
    requests = [_request(columns, (*first, *answer), len(first)) for answer in (chosen, rejected)]
    return PairRequest(place=columns.place, chosen=requests[0], rejected=requests[1])


def _common(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Returns the number of first items in common, at most all but the last of the shorter one."""
    most = min(len(chosen), len(rejected)) - 1
    return next((n for n in range(most) if chosen[n] != rejected[n]), max(0, most))


def _common_text(chosen: str, rejected: str) -> str:
    """Returns the prompt that two texts begin with. A space in front of the answers belongs to the
    answers.
    """
    shared = _common(chosen, rejected)
    return chosen[: shared - (0 < shared and chosen[shared - 1] == " ")]


def _tokens(columns: _Columns) -> Request:
    """Returns the ready ids of a record.

    Raises:
        ConfigError: a value is no list of ids, or labels and masks are not those of the ids.
    """
    if columns.get(IDS) is None:
        raise columns.missing(str(columns.name(IDS)))
    given = {
        name: Column(name=columns.name(name) or name, value=columns.get(name)) for name in NAMES
    }
    return ready_ids(columns.place, given)


_READERS: Mapping[Format, Callable[[_Columns], Request]] = {
    Format.TEXT: _text,
    Format.CHAT: _chat,
    Format.COMPLETION: _completion,
    Format.ALPACA: _alpaca,
    Format.STANFORD: _stanford,
    Format.TOKENS: _tokens,
    Format.PREFERENCE: _preference,
}
_PAIR_READERS: Mapping[Format, Callable[[_Columns], Request]] = {
    Format.AUTO: _preference,
    Format.CHAT: _chat_pair,
    Format.ALPACA: _alpaca_pair,
}
"""Readers of records with two answers, where they differ from those of other records."""
