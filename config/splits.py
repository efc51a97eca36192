"""Splits of data sets in the words of datasets: ``train``, ``train[:90%]``, ``[100:200]``."""

from __future__ import annotations

import re
from dataclasses import dataclass

EXAMPLES = "train, test, train[:90%], [10%:] or train[100:200]"

_FORM = re.compile(
    r"(?P<name>\w+(?:\.\w+)*)?"
    r"(?P<part>\[(?:(?P<start>-?\d[\d_]*)(?P<of_start>%)?)?"
    r":(?:(?P<stop>-?\d[\d_]*)(?P<of_stop>%)?)?\])?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A split, or a part of one.

    ``name`` is None for all files of a source. ``start`` and ``stop`` are records, or percent of
    all records with ``percent``; negative ones count from the end. None stands for an open end.
    """

    name: str | None = None
    start: int | None = None
    stop: int | None = None
    percent: bool = False

    @classmethod
    def parse(cls, text: str) -> Split:
        """Returns the split that a text names.

        Raises:
            ValueError: the text has another form, or a share above 100 %.
        """
        form = _FORM.fullmatch(text)
        if form is None or not text:
            plus = "; give each part a source of its own" if "+" in text else ""
            raise ValueError(
                f"accepted are a split, a part of it or a part of all: {EXAMPLES}{plus}"
            )
        start, stop = (None if form[key] is None else int(form[key]) for key in ("start", "stop"))
        # One sign of percent counts for both ends, as in datasets.
        percent = bool(form["of_start"] or form["of_stop"])
        if percent and any(abs(end) > 100 for end in (start, stop) if end is not None):
            raise ValueError("a share is between -100% and 100%, such as train[:90%]")
        return cls(name=form["name"], start=start, stop=stop, percent=percent)

    @property
    def is_part(self) -> bool:
        """True if some records may be left out."""
        return self.start is not None or self.stop is not None

    def records(self, count: int) -> range:
        """Returns the records of the part, of ``count`` in all. Shares are rounded to the nearest
        record, halves to the even one, as in datasets.
        """
        start, stop = (
            end if end is None or not self.percent else round(end * count / 100)
            for end in (self.start, self.stop)
        )
        return range(count)[slice(start, stop)]
