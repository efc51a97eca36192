"""A checkpoint of another trainer as a list of tensors, each of which is read alone.

A reader (:data:`~penstock.models.exchange.readers.READERS`) lists the tensors from headers. It
executes nothing of the checkpoint: pickles go through :mod:`~penstock.models.exchange.pickles`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from penstock.models.surgery.skeleton import Skeleton

WEIGHT, MASTER = "weight", "master"
"""Roles of a parameter's numbers: as the model computes with them, and as the optimizer keeps them
in fp32. Other roles are names of state arrays, such as ``exp_avg``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignTensor:
    """A tensor of a checkpoint.

    ``name``: the parameter as ``named_parameters()`` of the transformers model calls it; wrappers'
    prefixes are removed. ``dtype``: as torch prints it, without ``torch.``. ``shape`` None: the
    file has the numbers in one row and no shape. ``num_bytes``: in the file. ``file``: relative to
    the checkpoint. ``load`` returns the tensor on the CPU, perhaps over the mapped file, and raises
    StateError if the file is damaged.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...] | None
    num_elements: int
    num_bytes: int
    file: str
    load: Callable[[], torch.Tensor] = field(repr=False, compare=False)

    def to_fields(self) -> dict[str, Any]:
        """Returns the JSON object of ``penstock inspect``."""
        return {
            "name": self.name,
            "role": self.role,
            "dtype": self.dtype,
            "shape": None if self.shape is None else list(self.shape),
            "bytes": self.num_bytes,
            "file": self.file,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignGroup:
    """Settings of the optimizer for some parameters. None: the checkpoint does not name the value.
    ``names`` are empty if the checkpoint does not name the parameters. ``others``: settings that
    have no field here.
    """

    names: tuple[str, ...]
    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    def to_fields(self) -> dict[str, Any]:
        """Returns the JSON object of ``penstock inspect``."""
        known = {
            "lr": self.lr,
            "betas": None if self.betas is None else list(self.betas),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }
        return {"names": list(self.names), **known, "others": dict(self.others)}


def finite(value: Any) -> float | None:
    """Returns a finite number as a float; None for another value."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None


_OTHER_RULES = {"amsgrad": "Penstock's AdamW has none", "maximize": "Penstock minimizes"}


def group_of(settings: Mapping[Any, Any], names: tuple[str, ...]) -> ForeignGroup:
    """Returns the group of some parameters. A setting that is no finite number is unknown."""
    betas = settings.get("betas")
    pair = tuple(map(finite, betas)) if isinstance(betas, list | tuple) else ()
    first, second = pair if len(pair) == 2 else (None, None)
    known = ("lr", "betas", "eps", "weight_decay", "params", "param_names")
    return ForeignGroup(
        names=names,
        lr=finite(settings.get("lr")),
        betas=None if first is None or second is None else (first, second),
        eps=finite(settings.get("eps")),
        weight_decay=finite(settings.get("weight_decay")),
        others={
            str(key): value
            for key, value in settings.items()
            if key not in known
            and (isinstance(value, bool | str | None) or finite(value) is not None)
        },
    )


def other_rule(groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns a setting of the groups by which a step is another one than Penstock's, and the
    difference.
    """
    for key, difference in _OTHER_RULES.items():
        if any(group.get(key) for group in groups):
            return f"{key} is on, and {difference}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSchedule:
    """State of a learning-rate schedule in ``file``. ``rates``: those of the next step, by group of
    the optimizer. ``base_rates``: the groups' highest rates; empty if the schedule has none.
    ``steps``: the schedule's own count.
    """

    file: str
    rates: tuple[float, ...]
    base_rates: tuple[float, ...] = ()
    steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignState:
    """A checkpoint. ``step``: steps of the optimizer; None if the checkpoint does not say.

    ``steps``: steps by parameter, where the checkpoint counts them so. ``samples_seen``: samples
    consumed, where the checkpoint counts them; ``samples_note`` says how. ``model_settings``: those
    of the checkpoint's config.json, completed by transformers. ``schedule`` None: only ``groups``
    have learning rates. ``problems``: faults that an import would refuse, each in a sentence that
    names the file and the remedy. ``state_problems``: those of the optimizer's state, which an
    import of weights alone leaves behind. ``notes``: facts for the user. ``fit``: see
    :meth:`fitted`; None: the checkpoint has all names.
    """

    kind: str
    path: Path
    tensors: tuple[ForeignTensor, ...]
    step: int | None = None
    steps: Mapping[str, int] = field(default_factory=dict)
    samples_seen: int | None = None
    samples_note: str = ""
    model_settings: Mapping[str, Any] | None = None
    groups: tuple[ForeignGroup, ...] = ()
    schedule: ForeignSchedule | None = None
    problems: tuple[str, ...] = ()
    state_problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fit: Callable[[Skeleton, Collection[str]], ForeignState] | None = field(
        default=None, repr=False, compare=False
    )

    def fitted(self, skeleton: Skeleton, trained: Collection[str]) -> ForeignState:
        """Returns the checkpoint with the names and problems that follow from a run's model.
        ``trained``: names of the tensors that the run trains.
        """
        return self if self.fit is None else self.fit(skeleton, trained)

    def to_fields(self) -> dict[str, Any]:
        """Returns the JSON object of ``penstock inspect``."""
        return {
            "kind": self.kind,
            "step": self.step,
            "tensors": [tensor.to_fields() for tensor in self.tensors],
            "groups": [group.to_fields() for group in self.groups],
            "problems": [*self.problems, *self.state_problems],
            "notes": list(self.notes),
        }


class Reader(Protocol):
    """Reads one kind of checkpoint."""

    def recognises(self, path: Path) -> bool:
        """Returns whether a folder has the files of this kind, by their names."""

    def open(self, path: Path) -> ForeignState:
        """Lists the tensors from headers.

        Raises:
            ConfigError: the checkpoint is of a form that is not read; names the remedy.
            StateError: a file is missing or damaged; names the file.
        """
