"""Columns of a record without a reader: known names are refused, and all others are counted. No
torch.

Names are known in their plain form: ``lossMask`` and ``Loss-Mask`` are ``loss_mask``. Null and
empty values have no content, since the records of a file may share their columns. A source's
``columns: {NAME: null}`` says that its user leaves a column out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.host.errors import ConfigError
from penstock.models.data.chat.requests import Format, refused
from penstock.models.data.reading.record import shown_name

_PICTURES = frozenset(
    {
        *("image", "images", "img", "imgs", "picture", "pictures", "photo", "photos"),
        *("image_path", "image_paths", "image_url", "image_urls", "image_file", "image_files"),
        *("pixel_values", "image_grid_thw", "image_sizes", "image_bytes"),
        *("video", "videos", "video_path", "audio", "audios", "audio_path", "input_features"),
    }
)
"""Names of pictures, films and sounds."""

_PROMPTS = (
    *("prompt", "instruction", "question", "query", "problem", "prompts", "user_prompt", "post"),
    *("messages", "conversations", "conversation", "dialog", "dialogue", "history"),
    *("user_input", "user", "human", "input", "inputs", "context", "text"),
)
"""Names of prompts; the first one with content is the remedy."""

_TALKS = frozenset({"messages", "conversations", "conversation", "dialog", "dialogue", "history"})
_INPUTS = frozenset({"context", "question", "query", "input", "inputs", "input_text", "passage"})
"""Names of the second part of an instruction."""

_REFERENCES = frozenset({"ref_chosen_logps", "ref_rejected_logps"}) | frozenset(
    {"reference_chosen_logps", "reference_rejected_logps"}
)
"""TRL's names of a pair's log-probabilities, which replace those of the model at the start."""

_LABELS = frozenset({"label", "label_ids", "target", "targets", "target_ids"})
_WEIGHTS = frozenset({"weights", "token_weights", "loss_weights", "loss_scale"})
_TOOLS = frozenset({"functions", "function", "tool", "available_tools"})
_VERDICTS = frozenset({"label", "kto_tag"})
"""Names of KTO's verdict on an answer: false stands for an answer to keep away from."""

_HARMLESS_MASKS = frozenset({"special_tokens_mask"})
_ADDITIONS = ("system", "tools", "history", "query")
"""Names that some formats have no place for."""

