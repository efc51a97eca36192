"""A profile: measurements of ``penstock profile`` on a machine, as a value and as a file.

Written by :mod:`penstock.models.profiling.profile`, read by the planner
(:mod:`penstock.planner.cost.profile` makes costs of it). The file is JSON, versioned and bounded::

    {"format": 5, "device": "…", "sequence_length": 256, "micro_batch": 1,
     "machine": {"instruction_s": 0.0001, "fetch_bandwidth": null, …},
     "kinds": {"layer": {"forward_s": [slope, intercept], …,
                         "operators": [{"name": "norm", "forward_s": […], …}],
                         "sources": [{"operator": "norm", "needed_by": [["qkv"]], …}]}},
     "table": {…}}

Fits are per token; ``null`` means that a bandwidth is no limit. Every number is finite and below
1e18, so that all costs that follow stay finite.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf, isinf
from pathlib import Path
from typing import Any

from penstock.host.errors import ConfigError, reason
from penstock.host.inputs import read_bytes, unique_keys
from penstock.shm.table import BlockTable


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFit:
    """``slope`` x tokens + ``intercept``: what Mario fits (its section 5.2: y = a n + b)."""

    slope: float
    intercept: float = 0.0

    def at(self, tokens: float) -> float:
        """Returns the value for ``tokens`` tokens, not below 0."""
        return max(0.0, self.slope * tokens + self.intercept)

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> LinearFit:
        """Fits least squares over (tokens, value); one point gives a line through the origin."""
        if len({x for x, _ in points}) < 2:
            return cls(slope=sum(y for _, y in points) / sum(x for x, _ in points))
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        covariance = sum((x - mean_x) * (y - mean_y) for x, y in points)
        slope = covariance / sum((x - mean_x) ** 2 for x, _ in points)
        return cls(slope=slope, intercept=mean_y - slope * mean_x)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """One operator of a kind of block: its forward, and what it leaves for the backward."""

    name: str
    forward_s: LinearFit
    activation_bytes: LinearFit


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProfile:
    """Outputs of an operator that only recomputation reads; fields as in
    :class:`~penstock.planner.cost.costs.RecomputeSource`.
    """

    operator: str
    needed_by: tuple[tuple[str, ...], ...]
    num_bytes: LinearFit


@dataclass(frozen=True, slots=True, kw_only=True)
class KindProfile:
    """One kind of block, per micro-batch as functions of its tokens.

    Fields as in :class:`~penstock.planner.cost.costs.BlockCost`. Of the workspaces, ``forward``
    belongs to a forward without a graph, ``graph`` to one with a graph. ``constant_bytes``: bytes
    that the first forward leaves for all others (masks, rotary tables), once for all blocks.
    ``operators``: the operators that were measured apart, in their order of execution; they may be
    less than the whole block. ``sources``: tensors to keep if some operators are dropped, and
    others not.
    """

    forward_s: LinearFit
    recompute_s: LinearFit
    backward_input_s: LinearFit
    backward_weight_s: LinearFit
    activation_bytes: LinearFit
    deferred_bytes: LinearFit
    output_bytes: LinearFit
    forward_workspace_bytes: LinearFit
    graph_workspace_bytes: LinearFit
    backward_workspace_bytes: LinearFit
    backward_input_workspace_bytes: LinearFit
    backward_weight_workspace_bytes: LinearFit
    constant_bytes: LinearFit
    operators: tuple[OperatorProfile, ...] = ()
    sources: tuple[SourceProfile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """Rates of one machine: bytes/s, seconds, parameters/s of all optimizer cores of a node.

    ``instruction_s``: overhead of each compute instruction. Bandwidths are ``inf`` where nothing
    has to move. The four rates are those of the optimizer's sweeps (``native/sweeps.h``);
    ``device_update_rate`` is an UPDATE's on one device, without its copies.
    """

    instruction_s: float
    fetch_bandwidth: float
    offload_bandwidth: float
    peer_bandwidth: float
    latency_s: float
    advance_rate: float
    preview_rate: float
    settle_rate: float
    in_place_rate: float
    device_update_rate: float
    device_memory_bytes: float = inf
    host_memory_bytes: float = inf

    @property
    def separate_memory(self) -> bool:
        """True if devices have separate memory, so that weights are copied to them."""
        return self.fetch_bandwidth != inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measurements: a machine, and on it the kinds of blocks of the model of ``table``.

    ``device`` describes the device in words. ``sequence_length``: length of the measured
    micro-batches (attention is quadratic in it, so another length needs another profile).
    ``micro_batch``: the configured one.
    """

    device: str
    sequence_length: int
    micro_batch: int
    machine: MachineProfile
    kinds: Mapping[str, KindProfile] = field(hash=False)
    table: BlockTable

    @property
    def tokens(self) -> int:
        """Tokens of a configured micro-batch."""
        return self.sequence_length * self.micro_batch


