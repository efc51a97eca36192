"""The token files of a run: their sources, and their creation.

A token file that Penstock makes is on disk before it gets its name. ``data/meta.json``, which the
caller writes last, has the entry of each split and marks all of them as complete.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from penstock.config.schema import Config
from penstock.config.values import BYTE, MASKED, UTF8
from penstock.host.errors import ConfigError, reason
from penstock.host.stamps import stamps_of
from penstock.models.data.cache import NewFile, TokenCache, cached, key_of, made_by
from penstock.models.data.chunks import SAY_EVERY_S, ChunkHasher, Progress, write_sums
from penstock.models.data.corpus import token_dtype, write_tokens
from penstock.models.data.marks import Marks, marks_of_numbers
from penstock.models.data.reading.opening import CountBytes
from penstock.models.data.reading.records import Document, documents
from penstock.models.data.sources import Source, find_source
from penstock.models.data.token_file import TokenFile
from penstock.models.data.tokenizer import Tokenizer
from penstock.protocol.run.rundir import RunDirectory

_NOT_IN_FILES = {
    "shuffle",
    "document_masks",
    "objective",
    "mask_fraction",
    "mask_token",
    "bos",
    "eos",
    "cache_limit",
    "sources",
    "chat_template",
    "chat_template_kwargs",
    "turns",
    "train_on",
    "packing",
    "packing_window",
    "too_long",
    "bad_records",
}
"""Keys of ``data`` that decide a text's tokens, and keys that fingerprints contain as marks."""

_READING = 2
"""Version of the reading of records as one text. A change gives kept tokens another key. Version 1
took no notice of masks, and of columns without a reader.
"""


