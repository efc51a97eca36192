"""Samples of the sources of a run, in order, and what became of their records. No torch."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from penstock.config.data import DataConfig
from penstock.host.errors import ConfigError
from penstock.models.data.batch import IGNORED_LABEL
from penstock.models.data.chat.conversation import checked_variables, request_of
from penstock.models.data.chat.encoder import ChatParts, Encoder
from penstock.models.data.chat.masks import (
    Choices,
    Prepared,
    Sample,
    TrainOn,
    Turns,
    drafts_of,
    encoded,
)
from penstock.models.data.chat.templates import MODEL, Template, chosen_template, named_template
from penstock.models.data.reading.opening import CountBytes, ignore_bytes
from penstock.models.data.reading.record import Record
from penstock.models.data.rows.origins import Origin

_Item = TypeVar("_Item")

_BATCH = 256
"""Records that the library encodes in one call."""


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
        end = parts.special.get("eos_token")
        pad = parts.special.get("pad_token", end)
        number = None if pad is None else parts.library.token_to_id(pad)
        return cls(
            encoder=Encoder(parts.library),
            template=_template(data, parts),
            choices=Choices(
                train_on=TrainOn(data.train_on),
                turns=Turns(data.turns),
                end=None if data.eos is False else end,
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
        choices = self.choices
        chosen = [choices.train_on.value, choices.turns.value, choices.end]
        return [shown, chosen, self.length, self.vocab_size, self.pad]


@dataclass(slots=True)
class Tally:
    """Counts of records and samples. ``lengths`` are the tokens of each sample before it was cut.

    ``skipped`` records cannot be read. ``empty`` samples have no token, and ``uncounted`` ones no
    token that counts. ``dropped`` samples are too long. ``lost`` tokens end prompts that are no
    prefix of their samples.
    """

    records: int = 0
    skipped: int = 0
    empty: int = 0
    uncounted: int = 0
    truncated: int = 0
    split: int = 0
    dropped: int = 0
    lost: int = 0
    by_source: dict[str, int] = field(default_factory=dict)
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
            "lengths": {
                name: int(np.percentile(lengths, share, method="nearest"))
                for name, share in marks.items()
            },
            "sources": dict(self.by_source),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """A sample with its source and the record in the source, both from 0."""

    sample: Sample
    source: int
    record: int


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
        for number, origin in enumerate(self.origins):
            before = len(self.tally.lengths)
            for batch in _batched(origin.records(self.read), _BATCH):
                for place, samples in self._samples(origin, batch):
                    for _ in range(origin.times(self.seed, number, place)):
                        for sample in samples:
                            yield from self._fitting(sample, number, place)
            self.tally.by_source[origin.name] = len(self.tally.lengths) - before

    def _samples(
        self, origin: Origin, batch: Sequence[tuple[int, Record]]
    ) -> Iterator[tuple[int, list[Sample]]]:
        """Yields records by number with their samples."""
        places: list[int] = []
        drafts: list[list[Prepared]] = []
        for number, record in batch:
            self.tally.records += 1
            prepared = self._drafts(origin, record)
            if prepared is not None:
                places.append(number)
                drafts.append(prepared)
        try:
            made = encoded([draft for group in drafts for draft in group], self.way.encoder)
        except ConfigError:
            if self.data.bad_records == "refuse":
                raise
            yield from self._one_by_one(places, drafts)
            return
        samples = iter(made)
        for number, group in zip(places, drafts, strict=True):
            yield number, list(itertools.islice(samples, len(group)))

    def _one_by_one(
        self, places: Sequence[int], drafts: Sequence[list[Prepared]]
    ) -> Iterator[tuple[int, list[Sample]]]:
        for number, group in zip(places, drafts, strict=True):
            try:
                yield number, encoded(group, self.way.encoder)
            except ConfigError:
                self.tally.skipped += 1

    def _drafts(self, origin: Origin, record: Record) -> list[Prepared] | None:
        """Returns the drafts of a record; None for one that is skipped."""
        fields = record.fields if record.where else {"text": "".join(record.parts)}
        digest = hashlib.blake2b(repr(fields).encode(errors="replace"), digest_size=8).digest()
        self.tally.digests.append(int.from_bytes(digest, "little"))
        way = self.way
        try:
            request = request_of(record.place, fields, origin.form)
            return drafts_of(request, way.encoder, way.template, way.choices)
        except ConfigError:
            if self.data.bad_records == "refuse":
                raise
            self.tally.skipped += 1
            return None

    def _fitting(self, sample: Sample, source: int, record: int) -> Iterator[Numbered]:
        """Yields a sample in the length of a row, as ``data.too_long`` says.

        Raises:
            ConfigError: the sample is too long, or has an id beyond the vocabulary.
        """
        length, tally = len(sample.ids), self.tally
        if not length:
            tally.empty += 1
            return
        if max(sample.ids) >= self.way.vocab_size:
            raise ConfigError(
                f"{sample.place}: has the token {max(sample.ids)}, and the model has a vocabulary"
                f" of {self.way.vocab_size}"
            )
        tally.lost += sample.lost
        tally.lengths.append(length)
        for part in self._cut(sample):
            # TRL leaves these samples out of rows of one sample, and packs them into other rows.
            if self.data.packing == "none" and max(part.labels) == IGNORED_LABEL:
                tally.uncounted += 1
                continue
            yield Numbered(sample=part, source=source, record=record)

    def _cut(self, sample: Sample) -> list[Sample]:
        """Returns the parts of a sample to train on; counts what is lost."""
        most, tally = self.way.length, self.tally
        if len(sample.ids) <= most:
            return [sample]
        match self.data.too_long:
            case "refuse":
                raise ConfigError(
                    f"{sample.place}: has {len(sample.ids):,} tokens, and data.sequence_length is"
                    f" {most:,}; set data.too_long to truncate, split or drop, or a greater length"
                )
            case "drop":
                tally.dropped += 1
                return []
            case "split":
                tally.split += 1
                stops = range(0, len(sample.ids), most)
                return [_part(sample, start, start + most) for start in stops]
        tally.truncated += 1
        return [_part(sample, 0, most)]


def _part(sample: Sample, start: int, stop: int) -> Sample:
    return Sample(place=sample.place, ids=sample.ids[start:stop], labels=sample.labels[start:stop])


def _batched(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    """Yields items in lists of ``size``; the last one may be shorter."""
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        yield batch


def _template(data: DataConfig, parts: ChatParts) -> Template | None:
    """Returns the chat template; None if the tokenizer has none and no key names one."""
    name = data.chat_template
    variables = checked_variables("data", "chat_template_kwargs", dict(data.chat_template_kwargs))
    published = parts.template if name == MODEL else named_template(name)
    if name == MODEL and not published:
        return None
    return chosen_template(name, published, {**parts.special, **variables})
