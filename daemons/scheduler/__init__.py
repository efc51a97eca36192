"""penstock.daemons.scheduler."""
