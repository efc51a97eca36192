"""The files of rows of a run: made of the records of its sources. No torch.

Preparation reads the records once, and writes the tokens of samples in order to a temporary file.
When all lengths are known, it decides the rows and writes the file of rows. Memory holds the
lengths, not the tokens.
"""

from __future__ import annotations

import dataclasses
import os
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.config.schema import Config
from penstock.config.values import PAIR, RECORD_OBJECTIVES, WEIGHTED
from penstock.host.errors import ConfigError, reason
from penstock.host.files import DAMAGED, parse_json, writing
from penstock.models.data.cache import Made, NewFile, TokenCache, cached, key_of, made_by
from penstock.models.data.chat.remarks import lines_of
from penstock.models.data.chat.unread import unread_line
from penstock.models.data.chunks import ChunkHasher, Progress
from penstock.models.data.marks import Marks
from penstock.models.data.reading.record import TEXT, is_chat
from penstock.models.data.reading.records import records
from penstock.models.data.rows.origins import Origin, origins_of
from penstock.models.data.rows.packing import Packing, alone, best_fit
from penstock.models.data.rows.row_file import RowLayout, Weights, count_counted, write_rows
from penstock.models.data.rows.samples import Numbered, SampleStream, Way
from penstock.models.data.rows.sharing import Measured, Sharing
from penstock.models.data.rows.wrapped import wrapped_text
from penstock.models.data.sources import PLAIN_TEXT, find_source, format_of
from penstock.models.data.token_sources import (
    Pace,
    TokenSources,
    content_stamps,
    file_stamps,
    fingerprint_of,
    tokenizer_sum,
)
from penstock.models.data.tokenizer import Tokenizer
from penstock.protocol.run.rundir import RunDirectory

_WITHOUT_TEMPLATE = {"text", "tokens", "stanford"}
"""Formats of sources without conversations."""

_WAYS_TO_COUNT = (
    "raise data.sequence_length above the prompts, or remove labels of -100, and train and weight"
    " of messages"
)

_FORMAT = 1
"""Version of the rows that are made of the same records: a change gives them another key."""

