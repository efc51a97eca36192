"""Places of tokens in a text, from the widths of tokens alone. No torch.

The library takes a quarter of its time to find the places. With byte-level BPE each byte of a text
is in one token, so the widths of the tokens in bytes give the same places.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import models

_PROBE = "a  b\n\n c\t1234 é水🙂 ​don't "
_CONTINUATION = 0x80
"""Second and later bytes of a character are below 0xC0 and at least this."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """First character of each token, and the one behind its last, both (tokens,)."""

    firsts: NDArray[np.int64]
    ends: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Widths:
    """Bytes of each token of a tokenizer, by id. ``composes`` is True if the tokenizer changes
    texts that are not in Unicode's form NFC.
    """

    by_id: NDArray[np.int64]
    composes: bool

    @classmethod
    def of(cls, tokenizer: HubTokenizer) -> Widths | None:
        """Returns the widths of a byte-level BPE; None for other tokenizers, and for those that
        move places.
        """
        parts = [_settings(part) for part in (tokenizer.normalizer, tokenizer.pre_tokenizer)]
        normalizers, cutters = _flat(parts[0], "normalizers"), _flat(parts[1], "pretokenizers")
        after = _flat(_settings(tokenizer.post_processor), "processors")
        model = tokenizer.model
        is_bytes = (
            isinstance(model, models.BPE)
            and model.unk_token is None
            and all(part["type"] == "NFC" for part in normalizers)
            and bool(cutters)
            and cutters[-1]["type"] == "ByteLevel"
            and not cutters[-1]["add_prefix_space"]
            and all(part["type"] != "ByteLevel" or not part["trim_offsets"] for part in after)
        )
        if not is_bytes:
            return None
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        added = tokenizer.get_added_tokens_decoder()
        by_id = np.zeros(max([*vocabulary.values(), *added], default=0) + 1, dtype=np.int64)
        for token, number in vocabulary.items():
            by_id[number] = len(token)  # a character stands for each byte
        for number, special in added.items():
            by_id[number] = len(special.content.encode())
        widths = cls(by_id=by_id, composes=bool(normalizers))
        return widths if widths._holds(tokenizer) else None

    def places(self, text: str, ids: Sequence[int]) -> Places | None:
        """Returns the places of a text's tokens; None where widths do not give them."""
        if self.composes and not (text.isascii() or unicodedata.is_normalized("NFC", text)):
            return None
        ends = np.cumsum(self.by_id[np.array(ids, dtype=np.int64)])
        content = text.encode()
        if not len(ends) or ends[-1] != len(content):
            return None  # a token may have taken white space
        firsts = np.concatenate([[0], ends[:-1]])
        if text.isascii():
            return Places(firsts, ends)
        leads = np.frombuffer(content, dtype=np.uint8) & 0xC0 != _CONTINUATION
        characters = np.cumsum(leads)
        return Places(characters[firsts] - 1, characters[ends - 1])

    def _holds(self, tokenizer: HubTokenizer) -> bool:
        """Returns whether the places of a text are those of the library."""
        made = tokenizer.encode(_PROBE, add_special_tokens=False)
        places = self.places(_PROBE, made.ids)
        return places is not None and made.offsets == list(
            zip(places.firsts.tolist(), places.ends.tolist(), strict=True)
        )


def _settings(part: Any) -> Mapping[str, Any] | None:
    """Returns the settings of a part of a tokenizer, as ``tokenizer.json`` has them."""
    if part is None:
        return None
    settings: Mapping[str, Any] = json.loads(part.__getstate__())
    return settings


def _flat(settings: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """Returns the parts of a sequence; one part as a list."""
    if settings is None:
        return []
    if settings["type"] != "Sequence":
        return [settings]
    return [part for inner in settings[key] for part in _flat(inner, key)]
