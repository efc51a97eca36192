"""The configuration in words: how values may be spelled, what each key accepts, what is wrong.

pydantic reports its check ("String should match pattern"). Users need the key, its value, and
accepted values. These follow from the annotations of the sections: types, limits, choices, and
:class:`~penstock.config.values.Accepts` where types and limits are unclear.

Keys given on the command line: ``section.key=value`` over a configuration's mapping.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from penstock.config.reading import Place, parse_yaml
from penstock.config.values import Accepts, Old, Unit
from penstock.host.errors import ConfigError

_ALIASES = dict(float32="fp32", float="fp32", bfloat16="bf16", float16="fp16", half="fp16")
"""Names of storage types in torch and elsewhere."""

_SHOWN_LETTERS = 80
"""Letters shown of a key or value; the rest is cut."""

_MOST_COMPLAINTS = 20
"""Mistakes that are listed; more are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Words of other programs. ``of`` returns the answer to one of their keys, None for other
    words; ``remedy`` ends an error with such a key.
    """

    of: Callable[[str], str | None] = lambda word: None
    remedy: str = ""


NO_TRANSLATION = Translation()
"""The words of no other program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Accepted values of a place in the configuration: an annotation with its limits, and with its
    words (:class:`Accepts`) and :class:`Unit`.
    """

    annotation: Any
    limits: tuple[Any, ...] = ()

    @classmethod
    def of(cls, annotation: Any) -> Form:
        """Returns the form of an annotation or of a section's field, with what ``Annotated`` says
        taken off.
        """
        if isinstance(annotation, FieldInfo):
            inner, metadata = cls.of(annotation.annotation), annotation.metadata
        elif get_origin(annotation) is Annotated:
            first, *metadata = get_args(annotation)
            inner = cls.of(first)
        else:
            return cls(annotation=annotation)
        flat = (item.metadata if isinstance(item, FieldInfo) else [item] for item in metadata)
        return cls(annotation=inner.annotation, limits=(*inner.limits, *chain(*flat)))

    @property
    def members(self) -> tuple[Form, ...]:
        """Returns the members of a union, each with the limits of the union, else itself alone."""
        if get_origin(self.annotation) not in (Union, UnionType):
            return (self,)
        limits = tuple(item for item in self.limits if not isinstance(item, Accepts))
        members = (Form.of(member) for member in get_args(self.annotation))
        return tuple(
            Form(annotation=member.annotation, limits=(*member.limits, *limits))
            for member in members
        )

    @property
    def accepted(self) -> str | None:
        """Returns words that say better than type and limits what is accepted, if there are any."""
        return next((item.words for item in self.limits if isinstance(item, Accepts)), None)

    @property
    def unit(self) -> str | None:
        """Returns the unit of the number, if it has one."""
        limits = chain(*(member.limits for member in self.members))
        return next((item.name for item in limits if isinstance(item, Unit)), None)

    @property
    def choices(self) -> tuple[str, ...]:
        """Returns the words among which one is chosen; of a union, those of all members."""
        return tuple(choice for member in self.members for choice in _choices(member.annotation))

    @property
    def accepts_booleans(self) -> bool:
        """Returns whether true and false are values of it."""
        return any(
            member.annotation in (bool, Any) or Any in get_args(member.annotation)
            for member in self.members
        )

    def inner(self, part: str | int) -> Form | None:
        """Returns the form of the value under a key or at a position; None: there is no such
        part.
        """
        for member in self.members:
            annotation, arguments = member.annotation, get_args(member.annotation)
            if _is_section(annotation) and part in annotation.model_fields:
                return Form.of(annotation.model_fields[part])
            if get_origin(annotation) is tuple and isinstance(part, int):
                return Form.of(arguments[0] if ... in arguments else arguments[part])
            if get_origin(annotation) is dict and part != "[key]":
                return Form.of(arguments[1])
        return None

    def __str__(self) -> str:
        """Returns words such as ``a whole number, 1 or more`` or ``true, false or auto``."""
        if self.accepted is not None:
            return self.accepted
        words = [word for member in self.members for word in _words(member)]
        return joined(words, "or")


def spelled(form: Form, value: Any) -> Any:
    """Returns a choice spelled as the configuration has it: ``1F1B`` and ``bfloat16`` become
    ``1f1b`` and ``bf16``. Any other value is returned as it is.
    """
    choices = form.choices
    if not isinstance(value, str) or value in choices:
        return value
    plain = value.strip().lower().replace("_", "-").removeprefix("torch.")
    matches = (word for word in (plain, _ALIASES.get(plain)) if word in choices)
    return next(matches, value)


def check_booleans(form: Form, value: Any) -> None:
    """Refuses true and false, also inside a list or mapping, where numbers are meant: pydantic
    would read them as 1 and 0.

    Raises:
        PydanticCustomError: for the validator that called; :func:`explain` finds the words.
    """
    if section_in(form.annotation) is not None or form.accepts_booleans:
        return  # A section checks its own values.
    parts = value.values() if isinstance(value, dict) else value
    parts = parts if isinstance(value, (dict, list, tuple)) else (value,)
    if any(isinstance(part, bool) for part in parts):
        raise PydanticCustomError("boolean_for_number", "a boolean")


def explain(
    errors: Sequence[ErrorDetails],
    root: type[BaseModel],
    lines: Mapping[Place, int] | None = None,
    translation: Translation = NO_TRANSLATION,
    empty: Sequence[Place] = (),
) -> str:
    """Describes each mistake of a configuration once: the line if ``lines`` has it, key, value,
    remedy. ``translation`` answers unknown keys of other programs. ``empty`` are the places of
    :func:`unwritten_places`.
    """
    errors = [each for each in errors if not any(each["loc"][: len(p)] == p for p in empty)]
    complaints = [(place, _empty_value(place, root)) for place in empty]
    complaints += [(each["loc"], _complaint(each, root, translation)) for each in errors]
    shown = dict.fromkeys(
        _line(place, lines or {}) + words for place, words in complaints[:_MOST_COMPLAINTS]
    )
    more = len(complaints) - _MOST_COMPLAINTS
    translated = any(
        details["type"] == "extra_forbidden"
        and _translated(details["loc"], root, translation) is not None
        for details in errors
    )
    ends = [f"and {more:,} mistakes more"] if more > 0 else []
    ends += [translation.remedy] if translated else []
    return "; ".join([*shown, *ends])


def unwritten_places(places: Sequence[Place], root: type[BaseModel]) -> tuple[Place, ...]:
    """Returns those places of empty values (``adapter:``) that need a written one. An empty section
    has its defaults; any other empty key may be meant for something else than null.
    """
    return tuple(place for place in places if _is_unwritten(place, root))


def _is_unwritten(place: Place, root: type[BaseModel]) -> bool:
    known, form = _find(place, root)
    if len(known) < len(place):
        return section_in(form.annotation) is None  # in a section the key is unknown
    return not _is_section(form.annotation)


def _empty_value(place: Place, root: type[BaseModel]) -> str:
    form = _find(place, root)[1]
    accepted = str(form) or "any value, null too"
    return f"{_key(place)}: is empty; write a value or remove the key; accepted is {accepted}"


def _translated(
    location: Sequence[str | int], root: type[BaseModel], translation: Translation
) -> str | None:
    """Returns the answer to an unknown key of another program; None if the key is one of ours in
    another section, or of no program.
    """
    name = str(location[-1])
    return None if name in keys_of(root).values() else translation.of(name)


def _line(location: Place, lines: Mapping[Place, int]) -> str:
    """Returns ``line 3: `` for the innermost part of a location that is in ``lines``; nothing where
    that is 0.

    The rest of a location names the member of a union, or the validator, that objected.
    """
    parts = (location[:length] for length in range(len(location), 0, -1))
    line = next((lines[part] for part in parts if part in lines), None)
    return f"line {line}: " if line else ""


def _complaint(details: ErrorDetails, root: type[BaseModel], translation: Translation) -> str:
    location = details["loc"]
    if details["type"] == "extra_forbidden":
        return unknown_key(location, root, translation)
    place, form = _find(location, root)
    if details["type"] == "value_error":
        words = details["msg"].removeprefix("Value error, ")
        # What a section objects to names its keys itself.
        section = section_in(form.annotation)
        return words if section is not None else f"{_value(place, details)}: {words}"
    missing = details["type"] == "missing"
    if missing and not isinstance(location[-1], int):
        return f"{_key(place)}: is missing; accepted is {form}"
    if missing:
        place, form = _find(location[:-1], root)
    return f"{_value(place, details)}: accepted is {form}{_advice(form, details['input'])}"


def _find(location: Sequence[str | int], root: type[BaseModel]) -> tuple[list[str | int], Form]:
    """Returns the key that a location of pydantic leads to, and its form. The rest of the location
    names the member of a union, or the validator, that objected.
    """
    place: list[str | int] = []
    form = Form.of(root)
    for part in location:
        inner = form.inner(part)
        if inner is None:
            break
        form = inner
        place.append(part)
    return place, form


def _key(location: Sequence[str | int]) -> str:
    return ".".join(_cut(str(part)) for part in location) or "configuration"


def _value(location: Sequence[str | int], details: ErrorDetails) -> str:
    return f"{_key(location)} = {_cut(repr(details['input']))}"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}…"


def _advice(form: Form, value: Any) -> str:
    """Returns a guess at the intended value; empty without one."""
    if isinstance(value, str):
        close = difflib.get_close_matches(value.lower(), form.choices, n=1)
        return f"; did you mean {close[0]}?" if close else ""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and form.annotation is str:
        return f", in quotes: '\"{value}\"'"
    if isinstance(value, float) and not math.isfinite(value):
        return ", and finite"
    return ""


def accepted_at(key: str, root: type[BaseModel]) -> str:
    """Returns the accepted values of a key such as ``train.steps`` in words."""
    return str(_find(key.split("."), root)[1])


def unknown_key(
    location: Sequence[str | int],
    root: type[BaseModel],
    translation: Translation = NO_TRANSLATION,
) -> str:
    """Reports an unknown key. Names the key that replaces one of another program, or else a similar
    key if there is one, and the keys of its section.
    """
    answer = _translated(location, root, translation)
    if answer is not None:
        return f"{_key(location)}: unknown key; {answer}"
    place, form = _find(location[:-1], root)
    if section_in(form.annotation) is None:
        return f"{_key(location)}: unknown key; {_key(place)} is {form}"
    known = list(listed_fields(form.annotation))
    name = _cut(str(location[-1]))
    close = _similar(name, [*place], known, root)
    hint = f"did you mean {close}? Known keys" if close else "known keys"
    return f"{_key(location)}: unknown key; {hint} are {', '.join(known)}"


def _similar(
    name: str, section: list[str | int], known: Sequence[str], root: type[BaseModel]
) -> str | None:
    """Returns a key that may have been meant: of the section, else of another one, else None."""
    everywhere = keys_of(root)
    for key, last in everywhere.items():
        if last == name:
            return key
    close = difflib.get_close_matches(name.lower(), known, n=1)
    if close:
        return _key([*section, close[0]])
    close = difflib.get_close_matches(name.lower(), everywhere.values(), n=1, cutoff=0.75)
    return next((key for key, last in everywhere.items() if last in close), None)


def keys_of(root: type[BaseModel]) -> dict[str, str]:
    """Returns every key of every section, with its last word."""
    return {
        f"{section}.{name}": name
        for section, field in root.model_fields.items()
        for name in listed_fields(field.annotation)
    }


def listed_fields(section: Any) -> dict[str, FieldInfo]:
    """Returns the keys of a section without old ones; none for any other annotation."""
    kind = section_in(section)
    fields = {} if kind is None else kind.model_fields
    return {
        name: field
        for name, field in fields.items()
        if not any(isinstance(item, Old) for item in field.metadata)
    }


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the section of an annotation, which may leave the choice of null; None: it has
    none.
    """
    members = (member.annotation for member in Form.of(annotation).members)
    return next((member for member in members if _is_section(member)), None)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return tuple(str(member.value) for member in annotation)
    return ()


