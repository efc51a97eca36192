"""The numerics recipe of a run: all choices that the bits of a run depend on.

Preparation chooses a recipe once before the first step and writes ``RUN_DIR/numerics.json``. Facts
that need torch come from a tool process (``RUN_DIR/model/kernels.json``), never from a worker. The
digest names the recipe in Begin, in the journal and in the manifests of saved states.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from penstock.host.errors import StateError

NUMERICS = "numerics.json"
KERNELS = "model/kernels.json"
FORMAT = 1
REMEDY = "the next penstock train writes a new one"

_DIGITS = 16
"""Hexadecimal digits of a recipe's digest."""


class _Stored:
    """A tree of dataclasses that is stored as JSON."""

    __slots__ = ()

    def to_json(self) -> str:
        """Returns the text of the tree's file; :meth:`from_json` reads the text."""
        return json.dumps(_fields(self), sort_keys=True, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, source: str) -> Self:
        """Returns the tree of a text.

        Raises:
            StateError: the text has a missing or unknown field; names ``source`` and a remedy.
        """
        try:
            values = json.loads(text)
            if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
                raise ValueError(f"format is not {FORMAT}")
            tree: Self = _tree(cls, values, "")
        except (ValueError, RecursionError) as error:
            raise StateError(f"{source}: {error}; {REMEDY}") from error
        return tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The shape of a micro-batch. ``attention_mask``: ``documents`` where attention stays inside a
    document, else ``plain``: all masks follow from the shape.
    """

    micro_batch: int
    sequence_length: int
    objective: str
    attention_mask: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The attention kernels of one kind of layer, by torch's names. ``model``: the model's own
    operators, without a fused call; ``unknown``: the layer does not run on the meta device.
    """

    forward: str
    backward: str
    evaluation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One kind of layer: whether its forwards are compiled, and its attention kernels."""

    kind: str
    compiled_in_training: bool
    compiled_in_evaluation: bool
    attention: Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerChoice:
    """The compiler of layers: its backend, its options as texts, and whether it chooses kernels by
    rule (``deterministic``).
    """

    backend: str
    deterministic: bool
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Settings of torch in a process that computes; ``instructions``: the processor's vector
    instructions, as torch names them.
    """

    compute_dtype: str
    deterministic: bool
    float32_precision: str
    tf32_products: bool
    tf32_convolutions: bool
    reduced_sums_bf16: bool
    reduced_sums_fp16: bool
    cublas_workspace: str
    instructions: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Addition of gradients. ``micro_batches``: the type of the sums, and the kernel that adds a
    gradient. ``stored``: the type in which sums reach the optimizer. ``replicas``: place and order
    of the sums over routes. ``loss_rows``: rows of a chunk of the loss.
    """

    micro_batches: str
    stored: str
    replicas: str
    loss_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels(_Stored):
    """Facts that need torch: attention kernels by kind of layer, settings, compiler. ``asked``:
    the value of ``model.attention``; ``choice``: the value that ``auto`` stands for, or the same.
    """

    asked: str
    choice: str
    attention: Mapping[str, Attention]
    arithmetic: Arithmetic
    compiler: CompilerChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics(_Stored):
    """A recipe. ``plan``: SHA-256 of ``plan.json``. ``arithmetic`` and ``compiler``: None where no
    worker uses them. ``threads``: compute threads of the first worker. ``software``: versions and
    hardware of the machine that prepared the run.
    """

    plan: str
    batch: Batch
    layers: tuple[Layer, ...]
    compiler: CompilerChoice | None
    sums: Sums
    arithmetic: Arithmetic | None
    threads: int
    software: Mapping[str, str]

    @property
    def canonical(self) -> str:
        """The recipe as one line of JSON with sorted keys."""
        return json.dumps(_fields(self), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """The name of the recipe: 16 hexadecimal digits of a SHA-256."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:_DIGITS]


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns in words the facts of ``before`` that have another value ``now``."""
    return [
        f"{name}: {old} -> {now[name]}"
        for name, old in before.items()
        if name in now and now[name] != old
    ]


def _fields(tree: Any) -> dict[str, Any]:
    return {"format": FORMAT, **asdict(tree)}


def _value(kind: Any, value: Any, place: str) -> Any:
    """Returns a JSON value as a field of type ``kind``; ``place`` names the field in errors."""
    origin, parameters = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else _value(parameters[0], value, place)
    if is_dataclass(kind):
        return _tree(kind, value, f"{place}.")
    if origin is tuple and isinstance(value, list):
        return tuple(
            _value(parameters[0], item, f"{place}[{index}]") for index, item in enumerate(value)
        )
    if origin is Mapping and isinstance(value, dict):
        return {key: _value(parameters[1], item, f"{place}.{key}") for key, item in value.items()}
    if type(value) is not kind:
        raise ValueError(f"{place or 'the file'} is {value!r:.60}, not of type {_name(kind)}")
    return value


def _tree(kind: Any, value: Any, prefix: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{prefix.rstrip('.') or 'the file'} is {value!r:.60}, not an object")
    types = _types(kind)
    for name in value:
        if name not in types:
            raise ValueError(f"unknown field {prefix}{name}")
    for name in types:
        if name not in value:
            raise ValueError(f"missing field {prefix}{name}")
    return kind(
        **{name: _value(types[name], item, f"{prefix}{name}") for name, item in value.items()}
    )


@cache
def _types(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _name(kind: Any) -> str:
    return {tuple: "list", Mapping: "object"}.get(get_origin(kind) or kind, str(kind.__name__))
