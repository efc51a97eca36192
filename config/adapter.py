"""The section adapter: low-rank adapters (LoRA, arXiv 2106.09685) of a model with frozen weights.

Keys and rules are those of PEFT's ``LoraConfig``, under shorter names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from penstock.config.values import Accepts, check_patterns
from penstock.config.words import Section

ALL_LINEAR = "all-linear"
"""The value of `adapter.targets` for every linear module but the head."""

RANK_TENSORS = (".lora_A.weight", ".lora_embedding_A")
"""Ends of the names of the adapters' tensors that have a row for each rank."""


def _check_modules(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if isinstance(value, str):
        check_patterns((value,))
    elif not all(value):
        raise ValueError("a name is empty; give names of modules such as q_proj")
    return value


def _check_keys(value: dict[str, Any]) -> dict[str, Any]:
    check_patterns(tuple(value))
    return value


_NAMES = "a list of module names such as [q_proj, v_proj], or one regular expression"


class AdapterConfig(Section):
    """Low-rank adapters (LoRA): W x becomes W x + scale * B A x. A and B are trained, and the
    model's own weights stay as they are. Without this section the model itself is trained.
    """

    r: int = Field(
        default=8, ge=1, le=1 << 16, description="Rank: rows of A, (r, inputs), and columns of B."
    )
    alpha: float = Field(
        default=8.0,
        gt=0.0,
        description="Scale of an adapter's output, times r: the factor is alpha / r.",
    )
    dropout: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="Share of an adapter's inputs that training drops."
    )
    rslora: bool = Field(
        default=False, description="Makes the factor alpha / sqrt(r) (arXiv 2312.03732)."
    )
    targets: Annotated[
        str | tuple[str, ...],
        AfterValidator(_check_modules),
        Accepts(f"{ALL_LINEAR}, {_NAMES}"),
    ] = Field(
        default=ALL_LINEAR,
        description="Modules that get an adapter. all-linear: every linear module of the layers and"
        " around them, but not the head. A name in a list is that of a module, whole or its last"
        " parts. A regular expression matches whole names. Embeddings get one where they are"
        " named.",
    )
    exclude: Annotated[str | tuple[str, ...], AfterValidator(_check_modules), Accepts(_NAMES)] = (
        Field(default=(), description="Modules without an adapter, named as in `targets`.")
    )
    modules_to_save: Annotated[
        tuple[str, ...], Accepts("a list of module names such as [lm_head]")
    ] = Field(
        default=(),
        description="Modules that are trained whole and saved with the adapter, by the ends of"
        " their names. They get no adapter.",
    )
    rank_pattern: Annotated[
        dict[str, Annotated[int, Field(ge=1, le=1 << 16)]],
        AfterValidator(_check_keys),
        Accepts("a mapping such as {q_proj: 16}, or {}"),
    ] = Field(
        default={},
        description="Other ranks by the ends of names, which are regular expressions; the first"
        " that matches counts.",
    )
    alpha_pattern: Annotated[
        dict[str, Annotated[float, Field(gt=0.0)]],
        AfterValidator(_check_keys),
        Accepts("a mapping such as {q_proj: 32}, or {}"),
    ] = Field(default={}, description="Other values of `alpha`, by names as in `rank_pattern`.")
    path: Path | None = Field(
        default=None,
        description="A folder with adapter_config.json and adapter_model.safetensors of PEFT, in"
        " which the training starts. They decide all other keys but `dropout`.",
    )

    @model_validator(mode="after")
    def _decided_once(self) -> AdapterConfig:
        others = sorted(self.model_fields_set - {"path", "dropout"})
        defaults = type(self).model_fields
        changed = [key for key in others if getattr(self, key) != defaults[key].default]
        if self.path is not None and changed:
            raise ValueError(
                f"adapter.{changed[0]} {getattr(self, changed[0])!r}: adapter_config.json in"
                f" adapter.path {str(self.path)!r} decides it; remove adapter.{changed[0]}, or"
                " remove adapter.path and start with a new adapter"
            )
        return self


def matcher(names: str | tuple[str, ...]) -> Callable[[str], bool]:
    """Returns a test for the names of modules, as PEFT matches targets.

    A text is a regular expression for whole names. Names of a list are whole names or their ends.
    """
    if isinstance(names, str):
        pattern = re.compile(names)
        return lambda name: pattern.fullmatch(name) is not None
    return lambda name: any(name == each or name.endswith(f".{each}") for each in names)


def end_matcher(patterns: Iterable[str]) -> Callable[[str], str | None]:
    """Returns a function of a module's name: the first pattern that matches the end of the name at
    a dot, as in PEFT.
    """
    rules = [(pattern, re.compile(rf"(.*\.)?({pattern})$")) for pattern in patterns]
    return lambda name: next((pattern for pattern, rule in rules if rule.match(name)), None)
