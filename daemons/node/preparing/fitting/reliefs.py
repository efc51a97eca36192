"""The keys that would let a run fit, each with the memory that the run then needs.

A refusal for memory (:func:`check_fits`) and the last lines of ``penstock estimate`` name them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import yaml

from penstock.config.adapter import AdapterConfig
from penstock.config.schema import Config, parse_config
from penstock.config.values import human_bytes
from penstock.config.words import apply_overrides
from penstock.daemons.node.preparing.fitting.capacity import MemoryDemand, check_capacity
from penstock.daemons.node.preparing.fitting.planned_run import PlannedRun, plan_anyway
from penstock.daemons.node.preparing.tables import table_of
from penstock.host.errors import PenstockError

_KEYS = (
    ("optimizer.master=split",),
    ("optimizer.grad_dtype=bf16",),
    ("optimizer.master=split", "optimizer.grad_dtype=bf16"),
    ("schedule.recompute=full",),
    ("train.micro_batch=1",),
)
"""Settings that take less memory, as ``--set`` writes them."""
RANK = 16
"""Rank of the adapter that a refusal proposes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief:
    """``settings`` that need less of something that is short. ``needs``: the demands that were
    short, as they are with the settings. ``fits``: nothing is short any more.
    """

    settings: tuple[str, ...]
    needs: tuple[MemoryDemand, ...]
    fits: bool

    def __str__(self) -> str:
        keys = " and ".join(setting.replace("=", ": ") for setting in self.settings)
        bytes_by_what = {need.name: human_bytes(need.needed) for need in self.needs}
        sizes = ", ".join(f"{size} of {what}" for what, size in bytes_by_what.items())
        return f"{keys}: needs {sizes}{'; fits' if self.fits else ''}"


def reliefs(run: PlannedRun) -> tuple[Relief, ...]:
    """Returns the settings that need less of something that is short for ``run``, those that fit
    first.
    """
    if run.config.cluster.platform.builtin_model:
        return ()
    known = [relief for settings in _KEYS for relief in _relief(run, settings)]
    known += _of_adapter(run)
    return tuple(sorted(known, key=lambda relief: not relief.fits))


def check_fits(run: PlannedRun) -> None:
    """Refuses a run that its machine has too little memory for.

    Raises:
        CapacityError: has the table, the settings that need less, and how to get more.
    """
    check_capacity(run.demands, () if run.fits else [str(relief) for relief in reliefs(run)])


def _relief(run: PlannedRun, settings: tuple[str, ...]) -> Iterator[Relief]:
    """Yields the relief of settings, if the configuration takes them and they help."""
    with suppress(PenstockError):
        config = _with_settings(run.config, settings)
        if config != run.config:
            table = replace(run.request.table, grad_dtype=config.optimizer.grad_dtype)
            yield from _compared(run, settings, run.with_keys(config, table))


def _of_adapter(run: PlannedRun) -> Iterator[Relief]:
    """Yields the relief of an adapter in place of full weights, with a schedule of its own."""
    config = run.request.config
    if config.adapter is None:
        with suppress(PenstockError):
            config = config.model_copy(update={"adapter": AdapterConfig(r=RANK)})
            table = table_of(config, config_only=True)
            request = replace(run.request, config=config, table=table, terms=None)
            yield from _compared(run, (f"adapter.r={RANK}",), plan_anyway(request, run.machine))


def _compared(run: PlannedRun, settings: tuple[str, ...], changed: PlannedRun) -> Iterator[Relief]:
    """Yields the relief of settings that lead to ``changed``, if they help."""
    short = {(need.place, need.what): need.needed for need in run.demands if need.short}
    needs = tuple(need for need in changed.demands if (need.place, need.what) in short)
    if changed.fits or any(need.needed < short[need.place, need.what] for need in needs):
        yield Relief(settings=settings, needs=needs, fits=changed.fits)


def _with_settings(config: Config, settings: tuple[str, ...]) -> Config:
    """Returns the configuration with other values of some keys.

    Raises:
        ConfigError: it does not take them.
    """
    values = apply_overrides(yaml.safe_load(config.to_yaml()), settings)
    return parse_config(values, source="penstock")