PROFILE_FORMAT = 5
"""Written to and required in profile JSON."""

MAX_PROFILE_BYTES = 64 << 20
_MAX_NUMBER = 1e18
_MAX_COUNT = 10**9
_MAX_KINDS = 1000
_MAX_OPERATORS = 64
_MAX_SOURCES = 256
_OPERATOR_NAME = re.compile(r"[a-z0-9_]{1,32}")

_FITS = tuple(
    field.name for field in fields(KindProfile) if field.name not in ("operators", "sources")
)
_RATES = tuple(field.name for field in fields(MachineProfile))
_TIMES = ("instruction_s", "latency_s")
_BLOCK_NUMBERS = (
    "trainable_elements",
    "frozen_elements",
    "forward_flops",
    "activation_bytes",
    "output_bytes",
)
_KEYS = ("format", "device", "sequence_length", "micro_batch", "machine", "kinds", "table")


def to_json(profile: Profile) -> str:
    """Serializes the profile; :func:`from_json` returns an equal profile."""
    rates = {name: getattr(profile.machine, name) for name in _RATES}
    data = {
        "format": PROFILE_FORMAT,
        "device": profile.device,
        "sequence_length": profile.sequence_length,
        "micro_batch": profile.micro_batch,
        "machine": {name: None if isinf(rate) else rate for name, rate in rates.items()},
        "kinds": {name: _kind_to_dict(kind) for name, kind in profile.kinds.items()},
        "table": json.loads(profile.table.to_json()),
    }
    return json.dumps(data, indent=1) + "\n"


def from_json(text: str | bytes) -> Profile:
    """Parses and checks a profile.

    Raises:
        ConfigError: the text is no profile, of another format, or has an impossible value; names
            it.
    """
    if len(text) > MAX_PROFILE_BYTES:
        raise ConfigError(f"profile: {len(text)} bytes; at most {MAX_PROFILE_BYTES} are read")
    try:
        data = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"profile: not valid JSON: {error}") from error
    file_format = data.get("format") if isinstance(data, dict) else None
    if isinstance(data, dict) and file_format != PROFILE_FORMAT:
        raise ConfigError(
            f"profile: format is {file_format!r}, this version reads {PROFILE_FORMAT}; run penstock"
            " profile again"
        )
    entry = _object("profile", data, _KEYS)
    table = _table(entry["table"])
    kinds = _bounded("kinds", entry["kinds"], dict, _MAX_KINDS)
    return Profile(
        device=_text("device", entry["device"], 200),
        sequence_length=_count("sequence_length", entry["sequence_length"]),
        micro_batch=_count("micro_batch", entry["micro_batch"]),
        machine=_machine(entry["machine"]),
        kinds={
            _text("kinds", name, 1000): _kind(f"kinds.{name[:60]}", value)
            for name, value in kinds.items()
        },
        table=table,
    )


