"""Tokens around documents: ``data.bos`` and ``data.eos`` as token ids. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.config.schema import Config
from penstock.config.values import AUTO
from penstock.host.errors import ConfigError
from penstock.models.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Token ids ``before`` and ``after`` each document of text; each of ``ends`` ends a document if
    documents are kept apart.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def recorded_ends(self) -> int | list[int] | None:
        """The value of ``eos`` in ``meta.json``: a number, a list of several, None without any."""
        return list(self.ends) if len(self.ends) > 1 else next(iter(self.ends), None)


def marks_of_text(config: Config, tokenizer: Tokenizer) -> Marks:
    """Returns the marks that ``tokenizer`` and the keys give documents of text.

    Raises:
        ConfigError: a key names a token that the tokenizer lacks.
    """
    ends = _ends(config, tokenizer)
    return Marks(before=_before(config, tokenizer), after=ends[:1], ends=ends)


def marks_of_numbers(config: Config, model_eos: Any, vocab_size: int) -> Marks:
    """Returns the marks of a token file. ``model_eos`` is ``eos_token_id`` of the model: a number,
    a list of numbers, or None.

    Raises:
        ConfigError: ``data.eos`` names a token beyond the vocabulary.
    """
    keyed = config.data.eos
    if keyed != AUTO:
        ends = tuple(token for token in _tokens(keyed) if isinstance(token, int))
        for token in ends:
            _check_range(token, vocab_size)
        return Marks(ends=ends)
    candidates = model_eos if isinstance(model_eos, list) else [model_eos]
    return Marks(ends=tuple(dict.fromkeys(t for t in candidates if type(t) is int)))


def end_ids(recorded: Any) -> tuple[int, ...]:
    """Returns the ids that ``eos`` of ``meta.json`` lists."""
    if recorded is None:
        return ()
    return tuple(recorded) if isinstance(recorded, list) else (int(recorded),)


def _before(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    if config.data.bos is False:
        return ()
    if tokenizer.prefix or config.data.bos == AUTO:
        return tokenizer.prefix
    if tokenizer.bos is None:
        raise ConfigError(
            f"data.bos = true: tokenizer {config.tokenizer!r} has no bos token; set data.bos to"
            " auto or false, or name a bos_token in its tokenizer_config.json"
        )
    return (tokenizer.bos,)


def _ends(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    if config.data.eos == AUTO:
        assert tokenizer.eos is not None  # open_tokenizer refuses a tokenizer without an end token
        return (tokenizer.eos,)
    ids = []
    for token in _tokens(config.data.eos):
        number = tokenizer.token_id(token) if isinstance(token, str) else token
        if number is None:
            raise ConfigError(
                f"data.eos = {token!r}: tokenizer {config.tokenizer!r} has no such token; give the"
                " text of a token of its vocabulary, or a number"
            )
        _check_range(number, tokenizer.vocab_size)
        ids.append(number)
    return tuple(dict.fromkeys(ids))


def _tokens(eos: Any) -> tuple[int | str, ...]:
    return eos if isinstance(eos, tuple) else ()


def _check_range(token: int, vocab_size: int) -> None:
    if token >= vocab_size:
        raise ConfigError(
            f"data.eos = {token}: the vocabulary has {vocab_size:,} tokens; give a number below"
        )
