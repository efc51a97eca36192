"""The smallest ``memory.device_limit`` that a configuration's plan can meet.

Schemes need what they need; passes that spend memory by the limit (Obscura's, keep-what-fits,
2BP's) are tried with limits between.
"""

from __future__ import annotations

from math import ceil

from penstock.planner.cost.sources import Prices
from penstock.planner.memory.footprint import device_peaks
from penstock.planner.tuning.auto import trainable_plan
from penstock.protocol.config.schema import Config
from penstock.protocol.errors import CapacityError, ConfigError
from penstock.protocol.plan.plan import Plan
from penstock.shm.table import BlockTable

_NEAR = 1.005
"""How near to the smallest limit the named one is, where it has to be searched for."""


def plan_within_limit(config: Config, table: BlockTable, prices: Prices) -> Plan:
    """The configuration's plan, refused as ``train`` refuses it.

    Raises:
        ConfigError: no plan can be built, or workers cannot run it.
        CapacityError: there is one, but not within ``memory.device_limit``; says what would do.
    """
    limit = config.memory.device_limit
    try:
        return trainable_plan(config, table, prices)
    except ConfigError as error:
        smallest = None if limit is None else smallest_limit(config, table, prices)
        if smallest is None:
            raise
        raise CapacityError(
            f"{str(error).splitlines()[0]}. The smallest limit with which this configuration has a"
            f" plan: memory.device_limit = {smallest}"
        ) from error


def smallest_limit(config: Config, table: BlockTable, prices: Prices) -> int | None:
    """Bytes of a limit that can be met, at most half a percent above the smallest; ``None`` if the
    configuration has no plan with any limit above its own.
    """

    def planned(limit: int | None) -> Plan | None:
        memory = config.memory.model_copy(update={"device_limit": limit})
        try:
            return trainable_plan(config.model_copy(update={"memory": memory}), table, prices)
        except ConfigError:
            return None

    def needs(plan: Plan) -> int:
        return ceil(max(peak.total_bytes for peak in device_peaks(plan, prices.costs)))

    plan = planned(None)
    if plan is None:
        return None
    low, high = config.memory.device_limit or 0, needs(plan)
    if high <= low:
        return None
    while config.schedule.passes and high > low * _NEAR and high > low + 1:
        middle = (low + high) // 2
        if planned(middle) is None:
            low = middle
        else:
            high = middle
    return high
