"""Emulated devices: real processes, messages and transactions; made-up numbers and modelled time.

- :mod:`.clock`: busy times of a device's streams and links, on a clock shared by all processes of
  the machine; durations of instructions.
- :mod:`.device`: weights, gradients and transfers at the stored size, each with its modelled time;
  messages contain their arrival times.
- :mod:`.handlers`: the workers' handlers, each with the time of its instruction;
  :mod:`.collectives`: the times of collectives.
- :mod:`.memory`: the device's memory at full size.
- :mod:`.runtime`: instead of a model, numbers that depend on all inputs of the model.
- :mod:`.platform`: all of these as a worker's platform, and UPDATE.
- :mod:`.loader`: initial weights.

Modelled: the compute stream, both copy streams and every link of a device. Each serves one piece of
work at a time in program order, at the rates of :class:`penstock.planner.cost.cluster.Cluster`.
Devices behind one PCIe switch have equal fixed shares of it. The optimizer has the rest of a node's
memory bandwidth beyond copies. The NIC of a node serves one transfer after the other
(:mod:`penstock.protocol.run.hardware.bandwidth_log`).

Not modelled: shared links through the host (the simulator shares them,
:mod:`penstock.planner.simulate.network`), and transfers that wait for their receive to be posted.
"""