_READING = 3
"""Version of the reading of records. A change gives rows another key in the cache. Runs that were
prepared before keep their rows and their fingerprint.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Drawn:
    """Samples on disk: marked tokens, the place of each sample in them, (samples + 1,), and its
    source and record, (samples, 2). ``weights``: those of the tokens; None without.
    """

    tokens: NDArray[np.uint32]
    begins: NDArray[np.int64]
    places: NDArray[np.int64]
    weights: Weights | None = None

    def part(self, first: int, end: int) -> _Drawn:
        """Returns the samples ``first`` to ``end - 1``."""
        begins = self.begins[first : end + 1]
        span = slice(int(begins[0]), int(begins[-1]))
        return _Drawn(
            tokens=self.tokens[span],
            begins=begins - begins[0],
            places=self.places[first:end],
            weights=None if self.weights is None else self.weights[span],
        )


class RunSources(Protocol):
    """Sources of a run's data, as preparation takes them."""

    holds_out: bool
    has_eval_text: bool

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all that decides the files."""

    def now(self, key: str) -> str | None:
        """Returns the fingerprint of ``data.KEY``; None if its files are gone."""

    def content(self, key: str) -> str | None:
        """Returns :meth:`now`, but by the content of the files."""

    def write(self, directory: Path) -> dict[str, dict[str, Any]]:
        """Makes the files; returns the entry of each split in ``meta.json``."""

    def write_eval(self, directory: Path, fingerprint: str | None) -> dict[str, Any]:
        """Makes the file of ``data.eval_path``; returns its entry in ``meta.json``."""


def open_sources(
    config: Config,
    tokenizer: Tokenizer | None,
    marks: Marks | None,
    run_dir: Path,
    progress: Progress,
    measured: Measured = Sharing,
) -> RunSources:
    """Returns the sources of rows, or of plain tokens. A run that has started keeps the kind that
    it was prepared with, also if the files of its data are gone. ``measured`` returns how samples
    of the run's model can share rows.

    Raises:
        ConfigError: a file of ``data.path`` cannot be read, or keys and records do not fit.
    """
    rows = _prepared_rows(run_dir)
    if rows is None:
        rows = tokenizer is not None and makes_rows(config)
    return sources_of(config, tokenizer, marks, run_dir, progress, measured, makes_rows=rows)


def sources_of(
    config: Config,
    tokenizer: Tokenizer | None,
    marks: Marks | None,
    run_dir: Path,
    progress: Progress,
    measured: Measured = Sharing,
    *,
    makes_rows: bool,
) -> RunSources:
    """Returns the sources of rows, or of plain tokens.

    Raises:
        ConfigError: documents of rows are to be kept apart, and the model cannot.
    """
    if tokenizer is not None and makes_rows:
        return RowSources(config, tokenizer, run_dir, progress, measured)
    if config.data.document_masks:
        measured().check_documents()
    texts = partial(wrapped_text, config, progress=progress) if config.data.sources else None
    return TokenSources(config, tokenizer, marks, run_dir, progress, texts)


def _prepared_rows(run_dir: Path) -> bool | None:
    """Returns whether a run that has started was prepared with rows; None if that is not known."""
    path = run_dir / "data" / "meta.json"
    if not RunDirectory(run_dir).has_started:
        return None
    try:
        return RowLayout.of(parse_json(path.read_bytes())["train"]) is not None
    except (OSError, *DAMAGED):
        return None


def makes_rows(config: Config) -> bool:
    """Returns whether the data become rows of whole samples.

    Raises:
        ConfigError: a file of ``data.path`` cannot be read, or the packing does not fit its
            records.
    """
    data = config.data
    chosen = data.packing in (Packing.NONE.value, Packing.BEST_FIT.value)
    if chosen or data.objective in RECORD_OBJECTIVES:
        return True
    if data.sources:
        return data.packing != Packing.WRAPPED.value
    if data.path is None or data.path.startswith("@"):
        return False
    source = find_source(data.path, encoding=data.encoding, any_records=True)
    # Files of text are whole records, which need no reading here.
    files = tuple(path for path in source.files if format_of(path) not in PLAIN_TEXT)
    first = next(records(dataclasses.replace(source, files=files)), None)
    if first is None or TEXT in first.fields or not is_chat(first.fields):
        return False
    if data.packing == Packing.WRAPPED.value:
        raise ConfigError(
            f"data.packing = {Packing.WRAPPED.value!r}: {first.place} has"
            " samples with tokens that do not count; use best-fit or none"
        )
    return True


class RowSources:
    """Sources of a run's rows, and the fingerprint of all that decides them."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        run_dir: Path,
        progress: Progress,
        measured: Measured,
    ) -> None:
        self._config, self._tokenizer, self._progress = config, tokenizer, progress
        self._measured = measured
        self._vocab_size = RunDirectory(run_dir).table.vocab_size
        self.holds_out = config.holds_out
        self.has_eval_text = self.holds_out and config.data.eval_path is not None

    @cached_property
    def _sharing(self) -> Sharing:
        return self._measured()

    @cached_property
    def _packing(self) -> Packing:
        return self._sharing.packing(self._config, self._progress)

    @cached_property
    def _way(self) -> Way:
        parts = self._tokenizer.chat_parts()
        return Way.of(self._config.data, parts, self._vocab_size)

    @cached_property
    def _origins(self) -> list[Origin]:
        return origins_of(self._config, "path", self._progress)

    @cached_property
    def _eval_origins(self) -> list[Origin]:
        return origins_of(self._config, "eval_path", self._progress)

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of all that decides the files."""
        held = [self.holds_out, self._config.data.eval_fraction]
        return fingerprint_of(
            self._key_parts(self._origins),
            _content(self._origins),
            held,
            _content(self._eval_origins) if self.has_eval_text else [],
            made_by(),
            [time.strftime("%Y-%m-%d")] if self._writes_date(self._origins) else [],
        )

    def now(self, key: str) -> str | None:
        """Returns the fingerprint of the records of ``data.KEY`` (path or eval_path) and of their
        reading; None if the files are gone.
        """
        try:
            origins = self._of(key)
            stamps = [file_stamps(origin.source.files) for origin in origins]
            return fingerprint_of(stamps, self._key_parts(origins))
        except ConfigError:
            return None

    def content(self, key: str) -> str | None:
        """Returns :meth:`now`, but by the content of the files: times that were set back hide no
        change.
        """
        known = self.now(key)
        return None if known is None else fingerprint_of(known, _content(self._of(key)))

    def _of(self, key: str) -> list[Origin]:
        return self._eval_origins if key == "eval_path" else self._origins

    def _key_parts(self, origins: Sequence[Origin]) -> list[Any]:
        """Returns all that decides the rows, next to the bytes of the records."""
        data = self._config.data
        # Rows that were made before other objectives existed keep their fingerprint.
        objective = [data.objective] if data.objective in RECORD_OBJECTIVES else []
        limit = self._sharing.limit
        return [
            *objective,
            *([] if limit is None else ["limit", limit, data.packing]),
            _FORMAT,
            tokenizer_sum(self._tokenizer),
            self._way.key,
            [origin.reading for origin in origins],
            [self._packing.value, data.packing_window, data.too_long, data.bad_records],
            self._config.run.seed,
        ]

    def write(self, directory: Path) -> dict[str, dict[str, Any]]:
        """Makes the files of rows; returns the entry of each split in ``meta.json``.

        Raises:
            CapacityError, ConfigError: a file cannot be written, or a record cannot be read.
        """
        fingerprint = self.fingerprint  # Before the files are read: they may change meanwhile.
        holds = self.holds_out and not self.has_eval_text
        names = ("train", "eval") if holds else ("train",)
        made = self._made(self._origins, directory, names)
        if self.has_eval_text:
            made["eval"] = self.write_eval(directory, None)
        return {
            name: {**entry, "fingerprint": fingerprint, "source": self.now(_KEYS[name])}
            for name, entry in made.items()
        }

    def write_eval(self, directory: Path, fingerprint: str | None) -> dict[str, Any]:
        """Makes the file of ``data.eval_path``; returns its entry in ``meta.json`` with this
        ``fingerprint`` of the data.
        """
        content = self.content("eval_path")
        entry = self._made(self._eval_origins, directory, ("eval",))["eval"]
        known = {"fingerprint": fingerprint, "content": content}
        return {**entry, **known, "source": self.now("eval_path")}

    def _writes_date(self, origins: Sequence[Origin]) -> bool:
        """Returns whether the rows depend on the day on which they are made."""
        template = self._way.template
        formats = {origin.config.format for origin in origins}
        return template is not None and template.writes_date and not formats <= _WITHOUT_TEMPLATE

    def _warn_of_dates(self, origins: Sequence[Origin]) -> None:
        """Reports a chat template that writes the date of the day."""
        template = self._way.template
        if template is None or not self._writes_date(origins):
            return
        self._progress(
            f"data.chat_template = {template.name!r}: the template writes the date of the day, so"
            f" conversations have other tokens on another day; {template.remedy_of_date}"
        )

    def _made(
        self, origins: Sequence[Origin], directory: Path, splits: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """Takes the splits of these records from the cache, or makes them."""
        self._warn_of_dates(origins)

        def keys() -> dict[Path, str]:
            sums = _sums(origins)
            return {
                path: self._cache_key(sums, origins, split, splits) for split, path in paths.items()
            }

        paths = {split: directory / f"{split}.bin" for split in splits}
        # Rows with the date of the day are kept for no other day.
        limit = 0 if self._writes_date(origins) else self._config.data.cache_limit
        made, is_cached = cached(
            TokenCache(limit, self._progress),
            keys,
            lambda now_s: _content(origins, now_s),
            lambda: self._draw(origins, paths),
        )
        if is_cached:
            self._progress("data: takes rows that were made of the same records before")
        tally = made[paths[splits[0]]]["tally"]
        for line in lines_of(tally.get("remarks", {}), tally["lost"], self._way.template):
            self._progress(line)
        for source, counts in tally["unread"].items():
            self._progress(unread_line(source, counts))
        return {split: self._entry(split, made[path]) for split, path in paths.items()}

    def _cache_key(
        self, sums: Sequence[str], origins: Sequence[Origin], split: str, splits: Sequence[str]
    ) -> str:
        held = self._config.data.eval_fraction if len(splits) > 1 else 0.0
        parts = [[origin.is_closed for origin in origins], self._key_parts(origins)]
        return fingerprint_of("rows", _READING, sums, parts, split, held)

    def _entry(self, split: str, made: dict[str, Any]) -> dict[str, Any]:
        return {
            "path": f"{split}.bin",
            "first_token": 0,
            "num_tokens": made["num_tokens"],
            "token_dtype": "uint32",
            "vocab_size": self._way.vocab_size,
            "eos": None,
            "mask": None,
            **{name: made[name] for name in ("rows", "tally", "sums")},
        }

    def _draw(self, origins: Sequence[Origin], paths: Mapping[str, Path]) -> Made:
        """Reads the records, and writes the files of the splits."""
        config = self._config
        files = [path for origin in origins for path in origin.source.files]
        pace = Pace("data", files, self._progress)
        stream = SampleStream(config.data, origins, self._way, config.run.seed, pace)
        first = next(iter(paths.values()))
        temporary = first.with_name(f".samples.{os.getpid()}.tmp")
        weights = None
        if config.data.objective == WEIGHTED:
            weights = first.with_name(f".weights.{os.getpid()}.tmp")
        try:
            drawn = _drawn(stream, temporary, weights)
            tally = stream.tally.to_json()
            count = len(drawn.places)
            whole = PAIR if config.trains_on_pairs else 1
            held = whole * max(1, round(count / whole * config.data.eval_fraction))
            held = held if len(paths) > 1 else 0
            if not count:
                raise ConfigError(
                    f"data: no token of {stream.tally.records:,} records counts; {_WAYS_TO_COUNT}"
                )
            if count <= held:
                raise ConfigError(
                    f"data: {stream.tally.records:,} records have {count:,} samples to train on;"
                    " give more records"
                )
            parts = {first: drawn.part(0, count - held)}
            if held:
                parts[paths["eval"]] = drawn.part(count - held, count)
            return {path: self._write(part, path, tally) for path, part in parts.items()}
        finally:
            temporary.unlink(missing_ok=True)
            if weights is not None:
                weights.unlink(missing_ok=True)

    def _write(self, drawn: _Drawn, path: Path, tally: dict[str, Any]) -> dict[str, Any]:
        """Writes the file of rows of a split, and its checksums; returns its fields."""
        lengths, data = np.diff(drawn.begins), self._config.data
        shortest, longest = int(lengths.min()), int(lengths.max())
        packing = self._sharing.packing_of(
            self._packing, self._config, shortest, longest, self._progress
        )
        if packing is Packing.NONE:
            rows = alone(lengths)
        else:
            rows = best_fit(lengths, data.sequence_length, data.packing_window)
        hasher = ChunkHasher()
        layout = RowLayout(
            rows=len(rows),
            samples=len(lengths),
            tokens=int(lengths.sum()),
            counted=count_counted(drawn.tokens),
            length=data.sequence_length,
            pad=self._way.pad,
            packing=packing.value,
            weighted=drawn.weights is not None,
            limit=self._sharing.limit or 0,
            shortest=shortest,
            longest=longest,
        )
        if not layout.counted:
            raise ConfigError(
                f"data.train_on = {data.train_on!r}: no token of {layout.samples:,} samples counts;"
                f" {_WAYS_TO_COUNT}"
            )
        with NewFile(path) as file:
            write_rows(
                file.temporary,
                drawn.tokens,
                drawn.begins,
                drawn.places,
                rows,
                hasher.update,
                drawn.weights,
            )
            sums = hasher.write(file.sums)
            file.keep()
        return {"num_tokens": layout.tokens, "rows": layout.to_json(), "tally": tally, "sums": sums}


_KEYS = {"train": "path", "eval": "eval_path"}


def _content(origins: Sequence[Origin], as_of_s: float | None = None) -> list[Any]:
    return [content_stamps(origin.source.files, as_of_s) for origin in origins]


def _sums(origins: Sequence[Origin]) -> list[str]:
    """Returns a checksum of the records of each source; reads all files.

    Raises:
        ConfigError: a file cannot be read.
    """
    try:
        return [key_of(origin.source, ()) for origin in origins]
    except OSError as error:
        raise ConfigError(f"data: cannot read {error.filename}: {reason(error)}") from error


def _drawn(stream: Iterable[Numbered], path: Path, weights_path: Path | None = None) -> _Drawn:
    """Writes the marked tokens of samples to a temporary file, and weights to another; returns them
    mapped.

    Raises:
        CapacityError, ConfigError: the file cannot be written.
    """
    begins, places = array("q", [0]), array("q")
    with ExitStack() as stack:
        stack.enter_context(writing(path, 0))
        file = stack.enter_context(path.open("wb"))
        other = None if weights_path is None else stack.enter_context(weights_path.open("wb"))
        for numbered in stream:
            file.write(numbered.tokens.tobytes())
            if other is not None:
                assert numbered.weights is not None
                other.write(numbered.weights.tobytes())
            begins.append(begins[-1] + len(numbered.tokens))
            places.extend((numbered.source, numbered.record))
    count = begins[-1]
    tokens = np.memmap(path, dtype=np.uint32, mode="r") if count else np.empty(0, np.uint32)
    weights: Weights | None = None
    if weights_path is not None:
        weights = np.memmap(weights_path, np.float32, "r") if count else np.empty(0, np.float32)
    return _Drawn(
        tokens=tokens,
        weights=weights,
        begins=np.frombuffer(begins, dtype=np.int64),
        places=np.frombuffer(places, dtype=np.int64).reshape(-1, 2),
    )