def load_profile(path: Path) -> Profile:
    """Reads a profile file.

    Raises:
        ConfigError: it cannot be read, or :func:`from_json` refuses it; names the file.
    """
    try:
        content = read_bytes(path, MAX_PROFILE_BYTES)
    except OSError as error:
        raise ConfigError(f"profile {str(path)!r}: cannot read it: {reason(error)}") from error
    try:
        return from_json(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _kind_to_dict(kind: KindProfile) -> dict[str, Any]:
    fields_of_kind: dict[str, Any] = {name: _fit_to_list(getattr(kind, name)) for name in _FITS}
    fields_of_kind["operators"] = [
        {
            "name": operator.name,
            "forward_s": _fit_to_list(operator.forward_s),
            "activation_bytes": _fit_to_list(operator.activation_bytes),
        }
        for operator in kind.operators
    ]
    fields_of_kind["sources"] = [
        {
            "operator": source.operator,
            "needed_by": source.needed_by,
            "num_bytes": _fit_to_list(source.num_bytes),
        }
        for source in kind.sources
    ]
    return fields_of_kind


def _fit_to_list(fit: LinearFit) -> list[float]:
    return [fit.slope, fit.intercept]


def _machine(value: Any) -> MachineProfile:
    entry = _object("machine", value, _RATES)
    rates = {}
    for name in _RATES:
        where = f"machine.{name}"
        if name in _TIMES:
            rates[name] = _number(where, entry[name])
        elif entry[name] is None:
            rates[name] = inf
        else:
            rates[name] = _number(where, entry[name])
            if rates[name] <= 0.0:
                raise ConfigError(f"profile: {where} is {rates[name]!r}, expected a positive rate")
    return MachineProfile(**rates)


def _kind(where: str, value: Any) -> KindProfile:
    entry = _object(where, value, (*_FITS, "operators", "sources"))
    operators = _bounded(f"{where}.operators", entry["operators"], list, _MAX_OPERATORS)
    sources = _bounded(f"{where}.sources", entry["sources"], list, _MAX_SOURCES)
    return KindProfile(
        **{name: _fit(f"{where}.{name}", entry[name]) for name in _FITS},
        operators=tuple(_operator(f"{where}.operators", item) for item in operators),
        sources=tuple(_source(f"{where}.sources", item) for item in sources),
    )


def _operator(where: str, value: Any) -> OperatorProfile:
    entry = _object(where, value, ("name", "forward_s", "activation_bytes"))
    name = _operator_name(f"{where}.name", entry["name"])
    return OperatorProfile(
        name=name,
        forward_s=_fit(f"{where}.{name}.forward_s", entry["forward_s"]),
        activation_bytes=_fit(f"{where}.{name}.activation_bytes", entry["activation_bytes"]),
    )


def _source(where: str, value: Any) -> SourceProfile:
    entry = _object(where, value, ("operator", "needed_by", "num_bytes"))
    sets = _bounded(f"{where}.needed_by", entry["needed_by"], list, _MAX_SOURCES)
    return SourceProfile(
        # A tensor that no operator can make again has no operator.
        operator=""
        if entry["operator"] == ""
        else _operator_name(f"{where}.operator", entry["operator"]),
        needed_by=tuple(
            tuple(
                _operator_name(f"{where}.needed_by", name)
                for name in _bounded(f"{where}.needed_by", names, list, _MAX_OPERATORS)
            )
            for names in sets
        ),
        num_bytes=_fit(f"{where}.num_bytes", entry["num_bytes"]),
    )


def _operator_name(where: str, value: Any) -> str:
    name = _text(where, value, 32)
    if not _OPERATOR_NAME.fullmatch(name):
        raise ConfigError(f"profile: {where} is {name!r}, expected a-z, 0-9 and _")
    return name


def _fit(where: str, value: Any) -> LinearFit:
    if not isinstance(value, list) or len(value) != 2:
        raise ConfigError(f"profile: {where} is {_short(value)}, expected [slope, intercept]")
    slope, intercept = (_number(where, number, least=-_MAX_NUMBER) for number in value)
    return LinearFit(slope=slope, intercept=intercept)


def _table(value: Any) -> BlockTable:
    """Reads the table, which checks its own rules, and checks the types of its numbers."""
    try:
        table = BlockTable.from_json(json.dumps(value))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"profile: table: {error}") from error
    for index, block in enumerate(table.blocks):
        where = f"table.blocks[{index}]"
        _text(f"{where}.kind", block.kind, 1000)
        for name in _BLOCK_NUMBERS:
            _number(f"{where}.{name}", getattr(block, name))
    return table


def _object(where: str, value: Any, keys: tuple[str, ...]) -> Mapping[str, Any]:
    """Returns an object that has exactly these keys."""
    if not isinstance(value, dict) or set(value) != set(keys):
        what = (
            f"keys {', '.join(map(str, value))}"[:200] if isinstance(value, dict) else "no object"
        )
        raise ConfigError(f"profile: {where}: found {what}; expected {', '.join(keys)}")
    return value


def _bounded(where: str, value: Any, kind: Callable[..., Any], most: int) -> Any:
    if type(value) is not kind or len(value) > most:
        what = f"{len(value)} entries" if type(value) is kind else _short(value)
        raise ConfigError(f"profile: {where} is {what}, expected at most {most} entries")
    return value


def _number(where: str, value: Any, *, least: float = 0.0) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= _MAX_NUMBER:
        raise ConfigError(
            f"profile: {where} is {_short(value)}, expected a number from {least:g} to"
            f" {_MAX_NUMBER:g}"
        )
    return float(value)


def _count(where: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_COUNT:
        raise ConfigError(f"profile: {where} is {_short(value)}, expected a count of 1 or more")
    return value


def _text(where: str, value: Any, most: int) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise ConfigError(f"profile: {where} is {_short(value)}, expected a text up to {most} long")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
