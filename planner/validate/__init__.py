"""An abstract machine that runs programs without computing: what the validator decides with.

It follows the meaning of instructions (:mod:`penstock.protocol.plan.instructions`): sends do not
wait, receives are posted, and the consumer of a tensor blocks until it has been sent. Every rule
that a device relies on is checked when the instruction is reached. Not here: costs and times
(:mod:`penstock.planner.simulate`), bytes (:mod:`penstock.planner.memory.table`).

:mod:`.machine` runs devices, :mod:`.world` holds what they share; one module of rules per kind of
instruction; :mod:`.endings` says what must hold at the end.
"""

from penstock.planner.validate.machine import AbstractMachine
from penstock.planner.validate.world import PlanRules, RuleError

__all__ = ["AbstractMachine", "PlanRules", "RuleError"]
