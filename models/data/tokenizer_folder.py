"""The tokenizer of a model's folder, opened as ``transformers.AutoTokenizer`` opens it. No torch.

transformers chooses the class by the folder's files and by the model's type, so that token ids are
those that the model has seen. Code that a folder brings along is never run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as HubTokenizer

from penstock.host.errors import ConfigError, reason
from penstock.host.files import DAMAGED, is_file, parse_json
from penstock.models.data.chat.encoder import SPECIAL, ChatParts, added_ids
from penstock.models.data.pieces.encoding import Encoded, Guard, encode_documents, unbounded, whole
from penstock.models.data.reading.records import Document

_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spm.model",
    "tiktoken.model",
    "tekken.json",
    "*.tiktoken",
)
"""Files one of which every tokenizer has."""

_COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "normalizer.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""Other files of the folder that belong to the tokenizer."""

_HOW_TO_SET = (
    "download its files again, or set data.tokenizer to a tokenizer.json or the folder of one"
)


class FolderTokenizer:
    """A tokenizer in a folder; its ``config.json`` may name class and end token."""

    def __init__(
        self, folder: Path, *, key: str, known_ends: Sequence[str], needs_end: bool = True
    ) -> None:
        """Opens the tokenizer.

        ``key`` is the key that names the folder. ``known_ends`` are end tokens to search if neither
        tokenizer nor model names one. ``needs_end``: refuse a tokenizer without an end token.

        Raises:
            ConfigError: there is no tokenizer, transformers cannot open it, or it has no end token.
            StateError: one of its files is no regular file.
        """
        # Imported here: it takes seconds, and neither bytes nor files alone need it.
        from transformers import AutoTokenizer

        self._name = f"{key} = {str(folder)!r}"
        self._folder = folder
        if not has_tokenizer(folder):
            raise ConfigError(
                f"{self._name}: the folder has no tokenizer (such as tokenizer.json, vocab.json or"
                f" tokenizer.model); {_HOW_TO_SET}"
            )
        for path in (folder / "config.json", *_files(folder)):
            is_file(path)  # A FIFO would be read without an end.
        load: Any = AutoTokenizer.from_pretrained
        try:
            self._tokenizer = load(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(
                f"{self._name}: transformers cannot open its tokenizer ({reason(error)});"
                f" {_HOW_TO_SET}"
            ) from error
        # If files are missing, transformers makes a tokenizer of special tokens only.
        if len(self._tokenizer.get_vocab()) <= len(self._tokenizer.all_special_ids):
            raise ConfigError(f"{self._name}: its tokenizer has no vocabulary; {_HOW_TO_SET}")
        self.eos: int | None = self._find_end(known_ends)
        if self.eos is None and needs_end:
            raise ConfigError(
                f"{self._name}: its tokenizer has no end token; name one as eos_token in"
                f" {folder / 'tokenizer_config.json'}, or as data.eos"
            )

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return int(max(self._tokenizer.get_vocab().values())) + 1

    @property
    def mask(self) -> int | None:
        """The tokenizer's own mask token."""
        number = getattr(self._tokenizer, "mask_token_id", None)
        return number if isinstance(number, int) else None

    @property
    def bos(self) -> int | None:
        """The tokenizer's own bos token, else its cls token."""
        names = ("bos_token_id", "cls_token_id")
        ids = (getattr(self._tokenizer, name, None) for name in names)
        return next((number for number in ids if isinstance(number, int)), None)

    @property
    def prefix(self) -> tuple[int, ...]:
        """The ids that transformers puts in front with ``add_special_tokens=True``."""
        return tuple(added_ids(self._ids)[0])

    def token_id(self, text: str) -> int | None:
        """Returns the id of a token by its text."""
        number = self._tokenizer.get_vocab().get(text)
        return number if isinstance(number, int) else None

    def encode_documents(
        self, documents: Iterable[Document], guard: Guard = unbounded
    ) -> Iterator[Encoded]:
        """Yields the ids of documents in parts; long ones are encoded in pieces, where transformers
        has the tokenizer of the library ``tokenizers``.
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if isinstance(backend, HubTokenizer):
            self._ids("", False)  # sets the backend up as each call of transformers does
            yield from encode_documents(documents, backend, guard)
            return
        for piece in whole(documents):
            with guard(piece.length):
                ids = np.asarray(self._ids(piece.text, False), dtype=np.uint32)
            yield Encoded(piece.document, ids, ends=True)

    def chat_parts(self) -> ChatParts:
        """Returns the library's tokenizer, and special tokens and template as transformers reads
        them.

        Raises:
            ConfigError: transformers has the tokenizer in Python alone.
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, HubTokenizer):
            raise ConfigError(
                f"{self._name}: its tokenizer has no tokenizer.json, which samples of records need"
            )
        self._ids("", False)  # sets the backend up as each call of transformers does
        named = {name: getattr(self._tokenizer, name, None) for name in SPECIAL}
        special = {name: str(text) for name, text in named.items() if text is not None}
        return ChatParts(
            library=backend,
            special=special,
            template=getattr(self._tokenizer, "chat_template", None),
            end=self._end_text(backend),
        )

    def _end_text(self, backend: HubTokenizer) -> str | None:
        """Returns the text of the token that ends a document.

        Raises:
            ConfigError: the tokenizer does not make the token of its text.
        """
        if self.eos is None:
            return None
        text: str | None = backend.id_to_token(self.eos)
        if backend.encode(text or "", add_special_tokens=False).ids != [self.eos]:
            raise ConfigError(
                f"{self._name}: its end token is {text!r}, and its tokenizer makes other tokens of"
                f" this text; name it as eos_token in {self._folder / 'tokenizer_config.json'}"
            )
        return text

    def files(self) -> dict[str, bytes]:
        """Returns the folder's files as they are: vocabulary, settings, special tokens,
        templates.
        """
        return tokenizer_files(self._folder)

    def _ids(self, text: str, special: bool) -> list[int]:
        encoded = self._tokenizer(
            text, add_special_tokens=special, padding=False, truncation=False, verbose=False
        )
        ids: list[int] = encoded["input_ids"]
        return ids

    def _find_end(self, known_ends: Sequence[str]) -> int | None:
        """Returns the tokenizer's end token, else the model's, else one that is known by its
        name.
        """
        vocabulary = self._tokenizer.get_vocab()
        ids = set(vocabulary.values())
        named = [vocabulary.get(token) for token in known_ends]
        for token in (self._tokenizer.eos_token_id, *_model_ends(self._folder), *named):
            if isinstance(token, int) and token in ids:
                return token
        return None


def has_tokenizer(folder: Path) -> bool:
    """Returns True if a folder holds the vocabulary of a tokenizer."""
    return any(True for pattern in _VOCABULARIES for _ in folder.glob(pattern))


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Returns the files that belong to a folder's tokenizer: path below the folder -> content.

    Raises:
        ConfigError: one cannot be read.
    """
    try:
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in _files(folder)
            if path.is_file()
        }
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot read it: {error.strerror}") from error


def _files(folder: Path) -> list[Path]:
    """Returns the existing paths that a tokenizer's files may have."""
    patterns = (*_VOCABULARIES, *_COMPANIONS)
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def _model_ends(folder: Path) -> list[Any]:
    """Returns the end tokens in the model's own ``config.json``, without defaults of its type."""
    try:
        end = parse_json((folder / "config.json").read_bytes())["eos_token_id"]
    except (OSError, *DAMAGED):
        return []
    return end if isinstance(end, list) else [end]
