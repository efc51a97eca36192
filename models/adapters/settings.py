"""The modules of a model that get an adapter, with the rank and factor of each.

The rules are those of PEFT, so that a ``LoraConfig`` with the same values adapts the same modules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.config.adapter import ALL_LINEAR, AdapterConfig, end_matcher, matcher
from penstock.host.errors import ConfigError
from penstock.host.limits.bounds import matching
from penstock.models.adapters.files import read_settings
from penstock.protocol.plan.groups import near_names

_TENSOR = re.compile(r"\.lora_(A\.weight|B\.weight|embedding_A|embedding_B)$")

_FUSED = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
"""Model types that read the weights of out_proj and dt_proj without a call of the module."""

_OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names that PEFT turns into parameters of experts, in models with all experts in one tensor."""


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """The adapter of one module: its rank, and the factor of its output."""

    r: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The adapters of a model: one for each module by its name, and the ``saved`` modules, which
    are trained whole.
    """

    modules: Mapping[str, AdaptedModule]
    saved: tuple[str, ...]
    dropout: float

    def trains(self, name: str) -> bool:
        """Returns whether a parameter is trained: one of an adapter, or of a saved module."""
        return is_adapter_tensor(name) or any(name.startswith(f"{saved}.") for saved in self.saved)


def is_adapter_tensor(name: str) -> bool:
    """Returns whether a tensor's name is one that an adapter has, and no model's own."""
    return _TENSOR.search(name) is not None


def resolved(config: AdapterConfig, model: Any) -> Adapter:
    """Returns the adapters that a configuration gives the modules of a transformers model.

    Raises:
        ConfigError: a name matches no module, or one that cannot have an adapter or be saved; names
            the key and the module.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    if config.path is not None:
        config = read_settings(config.path, modules, config.dropout)
    saved = _saved(config, modules)
    _check_tied(saved, model)
    with matching("adapter.targets", config.targets):
        names = [*_targets(config, model, modules)]
    excluded = matcher(config.exclude)
    with matching("adapter.exclude", config.exclude):
        names = [name for name in names if not excluded(name)]
    adapted = _adapted(
        config, [n for n in names if not any(f"{n}.".startswith(f"{whole}.") for whole in saved)]
    )
    if not adapted:
        raise ConfigError(
            f"adapter.targets {_shown(config.targets)}: adapter.exclude {_shown(config.exclude)}"
            f" and adapter.modules_to_save {list(saved)} leave no module that gets an adapter"
        )
    return Adapter(modules=adapted, saved=saved, dropout=config.dropout)


def adaptable(module: nn.Module) -> bool:
    """Returns whether a module can have an adapter."""
    return isinstance(module, (nn.Embedding, *product_kinds()))


def product_kinds() -> tuple[type[nn.Module], ...]:
    """Returns the classes of linear modules. Importing transformers takes seconds."""
    from transformers.pytorch_utils import Conv1D

    return nn.Linear, Conv1D


def _adapted(config: AdapterConfig, names: Sequence[str]) -> dict[str, AdaptedModule]:
    """Returns the adapter of each module that is named."""
    with matching("adapter.rank_pattern", config.rank_pattern, len(names)):
        ranks = [*map(end_matcher(config.rank_pattern), names)]
    with matching("adapter.alpha_pattern", config.alpha_pattern, len(names)):
        scales = [*map(end_matcher(config.alpha_pattern), names)]
    adapted = {}
    for name, rank, scaled in zip(names, ranks, scales, strict=True):
        r = config.r if rank is None else config.rank_pattern[rank]
        alpha = config.alpha if scaled is None else config.alpha_pattern[scaled]
        adapted[name] = AdaptedModule(r, alpha / (math.sqrt(r) if config.rslora else r))
    return adapted