_PLAIN_WORDS: dict[Any, tuple[str, ...]] = {
    bool: ("true", "false"),
    type(None): ("null",),
    str: ("a text",),
    Path: ("a path",),
}


def _words(form: Form) -> tuple[str, ...]:
    """Returns one member of a union in words, its choices one by one."""
    annotation, arguments = form.annotation, get_args(form.annotation)
    if form.accepted is not None:
        return (form.accepted,)
    if annotation in _PLAIN_WORDS:
        return _PLAIN_WORDS[annotation]
    if annotation in (int, float):
        number = "a whole number" if annotation is int else "a number"
        return (f"{number}{_limits(form.limits)}",)
    if _is_section(annotation):
        return (f"a section with {', '.join(listed_fields(annotation))}",)
    if get_origin(annotation) is tuple:
        some = "a list of any length" if ... in arguments else f"a list of {len(arguments)}"
        return (f"{some}, each {Form.of(arguments[0])}",)
    if get_origin(annotation) is dict:
        return ("a mapping of keys and values",)
    return _choices(annotation)


_BOUNDS = (
    (Ge, "ge", "{} or more"),
    (Gt, "gt", "above {}"),
    (Le, "le", "at most {}"),
    (Lt, "lt", "below {}"),
)


def _limits(limits: Sequence[Any]) -> str:
    """Returns words such as ``, 0 or more and below 1``."""
    bounds = [
        words.format(_bound(getattr(limit, name)))
        for limit in limits
        for kind, name, words in _BOUNDS
        if isinstance(limit, kind)
    ]
    return f", {' and '.join(bounds)}" if bounds else ""


