"""Groups of parameters by their names, and the ranges of a block that they make.

A pattern is a regular expression, searched for in all names of a parameter: a tied one has several.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from penstock.config.training import GroupConfig, OptimizerConfig
from penstock.host.errors import ConfigError
from penstock.host.limits.bounds import matching
from penstock.shm.table import BlockTable, TensorSpec, padded

_SHOWN_NAMES = 4
"""Names that an error lists."""


class StepRange(NamedTuple):
    """Elements [start, end) of a block's trainable array with one weight decay and one learning
    rate, which is the step's times ``rate``.
    """

    start: int
    end: int
    weight_decay: float
    rate: float = 1.0


def step_ranges(config: OptimizerConfig, table: BlockTable, block: int) -> list[StepRange]:
    """Returns the fewest ranges that cover the trainable array of a block. Bounds are multiples of
    :data:`penstock.shm.table.VECTOR_ELEMENTS`.
    """
    ranges: list[StepRange] = []
    for tensor, decay, rate in tensor_steps(config, table, block):
        start, end = tensor.offset, tensor.offset + padded(tensor.num_elements)
        if ranges and ranges[-1][2:] == (decay, rate):
            start = ranges.pop().start
        ranges.append(StepRange(start, end, decay, rate))
    return ranges


def tensor_steps(
    config: OptimizerConfig, table: BlockTable, block: int
) -> Iterator[tuple[TensorSpec, float, float]]:
    """Yields each trainable tensor of a block with its weight decay and its factor of the rate, in
    the order of the block's array.

    The first group that matches a tensor decides. Without one, ``optimizer.weight_decay`` acts on
    tensors with two or more axes.
    """
    groups = config.groups
    aliases = _aliases(table) if groups else {}
    trainable = (tensor for tensor in table.blocks[block].tensors if tensor.trainable)
    for tensor in sorted(trainable, key=lambda tensor: tensor.offset):
        decay, rate = config.weight_decay if tensor.decay else 0.0, 1.0
        names = (tensor.name, *aliases.get(tensor.name, ()))
        group = next((group for group in groups if is_matched(group.match, names)), None)
        if group is not None:
            rate = group.rate
            decay = decay if group.weight_decay is None else group.weight_decay
        yield tensor, decay, rate


def check_groups(table: BlockTable, groups: Sequence[GroupConfig]) -> None:
    """Refuses a group that decides nothing in this model.

    Raises:
        ConfigError: a pattern matches no parameter, or a group no trainable one, or only those of
            earlier groups. The error names the group, and near names.
    """
    patterns = [pattern for group in groups for pattern in group.match]
    tensors = sum(len(block.tensors) for block in table.blocks)
    with matching("optimizer.groups", patterns, tensors):
        _check_groups(table, groups)


def _check_groups(table: BlockTable, groups: Sequence[GroupConfig]) -> None:
    aliases = _aliases(table)
    tensors = {tensor.name: tensor for block in table.blocks for tensor in block.tensors}
    names = {name: (name, *aliases.get(name, ())) for name in tensors}
    trainable = {name for name, tensor in tensors.items() if tensor.trainable}
    free = set(trainable)
    for number, group in enumerate(groups):
        key = f"optimizer.groups.{number}.match"
        check_matches(key, group.match, [name for known in names.values() for name in known])
        members = {name for name in names if is_matched(group.match, names[name])}
        if not members & trainable:
            near = near_names(" ".join(group.match), sorted(trainable))
            raise ConfigError(
                f"{key}: {list(group.match)} matches only parameters that are not trained"
                " (train.freeze, train.only, adapter); trained are parameters such as"
                f" {', '.join(near)}"
            )
        if not members & free:
            raise ConfigError(
                f"{key}: {list(group.match)} matches only parameters of earlier groups, and the"
                " first group that matches decides; put this group before them, or remove it"
            )
        free -= members


def is_matched(patterns: Iterable[str], names: Collection[str]) -> bool:
    """Returns whether a pattern matches one of a parameter's names."""
    return any(re.search(pattern, name) for pattern in patterns for name in names)


def check_matches(key: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Refuses a pattern without a parameter. ``names``: all names of parameters.

    Raises:
        ConfigError: names ``key``, the pattern and near names.
    """
    for pattern in patterns:
        if not is_matched((pattern,), names):
            raise ConfigError(
                f"{key}: {pattern!r} matches no parameter; parameters have names such as"
                f" {', '.join(near_names(pattern, names))}"
            )


def near_names(pattern: str, names: Sequence[str]) -> list[str]:
    """Returns the names nearest to the words of a pattern, by their parts; one for all layers."""
    words = re.findall(r"[A-Za-z_]{2,}", pattern)

    def likeness(name: str) -> float:
        parts = name.split(".")
        ratios = (
            max(difflib.SequenceMatcher(None, word, part).ratio() for part in parts)
            for word in words
        )
        return sum(ratios)

    kinds = {re.sub(r"\d+", "N", name): name for name in reversed(names)}
    return sorted(reversed(kinds.values()), key=likeness, reverse=True)[:_SHOWN_NAMES]


def _aliases(table: BlockTable) -> dict[str, list[str]]:
    """Returns the further names of tied tensors by the name that the owner's block has."""
    aliases: dict[str, list[str]] = {}
    for block in table.blocks:
        for borrowed in block.borrows:
            aliases.setdefault(borrowed.name, []).append(borrowed.local_name)
    return aliases