def _targets(config: AdapterConfig, model: Any, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yields the names of the modules that the targets name, in the order of the model."""
    experts = _experts(model)
    if config.targets == ALL_LINEAR:
        if experts is not None:
            raise ConfigError(
                f"adapter.targets all-linear: {experts} has all experts in one tensor, which get no"
                " adapter (PEFT's target_parameters); name modules, such as [q_proj, v_proj]"
            )
        head, closed = model.get_output_embeddings(), _closed(model)
        for name, module in modules.items():
            if isinstance(module, product_kinds()) and module is not head and not closed(name):
                yield name
        return
    matches = _named("adapter.targets", config.targets, modules, model)
    for name in modules:
        if not matches(name):
            continue
        if not adaptable(modules[name]):
            raise ConfigError(
                f"adapter.targets: {name} is a {type(modules[name]).__name__}; adapters are for"
                " linear modules and embeddings"
            )
        if experts is not None and name.rpartition(".")[2] in _OF_EXPERTS:
            raise ConfigError(
                f"adapter.targets: {name}: {experts} has all experts in one tensor, and PEFT reads"
                " this name as theirs (target_parameters); give other modules, such as q_proj"
            )
        if _closed(model)(name):
            raise ConfigError(
                f"adapter.targets: {name}: models of type {model.config.model_type} read its"
                " weight without calling it, so an adapter would have no effect; leave it out"
            )
        yield name


def _experts(model: Any) -> str | None:
    """Returns the name of a parameter with the weights of several experts; None without one."""
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.ndim > 2:
                    return f"{path}.{name}"
    return None


def _closed(model: Any) -> Callable[[str], bool]:
    """Returns a test for modules with weights that are read without a call of the module."""
    reads = getattr(model.config, "model_type", None) in _FUSED
    return lambda name: reads and name.rpartition(".")[2] in ("out_proj", "conv1d", "dt_proj")


def _named(
    key: str, names: str | tuple[str, ...], modules: Mapping[str, nn.Module], model: Any
) -> Callable[[str], bool]:
    """Returns a test for the modules that are named, after each name has matched one.

    Raises:
        ConfigError: a name matches no module.
    """
    matches = matcher(names)
    for each in (names,) if isinstance(names, str) else names:
        if any(matcher(each if isinstance(names, str) else (each,))(name) for name in modules):
            continue
        for parameter, _ in model.named_parameters():
            if parameter.endswith(f".{each}") or parameter == each:
                raise ConfigError(
                    f"{key}: {each!r} is a parameter, {parameter}, and no module (experts in one"
                    " tensor, PEFT's target_parameters); adapters are for linear modules and"
                    " embeddings"
                )
        near = near_names(each, [name for name in modules if adaptable(modules[name])])
        raise ConfigError(
            f"{key}: {each!r} matches no module; modules have names such as {', '.join(near)}"
        )
    return matches


def _saved(config: AdapterConfig, modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Returns the names of the modules to save. Modules without parameters are left out, since PEFT
    trains nothing of them.

    Raises:
        ConfigError: a name matches no module, or no module has parameters.
    """
    saved: list[str] = []
    for each in config.modules_to_save:
        names = [name for name in modules if name.endswith(each)]  # PEFT's rule, without a dot
        if not names:
            near = near_names(each, list(modules))
            raise ConfigError(
                f"adapter.modules_to_save: {each!r} matches no module; modules have names such as"
                f" {', '.join(near)}"
            )
        saved += [name for name in names if next(modules[name].parameters(), None) is not None]
    if config.modules_to_save and not saved:
        raise ConfigError(
            f"adapter.modules_to_save: {', '.join(config.modules_to_save)} has no parameters, so"
            " nothing to train; leave it out"
        )
    return tuple(dict.fromkeys(saved))


def _check_tied(saved: tuple[str, ...], model: Any) -> None:
    """Refuses saved modules that share a parameter with others: PEFT would train a copy."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        inside = [name for name in names if any(name.startswith(f"{each}.") for each in saved)]
        if inside and len(names) > 1:
            others = [name for name in names if name != inside[0]]
            raise ConfigError(
                f"adapter.modules_to_save: {inside[0]} and {others[0]} are one tensor"
                " (tie_word_embeddings), and PEFT would train a copy of it apart; leave it out, or"
                " give the embedding an adapter (adapter.targets)"
            )


def _shown(names: str | tuple[str, ...]) -> str:
    return repr(names) if isinstance(names, str) else str(list(names))
