"""Decides for optimizerd: pure; see :mod:`penstock.daemons.optimizer.machine.machine`."""
