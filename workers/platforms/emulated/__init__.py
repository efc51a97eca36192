"""Emulated devices: real processes, messages and transactions; made-up numbers and modelled time.

- :mod:`.clock`: when a device's compute stream, copy streams and links are busy, on a clock that
  all processes of the machine share, and how long instructions take.
- :mod:`.device`: weights, gradients and transfers at the stored size, each taking its modelled
  time; messages say when they arrive.
- :mod:`.handlers`: the workers' handlers, each with the time of its instruction;
  :mod:`.collectives`: how long those take that all devices take part in.
- :mod:`.memory`: what a device holds, at full size.
- :mod:`.runtime`: instead of a model, numbers that follow from everything the model would use.
- :mod:`.platform`: all of these as a worker's platform, and UPDATE.
- :mod:`.loader`: initial weights.

Modelled: the compute stream, both copy streams and every link of a device, each serving one thing
at a time in program order, at the rates of :class:`penstock.planner.cost.cluster.Cluster`. Devices
that share a PCIe switch have equal fixed shares of it. The optimizer has what copies leave of a
node's memory bandwidth, and the NIC of a node serves one transfer after the other
(:mod:`penstock.protocol.run.hardware.bandwidth_log`). Not modelled: that links through the host are
shared (the simulator shares them, :mod:`penstock.planner.simulate.network`), and a transfer that
waits for its receive to be posted.
"""
