"""The reach of a regular expression: the atoms of its pattern, and those that it repeats.

Patterns are those of Oniguruma, which the library ``tokenizers`` uses. The module refuses
(:class:`CannotTell`) all patterns that it does not know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
_GROUP = re.compile(r"\((?:\?(?:[:=!>]|<[=!]|[imsx-]*:|<[A-Za-z_]\w*>))?")
_FLAGS = re.compile(r"\(\?[ims-]+\)")
_PROPERTY = re.compile(r"\\[pP]\{\^?\w+\}")
_CODE = re.compile(r"\\x\{[0-9A-Fa-f]+\}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}")
_PLACES = frozenset("bBAzZ")
_SETS = frozenset("sSdDwWhH")
_SIGNS = frozenset("rntfvae0")


class CannotTell(Exception):
    """A pattern, or a part of a tokenizer, with unknown reach."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The reach of a pattern.

    ``atoms``: number of single characters, sets and places in the pattern. ``repeated``: for each
    repetition the atoms in it, as patterns of one character.
    """

    atoms: int
    repeated: tuple[tuple[str, ...], ...]


def reach_of(pattern: str) -> Reach:
    """Returns the reach of a pattern.

    Raises:
        CannotTell: the pattern has parts that this module does not know.
    """
    scan = _Scan(pattern)
    scan.alternatives()
    if scan.place != len(pattern):
        raise CannotTell(pattern)
    return Reach(scan.atoms, tuple(scan.repeated))


@dataclass(slots=True)
class _Scan:
    """A walk over a pattern."""

    pattern: str
    place: int = 0
    atoms: int = 0
    repeated: list[tuple[str, ...]] = field(default_factory=list)

    def alternatives(self) -> tuple[str, ...]:
        """Reads up to the end of a group; returns the atoms in it."""
        atoms: tuple[str, ...] = ()
        while self.place < len(self.pattern) and self.pattern[self.place] != ")":
            if self.pattern[self.place] == "|":
                self.place += 1
                continue
            part = self._part()
            atoms += part
            while match := _QUANTIFIER.match(self.pattern, self.place):
                self.place = match.end()
                if _repeats(match) and part:
                    self.repeated.append(part)
        return atoms

    def _part(self) -> tuple[str, ...]:
        """Reads an atom or a group; returns the atoms that match a character."""
        sign = self.pattern[self.place]
        if sign == "(":
            return self._group()
        start = self.place
        self.atoms += 1
        if sign in "^$":
            self.place += 1
            return ()
        if sign in "*+?{":
            raise CannotTell(self.pattern)
        if sign == "[":
            self._skip_set()
        elif sign == "\\":
            if self._skip_escape():
                return ()
        else:
            self.place += 1
        return (self.pattern[start : self.place],)

    def _group(self) -> tuple[str, ...]:
        if flags := _FLAGS.match(self.pattern, self.place):
            self.place = flags.end()
            return ()
        opening = _GROUP.match(self.pattern, self.place)
        signs = self.pattern[self.place : self.place + 2]
        if opening is None or (opening.group() == "(" and signs in ("(?", "(*", "(")):
            raise CannotTell(self.pattern)
        if "x" in opening.group().partition("<")[0]:
            raise CannotTell(self.pattern)
        self.place = opening.end()
        atoms = self.alternatives()
        if self.pattern[self.place : self.place + 1] != ")":
            raise CannotTell(self.pattern)
        self.place += 1
        return atoms

    def _skip_set(self) -> None:
        """Moves behind a set in brackets, which may hold other sets."""
        depth = 0
        while self.place < len(self.pattern):
            sign = self.pattern[self.place]
            self.place += 2 if sign == "\\" else 1
            if sign == "[":
                depth += 1
                rest = self.pattern[self.place : self.place + 2]
                self.place += 2 if rest == "^]" else 1 if rest[:1] in ("]", "^") else 0
            elif sign == "]":
                depth -= 1
                if depth == 0:
                    return
        raise CannotTell(self.pattern)

    def _skip_escape(self) -> bool:
        """Moves behind an escape; returns True if it names a place and no character."""
        for known in (_PROPERTY, _CODE):
            if match := known.match(self.pattern, self.place):
                self.place = match.end()
                return False
        letter = self.pattern[self.place + 1 : self.place + 2]
        if not letter or (letter.isalnum() and letter not in _PLACES | _SETS | _SIGNS):
            raise CannotTell(self.pattern)
        self.place += 2
        return letter in _PLACES


def _repeats(match: re.Match[str]) -> bool:
    if match.group() in "*+":
        return True
    if match.group() == "?":
        return False
    least, comma, most = match.groups()
    return bool(comma and not most) or int(most or least or 0) > 1
