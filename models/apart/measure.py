"""The measurement: are loss and gradients of a sample in a row with others those of it alone?

A tiny model of the type computes samples alone, padded, packed into a row with different others,
and in a micro-batch with another row. All go through the runtime of workers, in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from penstock.config.schema import Config, parse_config
from penstock.config.values import MASKED, NEXT_TOKEN
from penstock.host.errors import reason
from penstock.models.apart.tiny import (
    LONGEST_ROW,
    candidates,
    layer_kinds,
    limits,
    shorter_than,
)
from penstock.models.apart.trial import Result, Sample, Trial, in_double, micro_batch, samples_of
from penstock.models.data.rows.sharing import Sharing
from penstock.models.surgery.decoder_parts import BatchTensors, DecoderParts
from penstock.models.surgery.hf import without_dropout
from penstock.models.surgery.skeleton import Skeleton, predicts_masked

TOLERANCE = 1e-9
"""Largest relative difference of equal losses and gradients: rounding alone is below 1e-12."""

_PADDED, _PACKED = "the padding behind it", "the other samples of its row"
_ROWS = "the other rows of its micro-batch"

_MIXED, _SHORT, _LONG = (7, 13, 5, 11, 4), (7, 11, 5, 9, 8), (13, 14, 13)
"""Lengths of samples that fill a row: on both sides of a tiny model's limit of positions, below it,
and above it.
"""

_FEW = 6
"""Positions below each limit. The last one leaves a gap, like the larger ones after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """Rows of a micro-batch, as numbers of samples. ``influence``: the part of the micro-batch that
    must not change a sample.
    """

    influence: str
    rows: tuple[tuple[int, ...], ...]

    @property
    def shares(self) -> bool:
        """True if a row has several samples."""
        return max(map(len, self.rows)) > 1


def measure(hf_config: PretrainedConfig, skeleton: Skeleton, length: int) -> Sharing:
    """Returns how samples of the model of ``skeleton`` can share rows of ``length`` tokens."""
    hf_config = without_dropout(hf_config)
    sharing = _measured(hf_config, skeleton, length)
    windows = shorter_than(hf_config, length)
    if sharing.padded or not windows:
        return sharing
    within = _measured(hf_config, skeleton, min(windows))
    return replace(sharing, shorter=min(windows) if within.padded else None)


def _measured(hf_config: PretrainedConfig, skeleton: Skeleton, length: int) -> Sharing:
    kind = hf_config.model_type
    exceeded = any(length > limit for limit in limits(hf_config))
    with torch.random.fork_rng(devices=[]), in_double():
        torch.manual_seed(0)  # a new model's weights: the result is the same in each process
        try:
            trial = _trial(hf_config, skeleton, length, exceeded=exceeded)
        except _NotTinyError as error:
            return Sharing(
                model_type=kind,
                apart=False,
                reason=f"samples of model type {kind!r} cannot be compared ({error})",
            )
        changed = _changed(trial, _MIXED)
        if exceeded and changed:
            limit = frequency_limit(skeleton, length)
            if limit is not None and not _changed(trial, _SHORT, lone_padding=True):
                grows = bool(_changed(trial, _LONG, lone_padding=True))
                return Sharing(model_type=kind, limit=limit, grows=grows)
    if not changed:
        return Sharing(model_type=kind)
    return Sharing(
        model_type=kind,
        apart=False,
        padded=not changed & {_PADDED, _ROWS},
        reason=f"in model type {kind!r} a sample's loss and gradients change with"
        f" {' and '.join(sorted(changed))}",
    )


class _NotTinyError(Exception):
    """No tiny model can be built or run; names the reason."""


def _trial(
    hf_config: PretrainedConfig, skeleton: Skeleton, length: int, *, exceeded: bool
) -> Trial:
    """Returns the first tiny model that has all kinds of layers and computes a sample.

    Raises:
        _NotTinyError: there is none.
    """
    kinds, failure = len(layer_kinds(skeleton)), "no candidate"
    objective = MASKED if predicts_masked(hf_config) else NEXT_TOKEN
    config = _config(objective)
    for candidate in _built(candidates(hf_config, skeleton, length, exceeded=exceeded)):
        if isinstance(candidate, str):
            failure = candidate
            break
        try:
            trial = Trial(without_dropout(candidate), config)
            if len(layer_kinds(trial.skeleton)) < min(kinds, len(trial.skeleton.layers)):
                failure = "the reduced model lacks a kind of layer"
            else:
                _alone(trial, samples_of([LONGEST_ROW])[0])
                return trial
        except Exception as error:  # each type has its own checks
            failure = reason(error)
    raise _NotTinyError(failure)


