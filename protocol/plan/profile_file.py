"""The file form of a :class:`~penstock.protocol.plan.profile.Profile`: JSON, versioned, bounded.

    {"format": 4, "device": "…", "sequence_length": 256, "micro_batch": 1,
     "machine": {"instruction_s": 0.0001, "fetch_bandwidth": null, …},
     "kinds": {"layer": {"forward_s": [slope, intercept], …,
                         "operators": [{"name": "norm", "forward_s": […], …}]}},
     "table": {…}}

Fits are per token; ``null`` stands for a bandwidth that is no limit. Every number is finite and
below 1e18, so that whatever is made of them stays finite.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from math import inf, isinf
from pathlib import Path
from typing import Any

from penstock.protocol.errors import ConfigError, reason
from penstock.protocol.plan.profile import (
    KindProfile,
    LinearFit,
    MachineProfile,
    OperatorProfile,
    Profile,
)
from penstock.shm.table import BlockTable

PROFILE_FORMAT = 4
"""Written to and required in profile JSON."""

MAX_PROFILE_BYTES = 64 << 20
_MAX_NUMBER = 1e18
_MAX_COUNT = 10**9
_MAX_KINDS = 1000
_MAX_OPERATORS = 64
_OPERATOR_NAME = re.compile(r"[a-z0-9_]{1,32}")

_FITS = tuple(field.name for field in fields(KindProfile) if field.name != "operators")
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
    """Serialize; :func:`from_json` reads it back to an equal profile."""
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
    """Parse and check.

    Raises:
        ConfigError: no profile, of another format, or a value that is impossible; names it.
    """
    if len(text) > MAX_PROFILE_BYTES:
        raise ConfigError(f"profile: {len(text)} bytes; at most {MAX_PROFILE_BYTES} are read")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"profile: not valid JSON: {error}") from error
    found = data.get("format") if isinstance(data, dict) else None
    if isinstance(data, dict) and found != PROFILE_FORMAT:
        raise ConfigError(
            f"profile: format is {found!r}, this version reads {PROFILE_FORMAT}; run penstock"
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
    """Read a profile file.

    Raises:
        ConfigError: it cannot be read, or :func:`from_json` refuses it; names the file.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_PROFILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"profile {str(path)!r}: cannot read it: {reason(error)}") from error
    try:
        return from_json(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _kind_to_dict(kind: KindProfile) -> dict[str, Any]:
    found: dict[str, Any] = {name: _fit_to_list(getattr(kind, name)) for name in _FITS}
    found["operators"] = [
        {
            "name": operator.name,
            "forward_s": _fit_to_list(operator.forward_s),
            "activation_bytes": _fit_to_list(operator.activation_bytes),
        }
        for operator in kind.operators
    ]
    return found


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
    entry = _object(where, value, (*_FITS, "operators"))
    operators = _bounded(f"{where}.operators", entry["operators"], list, _MAX_OPERATORS)
    return KindProfile(
        **{name: _fit(f"{where}.{name}", entry[name]) for name in _FITS},
        operators=tuple(_operator(f"{where}.operators", item) for item in operators),
    )


def _operator(where: str, value: Any) -> OperatorProfile:
    entry = _object(where, value, ("name", "forward_s", "activation_bytes"))
    name = _text(f"{where}.name", entry["name"], 32)
    if not _OPERATOR_NAME.fullmatch(name):
        raise ConfigError(f"profile: {where}.name is {name!r}, expected a-z, 0-9 and _")
    return OperatorProfile(
        name=name,
        forward_s=_fit(f"{where}.{name}.forward_s", entry["forward_s"]),
        activation_bytes=_fit(f"{where}.{name}.activation_bytes", entry["activation_bytes"]),
    )


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
