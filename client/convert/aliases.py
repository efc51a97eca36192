"""Keys of other trainers in Penstock's words, for errors about unknown keys."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.client.convert.conversion import TOOLS
from penstock.client.convert.keys import Key
from penstock.config.schema import Config
from penstock.config.words import Translation, accepted_at, joined

_SPELLINGS: Mapping[str, str] = {
    **dict.fromkeys(("lora", "qlora", "peft_config", "lora_config"), "use_peft"),
    **dict.fromkeys(("max_seq_len", "model_max_length", "seq_length"), "max_length"),
    **dict.fromkeys(("train_batch_size", "per_gpu_train_batch_size"), "batch_size"),
}
"""Words that other trainers' users write, and a key of :data:`TOOLS` with the same meaning."""


def _translated(word: str) -> str | None:
    """Returns Penstock's key for a key of another trainer, with the accepted values, or the reason
    why Penstock has none. None for a word that no trainer has.
    """
    trainers: dict[str, list[str]] = {}
    name = _SPELLINGS.get(word, word)
    for entry in TOOLS.values():
        key = entry.table.get(entry.old.get(name, name))
        if key is not None:
            titles = trainers.setdefault(_answer(key), [])
            titles.append(entry.title)
    answers = [
        answer.format(f"{word} of {joined(titles, 'and')}") for answer, titles in trainers.items()
    ]
    return "; ".join(answers) or None


def _answer(key: Key) -> str:
    """Returns the answer with ``{}`` in the place of the trainers' key."""
    if not key.places:
        return "Penstock has no {}" + _literal(f" ({key.used or key.why})")
    first, *others = key.places
    places = [f"{first} ({accepted_at(first, Config)})", *others]
    note = f" ({key.note})" if key.note else ""
    return _literal(f"write {joined(places, 'and')} for ") + "{}" + _literal(note)


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


TRAINERS = Translation(
    of=_translated,
    remedy="penstock convert trl, llamafactory, axolotl or peft FILE converts a whole file",
)
"""Words of the trainers of ``penstock convert``."""
