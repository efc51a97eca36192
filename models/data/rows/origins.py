"""Sources of the configuration with their files and records. No torch."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.config.data import DataConfig, SourceConfig
from penstock.config.schema import Config
from penstock.config.splits import Split
from penstock.host.errors import ConfigError
from penstock.models.data.chat.requests import Format, RecordForm
from penstock.models.data.chunks import Progress
from penstock.models.data.reading.opening import CountBytes, ignore_bytes
from penstock.models.data.reading.record import Record
from penstock.models.data.reading.records import records
from penstock.models.data.reading.split_names import named_splits
from penstock.models.data.rows.registry import registered
from penstock.models.data.sources import Source, find_source

_PLACES = {"path", "registry", "name"}
"""Keys of a source that name its files. Fingerprints have the bytes of the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A source of the configuration and its files. ``name`` is its key, such as
    ``data.sources[0]``. ``is_closed``: a registry decides on its columns.
    """

    name: str
    config: SourceConfig
    source: Source
    is_closed: bool = False

    @property
    def form(self) -> RecordForm:
        """The way to read its records."""
        config = self.config
        return RecordForm(
            format=Format(config.format),
            columns=config.columns,
            roles=config.roles,
            is_closed=self.is_closed,
        )

    def records(self, read: CountBytes = ignore_bytes) -> Iterator[tuple[int, Record]]:
        """Yields the records of its split and limit, each with its number in the files.

        Raises:
            ConfigError: a file cannot be read, or the split has no record.
        """
        text, limit = self.config.split, self.config.limit
        split = Split() if text is None else Split.parse(text)
        part: range | None = None
        if split.is_part:
            count = sum(1 for _ in records(self.source))
            part = split.records(count)
            if not part:
                raise ConfigError(
                    f"{self.name}.split = {text!r}: takes none of the {count:,} records"
                )
        first, end = (0, None) if part is None else (part.start, part.stop)
        if limit is not None:
            end = first + limit if end is None else min(end, first + limit)
        return itertools.islice(enumerate(records(self.source, read)), first, end)

    @property
    def reading(self) -> dict[str, Any]:
        """The keys of the source that decide its samples, next to the bytes of its files."""
        keys = self.config.model_dump(mode="json", exclude=_PLACES)
        # Rows that were made before the key existed keep their fingerprint.
        return {key: value for key, value in keys.items() if key != "split" or value is not None}

    def times(self, seed: int, source: int, record: int) -> int:
        """Returns how often a pass takes a record of the source with this number."""
        fraction, whole = math.modf(self.config.weight)
        if not fraction:
            return int(whole)
        digest = hashlib.blake2b(f"{seed}/{source}/{record}".encode(), digest_size=8).digest()
        drawn = int.from_bytes(digest, "little") >> 11
        return int(whole) + (drawn / 2.0**53 < fraction)


def origins_of(config: Config, key: str, progress: Progress) -> list[Origin]:
    """Returns the sources of ``data.sources``, or that of ``data.KEY`` (path or eval_path).

    Raises:
        ConfigError: the files of a source cannot be found.
    """
    data = config.data
    if data.sources and key == "path":
        named = [(f"data.sources[{n}]", source) for n, source in enumerate(data.sources)]
    else:
        named = [(f"data.{key}", SourceConfig(path=str(getattr(data, key))))]
    return [_origin(name, source, data, progress) for name, source in named]


def _origin(name: str, source: SourceConfig, data: DataConfig, progress: Progress) -> Origin:
    key = name if name.endswith("path") else f"{name}.path"
    is_closed = source.registry is not None
    if source.registry is not None:
        key, source = f"{name}.registry", registered(name, source, pairs=data.has_pairs)
    path = str(source.path)
    split = None if source.split is None else Split.parse(source.split).name
    matched = find_source(path, key=key, encoding=data.encoding, any_records=True, split=split)
    if matched.left_out:
        progress(
            f"{key} = {path!r}: reads {len(matched.files):,}"
            f" file{'s' * (len(matched.files) > 1)}; left out: {matched.omissions}"
        )
    splits = () if source.split is not None else named_splits(matched.files)
    if len(splits) > 1:
        progress(
            f"{key} = {path!r}: reads the splits {', '.join(splits)} together; split: {splits[-1]}"
            " would take one of them"
        )
    return Origin(name=name, config=source, source=matched, is_closed=is_closed)
