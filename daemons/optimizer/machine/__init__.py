"""penstock.daemons.optimizer.machine."""
