"""The seconds that a plan takes: an event simulation of one attempt over real resources.

A plan becomes a graph of tasks (this folder) that an event core in C++ runs
(``native/simulate.h``):

- A device has a compute stream and two copy streams, an ordered pair of devices a link, a node the
  cores of its optimizer. Each serves one task at a time, in the order of the program; the optimizer
  takes stages as their gradients arrive.
- Instructions are issued when the compute instructions before them have ended. A transfer starts
  when it was sent, its receive is posted, and all earlier sends on the same link have arrived.
- Users of a PCIe switch, a NIC or the DRAM of a node share its bandwidth fairly (max-min),
  recalculated at every moment. :mod:`.network` has the resources of each transfer.

The plan must be one that :func:`penstock.planner.validate.check.validate` accepts. Memory is in
:mod:`penstock.planner.memory.table`, times of compute instructions alone in
:mod:`penstock.planner.schedule.timing`.
"""

from __future__ import annotations

from penstock.planner.simulate.results import DeviceTimes, Simulation, Span
from penstock.planner.simulate.run import simulate

__all__ = ["DeviceTimes", "Simulation", "Span", "simulate"]
