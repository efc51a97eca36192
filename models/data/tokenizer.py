"""Text to token ids: the byte tokenizer, a ``tokenizer.json`` alone, or the tokenizer of a folder
(:mod:`penstock.models.data.tokenizer_folder`). No torch.

All end every document with an end-of-sequence token and can write themselves in the form that
``transformers.AutoTokenizer`` reads, so that exported models carry their tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import decoders, models, pre_tokenizers

from penstock.config.hub_names import from_hub
from penstock.config.schema import Config
from penstock.config.values import AUTO, BYTE, MASKED
from penstock.host.errors import ConfigError, reason
from penstock.host.files import DAMAGED, is_file, parse_json
from penstock.models.data.chat.encoder import SPECIAL, ChatParts, added_ids
from penstock.models.data.pieces.encoding import Encoded, Guard, encode_documents, end_of, unbounded
from penstock.models.data.reading.records import Document
from penstock.models.data.tokenizer_folder import FolderTokenizer

END_OF_TEXT = "<|endoftext|>"

MASK = "<mask>"
_SETTINGS = "tokenizer_config.json"
_ADDITIONAL, _DEFAULT = "additional_chat_templates/*.jinja", "default"
"""Files of other chat templates, and the name of the first one."""
_KNOWN_MASKS = ("[MASK]", MASK)
_KNOWN_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[EOS]", "<end>")


class Tokenizer(Protocol):
    """An object that turns documents into tokens."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def bos(self) -> int | None:
        """The id that the settings name for a beginning; None without one."""

    @property
    def prefix(self) -> tuple[int, ...]:
        """The ids in front of a text with special tokens."""

    @property
    def eos(self) -> int | None:
        """The id that ends a document; None without one, where ``data.eos`` decides."""

    @property
    def mask(self) -> int | None:
        """The id that replaces a masked token; None without one."""

    def token_id(self, text: str) -> int | None:
        """Returns the id of the token with this text; None without such a token."""

    def encode_documents(
        self, documents: Iterable[Document], guard: Guard = unbounded
    ) -> Iterator[Encoded]:
        """Yields the ids of documents in parts, those of one call each, without marks. Each call of
        a library is within ``guard``.

        Raises:
            ConfigError: a document is too long.
        """

    def chat_parts(self) -> ChatParts:
        """Returns what conversations need.

        Raises:
            ConfigError: a file cannot be read, or the tokenizer is none of the library.
        """

    def files(self) -> dict[str, bytes]:
        """Returns the tokenizer's files: path below a directory that ``AutoTokenizer`` can read ->
        content.
        """


class ByteTokenizer:
    """Ids 0-255 are bytes, 256 ends a document; with ``masks`` 257 stands for a masked token."""

    eos: int | None = 256
    bos: int | None = None
    prefix: tuple[int, ...] = ()

    def __init__(self, *, masks: bool = False) -> None:
        self.mask = 257 if masks else None
        self.vocab_size = 258 if masks else 257

    def token_id(self, text: str) -> int | None:
        """Returns the id of the end token or of the mask token by its text."""
        return {END_OF_TEXT: self.eos, MASK: self.mask}.get(text)

    def encode_documents(
        self, documents: Iterable[Document], guard: Guard = unbounded
    ) -> Iterator[Encoded]:
        """Yields the bytes of documents in parts."""
        for document in documents:
            for part in document.parts:
                ids = np.frombuffer(part.encode(), dtype=np.uint8).astype(np.uint32)
                yield Encoded(document, ids)
            yield end_of(document)

    def files(self) -> dict[str, bytes]:
        """Returns a byte-level vocabulary of single bytes without merges, which gives the same ids
        for any valid UTF-8.
        """
        return _files(self._library().to_str(), END_OF_TEXT, None if self.mask is None else MASK)

    def chat_parts(self) -> ChatParts:
        """Returns the vocabulary of bytes; there is no template."""
        special = {"eos_token": END_OF_TEXT}
        library = self._library()
        return ChatParts(library=library, special=special, end=END_OF_TEXT, is_bytes=True)

    def _library(self) -> HubTokenizer:
        vocabulary = {character: byte for byte, character in _byte_characters().items()}
        tokenizer = HubTokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([END_OF_TEXT] if self.mask is None else [END_OF_TEXT, MASK])
        return tokenizer


