"""Sources of a command's costs: ``--costs unit:…``, ``analytic:GPU:MODEL:…``, or a profile.

Each source *prices* a model: costs of its blocks and the cluster they run on. Units know no model:
theirs has as many equal blocks as both numbers of stages divide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite, lcm
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.host.errors import ConfigError
from penstock.planner.cost.analytic import analytic_costs
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.cost.frameworks import FRAMEWORKS, IDEAL
from penstock.planner.cost.profile import cluster_of, table_costs
from penstock.protocol.plan.profile import Profile, load_profile

COSTS_SYNTAX = (
    "unit[:f=1,b=2,p1=1,p2=1,r=1,o=0] | analytic:GPU:MODEL[:sequence_length=2048,micro_batch=1,…]"
    " | profile.json"
)
"""The syntax that :func:`parse_costs` reads, for ``--help`` and errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Costs of all blocks of a model, and the machines."""

    costs: Costs
    cluster: Cluster

    @property
    def block_work(self) -> tuple[float, ...]:
        """Forward seconds of every block: what stages are balanced by."""
        return tuple(block.forward_s for block in self.costs.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """Abstract units for one **forward stage** and as many blocks of a backward stage.

    ``forward``, ``backward_input`` (p1), ``backward_weight`` (p2), ``recompute``; ``optimizer``:
    what a node's CPU optimizer takes for that many blocks. Bytes move in no time; a forward stage's
    activations are 1 byte.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    recompute: float = 1.0
    optimizer: float = 0.0

    def price(self, *, forward_stages: int, backward_stages: int, num_devices: int) -> Prices:
        """Returns costs of lcm(forward stages, backward stages) blocks of a route, on a node."""
        num_blocks = lcm(forward_stages, backward_stages)
        share = forward_stages / num_blocks
        block = BlockCost(
            forward_s=self.forward * share,
            recompute_s=self.recompute * share,
            backward_input_s=self.backward_input * share,
            backward_weight_s=self.backward_weight * share,
            activation_bytes=share,
            deferred_bytes=share,
            parameters=self.optimizer * share,
        )
        cluster = Cluster(
            devices_per_node=num_devices, optimizer_rate=1.0, device_optimizer_rate=1.0
        )
        return Prices(costs=Costs(blocks=(block,) * num_blocks), cluster=cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticSource:
    """A named model on a named GPU; options as in :func:`analytic_costs`. ``activations``: so many
    times as large as reckoned. ``framework``: a name of
    :data:`~penstock.planner.cost.frameworks.FRAMEWORKS`.
    """

    gpu: str
    model: str
    sequence_length: int = 2048
    micro_batch: int = 1
    half_layers: bool = False
    offloaded: bool = True
    flash: bool = True
    efficiency: float | None = None
    layers: int | None = None
    activations: float = 1.0
    devices_per_node: int = 8
    tensor_parallel: int = 1
    framework: str = IDEAL.name

    def price(self, *, forward_stages: int, backward_stages: int, num_devices: int) -> Prices:
        """Returns costs of the model's blocks, however it is cut.

        Raises:
            ConfigError: as :func:`analytic_costs`.
        """
        del forward_stages, backward_stages, num_devices
        made = analytic_costs(
            self.gpu,
            self.model,
            sequence_length=self.sequence_length,
            micro_batch=self.micro_batch,
            half_layers=self.half_layers,
            offloaded=self.offloaded,
            flash=self.flash,
            efficiency=self.efficiency,
            layers=self.layers,
            devices_per_node=self.devices_per_node,
            tensor_parallel=self.tensor_parallel,
            framework=FRAMEWORKS[self.framework],
        )
        blocks = tuple(block.with_activations(self.activations) for block in made.costs.blocks)
        return Prices(costs=replace(made.costs, blocks=blocks), cluster=made.cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSource:
    """The model and machine of a profile."""

    profile: Profile

    def price(self, *, forward_stages: int, backward_stages: int, num_devices: int) -> Prices:
        """Returns costs of the model that was measured, however it is cut, on one node."""
        del forward_stages, backward_stages
        profile = self.profile
        own_memory = profile.machine.separate_memory
        return Prices(
            costs=table_costs(profile.table, profile, tokens=profile.tokens, own_memory=own_memory),
            cluster=cluster_of(profile, devices_per_node=num_devices),
        )


CostSource = UnitCosts | AnalyticSource | ProfileSource


def parse_costs(text: str) -> CostSource:
    """Reads the value of ``--costs``: see :data:`COSTS_SYNTAX`.

    ``b`` is p1 + p2 of the backward; if only ``b`` is given, p1 and p2 are half of it. ``r`` is
    ``f`` unless given.

    Raises:
        ConfigError: names the token and what would do.
    """
    kind, _, rest = text.partition(":")
    if kind == "unit":
        return _unit(rest, text)
    if kind == "analytic":
        return _analytic(rest, text)
    if text.endswith(".json"):
        return ProfileSource(profile=load_profile(Path(text)))
    raise ConfigError(f"--costs {text!r}: {kind!r} is no kind of costs; accepted: {COSTS_SYNTAX}")


def _unit(rest: str, text: str) -> UnitCosts:
    values = _options(rest, text, dict.fromkeys(("f", "b", "p1", "p2", "r", "o"), _number))
    forward = values.get("f", 1.0)
    first, second = _halves(values, text)
    return UnitCosts(
        forward=forward,
        backward_input=first,
        backward_weight=second,
        recompute=values.get("r", forward),
        optimizer=values.get("o", 0.0),
    )


def _halves(values: Mapping[str, float], text: str) -> tuple[float, float]:
    """Returns p1 and p2 from whichever of b, p1 and p2 are given."""
    first, second = values.get("p1"), values.get("p2")
    if "b" not in values:
        return 1.0 if first is None else first, 1.0 if second is None else second
    whole = values["b"]
    if first is None and second is None:
        return whole / 2, whole / 2
    if first is None or second is None:
        known = first if second is None else second
        assert known is not None
        first, second = (known, whole - known) if second is None else (whole - known, known)
    if first + second != whole or min(first, second) < 0.0:
        raise ConfigError(f"--costs {text!r}: b = {whole:g} is not p1 + p2; leave one of them out")
    return first, second


def _analytic(rest: str, text: str) -> AnalyticSource:
    gpu, _, rest = rest.partition(":")
    model, _, options = rest.partition(":")
    if not gpu or not model:
        raise ConfigError(f"--costs {text!r}: expected analytic:GPU:MODEL")
    values = _options(options, text, _ANALYTIC_OPTIONS)
    source = AnalyticSource(gpu=gpu, model=model, **values)
    source.price(forward_stages=1, backward_stages=1, num_devices=1)
    return source


def _options(
    rest: str, text: str, parsers: Mapping[str, Callable[[str], float | str]]
) -> dict[str, Any]:
    """Reads ``a=1,b=2`` with known keys, each at most once."""
    values: dict[str, Any] = {}
    for token in rest.split(",") if rest else ():
        key, _, value = token.partition("=")
        if key not in parsers or key in values:
            problem = "given twice" if key in values else "unknown"
            raise ConfigError(
                f"--costs {text!r}: token {token!r}: {key!r} is {problem}; accepted:"
                f" {', '.join(f'{name}=…' for name in parsers)}"
            )
        try:
            values[key] = parsers[key](value)
        except ValueError as error:
            raise ConfigError(f"--costs {text!r}: token {token!r}: {error}") from error
    return values


def _number(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not isfinite(number) or number < 0.0:
        raise ValueError("expected a number of 0 or more")
    return number


def _count(value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= len(value) <= 9 or int(value) < 1:
        raise ValueError("expected a whole number of 1 or more")
    return int(value)


def _switch(value: str) -> bool:
    if value not in ("yes", "no"):
        raise ValueError("expected yes or no")
    return value == "yes"


def _framework(value: str) -> str:
    if value not in FRAMEWORKS:
        raise ValueError(f"expected one of {', '.join(FRAMEWORKS)}")
    return value


_ANALYTIC_OPTIONS: Mapping[str, Callable[[str], float | str]] = MappingProxyType(
    {
        "sequence_length": _count,
        "micro_batch": _count,
        "half_layers": _switch,
        "offloaded": _switch,
        "flash": _switch,
        "efficiency": _number,
        "layers": _count,
        "activations": _number,
        "devices_per_node": _count,
        "tensor_parallel": _count,
        "framework": _framework,
    }
)
