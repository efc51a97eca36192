"""``schedule: auto`` when a run is prepared: the choice of its start is kept, or made anew.

A resume must not change its plan because a search came out differently; so ``resolved.yaml`` holds
the chosen schedule and what it was asked with. The search itself:
:mod:`penstock.planner.tuning.auto`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from penstock.planner.tuning.auto import Fits, asked_of, choose, describe, settings_of
from penstock.planner.tuning.search import Outcome
from penstock.protocol.config.schema import Config
from penstock.protocol.config.values import AUTO
from penstock.shm.table import BlockTable

SAY_EVERY_S = 5.0
"""How often a long search says how far it is."""

Progress = Callable[[str], None]


def keep_choice(config: Config, previous: Config | None, progress: Progress) -> Config:
    """With the schedule that ``auto`` chose for the run before, if it was asked the same.

    ``previous``: the run's configuration until now, ``None`` for a new run.
    """
    if config.schedule.scheme != AUTO or previous is None or previous.schedule.asked is None:
        return config
    before, after = _deciding(previous), _deciding(config)
    before["schedule"], after["schedule"] = previous.schedule.asked, asked_of(config.schedule)
    differing = [key for key in after if before[key] != after[key]]
    if differing:
        words = "; ".join(f"{key}: {before[key]!r} -> {after[key]!r}" for key in differing)
        progress(f"schedule: auto chooses anew, because of {words}")
        return config
    progress(
        f"schedule: auto keeps what it chose for this run: {describe(previous.schedule)} (for a new"
        " search give another run.dir, or say the schedule)"
    )
    schedule = previous.schedule.model_copy(update=settings_of(config.schedule))
    return config.model_copy(update={"schedule": schedule})


def make_choice(config: Config, table: BlockTable, fits: Fits, progress: Progress) -> Config:
    """With the schedule that ``auto`` stands for; any other configuration as it is.

    Raises:
        ConfigError, CapacityError: as :func:`penstock.planner.tuning.auto.choose`.
    """
    if config.schedule.scheme != AUTO:
        return config
    choice = choose(config, table, fits, _now_and_then(progress))
    progress(str(choice))
    return choice.config


def _deciding(config: Config) -> dict[str, Any]:
    """What the choice depends on beside the schedule's own keys."""
    emulation = config.emulation.model_dump(mode="json", exclude={"scale", "time_scale"})
    return {
        "cluster.workers": config.cluster.workers,
        "cluster.nodes": len(config.cluster.nodes),
        "cluster.device": config.cluster.device,
        "memory": config.memory.model_dump(),
        "train.global_batch": config.train.global_batch,
        "train.micro_batch": config.train.micro_batch,
        "data.sequence_length": config.data.sequence_length,
        "model": config.model.model_dump(mode="json"),
        "optimizer.grad_dtype": config.optimizer.grad_dtype.value,
        "emulation": emulation,
    }


def _now_and_then(progress: Progress) -> Callable[[int, int, Outcome | None], None]:
    due_s = time.monotonic() + SAY_EVERY_S

    def say(done: int, total: int, best: Outcome | None) -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + SAY_EVERY_S
            found = "" if best is None else f", best so far {best.candidate.scheme}"
            progress(f"schedule: auto has tried {done} of {total} candidates{found}")

    return say
