"""How long does a plan take? An event simulation of one attempt over real resources.

A plan becomes a graph of tasks (this folder) that an event core in C++ runs
(``native/simulate.h``):

- Per device a compute stream and two copy streams, per ordered pair of devices a link, per node the
  cores of its optimizer. Each serves one task at a time, in the order of the program; the optimizer
  takes stages as their gradients arrive.
- Instructions are issued when the compute instructions before them have ended. A transfer starts
  when it was sent and its receive is posted, and what was sent before it on the same link has
  arrived.
- What shares a PCIe switch, a NIC or the DRAM of a node shares its bandwidth fairly (max-min), at
  every moment anew (:mod:`.network` says what crosses what).

Only a plan that :func:`penstock.planner.validate.check.validate` accepts makes sense here. Not
here: memory (:mod:`penstock.planner.memory.table`), times of compute instructions alone
(:mod:`penstock.planner.schedule.timing`).
"""

from __future__ import annotations

from penstock.planner.simulate.results import DeviceTimes, Simulation, Span
from penstock.planner.simulate.run import simulate

__all__ = ["DeviceTimes", "Simulation", "Span", "simulate"]