_SHOWN_COLUMNS = 8
"""Columns without a reader that a line names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """The columns of a record with content that no reader takes.

    ``taken`` maps the columns that a reader has asked for to names of this package. ``columns`` are
    those of :class:`~penstock.models.data.chat.requests.RecordForm`.
    """

    place: str
    fields: Mapping[str, Any]
    taken: Mapping[str, str]
    columns: Mapping[str, str | None]
    kind: Format

    def names(self, left_out: frozenset[str]) -> Iterator[str]:
        """Yields the columns; ``left_out`` are columns that the user leaves out."""
        for column, value in self.fields.items():
            if column not in self.taken and column not in left_out and _has_content(value):
                yield column

    def check(self, column: str) -> None:
        """Refuses a column that has a meaning for training.

        Raises:
            ConfigError: the column has one.
        """
        plain, value = _plain(column), self.fields[column]
        self._check_mapped(column, value)
        for other, name in self.taken.items():
            if _plain(other) == plain and not _has_content(self.fields.get(other)):
                raise self._refused(column, f"is not the column {shown_name(other)}", name)
        if plain in _PICTURES:
            raise self._refused(column, "only texts are read, and the answer may depend on it")
        if plain in _REFERENCES and "chosen" in self.taken.values():
            raise self._refused(column, "the start computes the references itself")
        for check in _CHECKS.get(self.kind, ()):
            check(self, column, plain, value)
        if "mask" in plain and plain not in _HARMLESS_MASKS and _hides(value):
            ready = self.kind is Format.TOKENS
            cause = "no reader takes a mask of this name" if ready else "masks go with input_ids"
            raise self._refused(column, cause, "completion_mask" if ready else "")

    def _check_mapped(self, column: str, value: Any) -> None:
        """Refuses a column that the user has named for a format without a place for it."""
        for name in _ADDITIONS:
            if self.columns.get(name) == column:
                raise refused(
                    self.place,
                    shown_name(column),
                    value,
                    f"columns names it as {name}, and the format {self.kind.value} has no"
                    f" {name}; remove {name} from columns, or use the format alpaca or chat",
                )

    def pair(self, column: str, plain: str, value: Any) -> None:
        """Refuses the prompt of a pair under another name."""
        if plain not in _PROMPTS or self._in_answers(value):
            return
        if not self._lacks("prompt"):
            prompt = next((c for c, name in self.taken.items() if name == "prompt"), "")
            if _plain(prompt) == "instruction" and plain in _INPUTS:
                raise self._refused(column, "format alpaca reads it with an instruction")
            return
        full = {_plain(c): c for c, v in reversed(list(self.fields.items())) if _has_content(v)}
        first = next(full[name] for name in _PROMPTS if name in full)
        shown, value = shown_name(first), self.fields[first]
        if not any(isinstance(self.fields.get(c), str) for c in self.taken):
            raise self._refused(first, "is in no turn that both answers begin with")
        reading = f"set columns: {{prompt: {shown}}} to read it"
        if isinstance(value, list | tuple) and _plain(first) in _TALKS:
            reading = f"set format: chat and columns: {{messages: {shown}}} to read it"
        elif _plain(first) == "instruction":
            reading = f"set format: alpaca to read it with an input, {reading.removeprefix('set ')}"
        raise refused(
            self.place,
            shown,
            value,
            f"the pair has no prompt; {reading}, or columns: {{prompt: null}} of its source for"
            " answers to no prompt",
        )

    def ids(self, column: str, plain: str, value: Any) -> None:
        """Refuses labels and weights of ready ids under another name, and several samples."""
        if plain in _LABELS and self._lacks("labels") and isinstance(value, list | tuple):
            raise self._refused(column, "the ids have no labels", "labels")
        if plain in _WEIGHTS and _flat_numbers(value) and any(number != 1 for number in value):
            cause = "data.objective: weighted reads weights of ids; set it"
            raise self._refused(column, cause, "weights" if column != "weights" else "")
        if _holds_samples(plain, value):
            raise self._refused(column, "the ids are several samples; write a record for each")

    def answer(self, column: str, plain: str, value: Any) -> None:
        """Refuses an answer that is marked as a bad one."""
        if plain in _VERDICTS and value is False:
            raise self._refused(column, "the answer is marked as a bad one; remove the record")

    def chat(self, column: str, plain: str, value: Any) -> None:
        """Refuses tools of a conversation under another name."""
        if plain in _TOOLS and self._lacks("tools") and isinstance(value, str | list | tuple):
            raise self._refused(column, "the conversation has no tools", "tools")

    def instruction(self, column: str, plain: str, value: Any) -> None:
        """Refuses a second part of an instruction under another name."""
        if plain in _INPUTS and self._lacks("query") and isinstance(value, str):
            raise self._refused(column, "the instruction has no input", "query")

    def _lacks(self, name: str) -> bool:
        """Returns whether a reader has asked for a name, and found no content in its column."""
        columns = [column for column, taken in self.taken.items() if taken == name]
        return any(not _has_content(self.fields.get(column)) for column in columns)

    def _in_answers(self, value: Any) -> bool:
        """Returns whether both answers of a pair have a text in them."""
        answers = [
            self.fields.get(column)
            for column, name in self.taken.items()
            if name in ("chosen", "rejected")
        ]
        return isinstance(value, str) and all(occurs(value, answer) for answer in answers)

    def _refused(self, column: str, cause: str, name: str = "") -> ConfigError:
        """Returns the error for a column. ``name``: the name under which a reader takes it."""
        shown = shown_name(column)
        reading = f"set columns: {{{name}: {shown}}} to read it, or " if name else "set "
        return refused(
            self.place,
            shown,
            self.fields[column],
            f"{cause}; {reading}columns: {{{shown}: null}} of its source to train without it",
        )


def unread_line(source: str, counts: Mapping[str, int]) -> str:
    """Returns the line about the columns of a source that no reader takes, with the number of their
    records.
    """
    listed = [
        f"{shown_name(column)} ({count:,} record{'s' * (count > 1)})"
        for column, count in itertools.islice(counts.items(), _SHOWN_COLUMNS)
    ]
    rest = len(counts) - len(listed)
    more = f" and {rest:,} more" if rest else ""
    return f"{source}: reads no column {', '.join(listed)}{more}"


def occurs(text: str, value: Any) -> bool:
    """Returns whether a text occurs in another one, or in a message of a list; spaces and ends of
    lines do not matter.
    """
    if isinstance(value, str):
        return " ".join(text.split()) in " ".join(value.split())
    if isinstance(value, list | tuple):
        return any(occurs(text, item) for item in value)
    if isinstance(value, Mapping):
        return any(occurs(text, item) for item in value.values())
    return False


_Check = Callable[[Unread, str, str, Any], None]
_CHECKS: Mapping[Format, Sequence[_Check]] = {
    Format.PREFERENCE: (Unread.pair, Unread.chat),
    Format.TOKENS: (Unread.ids,),
    Format.COMPLETION: (Unread.answer, Unread.chat),
    Format.CHAT: (Unread.answer, Unread.chat),
    Format.ALPACA: (Unread.answer, Unread.chat, Unread.instruction),
    Format.STANFORD: (Unread.answer, Unread.instruction),
}
"""Checks of a column by the format of its record, next to those of all formats."""


def _plain(name: str) -> str:
    """Returns a name in small letters, with ``_`` between its words."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"\W+", "_", words).strip("_").lower()


def _has_content(value: Any) -> bool:
    """Returns whether a value is neither null nor empty."""
    if isinstance(value, str):
        return bool(value.strip())
    return value is not None and (not isinstance(value, list | tuple | dict) or len(value) > 0)


def _flat_numbers(value: Any) -> bool:
    """Returns whether a value is a list of numbers or booleans."""
    return isinstance(value, list | tuple) and all(isinstance(item, int | float) for item in value)


def _hides(value: Any) -> bool:
    """Returns whether a value is a mask, nested or not, that hides a token."""
    if not isinstance(value, list | tuple):
        return False
    if value and all(isinstance(item, list | tuple) for item in value):
        return any(_hides(item) for item in value)
    return _flat_numbers(value) and any(item != 1 for item in value)


def _holds_samples(plain: str, value: Any) -> bool:
    """Returns whether a column says that the ids of a record are several samples."""
    if not _flat_numbers(value):
        return False
    match plain:
        case "seq_lengths" | "sequence_lengths":
            return len(value) > 1
        case "position_ids":
            return list(value) != list(range(len(value)))
        case "segment_ids" | "document_ids" | "sample_ids":
            return len(set(value)) > 1
    return False
