"""Text to token ids: the byte tokenizer, a ``tokenizer.json`` alone, or the tokenizer of a folder
(:mod:`penstock.models.data.tokenizer_folder`). No torch.

All end every document with an end-of-sequence token and can write themselves in the form that
``transformers.AutoTokenizer`` reads, so that exported models carry their tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import decoders, models, pre_tokenizers

from penstock.models.data.tokenizer_folder import FolderTokenizer
from penstock.protocol.config.schema import Config
from penstock.protocol.config.values import BYTE, MASKED
from penstock.protocol.errors import ConfigError, reason
from penstock.protocol.run.files import DAMAGED, is_file, parse_json

END_OF_TEXT = "<|endoftext|>"

MASK = "<mask>"
_SETTINGS = "tokenizer_config.json"
_KNOWN_MASKS = ("[MASK]", MASK)
_KNOWN_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[EOS]", "<end>")


class Tokenizer(Protocol):
    """What turning documents into tokens needs."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def eos(self) -> int:
        """The id that ends a document."""

    @property
    def mask(self) -> int | None:
        """The id that stands for a masked token; None where there is none."""

    def encode(self, document: bytes) -> NDArray[np.uint32]:
        """Returns the uint32 ids of one UTF-8 document, (tokens,), without the end token."""

    def files(self) -> dict[str, bytes]:
        """Returns its files: path below a directory that ``AutoTokenizer`` can read -> content."""


class ByteTokenizer:
    """Ids 0-255 are bytes, 256 ends a document; with ``masks`` 257 stands for a masked token."""

    eos = 256

    def __init__(self, *, masks: bool = False) -> None:
        self.mask = 257 if masks else None
        self.vocab_size = 258 if masks else 257

    def encode(self, document: bytes) -> NDArray[np.uint32]:
        """Returns the uint32 ids of a document, (bytes,): one id per byte; any bytes will do."""
        return np.frombuffer(document, dtype=np.uint8).astype(np.uint32)

    def files(self) -> dict[str, bytes]:
        """Returns a byte-level vocabulary of single bytes without merges, which gives the same ids
        for any valid UTF-8.
        """
        vocabulary = {character: byte for byte, character in _byte_characters().items()}
        tokenizer = HubTokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([END_OF_TEXT] if self.mask is None else [END_OF_TEXT, MASK])
        return _files(tokenizer.to_str(), END_OF_TEXT, None if self.mask is None else MASK)


class JsonTokenizer:
    """A file like ``tokenizer.json`` of any name; ``tokenizer_config.json`` beside it may name the
    end token.
    """

    def __init__(self, path: Path) -> None:
        """Read it.

        Raises:
            ConfigError: no such file, no tokenizer, or no end token in it.
            StateError: it is no regular file.
        """
        for file in (path, path.with_name(_SETTINGS)):
            is_file(file)  # A FIFO would be read without an end.
        try:
            self._text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"data.tokenizer = {str(path)!r}: cannot read it: {reason(error)}; give byte or"
                " the path of a tokenizer.json"
            ) from error
        try:
            self._tokenizer = HubTokenizer.from_str(self._text)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(
                f"data.tokenizer = {str(path)!r}: not a tokenizer.json: {error}"
            ) from error
        # A file may ask for documents to be cut or padded; training wants them whole.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._end = self._find_end(path)
        end = self._tokenizer.token_to_id(self._end)
        assert end is not None
        self.eos: int = end

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def mask(self) -> int | None:
        """The id of a mask token that is known by its name."""
        found = (self._tokenizer.token_to_id(name) for name in _KNOWN_MASKS)
        return next((id_ for id_ in found if id_ is not None), None)

    def encode(self, document: bytes) -> NDArray[np.uint32]:
        """Returns the uint32 ids of a document, (tokens,); bytes that are no UTF-8 are replaced."""
        text = document.decode("utf-8", errors="replace")
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.uint32)

    def files(self) -> dict[str, bytes]:
        """Returns the file itself, and settings that name its end token."""
        return _files(self._text, self._end)

    def _find_end(self, path: Path) -> str:
        config = path.with_name(_SETTINGS)
        if config.exists():
            try:
                named = parse_json(config.read_bytes()).get("eos_token")
                named = named.get("content") if isinstance(named, dict) else named
                if named is not None and self._tokenizer.token_to_id(named) is not None:
                    return str(named)
            except (OSError, *DAMAGED) as error:
                raise ConfigError(f"{config}: cannot read eos_token: {error!r}") from error
        for token in _KNOWN_ENDS:
            if self._tokenizer.token_to_id(token) is not None:
                return token
        raise ConfigError(
            f"data.tokenizer = {str(path)!r}: has none of the end tokens {', '.join(_KNOWN_ENDS)};"
            f" name yours as eos_token in {config}"
        )


def open_tokenizer(config: Config) -> Tokenizer | None:
    """Returns the tokenizer that makes the tokens of a run; None where a token file has them.

    Raises:
        ConfigError: there is none where the configuration says, or it cannot be used.
    """
    name = config.tokenizer
    if name is None:
        return None
    if name == BYTE:
        return ByteTokenizer(masks=config.data.objective == MASKED)
    path = Path(name)
    if path.name == "tokenizer.json" and path.is_file():
        path = path.parent
    if not path.is_dir():
        return JsonTokenizer(path)
    key = "model.path" if path == config.model.path else "data.tokenizer"
    return FolderTokenizer(path, key=key, known_ends=_KNOWN_ENDS)


def _files(tokenizer_json: str, end: str, mask: str | None = None) -> dict[str, bytes]:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
    }
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