class Text(Protocol):
    """Documents of files, which become one text."""

    @property
    def source(self) -> Source:
        """The files."""

    @property
    def key(self) -> list[Any]:
        """Values that decide the documents, next to the bytes of the files."""

    def documents(self, read: CountBytes) -> Iterator[Document]:
        """Yields the documents; calls ``read`` with numbers of bytes read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainText:
    """Files of text, and the column ``text`` of files of records."""

    source: Source

    @property
    def key(self) -> list[Any]:
        """None: the files alone decide."""
        return []

    def documents(self, read: CountBytes) -> Iterator[Document]:
        """Yields the documents of the files."""
        return documents(self.source, read)


class TokenSources:
    """Sources of a run's tokens, and the fingerprint of all that decides them."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer | None,
        marks: Marks | None,
        run_dir: Path,
        progress: Progress,
        texts: Callable[[str], Text] | None = None,
    ) -> None:
        """Takes the text of ``data.path`` and ``data.eval_path``, unless ``texts`` returns others
        for the names of these keys.
        """
        self._texts = texts
        self._config, self._tokenizer, self._progress = config, tokenizer, progress
        self._vocab_size = RunDirectory(run_dir).table.vocab_size
        model = json.loads((run_dir / "model" / "config.json").read_text(encoding="utf-8"))
        eos = model.get("eos_token_id")
        self._eos = eos if isinstance(eos, int) else None
        self._marks = marks or marks_of_numbers(config, eos, self._vocab_size)
        self._mask = self._find_mask()
        self._check_marks()
        self.holds_out = config.holds_out
        self.has_eval_text = self.holds_out and config.data.eval_path is not None
        if self.has_eval_text and tokenizer is None:
            raise ConfigError(
                f"data.eval_path = {config.data.eval_path!r}: goes with data.path; with data.tokens"
                " the last sequences are held out (data.eval_fraction)"
            )

    @cached_property
    def _main_text(self) -> Text:
        data = self._config.data
        if self._texts is not None:
            return self._texts("path")
        if data.tokens is None:
            assert data.path is not None
            return PlainText(source=find_source(data.path, encoding=data.encoding))
        if not data.tokens.is_file():
            seen = "is no file" if data.tokens.exists() else "no such file"
            raise ConfigError(f"data.tokens = {str(data.tokens)!r}: {seen}")
        return PlainText(source=Source(files=(data.tokens,)))

    @cached_property
    def _eval_text(self) -> Text:
        data = self._config.data
        if self._texts is not None:
            return self._texts("eval_path")
        assert data.eval_path is not None
        return PlainText(
            source=find_source(data.eval_path, key="data.eval_path", encoding=data.encoding)
        )

    def _text(self, key: str) -> Text:
        return self._eval_text if key == "eval_path" else self._main_text

    @cached_property
    def _tokenizer_sum(self) -> str | None:
        return None if self._tokenizer is None else tokenizer_sum(self._tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of all that decides the token files."""
        data = self._config.data
        # Older runs have no data.encoding: the default leaves their fingerprints as they are.
        without = _NOT_IN_FILES | ({"encoding"} if data.encoding == UTF8 else set())
        return fingerprint_of(
            data.model_dump(mode="json", exclude=without),
            [self.holds_out, self._vocab_size, self._eos],
            content_stamps(self._main_text.source.files),
            content_stamps(self._eval_text.source.files) if self.has_eval_text else [],
            made_by(),
            self._tokenizer_sum,
            *self._unusual_marks,
            *self._main_text.key,
        )

    @property
    def _unusual_marks(self) -> list[Any]:
        """The marks if they differ from those before keys for marks existed, otherwise none. Those
        were no bos, and one end token of the tokenizer or of the model. Fingerprints of older runs
        have no marks.
        """
        marks, eos = self._marks, self._eos
        if self._tokenizer is not None:
            eos = self._tokenizer.eos
        usual = () if eos is None else (eos,)
        same_after = self._tokenizer is None or marks.after == usual
        if not marks.before and same_after and marks.ends == usual:
            return []
        return [[marks.before, marks.after, marks.ends]]

    def now(self, key: str) -> str | None:
        """Returns the fingerprint of the text of ``data.KEY`` (path or eval_path) and of its
        reading; None if the text is gone.
        """
        data = self._config.data
        try:
            text = self._text(key)
            stamps = file_stamps(text.source.files)
        except ConfigError:
            return None
        reading = [text.source.encoding, data.token_dtype, self._vocab_size, self._tokenizer_sum]
        return fingerprint_of(stamps, reading + self._unusual_marks + text.key)

    def content(self, key: str) -> str | None:
        """Returns :meth:`now`, but by the content of the files: times that were set back hide no
        change.
        """
        known = self.now(key)
        if known is None:
            return None
        return fingerprint_of(known, content_stamps(self._text(key).source.files))

    def _check_marks(self) -> None:
        """Refuses marks without a row in the model."""
        marks = self._marks
        for key, ids in (("bos", marks.before), ("eos", marks.after)):
            beyond = [number for number in ids if number >= self._vocab_size]
            if beyond:
                raise ConfigError(
                    f"data.{key} = {getattr(self._config.data, key)}: is token {beyond[0]}, and the"
                    f" model has a vocabulary of {self._vocab_size}; set data.{key} to another"
                    " token or to false"
                )

    def _find_mask(self) -> int | None:
        """Returns the token that replaces masked tokens; None without masking.

        Raises:
            ConfigError: neither key nor tokenizer names one, or the model has no such token.
        """
        data = self._config.data
        if data.objective != MASKED:
            return None
        tokenizer_mask = None if self._tokenizer is None else self._tokenizer.mask
        mask = tokenizer_mask if data.mask_token is None else data.mask_token
        if mask is None:
            raise ConfigError(
                f"data.objective = {MASKED!r}: the tokenizer has no mask token; give its number as"
                " data.mask_token"
            )
        if mask >= self._vocab_size:
            raise ConfigError(
                f"data.mask_token = {mask}: the model has a vocabulary of {self._vocab_size}; check"
                " model.hf.vocab_size"
            )
        return mask

    def write(self, directory: Path) -> dict[str, dict[str, Any]]:
        """Makes the token files; returns the entry of each split in ``meta.json``."""
        fingerprint = self.fingerprint  # Before the files are read: they may change meanwhile.
        if self._tokenizer is None:
            whole = self._given_tokens(directory / "train.sums")
        else:
            whole = self._tokenized("path", directory / "train.bin", self._tokenizer)
        whole["fingerprint"] = fingerprint
        if not self.holds_out:
            return {"train": whole}
        if self.has_eval_text:
            return {"train": whole, "eval": self.write_eval(directory, self.fingerprint)}
        return self._split(whole)

    def write_eval(self, directory: Path, fingerprint: str | None) -> dict[str, Any]:
        """Makes the token file of ``data.eval_path``; returns its entry in ``meta.json`` with this
        ``fingerprint`` of the data.
        """
        assert self._tokenizer is not None
        path, content = directory / "eval.bin", self.content("eval_path")
        made = self._tokenized("eval_path", path, self._tokenizer)
        return {**made, "fingerprint": fingerprint, "content": content}

    def _tokenized(self, key: str, path: Path, tokenizer: Tokenizer) -> dict[str, Any]:
        source = self._text(key).source
        if source.left_out:
            self._progress(
                f"data.{key} = {getattr(self._config.data, key)!r}: reads {len(source.files):,}"
                f" file{'s' * (len(source.files) > 1)}; left out: {source.omissions}"
            )
        cache = TokenCache(self._cache_limit, self._progress)
        made, is_cached = cached(
            cache,
            lambda: {path: self._key(key, tokenizer)},
            lambda now_s: content_stamps(source.files, now_s),
            lambda: {path: self._write_tokens(key, path, tokenizer)},
        )
        if is_cached:
            self._progress(f"data.{key}: takes tokens that were made from the same text before")
        fields = made[path]
        dtype = token_dtype(tokenizer.vocab_size)
        entry = self._entry(path.name, int(fields["num_tokens"]), dtype)
        return {**entry, "sums": fields["sums"], "source": self.now(key)}

    @property
    def _cache_limit(self) -> int:
        # Bytes are tokens as fast as files are read.
        return 0 if self._config.tokenizer == BYTE else self._config.data.cache_limit

    def _write_tokens(self, key: str, path: Path, tokenizer: Tokenizer) -> dict[str, Any]:
        """Makes a token file and its checksums; returns how many tokens it has, and the entry of
        the checksums.
        """
        text, hasher = self._text(key), ChunkHasher()
        documents = text.documents(Pace(f"data.{key}", text.source.files, self._progress))
        with NewFile(path) as file:
            num_tokens = write_tokens(
                documents,
                tokenizer,
                file.temporary,
                hasher,
                self._marks,
                vocab_size=self._vocab_size,
            )
            sums = hasher.write(file.sums)
            # The file is on disk before it gets its name; meta.json, last, marks all as complete.
            file.keep()
        return {"num_tokens": num_tokens, "sums": sums}

    def _key(self, key: str, tokenizer: Tokenizer) -> str:
        """Returns the key of a text's tokens in the cache; ``key`` is that of ``data``.

        Raises:
            ConfigError: a file cannot be read.
        """
        marks = self._marks
        is_folder = Path(str(self._config.tokenizer)).is_dir()
        parts = [
            [self._tokenizer_sum, is_folder, tokenizer.vocab_size],
            [marks.before, marks.after, self._vocab_size],
            *self._text(key).key,
            *([] if self._texts is None else [_READING]),
        ]
        try:
            return key_of(self._text(key).source, parts)
        except OSError as error:
            raise ConfigError(f"data: cannot read {error.filename}: {reason(error)}") from error

    def _given_tokens(self, sums: Path) -> dict[str, Any]:
        """Returns the entry of a token file, which stays where it is; checks every id once against
        the vocabulary, and makes checksums.
        """
        path, dtype = self._main_text.source.files[0].absolute(), self._config.data.token_dtype
        file = TokenFile(path, dtype, self._vocab_size)
        entry = self._entry(str(path), file.num_tokens, dtype)
        made = write_sums(path, sums, self._progress, file.check)
        return {**entry, "sums": made, "source": self.now("tokens")}

    def _entry(self, path: str, num_tokens: int, dtype: str) -> dict[str, Any]:
        return {
            "path": path,
            "first_token": 0,
            "num_tokens": num_tokens,
            "token_dtype": dtype,
            "vocab_size": self._vocab_size,
            "eos": self._marks.recorded_ends,
            "mask": self._mask,
        }

    def _split(self, whole: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Returns both splits' entries, with the last sequences held out; both are in one file."""
        length = self._config.data.sequence_length
        sequences = max(0, whole["num_tokens"] - 1) // length
        held = max(1, round(sequences * self._config.data.eval_fraction))
        kept = max(0, sequences - held)
        return {
            "train": {**whole, "num_tokens": kept * length + 1},
            "eval": {**whole, "first_token": kept * length, "num_tokens": held * length + 1},
        }


class Pace:
    """Counts bytes of text, and reports every few seconds the bytes read and the remaining time at
    this pace.
    """

    def __init__(self, name: str, files: Sequence[Path], progress: Progress) -> None:
        self._name, self._progress = name, progress
        self._total = sum(path.stat().st_size for path in files)
        self._read = 0
        self._began_s = self._said_s = time.monotonic()

    def __call__(self, count: int) -> None:
        """Counts bytes that were read."""
        self._read += count
        now_s = time.monotonic()
        if now_s - self._said_s < SAY_EVERY_S:
            return
        self._said_s = now_s
        rate = self._read / (now_s - self._began_s)
        left_s = round(max(0, self._total - self._read) / rate)
        self._progress(
            f"{self._name}: {self._read / 1e6:,.0f} of {self._total / 1e6:,.0f} MB are tokens,"
            f" {rate / 1e6:.1f} MB/s; about {left_s // 60}:{left_s % 60:02} minutes left"
        )


def file_stamps(files: Sequence[Path]) -> list[list[Any]]:
    """Returns path, size and time of the last change of each file. A program can set the time back,
    so equal stamps are a hint for a message, and no proof.

    Raises:
        ConfigError: a file is gone.
    """
    stamps = []
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        stamps.append([str(path.absolute()), status.st_size, status.st_mtime_ns])
    return stamps


def content_stamps(files: Sequence[Path], as_of_s: float | None = None) -> list[list[Any]]:
    """Returns path and stamp of each file; equal stamps mean equal content
    (:mod:`penstock.host.stamps`).

    Raises:
        ConfigError: a file is gone.
    """
    try:
        stamps = stamps_of(files, as_of_s)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return [[str(path.absolute()), *stamp] for path, stamp in zip(files, stamps, strict=True)]


def tokenizer_sum(tokenizer: Tokenizer) -> str:
    """Returns the checksum of a tokenizer's files."""
    files = sorted(tokenizer.files().items())
    return hashlib.sha256(b"".join(content for _, content in files)).hexdigest()


def fingerprint_of(*parts: Any) -> str:
    """Returns a checksum of JSON values; of other values, their text."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
