"""Samples of the sources of a run, in order, and what became of their records. No torch."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.config.data import DataConfig
from penstock.config.values import DPO, PAIR_OBJECTIVES, WEIGHTED
from penstock.host.errors import ConfigError
from penstock.host.limits.bounds import limited
from penstock.models.data.chat.conversation import checked_variables, pair_of, request_of
from penstock.models.data.chat.encoder import ChatParts, Encoder
from penstock.models.data.chat.masks import (
    Choices,
    Prepared,
    Sample,
    TrainOn,
    Turns,
    drafts_of,
    encoded,
    with_one_start,
)
from penstock.models.data.chat.requests import PairRequest, Request
from penstock.models.data.chat.templates import MODEL, Template, chosen_template, named_template
from penstock.models.data.chat.weights import WEIGHT, WEIGHTS, with_weights
from penstock.models.data.reading.opening import CountBytes, ignore_bytes
from penstock.models.data.reading.record import Record
from penstock.models.data.rows.origins import Origin
from penstock.models.data.rows.row_file import BEGINS, COUNTS, ID, Tokens, Weights, marked

_Batch = list[tuple[int, list[Prepared]]]
"""Numbers of records, and their samples before the encoding."""

_RECORD_S = 60.0
"""CPU seconds to render the turns of a record. Each turn may need a rendering of all before it."""
_REMEDY = "; divide the record, or set data.bad_records to skip"

_BATCH_CHARACTERS, _BATCH_RECORDS = 1 << 19, 1 << 10
"""Characters and records that the library encodes in one call. An encoding takes up to 300 bytes a
character, and two batches are in memory.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The way from records to tokens: tokenizer, template and choices.

    ``length`` is the most tokens of a sample. ``pad`` is the id behind a row's end.
    """

    encoder: Encoder
    template: Template | None
    choices: Choices
    length: int
    vocab_size: int
    pad: int

    @classmethod
    def of(cls, data: DataConfig, parts: ChatParts, vocab_size: int) -> Way:
        """Returns the way that the keys of ``data`` and a tokenizer describe.

        Raises:
            ConfigError: the file of the template cannot be read, or a variable is reserved.
        """
        end = _end(data, parts)
        pad = parts.special.get("pad_token", parts.end)
        number = None if pad is None else parts.library.token_to_id(pad)
        return cls(
            encoder=Encoder(parts.library, is_bytes=parts.is_bytes),
            template=_template(data, parts),
            choices=Choices(
                train_on=TrainOn(data.train_on),
                turns=Turns(data.turns),
                end=end,
                special_in_text=data.special_in_text,
            ),
            length=data.sequence_length,
            vocab_size=vocab_size,
            pad=number or 0,
        )

    @property
    def key(self) -> list[Any]:
        """Values that decide the tokens of a record, for fingerprints."""
        template = self.template
        shown = None if template is None else [template.text, dict(template.variables)]
        if shown is not None and template is not None and template.tools_text is not None:
            shown.append(template.tools_text)
        choices = self.choices
        chosen: list[Any] = [choices.train_on.value, choices.turns.value, choices.end]
        if choices.special_in_text:  # rows that were made before the key keep their fingerprint
            chosen.append("special")
        return [shown, chosen, self.length, self.vocab_size, self.pad]


@dataclass(slots=True)
class Tally:
    """Counts of records and samples. ``lengths`` are the tokens of each sample before it was cut.

    ``skipped`` records cannot be read. ``empty`` samples have no token, and ``uncounted`` ones no
    token that counts. ``dropped`` samples are too long. ``lost`` tokens end prompts that are no
    prefix of their samples. ``remarks`` counts samples by kind of remark. ``unread`` has the
    records with content in a column without a reader, by source and column.
    """

    records: int = 0
    skipped: int = 0
    empty: int = 0
    uncounted: int = 0
    truncated: int = 0
    split: int = 0
    dropped: int = 0
    lost: int = 0
    remarks: Counter[str] = field(default_factory=Counter)
    by_source: dict[str, int] = field(default_factory=dict)
    unread: dict[str, Counter[str]] = field(default_factory=dict)
    lengths: array[int] = field(default_factory=lambda: array("q"))
    digests: array[int] = field(default_factory=lambda: array("Q"))

    @property
    def duplicates(self) -> int:
        """Records with the fields of an earlier record."""
        digests = np.frombuffer(self.digests, dtype=np.uint64) if self.digests else np.empty(0)
        return len(digests) - len(np.unique(digests))

    def to_json(self) -> dict[str, Any]:
        """Returns the counts for ``meta.json`` and ``penstock data``."""
        lengths = np.frombuffer(self.lengths, dtype=np.int64) if self.lengths else np.zeros(1)
        marks = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}
        names = (
            "records",
            "skipped",
            "empty",
            "uncounted",
            "truncated",
            "split",
            "dropped",
            "lost",
        )
        return {
            **{name: getattr(self, name) for name in names},
            "duplicates": self.duplicates,
            "remarks": dict(self.remarks),
            "lengths": {
                name: int(np.percentile(lengths, share, method="nearest"))
                for name, share in marks.items()
            },
            "sources": dict(self.by_source),
            "unread": {name: dict(counts) for name, counts in self.unread.items() if counts},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """The marked tokens of a sample, with its source and the record in the source, both from 0.
    ``weights`` are those of the tokens; None without.
    """

    tokens: Tokens
    source: int
    record: int
    weights: Weights | None = None


@dataclass(slots=True)
class SampleStream:
    """The samples of sources in order, each iterated once. ``tally`` counts what became of them."""

    data: DataConfig
    origins: Sequence[Origin]
    way: Way
    seed: int
    read: CountBytes = ignore_bytes
    tally: Tally = field(default_factory=Tally)

    def __iter__(self) -> Iterator[Numbered]:
        # While the library encodes a batch on all cores, the next one is read and rendered.
        with ThreadPoolExecutor(1) as encoding:
            for number, origin in enumerate(self.origins):
                before = len(self.tally.lengths)
                for place, samples in self._samples(origin, encoding):
                    for _ in range(origin.times(self.seed, number, place)):
                        yield from self._fitted(samples, number, place)
                self.tally.by_source[origin.name] = len(self.tally.lengths) - before

    def _samples(self, origin: Origin, encoding: Executor) -> Iterator[tuple[int, list[Sample]]]:
        """Yields records by number with their samples."""
        waiting: deque[tuple[_Batch, Future[list[Sample]]]] = deque()
        for batch in self._batches(origin):
            drafts = [draft for _, group in batch for draft in group]
            waiting.append((batch, encoding.submit(encoded, drafts, self.way.encoder)))
            if len(waiting) > 1:
                yield from self._ready(*waiting.popleft(), encoding)
        while waiting:
            yield from self._ready(*waiting.popleft(), encoding)

    def _batches(self, origin: Origin) -> Iterator[_Batch]:
        """Yields the numbers of records with their drafts, in batches that memory has room for."""
        batch: _Batch = []
        size = 0
        for number, record in origin.records(self.read):
            self.tally.records += 1
            drafts = self._drafts(origin, record)
            if drafts is None:
                continue
            batch.append((number, drafts))
            size += sum(map(_size, drafts))
            if size >= _BATCH_CHARACTERS or len(batch) == _BATCH_RECORDS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _ready(
        self, batch: _Batch, made: Future[list[Sample]], encoding: Executor
    ) -> Iterator[tuple[int, list[Sample]]]:
        """Yields the records of a batch with their samples, once the library has made them."""
        try:
            samples = iter(made.result())
        except ConfigError:
            if self.data.bad_records == "refuse":
                raise
            yield from self._one_by_one(batch, encoding)
            return
        for number, group in batch:
            yield number, list(itertools.islice(samples, len(group)))

    def _one_by_one(self, batch: _Batch, encoding: Executor) -> Iterator[tuple[int, list[Sample]]]:
        for number, group in batch:
            try:
                yield number, encoding.submit(encoded, group, self.way.encoder).result()
            except ConfigError:
                self.tally.skipped += 1

    def _drafts(self, origin: Origin, record: Record) -> list[Prepared] | None:
        """Returns the drafts of a record; None for one that is skipped."""
        fields = record.fields if record.where else {"text": "".join(record.parts)}
        digest = hashlib.blake2b(repr(fields).encode(errors="replace"), digest_size=8).digest()
        self.tally.digests.append(int.from_bytes(digest, "little"))
        way = self.way
        try:
            read = pair_of if self.data.has_pairs else request_of
            also = (WEIGHT, WEIGHTS) if self.data.objective == WEIGHTED else ()
            unread = self.tally.unread.setdefault(origin.name, Counter())
            request = read(record.place, fields, origin.form, also, unread)
            self._check_kind(request, record.place)
            with limited(f"{record.place}: rendering its turns", _RECORD_S, remedy=_REMEDY):
                drafts = drafts_of(request, way.encoder, way.template, way.choices)
            if self.data.objective == WEIGHTED:
                return with_weights(drafts, record.place, fields, origin.form)
            return drafts
        except ConfigError:
            if self.data.bad_records == "refuse":
                raise
            self.tally.skipped += 1
            return None

    def _check_kind(self, request: Request, place: str) -> None:
        """Refuses a pair of answers without the objective of pairs, and other records with it.

        Raises:
            ConfigError: record and objective do not go together.
        """
        if isinstance(request, PairRequest) == self.data.has_pairs:
            return
        if self.data.has_pairs:
            raise ConfigError(
                f"{place}: is no pair of answers, which data.objective {self.data.objective} needs;"
                " use format preference with columns prompt, chosen and rejected"
            )
        raise ConfigError(
            f"{place}: format preference is a pair of answers, and data.objective is"
            f" {self.data.objective}; use objective {', '.join(PAIR_OBJECTIVES[:-1])} or"
            f" {PAIR_OBJECTIVES[-1]}, or leave out the format and name the chosen answers in"
            " columns"
        )

    def _fitted(self, samples: Sequence[Sample], source: int, record: int) -> Iterator[Numbered]:
        """Yields the samples of a record in the length of a row; the two of a pair, or none."""
        if not self.data.has_pairs:
            for sample in samples:
                yield from self._fitting(sample, source, record)
            return
        chosen, rejected = with_one_start(*samples)
        if not self._has_answers(chosen, rejected):
            self.tally.skipped += 1
            return
        pair = [*self._fitting(chosen, source, record), *self._fitting(rejected, source, record)]
        start = min(s.counted[0][0] if s.counted else len(s.ids) for s in (chosen, rejected))
        # TRL leaves out a pair with a prompt that fills a row.
        if len(pair) == 2 and start < self.way.length and any(_counts(n.tokens) for n in pair):
            yield from pair
        elif len(pair) == 2:
            self.tally.uncounted += 2
        elif len(pair) == 1:
            self.tally.dropped += 1

    def _has_answers(self, chosen: Sample, rejected: Sample) -> bool:
        """Returns whether each answer of a pair has the tokens that the objective needs: one for a
        mean over tokens.

        Raises:
            ConfigError: an answer has none, and bad records are refused.
        """
        if self.data.objective == DPO:
            return True
        for name, sample in (("chosen", chosen), ("rejected", rejected)):
            if any(end > max(1, first) for first, end in sample.counted):
                continue
            if self.data.bad_records != "refuse":
                return False
            raise ConfigError(
                f"{sample.place}: the {name} answer has no token that the model predicts, and"
                f" data.objective {self.data.objective} has the mean over an answer's tokens; leave"
                " data.eos at its default, so that an end token counts, or set data.bad_records:"
                " skip"
            )
        return True

    def _fitting(self, sample: Sample, source: int, record: int) -> Iterator[Numbered]:
        """Yields a sample in the length of a row, as ``data.too_long`` says.

        Raises:
            ConfigError: the sample is too long, or has an id beyond the vocabulary.
        """
        length, tally = len(sample.ids), self.tally
        if not length:
            tally.empty += 1
            return
        tokens = marked(sample.ids, sample.counted)
        if (most := int((tokens & np.uint32(ID)).max())) >= self.way.vocab_size:
            raise ConfigError(
                f"{sample.place}: has the token {most}, and the model has a vocabulary of"
                f" {self.way.vocab_size}"
            )
        tally.lost += sample.lost
        tally.remarks.update(remark.value for remark in sample.remarks)
        tally.lengths.append(length)
        weights = _weights_of(sample) if self.data.objective == WEIGHTED else None
        first = 0
        for part in self._cut(sample.place, tokens):
            # Parts follow one another from the sample's start.
            of_part = None if weights is None else weights[first : first + len(part)]
            first += len(part)
            # TRL leaves these samples out of rows of one sample, and packs them into other rows.
            alone = self.data.packing == "none" and not self.data.has_pairs
            if alone and not _counts(part):
                tally.uncounted += 1
                continue
            yield Numbered(tokens=part, source=source, record=record, weights=of_part)

    def _cut(self, place: str, tokens: Tokens) -> list[Tokens]:
        """Returns the parts of a sample to train on; counts what is lost."""
        most, tally = self.way.length, self.tally
        if len(tokens) <= most:
            return [tokens]
        match self.data.too_long:
            case "refuse":
                split = "" if self.data.has_pairs else ", split"
                raise ConfigError(
                    f"{place}: has {len(tokens):,} tokens, and data.sequence_length is"
                    f" {most:,}; set data.too_long to truncate{split} or drop, or a greater length"
                )
            case "drop":
                tally.dropped += 1
                return []
            case "split":
                tally.split += 1
                parts = [tokens[at : at + most] for at in range(0, len(tokens), most)]
                for part in parts:
                    part[0] |= np.uint32(BEGINS)
                return parts
        tally.truncated += 1
        return [tokens[:most]]


def _counts(tokens: Tokens) -> bool:
    """Returns whether a token takes part in the loss."""
    return bool((tokens & np.uint32(COUNTS)).any())


def _weights_of(sample: Sample) -> Weights:
    """Returns the weight of each token of a sample."""
    if sample.weights is None:
        return np.full(len(sample.ids), sample.weight, dtype=np.float32)
    return np.array(sample.weights, dtype=np.float32)


def _size(draft: Prepared) -> int:
    """Returns the characters that the library encodes for a draft."""
    if isinstance(draft, Sample):
        return len(draft.ids)
    return len(draft.passage.text) + (0 if draft.prompt is None else len(draft.prompt.text))


def _end(data: DataConfig, parts: ChatParts) -> str | None:
    """Returns the text of the token behind a plain text or completion; None without one.

    Raises:
        ConfigError: ``data.eos`` names a token that the tokenizer lacks.
    """
    if not isinstance(data.eos, tuple) or not data.eos:
        return None if data.eos is False else parts.end
    token = data.eos[0]
    text = token if isinstance(token, str) else parts.library.id_to_token(token)
    if text is None or parts.library.token_to_id(text) is None:
        raise ConfigError(
            f"data.eos = {token!r}: the tokenizer has no such token; give the text of a token of"
            " its vocabulary, or a number"
        )
    return text


def _template(data: DataConfig, parts: ChatParts) -> Template | None:
    """Returns the chat template; None if the tokenizer has none and no key names one."""
    name = data.chat_template
    variables = checked_variables("data", "chat_template_kwargs", dict(data.chat_template_kwargs))
    published = parts.template if name == MODEL else named_template(name)
    if name == MODEL and not published:
        return None
    return chosen_template(name, published, {**parts.special, **variables})
