"""Records of sources as one text, which is cut into rows (``packing: wrapped``). No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.models.data.batch import IGNORED_LABEL
from penstock.models.data.chat.conversation import request_of
from penstock.models.data.chat.requests import IdsRequest, Request, TextRequest
from penstock.models.data.chat.unread import unread_line
from penstock.models.data.chunks import Progress
from penstock.models.data.reading.opening import CountBytes
from penstock.models.data.reading.records import Document, document_of
from penstock.models.data.rows.origins import Origin, origins_of
from penstock.models.data.sources import Source

_WRAPPED = "data.packing = 'wrapped': makes one text of all records, of which every token counts"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedText:
    """Records of text or of ready ids, as documents in order; see
    :class:`penstock.models.data.token_sources.Text`.
    """

    origins: Sequence[Origin]
    seed: int
    skips: bool
    """True if records that cannot be read are left out."""
    progress: Progress

    @property
    def source(self) -> Source:
        """The files of all sources."""
        files = tuple(path for origin in self.origins for path in origin.source.files)
        return Source(files=files, encoding=self.origins[0].source.encoding)

    @property
    def key(self) -> list[Any]:
        """Values that decide the documents, next to the bytes of the files."""
        parts = [[len(origin.source.files), origin.reading] for origin in self.origins]
        return [["wrapped", parts, self.seed, self.skips]]

    def documents(self, read: CountBytes) -> Iterator[Document]:
        """Yields the documents of all records.

        Raises:
            ConfigError: a record cannot be read, or has tokens that do not count.
        """
        skipped = 0
        for number, origin in enumerate(self.origins):
            unread: Counter[str] = Counter()
            for place, record in origin.records(read):
                times = origin.times(self.seed, number, place)
                if not record.where:
                    parts = record.parts if times == 1 else list(record.parts)
                    for _ in range(times):
                        yield from document_of(record.place, parts)
                    continue
                try:
                    form = origin.form
                    request = request_of(record.place, record.fields, form, unread=unread)
                except ConfigError:
                    if not self.skips:
                        raise
                    skipped += 1
                    continue
                for _ in range(times):
                    yield from _documents(request)
            if unread:
                self.progress(unread_line(origin.name, unread))
        if skipped:
            self.progress(f"data: left out {skipped:,} records that cannot be read")


def wrapped_text(config: Config, key: str, progress: Progress) -> WrappedText:
    """Returns the text of ``data.sources``, or that of ``data.eval_path`` for this ``key``."""
    return WrappedText(
        origins=origins_of(config, key, progress),
        seed=config.run.seed,
        skips=config.data.bad_records == "skip",
        progress=progress,
    )


def _documents(request: Request) -> Iterator[Document]:
    """Yields the document of a request; none without content.

    Raises:
        ConfigError: the request has tokens that do not count.
    """
    match request:
        case TextRequest():
            yield from document_of(request.place, [request.text])
        case IdsRequest():
            labels = request.ids if request.labels is None else request.labels
            completion = request.completion or (True,) * len(labels)
            hidden = sum(
                label == IGNORED_LABEL or not counts
                for label, counts in zip(labels, completion, strict=True)
            )
            if hidden:
                raise ConfigError(
                    f"{request.place}: {_WRAPPED}, and labels or masks leave out {hidden:,} of"
                    f" {len(labels):,} tokens; use best-fit or none"
                )
            if request.ids:
                yield Document(place=request.place, ids=request.ids)
        case _:
            raise ConfigError(
                f"{request.place}: {_WRAPPED}, and the prompts of this record do not count; use"
                " best-fit or none"
            )