def _bound(limit: float) -> str:
    """Writes a limit as people do: without a needless fraction, large powers of two as such."""
    if limit >= 2**32:
        return f"2^{math.log2(limit):g}"
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def joined(words: Sequence[str], last: str) -> str:
    """Returns ``a, b or c``; with a comma more where words have one themselves."""
    unique = list(dict.fromkeys(words))
    if len(unique) < 2:
        return "".join(unique)
    comma = "," if any("," in word for word in unique) else ""
    return f"{', '.join(unique[:-1])}{comma} {last} {unique[-1]}"


class Section(BaseModel):
    """A mapping with known keys. Nothing under its name stands for all defaults."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_enum_values=False, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, data: Any) -> Any:
        return {} if data is None else data

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        form = Form.of(cls.model_fields[str(info.field_name)])
        check_booleans(form, value)
        return spelled(form, value)


def apply_overrides(data: dict[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    """Returns a copy of a nested mapping with ``section.key=value`` overrides applied in order.

    Raises:
        ConfigError: an override is not of this form, has no value, or takes back one before it.
    """
    changed: dict[str, Any] = _copied(data)
    given: list[tuple[str, ...]] = []
    for override in overrides:
        place = override_place(override)
        if any(before[: len(place)] == place for before in given):
            raise ConfigError(
                f"--set {'.'.join(place)}: is given twice, and the second would take back"
                " the first; give each key once"
            )
        given.append(place)
        _apply_override(changed, place, override)
    return changed


def _copied(value: Any) -> Any:
    """Returns a copy in which nothing is shared: two keys that had one value by an alias do not
    change together.
    """
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def override_place(override: str) -> tuple[str, ...]:
    """Returns the keys of ``section.key=value``.

    Raises:
        ConfigError: an override is not of this form.
    """
    key, separator, _ = override.partition("=")
    place = tuple(key.strip().split("."))
    if not separator or not all(place):
        raise ConfigError(
            f"--set {_cut(override)!r}: write section.key=value, such as train.steps=100"
        )
    return place


def _apply_override(data: dict[str, Any], place: tuple[str, ...], override: str) -> None:
    key, _, text = override.partition("=")
    document = parse_yaml(text, f"--set {key}")
    if document.empty or not text.strip():
        name = _key([*place, *next(iter(document.empty), ())])
        raise ConfigError(f"--set {key}: {name} is empty; write a value or null")
    target = data
    for part in place[:-1]:
        inner = target[part] = {} if target.get(part) is None else target[part]
        if not isinstance(inner, dict):
            raise ConfigError(
                f"--set {key}: {part} is {_cut(repr(inner))}, which has no keys; give {part} as a"
                " mapping"
            )
        target = inner
    target[place[-1]] = document.value
