"""What optimizerd decides: pure, see :mod:`penstock.daemons.optimizer.machine.machine`."""
