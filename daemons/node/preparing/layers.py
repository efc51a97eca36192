"""Decides how the layers of a run execute: ``model.attention: auto`` and ``model.compile: auto``.

Both are decided before the first step. The bits of a run depend on them, so ``resolved.yaml`` holds
the decisions, and a run keeps them until its user sets other values. The tool process that observes
kernels chooses the attention; runs that are older than its key have ``sdpa``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock.config.schema import Config
from penstock.config.values import AUTO
from penstock.daemons.node.preparing.changes import Change
from penstock.daemons.node.preparing.tool import run_tool
from penstock.daemons.preload.starting import Starter
from penstock.host.errors import ConfigError
from penstock.protocol.plan.instructions import Forward
from penstock.protocol.plan.plan import Plan

_GRAPHS = (
    *("model.", "adapter", "data.", "train.micro_batch", "train.freeze", "train.only"),
    "cluster.device",
)
"""Keys, or beginnings of keys, that compiled graphs depend on."""


def keep_attention(config: Config, previous: Config | None) -> Config:
    """Returns the configuration with the value that ``auto`` stood for in the run until now.
    Another device has a choice of its own. ``previous``: the configuration of a run that has
    started, else None.
    """
    if config.model.attention != AUTO or previous is None:
        return config
    if previous.model.attention == AUTO or previous.cluster.device != config.cluster.device:
        return config
    return with_attention(config, previous.model.attention)


def with_attention(config: Config, name: str) -> Config:
    """Returns the configuration with another value of ``model.attention``."""
    return config.model_copy(update={"model": config.model.model_copy(update={"attention": name})})


def keep_compile(config: Config, previous: Config | None) -> Config:
    """Returns the configuration with the value that ``auto`` stood for in the run until now."""
    if config.model.compile != AUTO or previous is None or previous.model.compile == AUTO:
        return config
    return with_compile(config, compiled=bool(previous.model.compile))


def with_compile(config: Config, *, compiled: bool) -> Config:
    """Returns the configuration with ``model.compile`` settled."""
    return config.model_copy(
        update={"model": config.model.model_copy(update={"compile": compiled})}
    )


def first_guess(config: Config, plan: Plan, progress: Callable[[str], None]) -> Config:
    """Returns the configuration with ``model.compile`` settled as far as device and plan tell.
    ``progress`` gets the reason for a GPU's layers to run as they are.
    """
    platform = config.cluster.platform
    if config.model.compile != AUTO:
        return config
    if platform.builtin_model or not platform.own_memory:
        return with_compile(config, compiled=False)
    objection = next(_objections(plan), None)
    if objection is not None:
        progress(
            f"model.compile: auto does not compile the layers: the plan {objection}, which compiled"
            " layers cannot do"
        )
    return with_compile(config, compiled=objection is None)


def is_to_try(config: Config, previous: Config | None, changes: Sequence[Change]) -> bool:
    """Returns whether layers are to be compiled that were not compiled for this run before."""
    if config.model.compile is not True or config.cluster.platform.builtin_model:
        return False
    known = previous is not None and previous.model.compile is True
    return not known or any(change.key.startswith(_GRAPHS) for change in changes)


def compiles(
    run_dir: Path,
    *,
    asked: bool,
    silence_s: float,
    progress: Callable[[str], None],
    starter: Starter | None,
) -> bool:
    """Compiles the layers of a prepared run into its cache; returns whether that is possible.
    ``asked``: the user set ``model.compile: true``.

    Raises:
        ConfigError: it is ``asked`` and impossible; names the kind of layer and the reason.
    """
    progress("compiling the layers (model.compile)")
    try:
        run_tool(
            "penstock.workers.compiling",
            str(run_dir),
            log=run_dir / "logs" / "compile.txt",
            progress=progress,
            starter=starter,
            silence_s=silence_s,
        )
    except ConfigError as error:
        if asked:
            raise
        progress(f"warning: the layers run without being compiled: {error}")
        return False
    return True


def leaves_layers(plan: Plan) -> bool:
    """Returns whether a plan's training forwards run the layers as they are, never compiled."""
    return next(_objections(plan), None) is not None


def _objections(plan: Plan) -> Iterator[str]:
    """Yields what a plan does that needs layers as they are."""
    for instruction in (one for program in plan.programs for one in program):
        if isinstance(instruction, Forward) and instruction.drop:
            yield "drops operators"
