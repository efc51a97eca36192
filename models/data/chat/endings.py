"""Ends of the assistant's turns: whether a template ends them, and by which mark. No torch.

A model learns to stop from the text behind an answer. Some templates write none: the mark of the
next role ends the turn. TRL's training template of GLM-4 counts this mark behind the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.models.data.chat.encoder import Span
from penstock.models.data.chat.forms import contents, probe_call, render_template
from penstock.models.data.chat.requests import ASSISTANT, SYSTEM, TOOL, USER, Turn

_ANSWER, _NEXT = "zqxanswer", "zqxnext"
_SHOWN = 100
"""Characters of a template's line in messages."""
_LINES = ("endgeneration", "assistant.*content", "content", "assistant", "")
"""Patterns of the line that writes the assistant's turns; the first one that occurs decides."""


class Endings:
    """Ends of the assistant's turns in renderings of a template. ``training`` is its text with
    marks of the assistant's turns; None without one.
    """

    def __init__(self, text: str, training: str | None, variables: Mapping[str, Any]) -> None:
        self._text, self._training, self._variables = text, training, variables
        self._closed: dict[bool, bool] = {}
        self._marks: dict[str, str] = {}

    def is_closed(self, *, training: bool) -> bool:
        """Returns whether the text that counts goes on behind an answer. True where the template
        refuses all probes.
        """
        if training not in self._closed:
            ends = list(self._ends(training))
            self._closed[training] = not ends or any(end.strip() for end in ends)
        return self._closed[training]

    def mark_behind(self, turns: Sequence[Turn], number: int, special_tokens: Sequence[str]) -> str:
        """Returns the mark of the next role that ends a turn, as in TRL's training template of
        GLM-4. A tool's mark ends calls; the system's or the user's ends other turns.
        """
        if turns[number].fields.get("tool_calls"):
            return self.mark(TOOL, special_tokens)
        is_system = number + 1 < len(turns) and turns[number + 1].role == SYSTEM
        return self.mark(SYSTEM if is_system else USER, special_tokens)

    def mark(self, role: str, special_tokens: Sequence[str]) -> str:
        """Returns the special token at the front of a turn of ``role`` behind an answer, with the
        white space before the token. An empty text: there is none.
        """
        if role not in self._marks:
            self._marks[role] = self._front(role, special_tokens)
        return self._marks[role]

    @property
    def line(self) -> str:
        """The template's line that writes the assistant's turns, with its number."""
        lines = self._text.splitlines() or [""]
        number = next(n for p in _LINES for n, line in enumerate(lines) if re.search(p, line))
        text = lines[number].strip()
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        return f"line {number + 1}: {shown!r}"

    def _ends(self, training: bool) -> Iterator[str]:
        """Yields the text that counts behind the answer of each probe."""
        for text, spans in self._probed(USER if training else None, training=training):
            behind = text.index(_ANSWER) + len(_ANSWER)
            stop = text.index(_NEXT) if _NEXT in text else len(text)
            marked = spans if training else [(0, len(text))]
            yield "".join(text[max(first, behind) : min(last, stop)] for first, last in marked)

    def _front(self, role: str, special_tokens: Sequence[str]) -> str:
        """Returns the mark at the front of a turn, without a cache."""
        calls = role == TOOL
        whole = [text for text, _ in self._probed(role, calls=calls)]
        for cut, _ in self._probed(calls=calls):
            for text in whole:
                rest = text[len(cut) :] if text.startswith(cut) else ""
                space = rest[: len(rest) - len(rest.lstrip())]
                tokens = [token for token in special_tokens if rest.startswith(token, len(space))]
                if tokens:
                    return space + max(tokens, key=len)
        return ""

    def _probed(
        self, after: str | None = None, *, calls: bool = False, training: bool = False
    ) -> Iterator[tuple[str, Sequence[Span]]]:
        """Yields the rendering with an answer, and a turn of the role ``after`` behind the answer.
        Contents are texts, or parts where the template does not print texts.
        """
        template = self._training if training else self._text
        for question, answer, following in zip(
            contents("zqxquestion"), contents(_ANSWER), contents(_NEXT), strict=True
        ):
            messages = [
                {"role": USER, "content": question},
                {"role": ASSISTANT, "content": answer},
            ]
            if calls:
                messages[1]["tool_calls"] = [probe_call({})]
            if after is not None:
                messages.append({"role": after, "content": following})
            try:
                text, spans = render_template(
                    template or "",
                    messages,
                    return_assistant_tokens_mask=training,
                    **self._variables,
                )
            except Exception:  # a template may raise anything
                continue
            if _ANSWER in text:
                yield text, spans[0] if spans else ()
                return