def _built(made: Iterator[PretrainedConfig]) -> Iterator[PretrainedConfig | str]:
    """Yields configurations; after an error, its reason."""
    try:
        yield from made
    except Exception as error:  # each type has its own checks
        yield reason(error)


def _config(objective: str) -> Config:
    return parse_config(
        {
            "model": {"hf": {"model_type": "llama"}},
            "data": {
                "path": "@stdlib",
                "sequence_length": LONGEST_ROW,
                "objective": objective,
            },
        }
    )


def _cases(count: int, *, masked: bool) -> Iterator[_Case]:
    """Yields the cases of ``count`` samples that fill a row. An encoder sees no padding: rows of
    masked words are full.
    """
    everything = tuple(range(count))
    backwards = everything[::-1]
    if masked:
        yield _Case(influence=_PACKED, rows=(everything,))
        yield _Case(influence=_ROWS, rows=(everything, backwards))
        return
    for number in backwards:
        yield _Case(influence=_PADDED, rows=((number,),))
    yield _Case(influence=_PACKED, rows=(everything,))
    yield _Case(influence=_PACKED, rows=(backwards[1:],))
    yield _Case(influence=_PACKED, rows=(everything[1:],))
    yield _Case(influence=_ROWS, rows=((0,), (1,)))
    yield _Case(influence=_ROWS, rows=((0, 2), (1,)))


def _changed(trial: Trial, lengths: Sequence[int], *, lone_padding: bool = False) -> frozenset[str]:
    """Returns the influences that change a sample of these lengths in tokens."""
    samples = samples_of(lengths)
    # Shortest first: frequencies may grow with the longest sample so far.
    order = sorted(range(len(samples)), key=lambda number: lengths[number])
    alone = {number: _alone(trial, samples[number]) for number in order}
    masked = predicts_masked(trial.skeleton.model.config)
    changed: set[str] = set()
    for case in _cases(len(samples), masked=masked):
        if case.influence == _ROWS and changed & {_PADDED, _PACKED} and case.shares:
            continue  # a cause is known
        rows = [[samples[number] for number in row] for row in case.rows]
        expected = [alone[number] for row in case.rows for number in row]
        batch = micro_batch(rows, LONGEST_ROW, lone_padding=lone_padding)
        try:
            distance = trial.run(batch).distance(_sum(expected))
        except Exception:  # the type takes no positions, or other shapes than before
            distance = float("inf")
        if distance > TOLERANCE:
            changed.add(case.influence)
    return frozenset(changed)


def _alone(trial: Trial, sample: Sample) -> Result:
    return trial.run(micro_batch([[sample]], len(sample.tokens)))


def _sum(results: Sequence[Result]) -> Result:
    total = results[0]
    for result in results[1:]:
        total = total + result
    return total


def frequency_limit(skeleton: Skeleton, length: int) -> int | None:
    """Returns the number of positions beyond which the largest position of a micro-batch changes
    the arguments of layers at other positions. None if that does not occur within ``length``.
    """
    parts = DecoderParts(skeleton, device=torch.device("cpu"), compute_dtype=torch.float32)

    def arguments(positions: int) -> list[torch.Tensor]:
        ids = torch.tensor([[0, 1, 2, 3, positions - 1]])
        calls = parts.layer_calls(BatchTensors(shape=(1, ids.shape[1]), position_ids=ids))
        tensors = [
            value
            for call in calls
            for entry in (*call.args, *call.kwargs.values())
            for value in (entry if isinstance(entry, (tuple, list)) else (entry,))
            if isinstance(value, torch.Tensor)
        ]
        return [_before_last(tensor, ids.shape[1]) for tensor in tensors]

    with suppress(Exception):
        few = arguments(_FEW)

        def same(positions: int) -> bool:
            arguments(_FEW)  # Frequencies that have grown shrink again.
            return all(map(torch.equal, arguments(positions), few))

        if same(length):
            return None
        low, high = _FEW, length
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if same(middle) else (low, middle)
        arguments(_FEW)
        return low
    return None


def _before_last(tensor: torch.Tensor, positions: int) -> torch.Tensor:
    """Returns the part of a tensor without the last position."""
    for axis, size in enumerate(tensor.shape):
        if size == positions:
            tensor = tensor.narrow(axis, 0, positions - 1)
    return tensor
