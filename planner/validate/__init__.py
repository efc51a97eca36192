"""An abstract machine that runs programs without computing: what the validator decides with.

It states the meaning of instructions (:mod:`penstock.protocol.plan.instructions`) a second time, on
purpose: an error in the planner's own table is not shared. Sends do not wait, receives are posted,
and the consumer of a tensor blocks until it has been sent. Every rule that a device relies on is
checked when the instruction is reached. Costs and times are not here
(:mod:`penstock.planner.simulate`), nor are bytes (:mod:`penstock.planner.memory.table`).

:mod:`.machine` runs the devices and judges the end, :mod:`.world` holds what they share,
:mod:`.compute` and :mod:`.moves` have the rules, and :mod:`.check` validates whole plans.
"""

from penstock.planner.validate.machine import AbstractMachine
from penstock.planner.validate.world import PlanRules, RuleError

__all__ = ["AbstractMachine", "PlanRules", "RuleError"]
