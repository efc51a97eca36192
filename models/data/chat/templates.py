"""Chat templates: conversations as text, rendered by transformers' own sandbox. No torch.

A template is code of a model's author. transformers renders it in Jinja's immutable sandbox, with
values that are plain data. A rendering has the spans of ``{% generation %}``, and the spans of
messages' text that only reads like a special token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.host.errors import ConfigError, reason
from penstock.models.data.chat.encoder import Span
from penstock.models.data.chat.endings import Endings
from penstock.models.data.chat.forms import Forms, render_template
from penstock.models.data.chat.published.variants import keeps_rendering, training_text
from penstock.models.data.chat.requests import Turn

MODEL, CHATML = "model", "chatml"
"""Values of ``data.chat_template`` that are no path."""

_TOOL_USE = "tool_use"
"""Name of a tokenizer's template for records with tools."""

_DATE = "date_string"
"""Variable of Llama's templates that replaces the date of the day."""

_CHATML = (
    "{% if tools %}{{ raise_exception('the template chatml has no form for tools') }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.tool_calls %}"
    "{{ raise_exception('the template chatml has no form for tool calls') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_MARKS = range(0xF0000, 0xFFFFE)
"""Characters for private use: two that a conversation does not have enclose literal text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """A conversation as text.

    ``generated`` are the spans of ``{% generation %}``, and ``literal`` those of ordinary text that
    reads like a special token; both in order.
    """

    text: str
    generated: tuple[Span, ...] = ()
    literal: tuple[Span, ...] = ()

    @property
    def marks(self) -> list[Span]:
        """The spans of ``{% generation %}``, of which those that touch are one."""
        joined: list[Span] = []
        for first, last in self.generated:
            if joined and joined[-1][1] == first and first < last:
                joined[-1] = (joined[-1][0], last)
            else:
                joined.append((first, last))
        return joined


@dataclass(frozen=True, kw_only=True)
class Template:
    """A chat template. ``name`` is the value of ``data.chat_template``. ``variables`` are the texts
    of special tokens by their names (``bos_token``) and ``data.chat_template_kwargs``.
    ``tools_text`` is another text for records with tools; None without one.
    """

    name: str
    text: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools_text: str | None = None

    def of_tools(self, tools: Sequence[Any] | None) -> Template:
        """Returns the template of a record with these tools, as transformers chooses it."""
        return self if tools is None or self.tools_text is None else self._for_tools

    @cached_property
    def _for_tools(self) -> Template:
        assert self.tools_text is not None
        return Template(name=self.name, text=self.tools_text, variables=self.variables)

    @cached_property
    def forms(self) -> Forms:
        """The forms of values that the template takes."""
        return Forms(self.text, self.variables)

    @cached_property
    def endings(self) -> Endings:
        """The ends of the assistant's turns."""
        return Endings(self.text, self.training, self.variables)

    @cached_property
    def training(self) -> str | None:
        """The text that marks the assistant's turns; None without one."""
        return training_text(self.text)

    @property
    def writes_date(self) -> bool:
        """True if the template writes the date of the day into a conversation."""
        texts = (self.text, self.tools_text or "")
        return any(
            "strftime_now" in text and not (_DATE in text and _DATE in self.variables)
            for text in texts
        )

    @property
    def remedy_of_date(self) -> str:
        """The change that fixes the date of a template."""
        if _DATE in self.text:
            return f'set data.chat_template_kwargs: {{{_DATE}: "26 Jul 2024"}}, or another date'
        return "name a copy of the template with a fixed date in data.chat_template"

    @property
    def keeps_rendering(self) -> bool:
        """True if the training text renders as the template itself does."""
        return keeps_rendering(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A record's conversation for renderings of its parts. Texts of ``special_tokens`` in messages,
    tools and variables are ordinary text.
    """

    place: str
    turns: tuple[Turn, ...]
    tools: tuple[Any, ...] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    special_tokens: Sequence[str] = ()

    def render(
        self,
        template: Template,
        stop: int | None = None,
        *,
        prompts: bool = False,
        training: bool = False,
    ) -> Rendering:
        """Returns the rendering of the first ``stop`` turns, or of all.

        ``prompts`` adds the header of the assistant's next turn. ``training`` takes the template's
        training text.

        Raises:
            ConfigError: the template refuses the conversation, or is no template.
        """
        text = template.training if training else template.text
        assert text is not None
        messages = [dict(turn.fields) for turn in self.turns[:stop]]
        try:
            marks = self._marks()
            given = {**template.variables, **marks.enclose(dict(self.variables))}
            rendered, generated = render_template(
                text,
                marks.enclose(messages),
                tools=None if self.tools is None else marks.enclose(list(self.tools)),
                return_assistant_tokens_mask=training,
                add_generation_prompt=prompts,
                **given,
            )
        except Exception as error:  # a template may raise anything; values may nest too deeply
            raise ConfigError(
                f"{self.place}: data.chat_template = {template.name!r} cannot render the"
                f" conversation: {reason(error)}; change the record or name another template"
            ) from error
        return marks.removed(rendered, tuple(generated[0]) if generated else ())

    def _marks(self) -> _Marks:
        """Returns the marks for the texts of special tokens in this conversation."""
        pattern = re.compile("|".join(map(re.escape, sorted(self.special_tokens, key=len)[::-1])))
        values = ([dict(turn.fields) for turn in self.turns], self.tools, dict(self.variables))
        texts = list(_strings(values)) if pattern.pattern else []
        if not any(pattern.search(text) for text in texts):
            return _Marks()
        taken = set().union(*texts)
        free = [mark for mark in map(chr, _MARKS) if mark not in taken][:2]
        return _Marks(pattern=pattern, opening=free[0], closing=free[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marks:
    """Two characters that enclose the texts of special tokens in a conversation; none without a
    ``pattern``.
    """

    pattern: re.Pattern[str] | None = None
    opening: str = ""
    closing: str = ""

    def enclose(self, value: Any) -> Any:
        """Returns a value with marks in all its texts but keys."""
        pattern = self.pattern
        if pattern is None:
            return value
        return _mapped(value, lambda t: pattern.sub(f"{self.opening}\\g<0>{self.closing}", t))

    def removed(self, text: str, generated: tuple[Span, ...]) -> Rendering:
        """Returns a rendering without marks. A template's string functions may part two marks; a
        mark alone is removed, too.
        """
        if self.pattern is None:
            return Rendering(text=text, generated=generated)
        parts: list[str] = []
        literal: list[Span] = []
        cuts: list[int] = []
        length = start = 0
        opened: int | None = None
        for match in re.finditer(f"[{self.opening}{self.closing}]", text):
            parts.append(text[start : match.start()])
            length += match.start() - start
            start = match.end()
            cuts.append(match.start())
            if match[0] == self.opening:
                opened = length
            elif opened is not None:
                literal.append((opened, length))
                opened = None
        parts.append(text[start:])
        moved = tuple(
            (first - sum(cut < first for cut in cuts), last - sum(cut < last for cut in cuts))
            for first, last in generated
        )
        return Rendering(text="".join(parts), generated=moved, literal=tuple(literal))


def named_template(name: str) -> str | None:
    """Returns the text of the template that ``data.chat_template`` names; None for the template of
    the model's tokenizer.

    Raises:
        ConfigError: the file of the template cannot be read.
    """
    if name == MODEL:
        return None
    if name == CHATML:
        return _CHATML
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template = {name!r}: cannot read the file: {reason(error)}; give"
            f" {MODEL}, {CHATML} or the path of a Jinja template"
        ) from error


def chosen_template(
    name: str, published: str | Mapping[str, str] | None, variables: Mapping[str, Any]
) -> Template:
    """Returns the template that ``data.chat_template`` names.

    ``published`` is the template of the model's tokenizer, or the content of the file ``name``. A
    tokenizer may have several by name. As in transformers, records with tools take ``tool_use``,
    and others take ``default``.

    Raises:
        ConfigError: the model's tokenizer has no template.
    """
    if name == CHATML:
        return Template(name=name, text=_CHATML, variables=variables)
    text = published if isinstance(published, str | None) else published.get("default")
    if not text:
        raise ConfigError(
            f"data.chat_template = {name!r}: there is no template; set {CHATML}, or the path of a"
            " file with a Jinja template"
        )
    tools_text = published.get(_TOOL_USE) if isinstance(published, Mapping) else None
    return Template(name=name, text=text, variables=variables, tools_text=tools_text)


def first_difference(values: Sequence[Any], others: Sequence[Any]) -> int:
    """Returns the first place at which two texts or lists differ."""
    pairs = enumerate(zip(values, others, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(values), len(others)))


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a nested value with all texts changed but keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value


def _strings(value: Any) -> Iterator[str]:
    """Yields all texts of a nested value but keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, (dict, Mapping)):  # the check of a dict alone takes a tenth of the time
        for item in value.values():
            yield from _strings(item)