class JsonTokenizer:
    """A file like ``tokenizer.json``, of any name. A ``tokenizer_config.json`` in the same folder
    may name its bos and end tokens.
    """

    def __init__(self, path: Path, *, needs_end: bool = True) -> None:
        """Reads the file. ``needs_end``: refuse a file without an end token.

        Raises:
            ConfigError: there is no such file, it is no tokenizer, or it has no end token.
            StateError: it is no regular file.
        """
        for file in (path, path.with_name(_SETTINGS)):
            is_file(file)  # A FIFO would be read without an end.
        try:
            self._text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"data.tokenizer = {str(path)!r}: cannot read it: {reason(error)}; give byte or"
                f" the path of a tokenizer.json ({from_hub(path)})"
            ) from error
        try:
            self._tokenizer = HubTokenizer.from_str(self._text)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(
                f"data.tokenizer = {str(path)!r}: not a tokenizer.json: {error}"
            ) from error
        # A file may request cut or padded documents; training needs whole ones.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._settings = settings = path.with_name(_SETTINGS)
        self._end = self._find_end(settings)
        if self._end is None and needs_end:
            raise ConfigError(
                f"data.tokenizer = {str(path)!r}: has none of the end tokens"
                f" {', '.join(_KNOWN_ENDS)}; name yours as eos_token in {settings}, or as data.eos"
            )
        self.eos: int | None = None if self._end is None else self.token_id(self._end)
        begin = self._named_token(settings, "bos_token")
        self.bos: int | None = None if begin is None else self.token_id(begin)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def mask(self) -> int | None:
        """The id of a mask token that is known by its name."""
        ids = (self._tokenizer.token_to_id(name) for name in _KNOWN_MASKS)
        return next((id_ for id_ in ids if id_ is not None), None)

    @property
    def prefix(self) -> tuple[int, ...]:
        """The ids that the file's template puts in front."""
        front, _ = added_ids(
            lambda text, special: self._tokenizer.encode(text, add_special_tokens=special).ids
        )
        return tuple(front)

    def token_id(self, text: str) -> int | None:
        """Returns the id of a token by its text."""
        return self._tokenizer.token_to_id(text)

    def encode_documents(
        self, documents: Iterable[Document], guard: Guard = unbounded
    ) -> Iterator[Encoded]:
        """Yields the ids of documents in parts; long ones are encoded in pieces."""
        return encode_documents(documents, self._tokenizer, guard)

    def chat_parts(self) -> ChatParts:
        """Returns the library's tokenizer, with special tokens and template from the folder of the
        file.
        """
        named = {name: self._named_token(self._settings, name) for name in SPECIAL}
        special = {name: text for name, text in named.items() if text is not None}
        if self._end is not None:
            special["eos_token"] = self._end
        return ChatParts(
            library=self._tokenizer, special=special, template=self._template(), end=self._end
        )

    def files(self) -> dict[str, bytes]:
        """Returns the file itself, and settings that name its end token."""
        return _files(self._text, self._end)

    def _find_end(self, settings: Path) -> str | None:
        known = (token for token in _KNOWN_ENDS if self.token_id(token) is not None)
        return self._named_token(settings, "eos_token") or next(known, None)

    def _named_token(self, settings: Path, key: str) -> str | None:
        """Returns the token that ``tokenizer_config.json`` names by ``key``; None without one."""
        named = self._setting(settings, key)
        named = named.get("content") if isinstance(named, dict) else named
        is_token = isinstance(named, str) and named and self.token_id(named) is not None
        return named if is_token else None

    def _template(self) -> str | dict[str, str] | None:
        """Returns the chat template of ``chat_template.jinja`` or of the settings. Files of
        ``additional_chat_templates`` have other templates by name.

        Raises:
            ConfigError: a file cannot be read, or its templates have no known form.
        """
        file = self._settings.with_name("chat_template.jinja")
        named = {path.stem: path for path in self._settings.parent.glob(_ADDITIONAL)}
        if file.exists():
            named[_DEFAULT] = file
        if named:
            texts = {name: _template_text(path) for name, path in named.items()}
            return texts if set(texts) != {_DEFAULT} else texts[_DEFAULT]
        template = self._setting(self._settings, "chat_template")
        if template is None or isinstance(template, str):
            return template
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in template}
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{self._settings}: chat_template is neither a text nor a list of name and template"
            ) from error

    @staticmethod
    def _setting(settings: Path, key: str) -> Any:
        """Returns a value of ``tokenizer_config.json``; None without one."""
        if not settings.exists():
            return None
        try:
            return parse_json(settings.read_bytes()).get(key)
        except (OSError, *DAMAGED) as error:
            raise ConfigError(f"{settings}: cannot read {key}: {error!r}") from error


def open_tokenizer(config: Config) -> Tokenizer | None:
    """Returns the tokenizer that makes the tokens of a run; None for a token file.

    Raises:
        ConfigError: the configured tokenizer does not exist, or cannot be used.
    """
    name = config.tokenizer
    if name is None:
        return None
    if name == BYTE:
        return ByteTokenizer(masks=config.data.objective == MASKED)
    path = Path(name)
    if path.name == "tokenizer.json" and path.is_file():
        path = path.parent
    needs_end = config.data.eos == AUTO
    if not path.is_dir():
        return JsonTokenizer(path, needs_end=needs_end)
    key = "model.path" if path == config.model.path else "data.tokenizer"
    return FolderTokenizer(path, key=key, known_ends=_KNOWN_ENDS, needs_end=needs_end)


def _template_text(file: Path) -> str:
    """Returns the text of a template's file.

    Raises:
        ConfigError: the file cannot be read.
    """
    is_file(file)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot read it: {reason(error)}") from error


def _files(tokenizer_json: str, end: str | None, mask: str | None = None) -> dict[str, bytes]:
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if end is not None:
        settings["eos_token"] = end
    settings["clean_up_tokenization_spaces"] = False
    if mask is not None:
        settings["mask_token"] = mask
    return {
        "tokenizer.json": tokenizer_json.encode(),
        _SETTINGS: json.dumps(settings, indent=2).encode(),
    }


def _byte_characters() -> dict[int, str]:
    """Returns the printable character that byte-level tokenizers write for each byte (GPT-2's
    table).

    Printable Latin-1 stands for itself; the others follow from U+0100 in the order of their bytes.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}
