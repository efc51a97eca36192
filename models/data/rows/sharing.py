"""The ways in which samples of a model can share rows and micro-batches. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from penstock.config.schema import Config
from penstock.config.values import AUTO
from penstock.host.errors import ConfigError
from penstock.models.data.chunks import Progress
from penstock.models.data.rows.packing import Packing


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The result of a measurement (:mod:`penstock.models.apart.measure`).

    ``apart``: samples that share a row do not change each other. ``padded``: neither padding nor
    other rows of a micro-batch change a sample that has a row of its own. ``reason``: the measured
    influence. ``shorter``: tokens of a row within which ``padded`` holds; None if unknown.

    ``limit``: tokens beyond which the longest sample of a micro-batch decides the frequencies of
    all samples; None without such a limit within a row. ``grows``: beyond the limit frequencies
    also depend on earlier micro-batches.
    """

    model_type: str = ""
    apart: bool = True
    padded: bool = True
    reason: str = ""
    shorter: int | None = None
    limit: int | None = None
    grows: bool = False

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Sharing:
        """Returns the result with these fields.

        Raises:
            KeyError, TypeError, ValueError: the fields are damaged.
        """
        shorter, limit = fields["shorter"], fields["limit"]
        return cls(
            model_type=str(fields["model_type"]),
            apart=bool(fields["apart"]),
            padded=bool(fields["padded"]),
            reason=str(fields["reason"]),
            shorter=None if shorter is None else int(shorter),
            limit=None if limit is None else int(limit),
            grows=bool(fields["grows"]),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)

    def packing(self, config: Config, progress: Progress) -> Packing:
        """Returns the packing of samples: rows of one sample if the model needs them.

        Raises:
            ConfigError: padding changes samples, or ``data.packing`` asks for rows of several
                samples, and these would change each other.
        """
        data = config.data
        if not self.padded:
            remedy = "data.packing: wrapped makes rows without padding from plain text"
            if self.shorter is not None:
                remedy = f"set data.sequence_length to at most {self.shorter}"
            raise ConfigError(
                f"data.sequence_length = {data.sequence_length}: {self.reason}, and rows of"
                f" samples end in padding; {remedy}"
            )
        if data.packing == Packing.NONE.value or config.trains_on_pairs:
            return Packing.NONE
        if self.apart:
            return Packing.BEST_FIT
        return self._lone(config, self.reason, "", progress)

    def packing_of(
        self, packing: Packing, config: Config, shortest: int, longest: int, progress: Progress
    ) -> Packing:
        """Returns ``packing`` for samples of these lengths in tokens; rows of one sample if some
        are longer than the limit and others are not.

        Raises:
            ConfigError: ``data.packing`` asks for rows of several samples, and lengths decide
                frequencies. Or samples are beyond a limit where earlier samples decide, too.
        """
        if self.limit is None or longest <= self.limit:
            return packing
        shorter = f"set data.sequence_length to at most {self.limit}"
        if self.grows:
            raise ConfigError(
                f"data.sequence_length = {config.data.sequence_length}: a sample has {longest}"
                f" tokens, and beyond {self.limit} the rotary frequencies of {self._model} depend"
                f" on the longest sample so far; {shorter}"
            )
        if shortest > self.limit or packing is Packing.NONE:
            return packing
        cause = (
            f"samples have {shortest} to {longest} tokens, and in {self._model} a sample beyond"
            f" {self.limit} changes the rotary frequencies of others"
        )
        return self._lone(config, cause, f", or {shorter}", progress)

    def check_documents(
        self,
        name: str = "data.document_masks: true",
        remedy: str = "set data.document_masks: false",
    ) -> None:
        """Refuses to keep documents of a row apart if they would change each other.

        Raises:
            ConfigError: begins with ``name``, the key that keeps documents apart.
        """
        if not self.apart:
            raise ConfigError(f"{name}: {self.reason}; {remedy}")
        if self.limit is not None:
            raise ConfigError(
                f"{name}: beyond {self.limit} tokens the longest document of a micro-batch decides"
                f" the rotary frequencies of {self._model}; {remedy}, or data.sequence_length to"
                f" at most {self.limit}"
            )

    @property
    def _model(self) -> str:
        return f"model type {self.model_type!r}"

    def _lone(self, config: Config, cause: str, other: str, progress: Progress) -> Packing:
        """Returns rows of one sample if the packing is for Penstock to choose."""
        if config.data.packing != AUTO:
            raise ConfigError(
                f"data.packing = {config.data.packing!r}: {cause}; set data.packing: none{other}"
            )
        progress(f"data.packing: auto takes rows of one sample: {cause}")
        return Packing.NONE


Measured = Callable[[], Sharing]
"""Returns the sharing of a run's model; the first call may measure."""
