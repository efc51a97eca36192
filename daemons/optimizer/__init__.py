"""penstock.daemons.optimizer."""
